"""One call of a group: its arguments are checked, the core runs the operation, and a handle tells when that is over.

Start with `ops`, then `collectives`. Nothing here knows whether ranks share a host.
"""
