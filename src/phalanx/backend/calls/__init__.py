"""Calls of a group: checks their arguments, runs the operations in the core, returns handles that report their end.

Start with `ops`, then `collectives`. Nothing here decides how bytes reach another host: `tasks` runs the operations of
groups that span several hosts, and the other files treat all groups alike.
"""
