"""Checks before ranks are forked from the test process: that it can be forked, and that the machine has room."""

from __future__ import annotations

import asyncio
import resource

import pytest
import torch
import torch.distributed as dist

from phalanx._text import in_units
from phalanx.host.cgroups import known_memory

_RANK_BYTES = 16 * 2**20  # private memory of a rank after a small all_reduce: 3,300 pages and their page tables
_RANK_FDS = 4  # descriptors in this process per rank: its pipe, its pidfd, and two of multiprocessing
_SPARE_FDS = 32
_ELSEWHERE = "or run a function by phalanx.testing.run_ranks, whose ranks are forked from a process of their own"


def check_room(world_size: int) -> None:
    """Fail the test if this machine has no room for the test's ranks."""
    most_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most_fds != resource.RLIM_INFINITY and world_size * _RANK_FDS + _SPARE_FDS > most_fds:
        _fail(f"{world_size} ranks need {world_size * _RANK_FDS} open files, and ulimit -n allows {most_fds}")
    left = [memory.left_bytes for memory in known_memory()]
    if left and world_size * _RANK_BYTES > min(left):
        _fail(
            f"{world_size} ranks need at least {in_units(world_size * _RANK_BYTES)} of memory, and "
            f"{in_units(min(left))} are left"
        )


def words_of_refused_fork(world_size: int, error: OSError) -> str:
    """Return the message for a fork that failed because the system allows no more processes."""
    return (
        f"{world_size} ranks can't be forked: {error.strerror or error}; the user (ulimit -u), the container "
        "(pids.max) or the memory allows no more processes: take fewer ranks, or fewer workers of pytest-xdist"
    )


def check_fork(item: pytest.Item) -> None:
    """Fail the test if its process holds something that can't be forked."""
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_initialized():
            _fail(
                f"ranks are forked from this process, which has initialised {name}, and that can't be forked: make "
                f"what lies on the GPU in the test, or in a fixture that asks for rank, {_ELSEWHERE}"
            )
    if dist.is_initialized():
        _fail(
            "ranks are forked from this process, which has a default process group, and that can't be forked: end it "
            f"with torch.distributed.destroy_process_group() before, {_ELSEWHERE}"
        )
    for name, value in getattr(item, "funcargs", {}).items():
        if kind := _cannot_be_shared(value):
            _fail(
                f"the fixture {name} is {kind}, which ranks can't share: let it ask for the fixture rank, so that each "
                "rank computes its own"
            )


def _cannot_be_shared(value: object) -> str:
    if isinstance(value, dist.ProcessGroup):
        return "a process group"
    if isinstance(value, dist.TCPStore):
        return "a TCPStore"
    return "an event loop" if isinstance(value, asyncio.AbstractEventLoop) else ""


def _fail(words: str) -> None:
    __tracebackhide__ = True
    pytest.fail(f"@pytest.mark.ranks: {words}", pytrace=False)
