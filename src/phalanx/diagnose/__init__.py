"""Observes running and ended ranks through black boxes, stacks, ``/proc`` and logs.

`jobs` finds which processes are ranks of which job, and `stacks` reads the stacks of processes. `why/` says which ranks
a job waits for, `top/` shows live what ranks do, `trace/` draws a timeline, `check/` tries a script before its job is
started, and `attach` opens a debugger. Start with `jobs`, then `why/evidence`. Except for `attach`, nothing here
changes what a rank does, but reading native frames halts the rank for milliseconds.
"""
