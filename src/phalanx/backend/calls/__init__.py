"""Calls of a group: checks their arguments, runs the operations in the core, returns handles that report their end.

Start with `ops`, then `collectives`. `tasks` runs operations of groups that span several hosts; the other files treat
all groups alike.
"""
