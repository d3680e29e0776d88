"""What a rank does, from what was seen of it: its stacks, its box, and the kernel's view."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.diagnose.stacks import Frame, Stacks, Thread
from phalanx.diagnose.why.activity import Activity, Look, activity_of
from phalanx.diagnose.why.clauses import clause
from phalanx.host.kernel import Stand
from phalanx.host.processes import Process
from phalanx.record.box import Box, Event

PID = 100
PROCESS = Process(PID, 1, "python", "S", 5, 1.0, 2, 1 << 20, 0, 0)
OWN = Frame("train", "train.py", 31, "")
ENDED = Event(1, 10, 20, "collective", "all_reduce", "default", "train.py:9", PID, 1, 4)
OPEN = Event(2, 30, 0, "collective", "broadcast", "default", "train.py:31", PID, 2, 4)


def seen(*library: Frame, state: str = "S", call: str = "futex", tracer: int = 0, **more: object) -> Look:
    """A process whose main thread is in code of libraries that ``train`` has called, innermost first."""
    thread = Thread(PID, "MainThread", is_active=state == "R", owns_gil=False, frames=(*library, OWN))
    stand = Stand(state, None if state == "R" else 3.0, "futex_wait", call, tracer_pid=tracer)
    return dataclasses.replace(Look(PID, PROCESS, Stacks((thread,)), stand, seen_ns=10**9), **more)


def box(*events: Event) -> Box:
    return Box(0, 2, PID, 5, "host", 0, len(events), events)


def of_torch(function: str, file: str = "torch/distributed/distributed_c10d.py") -> Frame:
    return Frame(function, file, 1, "torch")


def doing(look: Look) -> Activity:
    return activity_of(0, look)


def test_a_box_tells_the_call_its_number_and_since_when():
    found = doing(seen(box=box(ENDED, OPEN)))
    assert (found.call.op, found.call.seq, found.call.site) == ("broadcast", 2, "train.py:31")
    assert found.call.since_s == pytest.approx((10**9 - 30) / 1e9)
    assert (found.last.op, found.progress) == ("all_reduce", {"default": 2})


def test_a_sleep_that_a_halt_may_have_begun_anew_has_lasted_at_least_so_long():
    soon_after, long_after = (dataclasses.replace(seen(box=box(ENDED)), seen_ns=ns * 10**9) for ns in (3, 60))
    assert [doing(look).since_s for look in (soon_after, long_after)] == [3.0, 3.0]
    assert not doing(soon_after).since_is_least, "it has slept since it left the collective"
    assert doing(long_after).since_is_least
    assert doing(seen()).since_is_least, "nothing is recorded"
    assert not doing(seen(state="R")).since_is_least, "it runs"
    assert doing(seen(of_torch("barrier"))).call.since_is_least
    assert not doing(seen(box=box(ENDED, OPEN))).call.since_is_least


def test_a_rank_that_steps_without_others_is_told_by_its_last_step():
    step = Event(2, 30, 58 * 10**9, "step", "", "", "", PID, 7, 64)
    look = dataclasses.replace(seen(state="R", box=box(ENDED, step)), seen_ns=60 * 10**9)
    assert clause(doing(look)) == "is running in train at train.py:31, 2.0 s after its last step"
    soon = dataclasses.replace(look, seen_ns=58 * 10**9 + 10**8)
    assert clause(doing(soon)) == "is running in train at train.py:31"


def test_without_stacks_the_box_still_tells_it():
    found = doing(seen(box=box(ENDED, OPEN), stacks=Stacks(problem="py-spy is not installed")))
    assert (found.call.op, found.frame, found.how) == ("broadcast", None, "asleep")


def test_an_operation_that_another_thread_runs_meanwhile_is_not_waited_in():
    of_worker = OPEN._replace(thread=555)
    assert doing(seen(box=box(ENDED, of_worker))).call is None
    assert doing(seen(of_torch("barrier"), box=box(ENDED, of_worker))).call.op == "broadcast"


def test_of_a_training_that_is_not_in_the_main_thread_that_thread_is_looked_at():
    trains = Thread(555, "trainer", is_active=False, owns_gil=False, frames=(Frame("load", "data.py", 8, ""),))
    look = seen(box=box(ENDED._replace(thread=555)))
    look = dataclasses.replace(look, stacks=Stacks((*look.stacks.threads, trains)))
    assert doing(look).frame == trains.frames[0]
    assert doing(dataclasses.replace(look, box=box(ENDED))).frame == OWN


@pytest.mark.parametrize(
    ("library", "op"),
    [
        ([of_torch("all_reduce")], "all_reduce"),
        ([of_torch("all_gather"), of_torch("all_gather_object")], "all_gather_object"),
        ([of_torch("_engine_run_backward", "torch/autograd/graph.py")], "backward"),
        ([of_torch("_sync_params", "torch/nn/parallel/distributed.py")], "sync_params"),
    ],
)
def test_without_a_box_the_stack_tells_the_call_and_the_line(library, op):
    found = doing(seen(*library))
    assert (found.call.op, found.call.site, found.call.seq) == (op, "train.py:31", 0)


def test_a_box_without_collectives_leaves_the_call_to_the_stack():
    step = Event(1, 10, 0, "step", "", "", "", PID, 7, 64)
    found = doing(seen(of_torch("all_reduce"), box=box(step)))
    assert (found.call.op, found.last, found.progress) == ("all_reduce", None, {})


BACKWARD = of_torch("_engine_run_backward", "torch/autograd/graph.py")
CALLED = ENDED._replace(kind="call")


@pytest.mark.parametrize(
    ("library", "state", "events", "op"),
    [
        (BACKWARD, "S", (ENDED, CALLED), "backward"),  # which averages gradients on Gloo
        (BACKWARD, "R", (ENDED, CALLED), ""),
        (BACKWARD, "S", (ENDED,), ""),  # whoever records each wait does not wait
        (of_torch("recv"), "S", (ENDED,), "recv"),
        (Frame("Event.wait", "threading.py", 1, "Python"), "S", (ENDED, CALLED), ""),
    ],
)
def test_waits_that_gloo_tells_nobody_of_are_told_by_the_stack(library, state, events, op):
    found = doing(seen(library, state=state, box=box(*events)))
    assert (found.call.op if found.call else "") == op
    assert (found.progress, found.last.op) == ({"default": 1}, "all_reduce")


def test_a_backward_pass_that_computes_waits_for_nobody():
    assert doing(seen(of_torch("_engine_run_backward", "torch/autograd/graph.py"), state="R")).call is None


@pytest.mark.parametrize("recorded", [None, box(ENDED)], ids=["no box", "a box"])
def test_a_rank_that_waits_for_the_one_with_the_debugger_waits_at_the_breakpoint(recorded):
    waits = Frame("_Meeting.wait", "phalanx/debugging/breakpoints.py", 157, "phalanx")
    call = doing(seen(waits, box=recorded)).call
    assert (call.op, call.site, call.since_s) == ("phalanx.breakpoint", "train.py:31", None)


LOOP = of_torch("_worker_loop", "torch/utils/data/_utils/worker.py")
FETCH = of_torch("fetch", "torch/utils/data/_utils/fetch.py")
QUEUE = Frame("Queue.get", "multiprocessing/queues.py", 113, "Python")


def test_of_the_workers_of_a_loader_the_one_that_has_something_to_do_is_named():
    loading = seen(Frame("load", "data.py", 8, ""), FETCH, LOOP)  # below the loop lies the rank that was forked
    rank = seen(of_torch("_next_data", "torch/utils/data/dataloader.py"))
    found = activity_of(0, rank, [seen(QUEUE, LOOP), loading, seen(FETCH, LOOP)])
    assert (found.how, found.other) == ("loader", Frame("load", "data.py", 8, ""))
    assert activity_of(0, rank, [seen(QUEUE, LOOP)]).other is None


@pytest.mark.parametrize(
    ("look", "how"),
    [
        (seen(state="R"), "runs"),
        (seen(state="T"), "stopped"),
        (seen(state="t", tracer=1), "traced"),
        (seen(state="D"), "disk"),
        (seen(Frame("Pdb.interaction", "pdb.py", 1, "Python")), "breakpoint"),
        (seen(of_torch("_next_data", "torch/utils/data/dataloader.py")), "loader"),
        (seen(QUEUE, LOOP), "idle"),
        (seen(FETCH, LOOP), "asleep"),
        (seen(call="nanosleep"), "asleep"),
        (seen(process=None), "ended"),
        (seen(process=dataclasses.replace(PROCESS, state="Z")), "ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_it_stands_is_told_by_the_kernel_and_the_functions_it_is_in(look, how):
    assert doing(look).how == how
