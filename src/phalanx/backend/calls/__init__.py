"""One call of a group: its arguments checked, its operation run by the core, its handle fulfilled.

Start with `ops`, then `collectives`. Nothing here knows whether ranks share a host.
"""
