"""Runs the calls of a group: checks their arguments, starts their operations in the core, returns their handles.

Start with `ops`, then `collectives`. Nothing here decides how bytes reach another host: `tasks` runs the operations of
groups that span several hosts, and the other files treat all groups alike.
"""
