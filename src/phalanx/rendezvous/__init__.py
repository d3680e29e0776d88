"""How a job's ranks meet before there is a group: a rank reports what it waits for, and never waits for a dead one.

`handler` runs in front of torch's own handlers of ``env://``, ``tcp://`` and ``file://``; `server` opens the store, and
`roll_call` gathers the ranks in it. `launched` is what a rank knows of its launch; `solo` notices ranks that never met.
Start with `handler`. Nothing here makes a group or moves a tensor.
"""
