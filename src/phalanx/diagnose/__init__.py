"""Observes ranks, running and ended: from black boxes, stacks, ``/proc`` and logs.

`jobs` finds which processes are ranks of which job, `stacks` reads their stacks; `why/` says whom a job waits for,
`top/` shows it live, `trace/` as a time line, `check/` before a job is started; `attach` opens a debugger. Start with
`jobs`, then `why/answer`. Nothing here changes what a rank does.
"""
