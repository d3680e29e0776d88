"""The group of ranks on several hosts. To `Operations` it looks like a group of the core.

**The tensors of an asynchronous call live as long as the engine (Gloo or MPI) may use them**, even if the call has been
declared over and this rank has left the group: the task keeps the tensors, and the thread inside the engine keeps the
task. The tensors are released once the engine has closed its end of each connection.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from phalanx import _core
from phalanx._errors import GroupAborted
from phalanx.backend.calls.tasks import Task, Tasks, Watch
from phalanx.backend.deadlines import END_S, LATE_S
from phalanx.backend.failures.core_failures import forget_bridged, note_bridged
from phalanx.backend.failures.members import Members
from phalanx.backend.hosts.channels import Channel
from phalanx.backend.hosts.failures import Failures
from phalanx.backend.hosts.messages import Messages
from phalanx.backend.hosts.running import Running
from phalanx.backend.hosts.steps import Steps
from phalanx.record import writer
from phalanx.record.sites import call_site

_CALLER_BYTES = 1 << 20  # larger calls run on the group's thread, so that Ctrl-C need not wait for the network


class BridgedGroup:
    """Collectives and messages of ranks on several hosts.

    Args:
        core: Core group of this host's ranks.
        hosts: Ranks of the group by host, in ascending order on each host.
        members: Identity of the group's ranks.
        rail: Channel to the ranks that have the same local number on their hosts as this rank, in the order of hosts;
            None if some host has too few ranks.
        everyone: Channel to all ranks of the group.
        failures: Handler of failures, which ends the group on all hosts.
        timeout_s: Timeout of operations that have none of their own.
        stall_s: Seconds after which a waiting call is reported.
    """

    def __init__(
        self,
        core: _core.Group,
        hosts: list[list[int]],
        members: Members,
        rail: Channel | None,
        everyone: Channel,
        failures: Failures,
        timeout_s: float,
        stall_s: float,
    ) -> None:
        self._core, self._members = core, members
        self._failures = failures
        self._timeout_s, self._stall_s = timeout_s, stall_s
        # Address of this rank, for the Gloo group that verifies this group.
        self.address: str = getattr(everyone, "address", "")
        self._steps = Steps(core, hosts, members.rank, rail, everyone)
        self.seq = self.issued = 0
        self._tasks = Tasks("phalanx-bridge", self._check_reach)
        self._landings = Tasks("phalanx-landing", self._check_reach)
        self._watch = Watch(self._look_unless_ended)
        self._current: Running | None = None
        self._messages = Messages(core, self._steps.here, members, everyone, failures, timeout_s)
        self.send, self.recv, self.wait_request = self._messages.send, self._messages.recv, self._messages.wait
        channels = [channel for channel in (rail, everyone) if channel is not None]
        failures.watch(core, channels, self._messages.end)
        core.records_collectives = False  # the core runs only steps; this group records the whole calls
        note_bridged(members)

    # ---- collectives -----------------------------------------------------------------------------------------------

    @property
    def here(self) -> list[int]:
        """The ranks of the group on this host, in the order of the core group that they form."""
        return self._steps.here

    def of_host(self, op: str) -> _core.Group:
        """Return the core group of this host's ranks, for an operation that concerns them alone."""
        self._failures.check(op)
        return self._core

    @property
    def spins(self) -> bool:
        return self._core.spins

    @property
    def ended(self) -> bool:
        return self._failures.ended or self._core.ended

    @property
    def told(self) -> bool:
        """Whether any rank has ended the group."""
        return self.ended or self._failures.is_ended_elsewhere()

    def run_plain(self, *args: object) -> bool:
        """Return False: unlike a group of the core, this group has no shortcut for plain calls."""
        return False

    def send_plain(self, *args: object) -> None:
        """Return None: there is no shortcut for messages and averages either."""

    recv_plain = send_now = recv_now = average_plain = send_plain

    def run(self, call: _core.Call, ins: list[int], outs: list[int], timeout: timedelta, site: str | None) -> Any:
        """Run a collective in this thread; if `site` is given, start it on the group's thread and return its task."""
        return self._run(call, timeout, site, lambda running: self._steps.perform(running, ins, outs))

    def all_reduce_pieces(
        self,
        call: _core.Call,
        ins: list[int],
        outs: list[int],
        counts: list[int],
        num_squared: int,
        timeout: timedelta,
    ) -> tuple[float, float]:
        pieces = self._steps.all_reduce_pieces
        squares = self._run(call, timeout, None, lambda running: pieces(running, ins, outs, counts, num_squared))
        return squares, 0.0  # the wait for all ranks is not measured between hosts

    def _run(self, call: _core.Call, timeout: timedelta, site: str | None, work: Callable[[Running], Any]) -> Any:
        op = call.op
        self._failures.check(op)
        self._check_reach(op)
        self.issued += 1
        given_s = timeout.total_seconds()
        timeout_s = given_s if given_s > 0 else self._timeout_s
        running = Running(call, timeout_s, self._failures, self._landings, self._stall_s, site)
        if site is not None:
            return self._submit(running, work)
        running.caller = sys._getframe()
        try:
            may_run_here = call.count * call.item <= _CALLER_BYTES and not running.has_splits
            if may_run_here and self._tasks.begin_here():
                try:
                    return self._perform(running, work)
                finally:
                    self._tasks.end_here()
            task = self._submit(running, work)
            self.wait_collective(task, 0)
            return task.value
        finally:
            running.caller = None  # a frame would keep the callers' tensors alive

    def _submit(self, running: Running, work: Callable[[Running], Any]) -> Task:
        try:
            return self._tasks.submit(lambda: self._perform(running, work))
        except GroupAborted as error:  # the group has ended meanwhile
            raise running.explain(error) from None

    def _perform(self, running: Running, work: Callable[[Running], Any]) -> Any:
        if self._failures.ended:  # the group ended after the call was made
            raise running.explain(GroupAborted("the group has ended"))
        self.seq += 1
        running.seq = self.seq
        running.began_s = time.monotonic()
        running.task = self._tasks.current
        self._current = running
        event = self._record(running)
        try:
            with self._watch:
                return work(running)
        except BaseException as error:
            explained = running.explain(error)
            for transfer in running.transfers:  # the caller may free its tensors as soon as it has the error
                transfer.drain()
            raise explained from None
        finally:
            self._current = running.task = None  # breaks a cycle: the error's traceback -> `running` -> task -> error
            writer.end(event)

    def _record(self, running: Running) -> int:
        call = running.call
        return writer.begin_collective(
            running.op, call.dtype, self._members.group, running.seq, call.count, running.line()
        )

    def _check_reach(self, op: str = "the wait for an operation") -> None:
        """Raise if `op` would wait forever: in a forked child, or in a signal handler inside another collective."""
        self._failures.require_own_process(op)
        if not self._tasks.runs_here:
            return
        running = self._current
        interrupted = "a call" if running is None else f"{running.op} #{running.seq}"
        self._failures.refuse_nested(op, call_site(), interrupted)

    def wait_collective(self, task: Task, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a task (0: until it is over); return whether it is over; raise its error."""
        task.require_reachable()
        try:
            while not self._tasks.wait(task, timeout_s or LATE_S):
                if timeout_s:
                    return False
                if (running := self._current) is not None:
                    running.look_from_outside()
        except BaseException as interruption:  # such as Ctrl-C; without the abort, other ranks would wait for this one
            self.abort(f"interrupted by {type(interruption).__name__}")
            if task.keep is None:  # a blocking call: the caller may free its tensors next, so the engine must be done
                task.wait(END_S)
            raise
        error = task.error()
        if error is not None:
            raise error
        return True

    def _look_unless_ended(self) -> None:
        if (running := self._current) is not None and not self._failures.ended:  # an ended group's waits end anyway
            running.look()

    # ---- messages and life -----------------------------------------------------------------------------------------

    def set_timeout(self, timeout_s: float) -> None:
        self._core.set_timeout(timeout_s)  # first, because the core checks the value
        self._timeout_s = self._messages.timeout_s = timeout_s

    def abort(self, why: str) -> None:
        self._failures.declare("aborted", why)

    def leave(self, why: str = "") -> None:
        if why and not self._failures.ended:
            self._failures.declare("rank_fell", why)
        forget_bridged(self._members)
        if self._failures.is_forked:  # destroying an engine whose threads stayed in the parent would hang
            _keep_for_ever(self)
            return
        may_wait = not self._tasks.runs_here  # in a signal handler, the interrupted call can't finish
        if may_wait and not why:
            self._tasks.drain(END_S)
        self._failures.leave()
        self._close_threads()
        self._core.leave()
        if may_wait:
            self._tasks.drain(END_S)  # waits for calls that now fail because their connections were closed
        _left.append(self)
        for group in list(_left):
            if group._release():
                _left.remove(group)
        if self in _left:
            _keep_for_ever(self)

    def _release(self) -> bool:
        """Free the engine's threads, connections and memory, even if references remain.

        Return False if the engine is busy because a call in another thread still uses it. It may stay busy forever,
        because Gloo may never end a receive that a lost connection has interrupted. `leave` tries again the next time
        this process leaves a group.
        """
        is_quiet = self._tasks.is_idle and self._tasks.is_over and self._landings.is_over and self._messages.is_over
        if not is_quiet or not self._failures.release():
            return False
        self._core = None
        self._steps.release()
        self._messages.release()
        return True

    def end_threads(self) -> None:
        """End the threads of a script that is ending, without telling the other ranks.

        A thread that returned from an engine after the interpreter is gone would abort the process.
        """
        if self._failures.is_forked:
            return
        self._failures.stop_watching()
        if self._messages.has_threads or not self._tasks.drain(0):
            self._failures.close_channels()
            self._close_threads()

    def _close_threads(self) -> None:
        self._watch.close()
        self._messages.close()
        self._tasks.close()
        self._landings.close()


_left: list[BridgedGroup] = []  # groups whose engine was still busy when this rank left them, to be released later


def _keep_for_ever(group: BridgedGroup) -> None:
    """Keep an engine from being destroyed, even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
