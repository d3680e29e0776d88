"""``_add_ephemeral_timeout`` adds to the timeout of what starts next, until the first of it is over, as on NCCL."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import phalanx
from phalanx import CollectiveTimeout

pytestmark = pytest.mark.kept_ranks

OWN_S, MORE_S = 0.1, 0.2
MORE = timedelta(seconds=MORE_S)
HOSTS = pytest.mark.parametrize("hosts", [(), (1, 1)], ids=["one host", "two hosts"])


def limit_of(call):
    """Return the timeout with which a call ended in vain, in seconds."""
    with pytest.raises(CollectiveTimeout) as caught:
        call()
    return round(caught.value.failure.timeout_s, 3)


def barrier(group, timeout_s=0.0):
    options = c10d.BarrierOptions()
    options.asyncOp = False
    if timeout_s:
        options.timeout = timedelta(seconds=timeout_s)
    group.barrier(options)


def meet(group):
    """Meet the other rank, however late it is."""
    barrier(group, 30.0)


def started(group, **options):
    opts = c10d.AllreduceOptions()
    opts.asyncOp = True
    for name, value in options.items():
        setattr(opts, name, value)
    return group.allreduce([torch.ones(2)], opts)


def in_vain(rank, world_size):
    """Rank 0 waits alone in groups of a short timeout, once each; rank 1 is there for what they do together."""
    limits = {}

    def group_of(case, *, meets=0):
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=OWN_S))  # now that the ranks have met, which takes longer
        if rank != 0:
            for _ in range(meets):
                meet(group)
        limits.setdefault(case, None)
        return group

    def alone(case, call, *, prepare=None, meets=0):
        group = group_of(case, meets=meets)
        if rank == 0:
            if prepare is not None:
                prepare(group)
            limits[case] = limit_of(lambda: call(group))
        dist.barrier()

    def extend(group):
        group._add_ephemeral_timeout(MORE)

    def extend_twice(group):
        extend(group)
        extend(group)

    def spend(group):
        extend(group)
        meet(group)

    def spend_one_of_two(group):
        spend(group)
        extend(group)

    alone("its own", barrier)
    alone("a call", barrier, prepare=extend)
    alone("a communicator", lambda group: phalanx.communicator(group).barrier(), prepare=extend)
    alone("a work", lambda group: started(group).wait(), prepare=extend)
    alone("a message", lambda group: group.recv([torch.ones(2)], 1, 0).wait(), prepare=extend)
    alone("a timeout of the call", lambda group: barrier(group, OWN_S * 2), prepare=extend)
    alone("two", barrier, prepare=extend_twice)
    alone("after another call", barrier, prepare=spend, meets=1)
    alone("one after the other", barrier, prepare=spend_one_of_two, meets=1)
    alone("set meanwhile", barrier, prepare=lambda group: (extend(group), shorten(group)))
    alone("nothing", barrier, prepare=lambda group: group._add_ephemeral_timeout(timedelta(0)))

    group = group_of("started before")
    if rank == 0:
        earlier = started(group)
        extend(group)
        limits["started before"] = limit_of(earlier.wait)
    dist.barrier()
    return limits


def shorten(group):
    group.set_timeout(timedelta(seconds=OWN_S / 2))


WANT = {
    "its own": OWN_S,
    "a call": OWN_S + MORE_S,
    "a communicator": OWN_S + MORE_S,
    "a work": OWN_S + MORE_S,
    "a message": OWN_S + MORE_S,
    "a timeout of the call": OWN_S * 2 + MORE_S,
    "two": OWN_S + 2 * MORE_S,
    "after another call": OWN_S,
    "one after the other": OWN_S + MORE_S,
    "set meanwhile": OWN_S / 2 + MORE_S,
    "nothing": OWN_S,
    "started before": OWN_S,
}


@HOSTS
def test_what_starts_next_has_the_longer_timeout_and_nothing_else(run_ranks, hosts):
    got, _ = run_ranks(in_vain, 2, hosts=hosts)
    assert got == {case: round(limit_s, 3) for case, limit_s in WANT.items()}


def every_operation(rank, world_size):
    """All kinds of operations work while a timeout is extended, and the group is as it was afterwards."""
    group, other = dist.group.WORLD, 1 - rank
    core = group._operations._core
    comm = phalanx.communicator()
    got = []

    def extended(call):
        group._add_ephemeral_timeout(MORE)
        assert group._operations._core is not core
        got.append(call())
        dist.barrier()  # the second to start: by now the first is over
        dist.barrier()
        assert group._operations._core is core, "the first operation ends it"

    def exchange(send, recv):
        tensor = torch.zeros(2)
        works = [send(torch.full((2,), float(rank)), other), recv(tensor, other)]
        for work in works:
            if isinstance(work, dist.Work):
                work.wait()
        return tensor.tolist()

    def in_turn(tensor, peer):
        comm.send(torch.full((2,), float(rank)), peer) if rank == 0 else comm.recv(tensor, peer)
        comm.recv(tensor, peer) if rank == 0 else comm.send(torch.full((2,), float(rank)), peer)

    def total(call):
        tensor = torch.ones(3)
        work = call(tensor)
        if isinstance(work, dist.Work):
            work.wait()
        return tensor.tolist()

    extended(lambda: total(lambda tensor: dist.all_reduce(tensor)))
    extended(lambda: total(lambda tensor: dist.all_reduce(tensor, async_op=True)))
    extended(lambda: total(comm.all_reduce))
    extended(lambda: total(lambda tensor: group.average_coalesced([tensor], torch.ones(1))))
    extended(lambda: total(lambda tensor: group.average_coalesced([tensor.t()], torch.ones(1).double())))
    extended(lambda: exchange(dist.isend, dist.irecv))
    extended(lambda: exchange(lambda tensor, peer: None, lambda tensor, peer: in_turn(tensor, peer)))
    return got


@HOSTS
def test_every_operation_works_while_a_timeout_is_extended(run_ranks, hosts):
    for rank, got in enumerate(run_ranks(every_operation, 2, hosts=hosts)):
        assert got == [[2.0] * 3] * 3 + [[1.0] * 3] * 2 + [[1.0 - rank] * 2] * 2


def all_groups(rank, world_size):
    group = dist.new_group()
    c10d._add_ephemeral_timeout_for_all_pgs(MORE)
    are_extended = [type(each._operations._core).__name__ for each in (dist.group.WORLD, group)]
    group._add_ephemeral_timeout(MORE)
    dist.destroy_process_group(group)
    group._add_ephemeral_timeout(MORE)  # nothing is left to extend
    with pytest.raises(ValueError, match=r"at least 0 s, got -1 s"):
        dist.group.WORLD._add_ephemeral_timeout(timedelta(seconds=-1))
    dist.barrier()
    return are_extended


def test_torchs_function_reaches_all_groups(run_ranks):
    reached = "Extended" if phalanx._torch.version() >= (2, 14) else "Group"  # before, it asks for NCCL's alone
    assert run_ranks(all_groups, 2) == [[reached] * 2] * 2
