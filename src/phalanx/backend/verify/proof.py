"""Counts the calls of a group, repeats every k-th on Gloo, and raises one error on all ranks if a result differs.

**Which calls.** Collectives are counted in the order in which they begin. That order is the same on all ranks, because
the core refuses calls that differ; a refused call is not counted. Messages are counted for each pair and tag: see
`messages`.

**In order.** Every rank must ask Gloo for the same operations in the same order. A blocking call is verified in the
calling thread if nothing is pending. Verifications of asynchronous calls run on a thread of the group, one after the
other, in the order in which the calls began. Each verification waits only for its own operation, which has begun on all
ranks, so it never waits for a caller's next step. The caller's work is over once its verification is over.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phalanx._errors import GroupAborted, PhalanxError, WrongResult
from phalanx._torch.replace import say_once
from phalanx._torch.tensors import Overridden, is_dense
from phalanx.backend.calls.collectives import BARRIER, UNSET
from phalanx.backend.calls.memory import Tensors, copied, do_overlap
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.tasks import Task, Tasks
from phalanx.backend.calls.work import PhalanxWork
from phalanx.backend.deadlines import LATE_S
from phalanx.backend.verify.cases import Finding, Parts, Unverifiable
from phalanx.backend.verify.messages import Messages
from phalanx.backend.verify.oracle import Oracle
from phalanx.backend.verify.reports import Told, error_of, factor_of, new_folder, save, saved, tally
from phalanx.record.sites import call_site

_NAMES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "allgather_coalesced": "all_gather", "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor", "gather_single": "gather",
    "reduce_scatter_single": "reduce_scatter_tensor", "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
}  # fmt: skip


@dataclass
class Call:
    """A call that is to be verified.

    Attributes:
        op: Name of the operation in messages.
        method: Name of the method of `Operations`.
        number: Number of the call among the group's collectives, from 1.
        site: Line of the call.
        args: Arguments of the method.
        made: Parts and copies of the inputs.
    """

    op: str
    method: str
    number: int
    site: str
    args: tuple[Any, ...]
    made: Parts


class Proof:
    """The verification of one group's operations.

    Args:
        operations: Operations of the group.
        oracle: Gloo beside the group.
        every: Number k; every k-th call is verified.
        name: Name of the group in messages.
    """

    def __init__(self, operations: Operations, oracle: Oracle, every: int, name: str) -> None:
        self._operations, self._oracle, self._every, self._name = operations, oracle, every, name
        self._ranks = operations.ranks
        self._number = 0
        self._pid = os.getpid()
        self._pending: list[tuple[Task, Tensors]] = []  # verifications that have not read the results yet
        self._unverified: list[weakref.ref[PhalanxWork]] = []  # running works of calls that are not verified
        self._tasks = Tasks("phalanx-verify", self._require_own_process)
        self.messages = Messages(operations, oracle, every, name)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def collective(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a collective of `Operations`; verify every k-th collective."""
        if self._pending:
            self._wait_for_overlaps(args)
        self._number += 1
        try:
            if self._number % self._every:
                result = run(self._operations, *args)
                tally.num_called += 1
                return self._noted(result)
            self._wait_for_inputs(args)
            call, problem = self._call(run.__name__, self._number, args)
            if call is not None:
                return self._verified(call, run)
            result = run(self._operations, *args)
        except WrongResult:
            raise
        except Exception:
            self._number -= 1  # not reset to its former value: another thread may have counted meanwhile
            raise
        if not isinstance(problem, Unverifiable):
            raise problem
        tally.num_called += 1
        say_once(f"PHALANX_VERIFY: {_NAMES.get(run.__name__, run.__name__)} of {problem} is not verified")
        return self._noted(result)

    def _noted(self, result: Any) -> Any:
        """Note an asynchronous call that is not verified, and return its result."""
        if isinstance(result, PhalanxWork) and not result.over:
            self._unverified = [ref for ref in self._unverified if (work := ref()) is not None and not work.over]
            self._unverified.append(weakref.ref(result))
        return result

    def _verified(self, call: Call, run: Callable[..., Any]) -> Any:
        """Run a call and verify it. Its place in the order of verifications is reserved before the call begins."""
        if not getattr(call.args[-1], "asyncOp", False) and self._tasks.begin_here():
            try:
                result = run(self._operations, *call.args)
                self._prove(call)
                return result
            finally:
                self._tasks.end_here()
        begun = threading.Event()
        results: list[Any] = []  # empty if the call was refused

        def prove() -> None:
            begun.wait()
            if results and isinstance(results[0], PhalanxWork):
                results[0].wait()
            if results:
                self._prove(call)

        try:
            task = self._tasks.submit(prove, keep=call)
        except GroupAborted:  # another thread has left the group; the core raises the error
            return run(self._operations, *call.args)
        try:
            results.append(run(self._operations, *call.args))
        finally:
            begun.set()
        if isinstance(results[0], PhalanxWork):
            return self._outer(call, task, results[0])
        self._wait(task, 0)
        return results[0]

    def _outer(self, call: Call, task: Task, work: PhalanxWork) -> PhalanxWork:
        """Return the work of an asynchronous call; the work is over once the verification is over."""
        self._pending.append((task, [t for part in call.made.parts for t in part.outputs]))
        outer = self._operations._flight.begin(task, self._wait, work._result, None, call)
        if len(work._result) == 1 and work._result[0].numel() == 1:
            self._operations._last_of_one.append(outer)
        return outer

    def _call(self, method: str, number: int, args: tuple[Any, ...]) -> tuple[Call | None, Any]:
        """Copy a call's inputs. If that fails, return the error; it is raised only if the core has none of its own."""
        made = Parts(self._ranks)
        try:
            with torch.no_grad():
                getattr(made, method)(*args)
        except Overridden:
            raise  # the caller tries again, without overrides
        except Exception as problem:
            return None, problem
        return Call(_NAMES.get(method, method), method, number, call_site(), args, made), None

    def _wait_for_overlaps(self, args: tuple[Any, ...]) -> None:
        """Wait for pending verifications of results that this call may overwrite."""
        self._pending = [one for one in self._pending if not one[0].done]
        tensors = list(_tensors_in(args))
        for task, results in self._pending:
            if _meet(results, tensors):
                self._wait(task, 0)

    def _wait_for_inputs(self, args: tuple[Any, ...]) -> None:
        """Wait for collectives that still write to the tensors of a call, before the tensors are copied.

        This does not wait for messages, because whether a message arrives may depend on what its sender does after this
        call.
        """
        running = [work for ref in self._unverified if (work := ref()) is not None and not work.over]
        tensors = list(_tensors_in(args)) if running else []
        for work in running:
            if _meet(work._result, tensors):
                with contextlib.suppress(PhalanxError):  # the call will raise the same error
                    work.wait()

    def _require_own_process(self) -> None:
        """Raise in a forked child, which lacks the thread that verifies."""
        if os.getpid() != self._pid:
            self._operations._core.run(BARRIER, [], [], UNSET, None)

    def _wait(self, task: Task, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a verification (0: until it is over); raise its error."""
        task.require_reachable()
        try:
            while not self._tasks.wait(task, timeout_s or LATE_S):
                if timeout_s:
                    return False
        except BaseException as interruption:
            self._interrupt(interruption)
            raise
        error = task.error()
        if error is not None:
            raise error
        return True

    def _prove(self, call: Call) -> None:
        try:
            with torch.no_grad():
                findings = [part.find(self._oracle) for part in call.made.parts]  # all parts, as on the other ranks
                found = next((one for one in findings if one is not None), None)
                tally.num_called += 1
                tally.num_repeated += bool(findings) or call.method == "barrier"
                if findings and all(part.is_agreed for part in call.made.parts):
                    return
                told = self._oracle.share(None if found is None else self._told(call, found), Told)
        except PhalanxError:
            raise
        except BaseException as error:
            self._interrupt(error)
            raise
        if told:
            tally.num_wrong += 1
            raise self._error(call, told, self._save(call, told[0].folder))

    def _interrupt(self, error: BaseException) -> None:
        """End the group, because the other ranks would wait for this one in Gloo."""
        with contextlib.suppress(PhalanxError):
            self._operations._core.abort(f"interrupted by {type(error).__name__} while a result was verified")

    # ---- a result that differs -------------------------------------------------------------------------------------

    @property
    def me(self) -> int:
        return self._ranks.global_ranks[self._ranks.rank]

    def _told(self, call: Call, found: Finding) -> Told:
        return Told(self.me, call.site, new_folder(call.op), found)

    def _save(self, call: Call, folder: str) -> str:
        """Write the arguments as they were before the call, and the results, for `replay`; return the error, if any."""
        reduce_op = getattr(call.args[-1], "reduceOp", None)
        state = {
            "method": call.method,
            "args": saved(call.args[:-1] if hasattr(call.args[-1], "timeout") else call.args, call.made.copies),
            "reduce_op": str(reduce_op.op).rpartition(".")[2] if reduce_op is not None else "",
            "factor": factor_of(reduce_op),
            "root": getattr(call.args[-1], "rootRank", -1),
            "rank": self._ranks.rank,
            "world_size": self._ranks.size,
            "call": f"{call.op} #{call.number} of group '{self._name}' at {call.site}",
            "results": [copied(t) for part in call.made.parts for t in part.outputs],
        }
        return save(state, folder, self._ranks.rank)

    def _error(self, call: Call, told: list[Told], lost: str) -> WrongResult:
        ranks = tuple(one.rank for one in told)
        what = f"{call.op} #{call.number} of group '{self._name}'"
        return error_of(self.me, what, call.op, call.number, told[0], ranks, self._ranks.size, lost)

    def drain(self, timeout_s: float) -> bool:
        """Wait up to the given time until no verification or message is pending; return whether none is."""
        return self._tasks.drain(timeout_s) and self._oracle.is_quiet

    def close(self, *, may_wait: bool = False) -> None:
        """Free Gloo; with `may_wait`, first let verifications finish and this rank's messages be delivered."""
        if may_wait:
            self._oracle.deliver()
            self._tasks.drain(LATE_S)
        self._oracle.disconnect()
        self._tasks.close()
        self._oracle.free()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments that have readable memory."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and is_dense(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


def _meet(some: Tensors, others: Tensors) -> bool:
    """Whether a tensor in `some` shares memory with a tensor in `others`."""
    return any(do_overlap([one], others) for one in _tensors_in(some))
