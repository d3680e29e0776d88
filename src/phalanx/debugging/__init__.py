"""A debugger in one rank of a job, while the others wait for as long as it takes.

Start with `breakpoints`, then `prompt`. The command that opens a debugger from outside is `diagnose.attach`.
"""

HELD_BY = "a debugger at "
"""Text in the control blocks of a rank's groups while it is in a debugger; the line follows."""
IN_DEBUGGER, AT_BREAKPOINT = "debugger", "phalanx.breakpoint"
"""Phases in a rank's black box: the rank is in the debugger; it waits for the rank that is."""
