"""After the last group nothing is left: no thread, no descriptor, no memory, whatever happened to the groups before."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import PhalanxError
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.record.box import MEMORY_NAME
from tests.ports import free_port

_SETTLE_S = 3.0  # a thread that was joined is yet seen for a moment


def holdings():
    """Return what this process has: threads, descriptors, mappings of shared segments."""
    threads = {f"{thread.name} of Python" for thread in threading.enumerate()}
    descriptors = set()
    for kind, found in (("task", threads), ("fd", descriptors)):
        for name in os.listdir(f"/proc/self/{kind}"):
            try:
                if kind == "fd":
                    place = os.readlink(f"/proc/self/fd/{name}")
                    if MEMORY_NAME not in place:  # the black box stays as long as its process
                        found.add((name, place))
                else:
                    with open(f"/proc/self/task/{name}/comm") as comm:
                        found.add((name, comm.read().strip()))
            except OSError:  # closed or ended since: the listing's own
                continue
    with open("/proc/self/maps") as maps:
        found = {line.strip() for line in maps if "memfd" in line or "phalanx (" in line}
        segments = {line for line in found if MEMORY_NAME not in line}
    return {"threads": threads, "descriptors": descriptors, "mappings": segments}


def leftovers(before):
    deadline = time.monotonic() + _SETTLE_S
    while True:
        if not HAS_PYTHON_BACKENDS:
            gc.collect()  # torch's group, which has a Gloo then, is in a cycle with the error that ended it
        after = holdings()
        left = {kind: sorted(map(str, after[kind] - before[kind])) for kind in after if after[kind] - before[kind]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def use(rank, world_size, held):
    """Call everything that starts a thread, opens a descriptor or maps memory; hold what it returns."""
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(300_000))
    work = dist.all_reduce(torch.ones(3, 300_000).t(), async_op=True)
    future = work.get_future().then(lambda result: result.value())
    assert work.wait()
    future.wait()
    held += [work, future, dist.all_reduce(torch.ones(100_000), async_op=True)]
    if world_size == 1:
        return
    tensors = [torch.ones(50_000) for _ in range(2)]
    works = [dist.isend(tensors[0], (rank + 1) % world_size), dist.irecv(tensors[1], (rank - 1) % world_size)]
    held += [*works, works[1].get_future()]
    for work in works:
        work.wait()
    if rank == 0:
        for _ in range(1, world_size):
            dist.recv(torch.ones(2))  # from anybody
    else:
        dist.send(torch.ones(2), 0)
    dist.barrier()


def keep_error(held, error):
    """Hold the error, and so the frames of its traceback: before torch 2.14 they hold torch's group and its Gloo."""
    held.append(error if HAS_PYTHON_BACKENDS else str(error))


def leave_in_order(rank, world_size, held):
    use(rank, world_size, held)


def leave_subgroups(rank, world_size, held):
    groups = [dist.new_group(), dist.new_group([0])]
    held.append(dist.all_reduce(torch.ones(3), group=groups[0], async_op=True))
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=groups[1])
    use(rank, world_size, held)


def leave_what_never_comes(rank, world_size, held):
    """A receive that nobody answers, and a rank that goes with calls under way."""
    use(rank, world_size, held)
    if world_size > 1:
        request = dist.irecv(torch.ones(5), (rank + 1) % world_size, tag=7)
        if HAS_PYTHON_BACKENDS:  # their error holds frames, see keep_error
            held += [request, request.get_future()]


def abort(rank, world_size, held):
    use(rank, world_size, held)
    if rank == 0:
        dist.group.WORLD.abort()
    for _ in range(2):
        try:
            held.append(dist.all_reduce(torch.ones(100_000), async_op=True))
            held[-1].wait()
        except PhalanxError as error:
            keep_error(held, error)


def disagree(rank, world_size, held):
    use(rank, world_size, held)
    try:
        dist.all_reduce(torch.ones(4 if rank else 5))
    except PhalanxError as error:
        keep_error(held, error)


def come_late(rank, world_size, held):
    use(rank, world_size, held)
    try:
        if rank == 0:
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        else:
            dist.recv(torch.ones(1), 0)  # ends with the group
    except PhalanxError as error:
        keep_error(held, error)


def run_scenarios(rank, world_size, folder, port, num_cycles):
    """Return what each scenario has left."""
    torch.ones(1_000_000).sum()  # torch's own pool of threads
    url = f"tcp://127.0.0.1:{port}"
    dist.TCPStore("127.0.0.1", port, world_size, rank == 0, multi_tenant=True)  # libuv's pipe, once in a process
    found = {}
    scenarios = [leave_in_order] * num_cycles
    scenarios += [leave_subgroups, leave_what_never_comes, abort, disagree, come_late]
    for i, scenario in enumerate(scenarios):
        before, held = holdings(), []
        where = url if scenario is leave_subgroups else f"file://{folder}/store-{i}"
        dist.init_process_group("phalanx", init_method=where, rank=rank, world_size=world_size)
        scenario(rank, world_size, held)
        dist.destroy_process_group()
        left = leftovers(before)
        if left:
            found[scenario.__name__, i] = left
        # What was held still answers, and does not hang.
        for work in held:
            if isinstance(work, dist.Work):
                assert work.is_completed()
            elif isinstance(work, torch.futures.Future):
                assert work.done()
    return found


@pytest.mark.parametrize(
    ("world_size", "hosts"), [(1, ()), (2, ()), (2, (1, 1)), (3, (1, 2))], ids=["1", "2", "1+1", "1+2"]
)
def test_nothing_is_left_after_the_last_group(run_ranks, tmp_path, world_size, hosts):
    cycles = 20 if world_size == 2 and not hosts else 3
    ends = run_ranks(
        run_scenarios, world_size, str(tmp_path), int(free_port()), cycles, hosts=hosts, init=False, timeout_s=100
    )
    assert ends == [{}] * world_size
