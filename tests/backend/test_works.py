"""Operations on their way: several at once, handles and futures, timeouts, threads."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveTimeout
from phalanx.testing import await_release, reached
from tests.backend._calls import CALLS, Call, check_equal

pytestmark = pytest.mark.kept_ranks

SOON = timedelta(seconds=20)


def start_many(rank, world_size):
    tensors = [torch.full((num,), float(rank + i)) for i, num in enumerate([1, 40_000, 7, 100_001, 12, 0, 3000])]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    sums = torch.zeros(world_size)
    gathered = dist.all_gather_into_tensor(sums, torch.tensor([float(rank)]), async_op=True)
    for i in reversed(range(len(works))):
        assert works[i].wait()
        assert works[i].is_completed()
        want = float(sum(r + i for r in range(world_size)))
        assert (tensors[i] == want).all()
    gathered.wait()
    return sums.tolist()


def blocking_behind_pending(rank, world_size):
    """A blocking operation sees what the asynchronous ones before it did: the group keeps the order of calls."""
    tensor = torch.ones(60_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
    dist.all_reduce(tensor)  # behind four others
    after = tensor[0].item()
    for work in works:
        assert work.is_completed()
        work.wait()
    return after


def look_at_a_work(rank, world_size):
    """Until rank 0 comes, the others' work is neither done nor failed."""
    tensor = torch.full((5,), float(rank))
    if rank == 0:
        await_release("go")
    work = dist.all_reduce(tensor, async_op=True)
    if rank != 0:
        before = work.is_completed(), work.exception()
        reached("pending", before)
        thens = threading.Event()
        future = work.get_future()
        future.then(lambda f: thens.set())
        assert thens.wait(20), "nobody polled, and the future did not complete"
        assert future.done()
        assert future.value()[0] is tensor
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    return tensor.tolist()


def chain_futures(rank, world_size):
    tensor = torch.full((3,), float(rank + 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    late = dist.all_reduce(torch.ones(2), async_op=True)
    late.wait()
    seen = late.get_future().then(lambda f: f.value()[0].tolist())  # asked for when it was over
    again = late.get_future()
    together = torch.futures.collect_all([future, again]).wait()
    blocked = dist.broadcast(torch.ones(1), 0, async_op=True)
    blocked.wait()
    return doubled.wait().tolist(), seen.wait(), len(together), again.done()


def future_of_a_view(rank, world_size):
    """A result that is copied back is there when the future says so."""
    whole = torch.full((40_000, 2), float(rank))
    value = dist.all_reduce(whole[:, 0], async_op=True).get_future().wait()
    assert value[0].data_ptr() == whole.data_ptr()
    return whole[:, 0].unique().tolist(), whole[:, 1].unique().tolist()


def future_of_each_call(rank, world_size):
    for name in CALLS:
        if name == "all_reduce_coalesced":
            continue
        works, results = Call(name, dist.group.WORLD, (6, 2), seed=3, async_op=True).start()
        wanted = Call(name, dist.group.WORLD, (6, 2), seed=3).run()
        for work in works:
            work.get_future().wait()
            assert work.is_completed(), name
        for got, want in zip(results, wanted, strict=True):
            check_equal(got, want, name)


def wait_in_vain(rank, world_size, op):
    """The wait ends, the operation does not: it can be waited for again."""
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        await_release("go")
        if op == "recv":
            dist.send(torch.full((3,), 9.0), 1)
            return None
    if op == "recv":
        work = dist.irecv(tensor, 0)
    else:
        work = getattr(dist, op)(*([tensor] if op != "barrier" else []), async_op=True)
    if rank != 0:
        for _ in range(2):
            try:
                work.wait(timedelta(milliseconds=30))
            except TimeoutError as error:
                seen = str(error)
            else:
                raise AssertionError("the wait did not end")
        assert not work.is_completed()
        reached("timed out", seen)
    work.wait(SOON)
    return tensor.tolist()


def queue_behind_a_stuck_one(rank, world_size):
    """A short wait for the second of two operations ends too, and both come to their end later."""
    first, second = torch.ones(2), torch.ones(70_000)
    if rank == 0:
        await_release("go")
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    if rank != 0:
        with pytest.raises(TimeoutError):
            works[1].wait(timedelta(milliseconds=30))
        reached("timed out")
    works[1].wait(SOON)
    assert works[0].is_completed()
    return first[0].item(), second[-1].item()


def drop_works(rank, world_size):
    """Nobody keeps the handle, the tensor or the input: memory must stay until the operation is over."""
    for _ in range(20):
        dist.all_reduce(torch.ones(80_000), async_op=True)
        dist.all_gather_into_tensor(torch.empty(3 * world_size), torch.ones(3), async_op=True)
        dist.isend(torch.full((30_000,), 5.0), (rank + 1) % world_size)
    gc.collect()
    got = torch.zeros(30_000)
    for _ in range(20):
        dist.recv(got, (rank - 1) % world_size)
        assert (got == 5).all()
    dist.all_reduce(torch.ones(80_000), async_op=True).get_future().then(lambda f: None)
    gc.collect()
    total = torch.ones(4)
    dist.all_reduce(total)
    return total.tolist()


def hold_memory(rank, world_size):
    """Tensors are let go once their operations are over, whether anybody waited or not."""
    freed = []

    class Watched(torch.Tensor):
        def __del__(self):
            freed.append(1)

    for i in range(30):
        tensor = torch.ones(10).as_subclass(Watched)
        work = dist.all_reduce(tensor, async_op=True)
        if i % 2:
            work.wait()
        del tensor, work
    dist.barrier()
    last = torch.ones(1)
    dist.all_reduce(last, async_op=True).wait()
    gc.collect()
    return len(freed)


def call_from_threads(rank, world_size, num_threads):
    groups = [dist.new_group() for _ in range(num_threads)]
    failures = []

    def work(index):
        try:
            for i in range(40):
                num = [1, 700, 20_000, 50_001][(i + index) % 4]
                tensor = torch.full((num,), float(rank + index))
                handle = dist.all_reduce(tensor, group=groups[index], async_op=i % 3 == 0)
                if handle is not None:
                    handle.wait()
                want = float(sum(r + index for r in range(world_size)))
                assert (tensor == want).all(), (index, i)
                outputs = torch.zeros(world_size)
                dist.all_gather_into_tensor(outputs, torch.tensor([float(rank)]), group=groups[index])
                assert outputs.tolist() == [float(r) for r in range(world_size)]
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def wait_from_another_thread(rank, world_size):
    tensor = torch.full((90_000,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    done = []
    threads = [threading.Thread(target=lambda: done.append(work.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done, tensor.unique().tolist()


def fail_while_waited_for(rank, world_size):
    """An operation that fails says so to every way of asking."""
    if rank == 0:
        await_release("end")
        return
    dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    errors = []
    for ask in (work.wait, future.wait, work.result):
        try:
            ask()
        except Exception as error:
            errors.append((type(error).__name__, "waiting for rank 0" in str(error)))
    assert work.is_completed()
    assert not work.is_success()
    error = work.exception()
    assert isinstance(error, CollectiveTimeout)
    reached("failed", (errors, error.ranks, error.op))


class Meanwhile:
    """A core with which something happens between the start of an operation and the return of the call."""

    def __init__(self, group, happens):
        self._core, self._happens = group._operations._core, happens
        group._operations._core = self

    def __getattr__(self, name):
        found = getattr(self._core, name)
        if name not in ("run", "recv_plain", "recv"):
            return found

        def start(*args):
            handle = found(*args)
            self._happens()
            return handle

        return start


STARTS = {
    "all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group, async_op=True),
    "irecv": lambda tensor, group: dist.irecv(tensor, 1, group=group),
    "irecv from any": lambda tensor, group: dist.irecv(tensor, group=group),
}


def leave_while_starting(rank, world_size):
    """Another thread leaves the group while an operation starts that the other rank does not join."""
    found = {}
    for name, start in STARTS.items():
        group = dist.new_group()
        if rank == 0:
            operations = group._operations
            Meanwhile(group, lambda operations=operations: operations.shutdown("left"))
            work = start(torch.zeros(1000), group)
            found[name] = (work.is_completed(), type(work.exception()).__name__, len(operations._flight._works))
    return found


def interrupt_while_starting(rank, world_size):
    """A signal handler raises once the operation has started."""

    def interrupt():
        raise KeyboardInterrupt

    alive = {}
    for name, start in STARTS.items():
        group = dist.new_group()
        tensor = torch.ones(1000)
        freed = weakref.ref(tensor)
        if rank == 0:
            Meanwhile(group, interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                start(tensor, group)
            del tensor
            gc.collect()
            before = freed() is not None
            if name == "all_reduce":
                dist.all_reduce(torch.ones(1), group=group)  # behind the other, which the other rank joins now
            tensor = freed()
            total = None if tensor is None else tensor.unique().tolist()
            del tensor
            dist.destroy_process_group(group)
            gc.collect()
            alive[name] = before, total, freed() is not None
        else:
            if name == "all_reduce":
                dist.all_reduce(tensor, group=group)
                dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
    return alive


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_several_operations_are_in_flight(run_ranks, world_size):
    assert run_ranks(start_many, world_size) == [[float(r) for r in range(world_size)]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_blocking_operation_waits_for_those_before_it(run_ranks, world_size):
    assert run_ranks(blocking_behind_pending, world_size) == [float(world_size**5)] * world_size


def test_a_work_tells_whether_it_is_done_and_its_future_completes_by_itself(spawn_ranks):
    with spawn_ranks(look_at_a_work, 3) as ranks:
        assert ranks.wait_until_reached("pending", [1, 2]) == [(False, None)] * 2
        ranks.release("go", ranks=[0])
        assert [outcome.value or str(outcome) for outcome in ranks.join(30)] == [[3.0] * 5] * 3


def test_futures_chain_collect_and_can_be_asked_for_late(run_ranks):
    assert run_ranks(chain_futures, 2) == [([7.0] * 3, [2.0] * 2, 2, True)] * 2


def test_a_future_completes_after_its_view_was_filled(run_ranks):
    assert run_ranks(future_of_a_view, 2) == [([1.0], [0.0]), ([1.0], [1.0])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_operation_has_a_future(run_ranks, world_size):
    run_ranks(future_of_each_call, world_size)


@pytest.mark.parametrize(("op", "want"), [("all_reduce", [1.0] * 3), ("barrier", [1.0] * 3), ("recv", [9.0] * 3)])
def test_a_wait_that_times_out_can_be_repeated(spawn_ranks, op, want):
    with spawn_ranks(wait_in_vain, 2, op) as ranks:
        assert "again" in ranks.wait_until_reached("timed out", [1])[0]
        ranks.release("go", ranks=[0])
        outcomes = ranks.join(30)
        assert [str(outcome) for outcome in outcomes if not outcome.ok] == []
        assert outcomes[1].value == want


def test_a_wait_for_a_queued_operation_times_out_too(spawn_ranks):
    with spawn_ranks(queue_behind_a_stuck_one, 2) as ranks:
        ranks.wait_until_reached("timed out", [1])
        ranks.release("go", ranks=[0])
        assert [outcome.value or str(outcome) for outcome in ranks.join(30)] == [(2.0, 2.0)] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_handles_may_be_dropped(run_ranks, world_size):
    assert run_ranks(drop_works, world_size) == [[float(world_size)] * 4] * world_size


def test_tensors_of_finished_operations_are_let_go(run_ranks):
    assert all(count >= 29 for count in run_ranks(hold_memory, 2))


@pytest.mark.parametrize(("world_size", "num_threads"), [(2, 4), (3, 2), (1, 3)])
def test_threads_use_groups_of_their_own_at_the_same_time(run_ranks, world_size, num_threads):
    assert run_ranks(call_from_threads, world_size, num_threads) == [[]] * world_size


def test_an_operation_outlives_that_another_thread_leaves_its_group_while_it_starts(run_ranks):
    found = run_ranks(leave_while_starting, 2)[0]
    assert {name: (over, works) for name, (over, _, works) in found.items()} == dict.fromkeys(STARTS, (True, 0))
    assert "NoneType" not in [error for _, error, _ in found.values()]


def test_tensors_of_an_operation_live_though_a_signal_handler_raises_while_it_starts(run_ranks):
    found = run_ranks(interrupt_while_starting, 2)[0]
    assert found == {name: (True, [2.0 if name == "all_reduce" else 1.0], False) for name in STARTS}


def test_several_threads_wait_for_one_work(run_ranks):
    assert run_ranks(wait_from_another_thread, 2) == [([True] * 3, [1.0])] * 2


def test_a_failure_reaches_the_work_and_its_future(spawn_ranks):
    with spawn_ranks(fail_while_waited_for, 2) as ranks:
        errors, missing, op = ranks.wait_until_reached("failed", [1])[0]
        assert errors[0] == errors[2] == ("CollectiveTimeout", True)
        assert errors[1][1], "the future's error names the missing rank"
        assert (missing, op) == ((0,), "all_reduce")
        ranks.release("end", ranks=[0])
        assert [str(outcome) for outcome in ranks.join(30) if not outcome.ok] == []
