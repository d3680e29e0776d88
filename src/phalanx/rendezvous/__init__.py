"""The meeting of a job's ranks before there is a group: none waits in silence, or for a rank that can't come.

`handler` stands before torch's own handlers of ``env://``, ``tcp://`` and ``file://``; `server` has the store and
`roll_call` the roll call. `launched` is what a rank knows of its launch, `solo` whether it has ever met another. Start
with `handler`. Nothing here makes a group or moves a tensor.
"""
