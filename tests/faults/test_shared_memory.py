"""The shared segment: nothing of it outlives the ranks, /dev/shm does not matter, a shortage is an error everywhere."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx import OutOfSharedMemory
from phalanx.testing import reached
from tests.shm import own_shm

_BIG_GROUP = 1000  # ranks; its control block alone takes more than 100 MiB
_NOISE_KB = 40 * 1024  # what other programs may do to the machine's shared memory meanwhile


def segment_of_this_rank():
    return dist.group.WORLD._operations._segment


def reduce_for_ever(rank, world_size):
    """Hold the group's memory and more, and be busy in it."""
    segment = segment_of_this_rank()
    if rank == 0:
        segment.create_group(_BIG_GROUP)
    status = os.fstat(segment.fd)
    dist.barrier()
    reached("busy", (status.st_dev, status.st_ino))
    tensor = torch.ones(1 << 20)
    while True:
        dist.all_reduce(tensor)


def reduce_80_mib(rank, world_size, kind, folder):
    own_shm(b"size=64m", is_missing=kind != "64 MB")
    if kind == "64 MB":
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    dist.init_process_group("phalanx", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    tensor = torch.full((20 << 20,), float(rank + 1))
    dist.all_reduce(tensor)
    return tensor[0].item(), tensor[-1].item(), os.path.exists("/dev/shm")


def forbid_growth(at_bytes):
    """Let the segment grow to `at_bytes` and no further: the kernel applies the limit of files to it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, at_bytes))


def make_a_group_without_memory(rank, world_size, folder):
    forbid_growth(64 << 10)
    dist.init_process_group("phalanx", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)


NEEDS_MEMORY = {
    "large all_reduce": lambda rank: dist.all_reduce(torch.ones(1 << 20)),
    "large reduce_scatter": lambda rank: dist.reduce_scatter_tensor(torch.empty(1 << 18), torch.ones(3 << 18)),
    "async": lambda rank: dist.all_reduce(torch.ones(1 << 20), async_op=True).wait(),
    "new_group": lambda rank: dist.new_group([0, 1, 2]),
    "message": lambda rank: dist.send(torch.ones(4), dst=1) if rank == 0 else dist.recv(torch.empty(4), src=0),
}


def use_memory_that_is_not_there(rank, world_size, operation):
    dist.barrier()
    forbid_growth(os.fstat(segment_of_this_rank().fd).st_size)
    NEEDS_MEMORY[operation](rank)


def shared_kb():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1])
    raise AssertionError("no Shmem in /proc/meminfo")


def holders(inode):
    """Processes that have the segment open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fds = [os.stat(fd) for fd in (process / "fd").iterdir()]
            maps = (process / "maps").read_text()
        except OSError:  # it ended meanwhile
            continue
        if any((status.st_dev, status.st_ino) == inode for status in fds) or f" {inode[1]} /memfd:phalanx" in maps:
            found.append(process.name)
    return found


@functools.cache
def why_no_mounts():
    """Return why this process may not mount, or None if it may."""
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True, text=True
    )
    return None if probe.returncode == 0 else f"no right to mount: {probe.stderr.strip()}"


def test_nothing_is_left_when_all_ranks_are_killed(spawn_ranks):
    before_kb = shared_kb()
    with spawn_ranks(reduce_for_ever, 4, group_timeout_s=30) as ranks:
        inode = ranks.wait_until_reached("busy")[0]
        held_kb = shared_kb()
        assert len(holders(inode)) == 4
        for rank in range(4):
            ranks.kill(rank)
        outcomes = ranks.join(20)
    assert all(outcome.exitcode == -9 for outcome in outcomes)
    assert held_kb - before_kb > 2 * _NOISE_KB, "the ranks did not hold enough to see it go"
    assert holders(inode) == []
    deadline = time.monotonic() + 5
    while shared_kb() - before_kb > _NOISE_KB and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel frees the pages in its own time
    assert shared_kb() - before_kb <= _NOISE_KB


@pytest.mark.parametrize("kind", ["64 MB", "absent"])
def test_dev_shm_does_not_matter(run_ranks, tmp_path, kind):
    if reason := why_no_mounts():
        pytest.skip(reason)
    results = run_ranks(reduce_80_mib, 2, kind, str(tmp_path), init=False, timeout_s=30)
    assert results == [(3.0, 3.0, kind != "absent")] * 2


def test_no_memory_for_a_group_is_an_error_on_every_rank(run_ranks, tmp_path):
    outcomes = run_ranks(make_a_group_without_memory, 3, str(tmp_path), init=False, timeout_s=20, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, OutOfSharedMemory), outcome
        assert f"rank {outcome.rank}: " in str(outcome.error)
        assert "memory limit" in str(outcome.error)


@pytest.mark.parametrize("operation", NEEDS_MEMORY)
def test_a_shortage_in_an_operation_is_an_error_on_every_rank_that_takes_part(run_ranks, operation):
    world_size = 2 if operation == "message" else 3
    outcomes = run_ranks(
        use_memory_that_is_not_there, world_size, operation, timeout_s=20, group_timeout_s=10, expect_failures=True
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, OutOfSharedMemory), outcome
        assert f"rank {outcome.rank}: " in str(outcome.error), outcome
