"""A rank that is denied a system call or a resource says so, and all ranks end; tests/stress has every denial."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket

import pytest
import torch
import torch.distributed as dist

from phalanx import OutOfSharedMemory, PhalanxError, _core
from tests.denial import deny
from tests.faults._denials import DENIALS, MOMENTS, check_ends, deny_one

WHILE_JOINING = {
    "memfd_create": (0, PhalanxError, "memfd_create: Operation not permitted; a sandbox may forbid it"),
    "socket of unix": (1, PhalanxError, "socket: Operation not permitted; a sandbox may forbid it"),
    "recvmsg": (1, PhalanxError, "receiving the shared segment: Operation not permitted"),
    "mmap of shared without memory": (1, OutOfSharedMemory, "mmap of the shared segment: Cannot allocate memory"),
    "NOFILE now": (1, PhalanxError, "no file descriptor is left"),
    "AS now": (1, OutOfSharedMemory, "no shared memory for a group of 3 ranks"),
    "FSIZE none": (0, OutOfSharedMemory, "no shared memory for a group of 3 ranks"),
}
IN_AN_OPERATION = {
    "threads": "ulimit -u",
    "mmap of shared": "mmap of the shared segment: Operation not permitted",
    "fallocate": "fallocate of the shared segment: Operation not permitted",
}


@pytest.mark.parametrize("what", WHILE_JOINING)
def test_who_can_not_join_tells_all_why_at_once(what):
    victim, kind, says = WHILE_JOINING[what]
    for outcome in deny_one(3, what, MOMENTS[0], victim):
        assert type(outcome.error) is kind, outcome
        assert str(outcome.error).startswith(f"rank {outcome.rank}: init_process_group: "), outcome
        assert says in str(outcome.error), outcome
        assert outcome.error.ranks == (victim,)
        assert outcome.rank == victim or f"rank {victim} could not join: " in str(outcome.error)


@pytest.mark.parametrize("what", IN_AN_OPERATION)
def test_what_the_system_denies_in_an_operation_ends_it_on_all_ranks(what):
    outcomes = deny_one(2, what, MOMENTS[1], 1)
    check_ends(outcomes, 1)
    assert IN_AN_OPERATION[what] in str(outcomes[1].error)
    assert outcomes[0].error.ranks == (1,)


def add_up_much(rank, world_size, what, victim):
    """The first operation that needs the mailboxes of a group."""
    if rank == victim:
        DENIALS[what]()
    dist.all_reduce(torch.ones(200_000))


@pytest.mark.parametrize(
    ("what", "victim", "says"),
    [
        ("fallocate", 0, "fallocate of the shared segment: Operation not permitted"),
        ("mmap of shared", 1, "mmap of the shared segment: Operation not permitted"),
    ],
)
def test_a_rank_that_can_not_have_memory_for_large_tensors_says_why_on_all_ranks(run_ranks, what, victim, says):
    outcomes = run_ranks(add_up_much, 3, what, victim, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, PhalanxError), outcome
        assert f"rank {outcome.rank}: all_reduce #1 " in str(outcome.error), outcome
        assert outcome.error.ranks == (victim,), outcome
    assert says in str(outcomes[victim].error)


def move_much(rank, world_size, victim):
    """Return what is wrong with collectives whose blocks are large enough to be read from the memory of a peer."""
    if rank == victim:
        DENIALS["process_vm_readv"]()
    num = 20_000
    ranks = range(world_size)
    mine = torch.arange(float(num)) + 1e6 * rank
    parts = [torch.arange(float(num)) + 1e6 * rank + 1e5 * r for r in ranks]
    wrong = []
    for turn in range(2):  # a system that refuses is not asked again

        def check(name, got, *expected, turn=turn):
            if not torch.equal(got, torch.cat(expected)):
                wrong.append((name, turn))

        tensor = mine.clone()
        dist.broadcast(tensor, src=0)
        check("broadcast", tensor, torch.arange(float(num)))
        tensor = torch.zeros(world_size * num)
        dist.all_gather_into_tensor(tensor, mine)
        check("all_gather", tensor, *(torch.arange(float(num)) + 1e6 * r for r in ranks))
        outputs = [torch.zeros(num) for _ in ranks]
        dist.gather(mine, outputs if rank == 1 else None, dst=1)
        if rank == 1:
            check("gather", torch.cat(outputs), *(torch.arange(float(num)) + 1e6 * r for r in ranks))
        tensor = torch.zeros(num)
        dist.scatter(tensor, parts if rank == 0 else None, src=0)
        check("scatter", tensor, torch.arange(float(num)) + 1e5 * rank)
        outputs = [torch.zeros(num) for _ in ranks]
        dist.all_to_all(outputs, parts)
        check("all_to_all", torch.cat(outputs), *(torch.arange(float(num)) + 1e6 * r + 1e5 * rank for r in ranks))
        # Rank r sends (r + 1) * 10,000 elements to every rank.
        sent, received = [(rank + 1) * 10_000] * world_size, [(r + 1) * 10_000 for r in ranks]
        tensor = torch.zeros(sum(received))
        dist.all_to_all_single(tensor, torch.full((sum(sent),), float(rank)), received, sent)
        check("all_to_all with splits", tensor, *(torch.full((received[r],), float(r)) for r in ranks))
    return wrong


@pytest.mark.parametrize("victim", [0, 1])
def test_where_one_rank_may_not_read_the_memory_of_others_all_data_arrive(run_ranks, victim):
    assert run_ranks(move_much, 3, victim) == [[]] * 3


_MEMFD_SECRET = 447


def secret_memory(num_bytes):
    """Return memory that the kernel shows to this process alone, None on systems without it."""
    fd = ctypes.CDLL(None).syscall(_MEMFD_SECRET, 0)
    if fd < 0:
        return None
    try:
        os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def give_what_is_secret(rank, world_size):
    mine = torch.arange(20_000.0) + 1e6 * rank
    if rank == 1:
        mine = torch.frombuffer(secret_memory(mine.nbytes), dtype=mine.dtype).copy_(mine)
    for _ in range(2):
        tensor = torch.zeros(world_size * 20_000)
        dist.all_gather_into_tensor(tensor, mine)
        assert torch.equal(tensor, torch.cat([torch.arange(20_000.0) + 1e6 * r for r in range(world_size)]))
    dist.broadcast(mine, src=1)  # the others read it, and write over what is theirs
    assert torch.equal(mine, torch.arange(20_000.0) + 1e6)


def test_a_block_that_the_kernel_shows_to_its_owner_alone_arrives(run_ranks):
    if (memory := secret_memory(4096)) is None:
        pytest.skip("needs memfd_secret (Linux 6.5, or 5.14 with secretmem.enable=1)")
    memory.close()
    run_ranks(give_what_is_secret, 3)


def offer_without_accepting(rank, world_size):
    server = _core.SegmentServer(_core.Segment.create())
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect("\0" + server.name)
        deny("accept4")
        with pytest.raises(PermissionError) as caught:
            server.serve(1, 10.0)
    return str(caught.value)


def test_who_can_not_take_the_connections_of_others_says_so_at_once(run_ranks):
    assert run_ranks(offer_without_accepting, 1, init=False) == ["[Errno 1] accept: Operation not permitted"]
