"""Every collective of torch.distributed, and what each rank holds after it.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/collectives.py
    torchrun --nproc-per-node 2 examples/collectives.py
    python examples/collectives.py                                     # a world of one
"""

import torch
import torch.distributed as dist

import phalanx


def show(name, mine):
    """Print on rank 0 what every rank holds; a collective too: all ranks call it."""
    if isinstance(mine, list):
        mine = [item.tolist() if isinstance(item, torch.Tensor) else item for item in mine]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine.tolist() if isinstance(mine, torch.Tensor) else mine)
    if dist.get_rank() == 0:
        print(f"{name:24}" + "   ".join(f"{item!s:20}" for item in every).rstrip())


def reduce_and_broadcast(rank, world_size):
    """One tensor on each rank."""
    tensor = torch.tensor([rank + 1, 10 * (rank + 1)])
    show("before", tensor)
    dist.broadcast(tensor, src=0)  # all get rank 0's
    show("broadcast", tensor)

    tensor = torch.tensor([rank + 1, 10 * (rank + 1)])
    dist.reduce(tensor, dst=0)  # only rank 0's is the sum then; what the others hold means nothing
    show("reduce (on rank 0)", tensor if rank == 0 else "-")

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensor = torch.tensor([rank + 1.0, 10.0])
        dist.all_reduce(tensor, op=op)
        show(f"all_reduce {op.name}", tensor)


def gather_and_scatter(rank, world_size):
    """One tensor for each rank: lists of tensors, or the same in one tensor."""
    mine = torch.tensor([rank + 1, 10 * (rank + 1)])
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    show("gather (to rank 0)", parts if rank == 0 else "-")

    dist.all_gather(parts, mine)
    show("all_gather", parts)
    joined = torch.empty(2 * world_size, dtype=mine.dtype)
    dist.all_gather_into_tensor(joined, mine)
    show("all_gather_into_tensor", joined)

    dist.scatter(mine, [torch.tensor([r, 100 + r]) for r in range(world_size)] if rank == 0 else None, src=0)
    show("scatter (from rank 0)", mine)

    for_each = [torch.tensor([rank + 10 * r]) for r in range(world_size)]  # r's part of mine
    summed = torch.empty_like(for_each[0])
    dist.reduce_scatter(summed, for_each)
    show("reduce_scatter", summed)
    dist.reduce_scatter_tensor(summed, torch.cat(for_each))
    show("reduce_scatter_tensor", summed)

    received = [torch.empty_like(part) for part in for_each]
    dist.all_to_all(received, for_each)
    show("all_to_all", received)
    joined = torch.empty(world_size, dtype=torch.int64)
    dist.all_to_all_single(joined, torch.cat(for_each))
    show("all_to_all_single", joined)


def objects(rank, world_size):
    """Any Python objects, by way of pickle."""
    something = [{"lr": 0.1} if rank == 0 else None]
    dist.broadcast_object_list(something, src=0)
    show("broadcast_object_list", something[0])
    something = [None]
    dist.scatter_object_list(something, [f"for {r}" for r in range(world_size)] if rank == 0 else None, src=0)
    show("scatter_object_list", something[0])
    names = [None] * world_size
    dist.gather_object(f"from {rank}", names if rank == 0 else None, dst=0)
    show("gather_object", names if rank == 0 else "-")
    dist.all_gather_object(names, f"from {rank}")
    show("all_gather_object", names)


def without_waiting(rank, world_size):
    """``async_op=True`` returns at once: compute, then wait before the tensor is used."""
    tensor = torch.tensor([rank + 1.0, 10.0])
    work = dist.all_reduce(tensor, async_op=True)
    meanwhile = torch.ones(100, 100) @ torch.ones(100, 100)
    work.wait()
    show("all_reduce async", [*tensor, meanwhile[0, 0]])
    dist.barrier()  # nobody goes on before all have come here
    show("barrier", "passed")


def main():
    with phalanx.init() as session:
        show("", f"rank {session.rank}")
        for part in (reduce_and_broadcast, gather_and_scatter, objects, without_waiting):
            part(session.rank, session.world_size)


if __name__ == "__main__":
    main()
