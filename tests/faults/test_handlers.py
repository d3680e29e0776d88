"""Signal handlers that call the backend while a call of the same group waits: they work, or raise at once."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveTimeout, GroupAborted, GroupUnusable, PhalanxError, checkpoint
from phalanx.testing import await_release, reached
from tests.faults._watch import NAMED_WITHIN_S, start_waiting, telling, wait_until_asleep
from tests.hosts._layouts import layout_name

HOSTS = [(), (1, 1)]

INTERRUPTED = {
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
    "async wait": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "wait with a limit": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=30)),
}
"""What rank 0 waits in when the signal comes."""

NESTED = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "all_reduce of 8 MiB": lambda: dist.all_reduce(torch.ones(1 << 21)),
    "barrier": dist.barrier,
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], src=0),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=timedelta(seconds=20)),
    "checkpoint.save": lambda: checkpoint.save(os.getcwd(), {"model": torch.ones(3)}, 1),
}


def on_usr1(handler):
    signal.signal(signal.SIGUSR1, lambda signum, frame: handler())


def call_in_a_handler(rank, world_size, interrupted, nested):
    """Rank 0 catches what its handler's call raises; the call that was interrupted goes on."""
    tensor = torch.full((3,), rank + 1.0)
    if rank == 1:
        await_release("go")
        dist.all_reduce(tensor)
        dist.barrier()
        return tensor.tolist(), None
    errors = []

    def handler():
        with pytest.raises(GroupUnusable) as caught:
            NESTED[nested]()
        errors.append(caught.value)
        reached("handled")

    on_usr1(handler)
    reached("up")
    INTERRUPTED[interrupted](tensor)
    dist.barrier()
    return tensor.tolist(), errors


@pytest.mark.parametrize(
    ("nested", "hosts"),
    [*((nested, ()) for nested in NESTED), ("all_reduce", (1, 1)), ("all_reduce of 8 MiB", (1, 1))],
    ids=lambda value: value if isinstance(value, str) else layout_name(value),
)
def test_a_collective_of_a_handler_inside_one_of_its_group_raises_at_once(spawn_ranks, hosts, nested):
    with spawn_ranks(call_in_a_handler, 2, "all_reduce", nested, hosts=hosts, group_timeout_s=30) as ranks:
        (first, errors), second = interrupt_rank_zero(ranks)
    assert (first, second[0]) == ([3.0] * 3, [3.0] * 3)
    (error,) = errors
    assert "was called by a signal handler that interrupted all_reduce #1 of group" in str(error)
    assert f"{__name__.rpartition('.')[2]}.py:" in str(error)
    assert "Set a flag in the handler" in str(error)
    assert error.ranks == (0,)


def test_a_wait_that_runs_its_operation_itself_is_told_apart_too(spawn_ranks):
    with spawn_ranks(call_in_a_handler, 2, "async wait", "barrier", group_timeout_s=30) as ranks:
        (first, errors), second = interrupt_rank_zero(ranks)
    assert (first, second[0]) == ([3.0] * 3, [3.0] * 3)
    # The native thread may have been awake already: then it is the wait for it that was interrupted.
    what = r"signal handler that interrupted (the wait for all_reduce|all_reduce #1) of group"
    assert re.search(what, str(errors[0]))


def test_a_wait_that_leaves_its_operation_to_the_native_thread_is_told_with_its_line(spawn_ranks):
    """A wait that may give up does so: it could not return from an operation that it had begun."""
    with spawn_ranks(call_in_a_handler, 2, "wait with a limit", "barrier", group_timeout_s=30) as ranks:
        (first, errors), second = interrupt_rank_zero(ranks)
    assert (first, second[0]) == ([3.0] * 3, [3.0] * 3)
    what = r"signal handler that interrupted the wait for all_reduce of group 'default' at \S*test_handlers\.py:\d+"
    assert re.search(what, str(errors[0])), errors[0]


def interrupt_rank_zero(ranks):
    """Send the signal once rank 0 waits; let rank 1 answer when the handler is done; return what both returned."""
    ranks.wait_until_reached("up", ranks=[0])
    wait_until_asleep(ranks.pids[0])
    ranks.kill(0, signal.SIGUSR1)
    ranks.wait_until_reached("handled", ranks=[0], timeout_s=10)
    ranks.release("go", ranks=[1])
    outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def start_in_a_handler(rank, world_size):
    """An asynchronous call of a handler has its turn after the call that was interrupted; waiting is for later."""
    tensor, later = torch.full((3,), rank + 1.0), torch.full((50_000,), rank + 1.0)
    if rank == 1:
        await_release("go")
        dist.all_reduce(tensor)
        dist.all_reduce(later)
        return tensor.tolist(), later.unique().tolist(), 0
    works, errors = [], []

    def handler():
        work = dist.all_reduce(later, async_op=True)
        assert not work.is_completed()
        for wait in (work.wait, lambda: work.wait(timedelta(seconds=20)), work.get_future, work.result):
            with pytest.raises(GroupUnusable, match=r"the wait for all_reduce .*interrupted all_reduce #1") as caught:
                wait()
            errors.append(caught.value)
        works.append(work)
        reached("handled")

    on_usr1(handler)
    reached("up")
    dist.all_reduce(tensor)
    works[0].get_future().wait()
    works[0].wait()
    return tensor.tolist(), later.unique().tolist(), len(errors)


def test_an_asynchronous_call_of_a_handler_runs_after_the_interrupted_one(spawn_ranks):
    with spawn_ranks(start_in_a_handler, 2, group_timeout_s=30) as ranks:
        results = interrupt_rank_zero(ranks)
    assert results == [([3.0] * 3, [3.0], 4), ([3.0] * 3, [3.0], 0)]


def call_elsewhere_in_a_handler(rank, world_size):
    """Messages, and other groups, do not wait for the collective that was interrupted."""
    other = dist.new_group()
    tensor, sums, got = torch.full((3,), rank + 1.0), torch.full((2,), rank + 1.0), torch.zeros(1)
    if rank == 1:
        await_release("go")
        dist.recv(got, src=0)
        dist.send(got + 1, dst=0)
        dist.all_reduce(sums, group=other)
        dist.all_reduce(tensor)
        return tensor.tolist(), sums.tolist(), got.item()

    def handler():
        reached("handled")
        dist.send(torch.full((1,), 7.0), dst=1)
        dist.recv(got, src=1)
        dist.all_reduce(sums, group=other)

    on_usr1(handler)
    reached("up")
    dist.all_reduce(tensor)
    return tensor.tolist(), sums.tolist(), got.item()


def test_messages_and_other_groups_work_in_a_handler(spawn_ranks):
    with spawn_ranks(call_elsewhere_in_a_handler, 2, group_timeout_s=30) as ranks:
        results = interrupt_rank_zero(ranks)
    assert results == [([3.0] * 3, [3.0, 3.0], 8.0), ([3.0] * 3, [3.0, 3.0], 7.0)]


def call_inside_a_message(rank, world_size):
    """A receive that waits holds no collective up."""
    got, tensor = torch.zeros(1), torch.full((3,), rank + 1.0)
    if rank == 1:
        await_release("go")
        dist.all_reduce(tensor)
        dist.send(torch.full((1,), 7.0), dst=0)
        return tensor.tolist(), 7.0

    def handler():
        reached("handled")
        dist.all_reduce(tensor)

    on_usr1(handler)
    reached("up")
    dist.recv(got, src=1)
    return tensor.tolist(), got.item()


def test_a_collective_works_in_a_handler_that_interrupted_a_receive(spawn_ranks):
    with spawn_ranks(call_inside_a_message, 2, group_timeout_s=30) as ranks:
        assert interrupt_rank_zero(ranks) == [([3.0] * 3, 7.0)] * 2


def end_the_group_in_a_handler(rank, world_size, how):
    if rank == 1:
        await_release("go")
        dist.all_reduce(torch.ones(3))
        return

    def handler():
        if how == "destroy":
            dist.all_reduce(torch.ones(3), async_op=True)
            dist.destroy_process_group()
        elif how == "abort":
            dist.group.WORLD.abort()
        else:
            dist.barrier()  # its error leaves the handler

    on_usr1(handler)
    reached("up")
    with telling("handled", PhalanxError):
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("hosts", HOSTS, ids=layout_name)
@pytest.mark.parametrize("how", ["destroy", "abort", "raise"])
def test_a_handler_may_end_the_group_that_it_interrupted(spawn_ranks, hosts, how):
    with spawn_ranks(end_the_group_in_a_handler, 2, how, hosts=hosts, group_timeout_s=30, init_method="tcp") as ranks:
        ranks.wait_until_reached("up", ranks=[0])
        wait_until_asleep(ranks.pids[0])
        ranks.kill(0, signal.SIGUSR1)
        ranks.wait_until_reached("handled", ranks=[0], timeout_s=10)
        ranks.release("go", ranks=[1])
        own, peer = ranks.join(20)
    assert isinstance(own.error, GroupUnusable if how == "raise" else PhalanxError), own
    assert isinstance(peer.error, PhalanxError), peer
    assert 0 in peer.error.ranks


def wait_while_another_thread_does(rank, world_size):
    if rank == 1:
        await_release("rank 0 is done")
        return None
    held = []

    def hold():
        try:
            dist.all_reduce(torch.ones(3))
        except PhalanxError as error:
            held.append(error)

    thread = start_waiting(hold)
    reached("up")
    try:
        dist.barrier()
    except KeyboardInterrupt:
        reached("interrupted", time.monotonic())
    thread.join()
    return type(held[0])


def test_ctrl_c_is_acted_on_while_another_thread_waits_in_the_group(spawn_ranks):
    with spawn_ranks(wait_while_another_thread_does, 2, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up", ranks=[0])
        wait_until_asleep(ranks.pids[0])
        pressed_at = time.monotonic()
        ranks.kill(0, signal.SIGINT)
        (when,) = ranks.wait_until_reached("interrupted", ranks=[0], timeout_s=10)
        ranks.release("rank 0 is done", ranks=[1])
        outcomes = ranks.join(20)
    assert when - pressed_at < NAMED_WITHIN_S
    assert outcomes[0].value is GroupAborted, outcomes


def run_out_of_time_behind_another_thread(rank, world_size):
    if rank == 1:
        await_release("rank 0 is done")
        return None
    errors = []

    def hold():
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.ones(3))

    thread = start_waiting(hold)
    with pytest.raises(CollectiveTimeout) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=0.2))
    errors.append(str(caught.value))
    thread.join()
    reached("done")
    return errors


def test_waiting_for_another_thread_has_a_deadline(spawn_ranks):
    with spawn_ranks(run_out_of_time_behind_another_thread, 2, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("done", ranks=[0], timeout_s=10)
        ranks.release("rank 0 is done", ranks=[1])
        outcomes = ranks.join(20)
    assert "another thread of this rank is in a collective of the group" in outcomes[0].value[0]


def interrupt_the_look_for_the_line(rank, world_size):
    """Python handles signals in the function that finds the caller's line, too; what a handler raises is not lost."""
    from phalanx.record import sites

    class Interruption(Exception):
        pass

    def handler():
        raise Interruption

    on_usr1(handler)
    show, armed = sites.shown_file, rank == 0

    def show_and_signal(code):
        nonlocal armed
        if armed:
            armed = False
            signal.raise_signal(signal.SIGUSR1)
        return show(code)

    sites._shown.clear()
    sites.shown_file = show_and_signal
    if rank == 1:
        await_release("rank 0 is done")
        return None
    with pytest.raises(Interruption):
        dist.all_reduce(torch.ones(3))
    reached("done")
    return "raised"


def test_what_a_handler_raises_while_the_line_is_looked_for_is_not_lost(spawn_ranks):
    with spawn_ranks(interrupt_the_look_for_the_line, 2, group_timeout_s=20) as ranks:
        ranks.wait_until_reached("done", ranks=[0], timeout_s=5)
        ranks.release("rank 0 is done", ranks=[1])
        assert ranks.join(20)[0].value == "raised"


def wait_for_a_future_in_a_handler(rank, world_size, interrupted):
    """Rank 0's handler waits for the future of another operation, which rank 1 joins once it is waited for."""
    from phalanx.backend.calls import work as work_module

    side, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    column = torch.ones(1000, 2)[:, 0]  # copied back at the end
    if rank == 1:
        dist.all_reduce(column)
        store.wait(["asked"])
        dist.all_reduce(torch.ones(3), group=side)
        return None
    handled = torch.ones(3)

    def handle():
        future = dist.all_reduce(handled, group=side, async_op=True).get_future()
        assert not future.done()
        store.set("asked", "")
        future.wait()

    on_usr1(handle)
    init, then = work_module.PhalanxWork.__init__, torch.futures.Future.then

    def init_interrupted(self, handle, wait, result, settle, *args, **options):
        work_module.PhalanxWork.__init__ = init
        init(self, handle, wait, result, lambda: (signal.raise_signal(signal.SIGUSR1), settle()), *args, **options)

    def then_interrupted(self, callback):
        torch.futures.Future.then = then
        signal.raise_signal(signal.SIGUSR1)
        return then(self, callback)

    if interrupted == "wait":
        work_module.PhalanxWork.__init__ = init_interrupted
        dist.all_reduce(column, async_op=True).wait()
    else:
        work = dist.all_reduce(column, async_op=True)
        torch.futures.Future.then = then_interrupted
        work.get_future().wait()
    return column[0].item(), handled[0].item()


@pytest.mark.parametrize("interrupted", ["wait", "get_future"])
def test_a_handler_may_wait_for_the_future_of_another_operation(run_ranks, interrupted):
    options = {"group_timeout_s": 10, "timeout_s": 20}
    assert run_ranks(wait_for_a_future_in_a_handler, 2, interrupted, **options) == [(2.0, 2.0), None]
