"""The ``phalanx`` backend of ``torch.distributed``: collectives of CPU tensors over shared memory.

`groups` makes a group when torch asks for one. A call goes from `torch/` (the classes and signatures that torch
expects) to `calls/` (checks, operations, handles) and on to the core, or to `hosts/` if the group spans several hosts.
`failures/` says in words what went wrong. Start with `groups`, then `calls/ops`. Nothing here starts ranks or knows of
models.

The path of a blocking call: ``dist.all_reduce(t)`` -> `PhalanxGroup.allreduce`, an entry point of the core, which runs
the collective itself, in the calling thread and without the GIL. Any other call goes on to `Operations.allreduce` ->
`Group.run`. ``csrc/python/entry_points.cpp``, `torch/adapters`, `calls/collectives`, `calls/memory` and
``csrc/collectives/exchange.h`` explain one stage each.
"""
