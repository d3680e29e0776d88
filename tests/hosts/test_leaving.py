"""A rank that destroys a group while another of its threads calls it ends that call, and hangs nowhere."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.distributed as dist

from phalanx import GroupAborted, PhalanxError
from phalanx.backend._tasks import Tasks, Watch

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
