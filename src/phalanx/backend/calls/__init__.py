"""One call of a group: its arguments are checked, the core runs its operation, and its handle tells when it is over.

Start with `ops`, then `collectives`. Nothing here knows whether ranks share a host.
"""
