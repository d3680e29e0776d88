"""Groups and jobs begin and end again and again, and leave nothing behind.

Short here; PHALANX_TEST_LONG=1 (`make stress`) runs the full counts.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.record.box import MEMORY_NAME
from phalanx.testing import await_release, reached, run_ranks, spawn_ranks

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
NUM_IN_ONE_PROCESS = 1000 if LONG else 20
NUM_WITH_FRESH_PROCESSES = 50 if LONG else 5
NUM_PAIRS_OF_JOBS = 20 if LONG else 2


def holdings():
    """Descriptors, threads and mappings of the segment that this process has."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:phalanx" in line]
    of_groups = [line for line in maps if MEMORY_NAME not in line]  # the black box stays as long as the process
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(of_groups)


def begin_and_end(rank, world_size, folder, num_rounds):
    """Return the sums of all rounds, and what was held after the second round and after the last."""
    sums, held = [], []
    for round_ in range(num_rounds):
        meeting = f"file://{folder}/{round_}"
        dist.init_process_group("phalanx", init_method=meeting, rank=rank, world_size=world_size)
        tensor = torch.full((10_000,), float(rank + round_))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        large = torch.ones(100_000)
        dist.all_reduce(large)
        peer = 1 - rank
        sent = dist.isend(torch.tensor([rank]), dst=peer)
        received = torch.zeros(1, dtype=torch.int64)
        dist.recv(received, src=peer)
        sent.wait()
        sums.append((tensor[0].item(), large[0].item(), received.item()))
        dist.destroy_process_group()
        del work, sent  # a handle keeps its group's memory
        held.append(holdings())
        if rank == 0:
            Path(folder, str(round_ - 1)).unlink(missing_ok=True)
    return sums, held[1], held[-1]


def add_ranks(rank, world_size, base):
    reached("up")
    tensor = torch.full((100_000,), float(base + rank))
    for _ in range(10):
        total = tensor.clone()
        dist.all_reduce(total)
    await_release("done")
    return total[0].item()


def test_one_set_of_processes_begins_and_ends_many_times(tmp_path):
    results = run_ranks(
        begin_and_end, 2, str(tmp_path), NUM_IN_ONE_PROCESS, init=False, timeout_s=30 + NUM_IN_ONE_PROCESS
    )
    for rank, (sums, early, late) in enumerate(results):
        assert sums == [(1.0 + 2 * round_, 2.0, 1 - rank) for round_ in range(NUM_IN_ONE_PROCESS)]
        assert late == early, "a round left descriptors, threads or mappings behind"
        assert late[2] == 0


def test_fresh_processes_begin_and_end_many_times(tmp_path):
    for job in range(NUM_WITH_FRESH_PROCESSES):
        folder = tmp_path / str(job)
        folder.mkdir()
        for rank, (sums, *_) in enumerate(run_ranks(begin_and_end, 2, str(folder), 2, init=False)):
            assert sums == [(1.0, 2.0, 1 - rank), (3.0, 2.0, 1 - rank)]


def test_two_jobs_at_once_do_not_meet():
    for _ in range(NUM_PAIRS_OF_JOBS):
        with spawn_ranks(add_ranks, 2, 0) as one, spawn_ranks(add_ranks, 3, 10) as other:
            for job in (one, other):
                job.wait_until_reached("up")
            for job in (one, other):
                job.release("done")
            results = [[outcome.value for outcome in job.join(30)] for job in (one, other)]
        assert results == [[1.0] * 2, [33.0] * 3]
