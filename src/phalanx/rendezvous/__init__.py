"""The meeting of a job's ranks before there is a group: ranks report what they wait for, and wait for no dead rank.

`handler` runs in front of torch's own handlers of ``env://``, ``tcp://`` and ``file://``; `server` opens the store, and
`roll_call` gathers the ranks in this store. `launched` holds what a rank knows about its launch. `solo` notices ranks
that never met; `reimported` stops processes that only import the script again. Start with `handler`. Nothing here makes
a group or sends a tensor.
"""
