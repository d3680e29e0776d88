"""A debugger in one rank of a job, while the others wait for as long as it takes.

Start with `breakpoints`, then `prompt`. Nothing here picks a rank or opens a debugger from outside: that is the command
`diagnose.attach`, which talks to `attached` in the rank.
"""

HELD_BY = "a debugger at "
"""What a rank in a debugger writes into the control blocks of its groups, followed by its line."""
IN_DEBUGGER, AT_BREAKPOINT = "debugger", "phalanx.breakpoint"
"""Phases in a rank's black box: the first of a rank in a debugger, the second of a rank that waits for such a rank."""
