"""How a job's ranks meet before there is a group: none waits without saying so, or for a rank that can't come.

`handler` runs in front of torch's own handlers of ``env://``, ``tcp://`` and ``file://``; `server` opens the store, and
`roll_call` gathers the ranks in it. `launched` is what a rank knows of its launch; `solo` notices ranks that never met.
Start with `handler`. Nothing here makes a group or moves a tensor.
"""
