"""Programs that a rank starts do not keep its connections, and a rank that becomes another program is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist

from phalanx import RankFailed
from phalanx.testing import await_release, reached

NAMED_WITHIN_S = 3.0
TWO_HOSTS = [1, 1]
CLOSED_AT_EXEC = 0o2000000  # O_CLOEXEC in /proc/self/fdinfo
STARTS = {  # in a session of its own: the harness ends that of a rank
    "os.system": lambda fifo: os.system(f"setsid cat {fifo} &"),
    "posix_spawn": lambda fifo: os.posix_spawn(shutil.which("cat"), ["cat", fifo], os.environ, setsid=True),
    "Popen": lambda fifo: subprocess.Popen(["cat", fifo], close_fds=False, start_new_session=True),
}


def inheritable_descriptors():
    """Return target by number of those that a program would get."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
            with open(f"/proc/self/fdinfo/{entry}") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
        except OSError:  # the listing's own
            continue
        if not flags & CLOSED_AT_EXEC:
            found[entry] = target
    return found


def open_everything(rank, world_size):
    """Return what is inheritable after a group was used in every way, and was not before."""
    before = inheritable_descriptors()
    dist.init_process_group("phalanx")
    dist.all_reduce(torch.ones(100_000))
    sent = dist.isend(torch.ones(9), 1 - rank)
    dist.recv(torch.ones(9), 1 - rank)
    sent.wait()
    dist.all_reduce(torch.ones(9), async_op=True).get_future().wait()
    return inheritable_descriptors().items() - before.items()


@pytest.mark.parametrize("hosts", [[], TWO_HOSTS], ids=["one host", "two hosts"])
def test_no_descriptor_is_inherited_by_programs(run_ranks, hosts):
    assert run_ranks(open_everything, 2, hosts=hosts, init=False, init_method="tcp") == [set(), set()]


def start_a_program(rank, world_size, way, fifo):
    dist.barrier()
    if rank == 1:
        STARTS[way](fifo)
        reached("up")
        threading.Event().wait()
    dist.barrier()


@pytest.mark.parametrize("way", sorted(STARTS))
def test_a_killed_rank_is_named_though_a_program_of_it_lives_on(spawn_ranks, tmp_path, way):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    with spawn_ranks(start_a_program, 2, way, str(fifo), hosts=TWO_HOSTS, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up", ranks=[1])
        killed_at = time.monotonic()
        ranks.kill(1)
        survivor, _ = ranks.join(20)
    os.close(held)  # the program ends
    assert isinstance(survivor.error, RankFailed), survivor
    assert survivor.error.ranks == (1,)
    assert survivor.when_s - killed_at < NAMED_WITHIN_S


def become_a_program(rank, world_size, fifo):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        await_release("exec")
        os.execv(shutil.which("cat"), ["cat", fifo])
    reached("up")
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        reached("raised")


@pytest.mark.parametrize("hosts", [[], TWO_HOSTS], ids=["one host", "two hosts"])
def test_a_rank_that_becomes_another_program_is_named(spawn_ranks, tmp_path, hosts):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    with spawn_ranks(become_a_program, 2, str(fifo), hosts=hosts, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up", ranks=[0])
        replaced_at = time.monotonic()
        ranks.release("exec", ranks=[1])
        ranks.wait_until_reached("raised", ranks=[0])
        os.close(held)  # the program ends
        survivor, victim = ranks.join(20)
    assert isinstance(survivor.error, RankFailed), survivor
    assert survivor.error.ranks == (1,)
    assert survivor.error.pid == victim.pid
    assert survivor.when_s - replaced_at < NAMED_WITHIN_S
    if not hosts:
        assert "runs another program now (exec)" in str(survivor.error)
