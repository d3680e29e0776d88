"""The meeting of a job's ranks before there is a group: none waits in silence, or for a rank that can't come.

`handler` runs in front of torch's own handlers of ``env://``, ``tcp://`` and ``file://``; `server` opens the store, and
`roll_call` gathers the ranks in it. `launched` is what a rank knows of its launch, `solo` whether it met any other.
Start with `handler`. Nothing here makes a group or moves a tensor.
"""
