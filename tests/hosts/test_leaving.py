"""A rank that destroys a group while another of its threads calls it ends that call, and hangs nowhere."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from phalanx import GroupAborted, PhalanxError
from phalanx.backend.calls.tasks import Tasks, Watch
from phalanx.backend.hosts.channels import GlooChannel

LENGTHS = (3, 20_000, 400_000)  # inline, on the thread of the caller, on that of the group


def forbidden():
    raise AssertionError("sys._current_frames() can stop the process while a thread begins or ends")


def leave_beside_a_call(rank, world_size, num_rounds):
    sys._current_frames = forbidden
    met = []
    for k in range(num_rounds):
        group, length, begun = dist.new_group(), LENGTHS[k % len(LENGTHS)], threading.Event()

        def call(group=group, length=length, begun=begun):
            try:
                while True:
                    dist.all_reduce(torch.ones(length), group=group)
                    begun.set()
            except (PhalanxError, ValueError) as error:  # torch's own, once it has forgotten the group
                met.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        assert begun.wait(20)
        dist.destroy_process_group(group)
        caller.join(20)
        assert not caller.is_alive()
    return len(met)


def test_a_group_is_left_while_another_thread_calls_it(run_ranks):
    assert run_ranks(leave_beside_a_call, 2, 9, hosts=[1, 1], group_timeout_s=20, timeout_s=40) == [9, 9]


NUM_BYTES = 700_000  # of no other message


class Unfinished:
    """A receive that the engine does not give back, as Gloo's after a connection has ended in the middle of it."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def wait(self, timeout):
        self.begun.set()
        assert self.may_end.wait(60)
        raise RuntimeError("the connection has ended")

    def is_completed(self):
        return self.may_end.is_set()


def receive(kind, group):
    """Start to receive on rank 0 what rank 1 sends; return the work."""
    data = torch.ones(NUM_BYTES, dtype=torch.uint8)
    if kind == "broadcast":
        return dist.broadcast(data, 1, group=group, async_op=True), data
    return (dist.irecv if dist.get_rank() == 0 else dist.isend)(data, 1 - dist.get_rank(), group=group), data


def end_during_a_receive(rank, world_size):
    """Return whether the memory lived as long as the engine's receive, and whether it did afterwards."""
    lived = {}
    engines_recv = GlooChannel.recv
    for kind in ("message", "broadcast"):
        for end in ("destroy", "abort"):
            group, engine = dist.new_group(), Unfinished()
            if rank:
                sent = receive(kind, group)
                dist.barrier()
                dist.destroy_process_group(group)
                del sent
                continue

            def recv(self, tensor, peer, tag, engine=engine):
                handle = engines_recv(self, tensor, peer, tag)
                return engine if tensor.numel() == NUM_BYTES else handle

            GlooChannel.recv = recv
            before = set(threading.enumerate())
            work, data = receive(kind, group)
            memory = weakref.ref(data)
            del data
            assert engine.begun.wait(20)
            if end == "abort":
                group.abort()
                with pytest.raises(PhalanxError):
                    work.wait()
            del work
            dist.destroy_process_group(group)
            gc.collect()
            during = memory() is not None
            engine.may_end.set()
            for thread in set(threading.enumerate()) - before:
                thread.join(20)
            gc.collect()
            lived[kind, end] = during, memory() is not None
            GlooChannel.recv = engines_recv
            dist.barrier()
    return lived


def test_memory_lives_as_long_as_the_engine_receives_into_it(run_ranks):
    lived, _ = run_ranks(end_during_a_receive, 2, hosts=[1, 1], timeout_s=60)
    assert len(lived) == 4
    assert set(lived.values()) == {(True, False)}, lived


def test_nothing_starts_once_closed():
    tasks, watch = Tasks("phalanx-test", lambda: None), Watch(lambda: None)
    assert tasks.submit(lambda: 7).wait(10)
    tasks.close()
    watch.close()
    before = threading.active_count()
    with pytest.raises(GroupAborted):
        tasks.submit(lambda: 7)
    assert not tasks.begin_here()
    with watch:
        assert threading.active_count() == before
