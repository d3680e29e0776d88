"""A debugger in one rank of a job; the other ranks wait until the rank continues, without a time limit.

Start with `breakpoints`, then `prompt`. Nothing here picks the rank for a debugger that is opened from outside: the
command in `diagnose.attach` picks the rank, and talks to `attached` in that rank.
"""

HELD_BY = "a debugger at "
"""Start of the text that a rank in a debugger writes into the control blocks of its groups; the rank's line follows."""
IN_DEBUGGER, AT_BREAKPOINT = "debugger", "phalanx.breakpoint"
"""Phases in a rank's black box: the rank is in a debugger, or waits at a breakpoint for the rank in the debugger."""
