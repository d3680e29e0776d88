"""A call of a group: checks its arguments, runs the operation in the core, returns a handle that reports when it ends.

Start with `ops`, then `collectives`. `tasks` runs operations of groups that span several hosts; the other files treat
all groups alike.
"""
