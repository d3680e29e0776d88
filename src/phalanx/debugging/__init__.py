"""A debugger in one rank of a job, while the others wait for as long as it takes.

Start with `breakpoints`, then `prompt`. Nothing here picks a rank or opens a debugger from outside: the command
`diagnose.attach` does that, and talks to `attached` in the rank.
"""

HELD_BY = "a debugger at "
"""Text that a rank in a debugger writes into the control blocks of its groups, followed by its line."""
IN_DEBUGGER, AT_BREAKPOINT = "debugger", "phalanx.breakpoint"
"""Phases in the black box of a rank: it is in a debugger, or it waits at a breakpoint for a rank that is."""
