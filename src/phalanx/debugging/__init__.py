"""A debugger in one rank of a job, while the others wait for it however long that takes.

Start with `breakpoints`, then `prompt`. The command that opens a debugger from outside is `diagnose.attach`.
"""

HELD_BY = "a debugger at "
"""What a rank says in the control blocks of its groups while a debugger holds it; the line follows."""
IN_DEBUGGER, AT_BREAKPOINT = "debugger", "phalanx.breakpoint"
"""Phases in a rank's black box: it is in the debugger; it waits for the rank that is."""
