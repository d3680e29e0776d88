"""A script that an MPI starts, on pretended hosts of two ranks each: ``python -m tests.hosts._mpi_job WHAT``."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])


def compare() -> None:
    from tests.backend._calls import CALLS
    from tests.backend.test_collectives import compare_with_gloo, split_in_odd_ways
    from tests.hosts.test_collectives import keep_the_order, move_around_the_inline_limit, move_many_mib
    from tests.hosts.test_messages import answer_everybody, pick_by_tag_from_anybody

    num = dist.get_world_size()
    compare_with_gloo(RANK, num, sorted(CALLS))
    group = dist.new_group([1, 2])
    if RANK in (1, 2):
        dist.barrier(group)
    for check in (
        split_in_odd_ways,
        move_around_the_inline_limit,
        move_many_mib,
        keep_the_order,
        answer_everybody,
    ):
        check(RANK, num)
    pick_by_tag_from_anybody(RANK, num)
    dist.destroy_process_group()


def fail() -> None:
    """Rank 3 aborts; rank 0 waits for a message over the bridge, ranks 1 and 2 in memory."""
    dist.barrier()
    began_s = time.monotonic()
    try:
        if RANK == 3:
            dist.group.WORLD.abort()
            dist.barrier()
        elif RANK == 2:
            dist.all_reduce(torch.ones(5))
        else:
            dist.recv(torch.ones(1), 2 if RANK == 0 else 0)
    except RuntimeError as error:
        print(f"{RANK} {type(error).__name__} {time.monotonic() - began_s < 2}\n", end="", flush=True)


if __name__ == "__main__":
    os.environ["PHALANX_HOST"] = f"host-{RANK // 2}"
    dist.init_process_group("phalanx")
    {"compare": compare, "fail": fail}[sys.argv[1]]()
    print(f"{RANK} done\n", end="", flush=True)
