"""What a rank can be denied: system calls, by a seccomp filter, and resources, by limits. And what it tries then."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx import PhalanxError
from phalanx.failure.ending import Ending
from phalanx.testing import reached, spawn_ranks
from tests.denial import OF_THREADS, OF_UNIX, SHARED, deny

TIMEOUT_S = 20.0
"""Of the group: whoever needs as long has waited for it."""
LIMIT_S = 10.0
"""Every rank has ended by then."""


def meeting_place(rank: int, world_size: int) -> dist.Store:
    """Load what loads late, and connect to the store: what torch itself needs is not denied to it."""
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)


def limit(name: str, value: int) -> None:
    number = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(number, (value, value))


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def no_threads() -> None:
    """As RLIMIT_NPROC does, which does not hold root."""
    deny("clone3", error=errno.EAGAIN)
    deny("clone", error=errno.EAGAIN, where=OF_THREADS)


DENIALS: dict[str, Callable[[], None]] = {
    "memfd_create": lambda: deny("memfd_create"),
    "memfd_create missing": lambda: deny("memfd_create", error=errno.ENOSYS),
    "pidfd_open": lambda: deny("pidfd_open"),
    "pidfd_open missing": lambda: deny("pidfd_open", error=errno.ENOSYS),
    "pidfd_open without descriptors": lambda: deny("pidfd_open", error=errno.EMFILE),
    "ftruncate": lambda: deny("ftruncate"),
    "fallocate": lambda: deny("fallocate"),
    "fallocate unsupported": lambda: deny("fallocate", error=errno.EOPNOTSUPP),
    "fallocate without space": lambda: deny("fallocate", error=errno.ENOSPC),
    "mmap of shared": lambda: deny("mmap", where=SHARED),
    "mmap of shared without memory": lambda: deny("mmap", error=errno.ENOMEM, where=SHARED),
    "fcntl": lambda: deny("fcntl"),
    "socket of unix": lambda: deny("socket", where=OF_UNIX),
    "bind": lambda: deny("bind"),
    "connect": lambda: deny("connect"),
    "sendmsg": lambda: deny("sendmsg"),
    "recvmsg": lambda: deny("recvmsg"),
    "poll": lambda: deny("poll", "ppoll", error=errno.ENOMEM),
    "kill": lambda: deny("kill"),
    "getrandom": lambda: deny("getrandom"),
    "sched_getaffinity": lambda: deny("sched_getaffinity"),
    "sched_yield": lambda: deny("sched_yield"),
    "process_vm_readv": lambda: deny("process_vm_readv"),
    "prctl": lambda: deny("prctl"),
    "userfaultfd": lambda: deny("userfaultfd"),
    "membarrier": lambda: deny("membarrier"),
    "clone3 missing": lambda: deny("clone3", error=errno.ENOSYS),
    "threads": no_threads,
    "NOFILE now": lambda: limit("NOFILE", num_open()),
    "NOFILE in a while": lambda: limit("NOFILE", num_open() + 3),
    "AS now": lambda: limit("AS", address_space()),
    "AS in a while": lambda: limit("AS", address_space() + (1 << 20)),
    "MEMLOCK": lambda: limit("MEMLOCK", 0),
    "FSIZE none": lambda: limit("FSIZE", 0),
    "FSIZE little": lambda: limit("FSIZE", 256 << 10),
    "NPROC": lambda: limit("NPROC", 1),
    "STACK": lambda: limit("STACK", 64 << 10),
}

MOMENTS = ("before the group", "in the group")


def use_all(rank: int) -> str:
    """Return what is wrong with operations of each kind; the first of them needs memory, a thread, a message's ring."""
    for num in (4, 200_000):
        total = torch.full((num,), rank + 1.0)
        dist.all_reduce(total)
        if total.unique().tolist() != [3.0]:
            return f"all_reduce of {num}"
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        if total.unique().tolist() != [6.0]:
            return f"asynchronous all_reduce of {num}"
        sent, received = torch.full((num,), rank + 1.0), torch.zeros(num)
        if rank == 0:
            dist.send(sent, 1)
            dist.recv(received, 1)
        else:
            dist.recv(received, 0)
            dist.send(sent, 0)
        if received.unique().tolist() != [2.0 - rank]:
            return f"message of {num}"
    group = dist.new_group()
    dist.barrier(group)
    return ""


def suffer(rank: int, world_size: int, what: str, moment: str, victim: int) -> str:
    """Join a group and use it, while one rank is denied something from some moment on."""
    store = meeting_place(rank, world_size)
    reached("ready")
    if rank == victim and moment == MOMENTS[0]:
        DENIALS[what]()
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if rank == victim and moment == MOMENTS[1]:
        DENIALS[what]()
    return use_all(rank)


def deny_one(num_ranks: int, what: str, moment: str, victim: int) -> list[Ending]:
    """Return how the ranks have ended, within the limit or killed, when one of them is denied something."""
    with spawn_ranks(suffer, num_ranks, what, moment, victim, init=False) as ranks:
        ranks.wait_until_reached("ready", timeout_s=60)
        return ranks.join(LIMIT_S)


def check_ends(outcomes: list[Ending], victim: int) -> None:
    """Every rank has a right result or an error that names a rank; torch itself may fail for want of memory, too."""
    for outcome in outcomes:
        assert not outcome.hung, outcome
        assert outcome.exitcode >= 0, outcome
        if outcome.ok:
            assert outcome.value == "", outcome
        elif outcome.rank != victim or "DefaultCPUAllocator" not in str(outcome.error):
            assert isinstance(outcome.error, PhalanxError), outcome
            assert f"rank {victim}" in str(outcome.error), outcome
