"""Groups: collectives among some of the ranks.

Start it with any number of ranks; four show most:

    phalanx run --nproc-per-node 4 examples/groups.py
    torchrun --nproc-per-node 4 examples/groups.py
    python examples/groups.py                                          # a world of one
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx


def total(group=None):
    """Return the sum of the ranks in the group, computed by themselves."""
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def show(title, text):
    """Print every rank's line, in rank order."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"  rank {dist.get_rank()}: {text}")
    if dist.get_rank() == 0:
        print("\n".join([title, *lines]))


def even_and_odd(rank, world_size):
    """`new_group`: all ranks of the world make each group, those outside as well, in the same order."""
    rows = [list(range(first, world_size, 2)) for first in (0, 1) if first < world_size]
    groups = [dist.new_group(row) for row in rows]
    mine = groups[rank % 2]
    # Within a group, ranks count from 0. `src` and `dst` of a collective still name a rank of the world.
    first = dist.get_global_rank(mine, 0)
    message = [f"hello from {rank}"]
    dist.broadcast_object_list(message, src=first, group=mine)
    members = dist.get_process_group_ranks(mine)
    show("new_group", f"number {dist.get_rank(mine)} of {members}, whose sum is {total(mine)}; heard {message[0]!r}")
    dist.destroy_process_group(mine)  # or leave it: it ends with the world's


def neighbours(rank, world_size):
    """`new_subgroups`: the world cut into groups of equal size, such as the ranks of each host."""
    size = 2 if world_size % 2 == 0 else 1
    mine, groups = dist.new_subgroups(size)
    members = dist.get_process_group_ranks(mine)
    show("new_subgroups", f"in {members}, one of {len(groups)} groups; its sum is {total(mine)}")


def rows_and_columns(rank, world_size):
    """`init_device_mesh`: ranks as a grid, and a group for each row and each column.

    Ranks of a row share one copy of a model, for example, and each row trains on its own data.
    """
    num_columns = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // num_columns, num_columns), mesh_dim_names=("data", "model"))
    row, column = mesh.get_coordinate()
    sums = {name: total(mesh.get_group(name)) for name in ("data", "model")}
    show("init_device_mesh", f"row {row} with sum {sums['model']}, column {column} with sum {sums['data']}")


def main():
    with phalanx.init() as session:
        for part in (even_and_odd, neighbours, rows_and_columns):
            part(session.rank, session.world_size)


if __name__ == "__main__":
    main()
