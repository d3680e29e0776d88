"""The rank's side: makes the groups, runs a program on phalanx, then compares the results with the reference.

Running and comparing are two separate calls, so that the reference backend can't synchronize the ranks while a program
runs. The program runs several times with different delays between its calls; the results of all runs must have the same
bits.
"""

from __future__ import annotations

import ctypes
import random
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._torch import version
from phalanx.testing.fuzz import mpi
from phalanx.testing.fuzz.calls import CALLS, Call, Wanted
from phalanx.testing.fuzz.compare import difference, reduced
from phalanx.testing.fuzz.memory import taken
from phalanx.testing.fuzz.program import IN_ORDER, GroupPlan, Program, Step

_MOST_GROUPS = 24  # once this many groups are kept, they are destroyed before the next program
_OF_GLOO = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8,
    torch.bool,
}  # fmt: skip
_ALSO_ON_GLOO = {
    "monitored_barrier", "functional_all_reduce", "functional_broadcast", "functional_all_gather",
    "functional_reduce_scatter", "functional_all_to_all", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "messages", "batched_messages", "blocking_messages",
    "reordered_messages",
}  # fmt: skip
# the results of these calls must be the same on all ranks
_ALIKE = ("all_reduce", "all_reduce_coalesced", "functional_all_reduce")


class StepFailed(RuntimeError):
    """A call of a program raised an exception; the message begins with the step."""


@dataclass
class Verdict:
    """The verdict on one rank's results of a program; the judge is the reference, another backend or arithmetic.

    Attributes:
        faults: Step and description of each wrong result.
        judged: Number of judged calls; key: the backend or method that judged them.
        of_judge: Description of each result of the judge that is wrong according to arithmetic.
        digests: Digests, by step, of results that must be the same on all ranks of the step's group.
    """

    faults: list[tuple[int, str]] = field(default_factory=list)
    judged: dict[str, int] = field(default_factory=dict)
    of_judge: list[str] = field(default_factory=list)
    digests: dict[int, int] = field(default_factory=dict)


class _Player:
    """State of this rank: groups, which are kept between programs, and results, kept until they are judged."""

    def __init__(self) -> None:
        self.limit = timedelta(0)
        self.groups: dict[GroupPlan, Any] = {}
        self.of_judge: dict[GroupPlan, Any] = {}
        self.results: dict[int, list[Tensor]] = {}
        self.faults: list[tuple[int, str]] = []


_player = _Player()


def start(rank: int, init_method: str, world_size: int, limit_s: float) -> None:
    """Make the default group."""
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")  # ComplexHalf tensors are only moved here
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer versions of torch deprecate some of the functions
    _player.limit = limit = timedelta(seconds=limit_s)
    dist.init_process_group("phalanx", init_method=init_method, rank=rank, world_size=world_size, timeout=limit)


def _group(plan: GroupPlan, made: dict[GroupPlan, Any], make: Callable[[GroupPlan], Any]) -> Any:
    if plan not in made:
        made[plan] = make(plan)
    return made[plan]


def _make(plan: GroupPlan) -> Any:
    if plan.how == "world":
        return dist.group.WORLD
    if plan.how == "new":
        return dist.new_group(list(plan.ranks), _player.limit, **IN_ORDER)
    # torch counts the groups that each rank has made, so the ranks outside of this group must make a group, too.
    rest = [rank for rank in range(dist.get_world_size()) if rank not in plan.ranks]
    if plan.how == "split":
        halves = [half for half in (list(plan.ranks), rest) if half]
        return dist.split_group(dist.group.WORLD, halves, timeout=_player.limit)
    own = list(plan.ranks) if dist.get_rank() in plan.ranks else rest
    return dist.new_group(own, _player.limit, use_local_synchronization=True)


def _make_gloo(plan: GroupPlan) -> Any:
    return dist.new_group(list(plan.ranks), 2 * _player.limit, backend="gloo", **IN_ORDER)


def _forget_groups() -> None:
    """Destroy the groups of earlier programs, if there are many."""
    if len(_player.groups) < _MOST_GROUPS:
        return
    for made in (_player.groups, _player.of_judge):
        for plan, group in list(made.items()):
            if plan.how == "world":
                continue
            del made[plan]
            if dist.get_rank() in plan.ranks or (made is _player.groups and plan.how != "new"):
                dist.destroy_process_group(group)


# ---- the run --------------------------------------------------------------------------------------------------------


class _Running:
    """One round of a program on this rank."""

    def __init__(self, program: Program, round_: int, groups: list[Any]) -> None:
        self._program, self._round, self._groups = program, round_, groups
        self._rank = dist.get_rank()
        self._draw = random.Random(f"{program.seed} {round_} {self._rank}")
        self._pending: list[tuple[int, int, Call, list[Any], list[Tensor]]] = []
        self.results: dict[int, list[Tensor]] = {}
        self.faults: list[tuple[int, str]] = []

    def run(self) -> None:
        for number, step in enumerate(self._program.steps):
            plan = self._program.groups[step.group]
            if self._rank in plan.ranks:
                self._delay()
                self._begin(number, step, self._groups[step.group])
            self._settle_due(number)
        self._settle_due(None)

    def _delay(self) -> None:
        """Delay this rank by a random time."""
        kind = self._draw.random()
        if kind < 0.1:
            time.sleep(self._draw.random() * 5e-4)
        elif kind < 0.3:
            end = time.perf_counter() + self._draw.random() * 1e-4
            while time.perf_counter() < end:
                pass

    def _begin(self, number: int, step: Step, group: Any) -> None:
        try:
            call = step.call(group)
            works, results = call.start()
        except Exception as error:
            raise StepFailed(f"step {number} ({step}) raised {type(error).__name__}: {error}") from error
        due = number + step.lag if step.async_op else number
        self._pending.append((due, number, call, works, results))

    def _settle_due(self, now: int | None) -> None:
        """Wait for the calls that are due at step `now`, in random order; None for all calls."""
        due = [one for one in self._pending if now is None or one[0] <= now]
        self._draw.shuffle(due)
        for one in due:
            self._pending.remove(one)
            self._settle(*one[1:])

    def _settle(self, number: int, call: Call, works: list[Any], results: list[Tensor]) -> None:
        step = self._program.steps[number]
        try:
            for work in works:
                work.wait()
        except Exception as error:
            raise StepFailed(f"step {number} ({step}) raised {type(error).__name__}: {error}") from error
        got = [taken(result) for result in results]
        if wrong := call.room.give_up():
            self.faults.append((number, wrong))
        self.results[number] = got


def perform(rank: int, program: Program) -> None:
    """Run a program on phalanx, and keep the results.

    Raises:
        StepFailed: A call raised an exception.
    """
    _forget_groups()
    groups = [_group(plan, _player.groups, _make) for plan in program.groups]
    _player.faults = []
    for round_ in range(program.num_rounds):
        running = _Running(program, round_, groups)
        running.run()
        _player.faults += running.faults
        if round_ == 0:
            _player.results = running.results
            continue
        for number, results in running.results.items():
            for got, first in zip(results, _player.results[number], strict=True):
                if wrong := difference(got, first):
                    _player.faults.append((number, f"another result than in the first round: {wrong}"))


# ---- the judgment ---------------------------------------------------------------------------------------------------


def judge(rank: int, program: Program, against: str, folder: str = "") -> Verdict:
    """Return the verdict on the results of the last program; `folder` contains MPI's results."""
    verdict = Verdict(faults=list(_player.faults))
    groups = [_group(plan, _player.of_judge, _make_gloo) for plan in program.groups] if against == "gloo" else []
    of_mpi = mpi.results_of(folder, rank) if folder else {}
    for number, step in enumerate(program.steps):
        plan = program.groups[step.group]
        if rank not in plan.ranks:
            continue
        own = step.call(_player.groups[plan])
        results = _player.results[number]
        theirs = _on_gloo(step, own.on(groups[step.group])) if groups else of_mpi.get(number)
        if theirs is not None:
            assert len(theirs) == len(results), f"{step}: {against} has {len(theirs)} results, not {len(results)}"
            theirs = list(map(_as_ours, results, theirs))
        for wrong in _differences(verdict, step, own, results, theirs):
            verdict.faults.append((number, wrong))
        by = "arithmetic" if theirs is None else against
        verdict.judged[by] = verdict.judged.get(by, 0) + 1
        if step.name in _ALIKE:
            verdict.digests[number] = _digest(results)
    return verdict


def _differences(
    verdict: Verdict, step: Step, call: Call, results: list[Tensor], theirs: list[Tensor] | None
) -> Iterator[str]:
    """Yield a description of each wrong result; add wrong results of the judge to `verdict`."""
    is_rounded = step.is_reduction and (call.dtype.is_floating_point or call.dtype.is_complex)
    if theirs is not None and not is_rounded and not any(map(difference, results, theirs)):
        return  # identical results need no arithmetic, for which the inputs of all ranks would be drawn
    wanted = call.wanted()
    assert len(wanted) == len(results), f"{step} has {len(results)} results, not {len(wanted)}"
    for i, (got, want) in enumerate(zip(results, wanted, strict=True)):
        own = _against(got, want, _right(want, step), step)
        if theirs is None:
            others = own
        elif is_rounded:  # both results must lie within the bounds of the results for all orders of the ranks
            others = own or (
                _against(theirs[i], want, _right(want, step), step) and "its result lies outside of the bound"
            )
        else:
            others = difference(got, theirs[i])
        if own:
            yield own
        elif others:
            verdict.of_judge.append(f"{step}: {others}")


def _as_ours(got: Tensor, theirs: Tensor) -> Tensor:
    """Return a judge's result in the dtype and shape of ours; `theirs` may hold bytes, or bools other than 0 and 1."""
    if theirs.dtype != got.dtype:
        theirs = taken(theirs).as_strided((theirs.numel(),), (1,)).view(got.dtype)
    if theirs.dtype is torch.bool:
        theirs = theirs.view(torch.uint8) != 0
    return theirs.reshape(got.shape)


def _right(want: Wanted, step: Step) -> Tensor:
    return want.moved if want.moved is not None else reduced(want.parts, step.reduce_op, step.factor)


def _against(got: Tensor, want: Wanted, right: Tensor, step: Step) -> str:
    return difference(got, right, want.parts, step.reduce_op, step.factor)


def _on_gloo(step: Step, call: Call) -> list[Tensor] | None:
    """Return the results of the call on Gloo, with contiguous tensors; None if Gloo can't run the call."""
    is_own = step.name in CALLS or step.name in _ALSO_ON_GLOO
    if not is_own or (step.name == "all_to_all" and version() < (2, 13)):
        return None
    call = replace(call, async_op=False, in_place=False)
    if step.is_reduction:
        has_op = step.reduce_op not in ("PREMUL_SUM", "AVG") or (step.reduce_op == "AVG" and version() >= (2, 15))
        # for a number and NaN, Gloo may return either
        is_ordered = step.reduce_op in ("MIN", "MAX") and step.values == "rare"
        is_whole = not (call.dtype.is_floating_point or call.dtype.is_complex)
        if not has_op or is_ordered or (is_whole and step.reduce_op == "AVG"):
            return None
        return call.run() if call.dtype in _OF_GLOO or call.dtype.is_complex else None
    if call.dtype not in _OF_GLOO and step.name in CALLS:
        size = call.dtype.itemsize
        call = replace(call, dtype=torch.uint8, shape=(*call.shape[:-1], call.shape[-1] * size))
    elif call.dtype not in _OF_GLOO and "message" not in step.name and "object" not in step.name:
        return None
    return call.run()


def _digest(results: list[Tensor]) -> int:
    crc = 0
    for result in results:
        crc = zlib.crc32(ctypes.string_at(result.data_ptr(), result.nbytes), crc)
    return crc
