"""A running collective of a group on several hosts: the call as its caller described it, and how its steps wait.

**Every wait ends by the deadline of its call, whatever else happens.** An engine may never finish an operation that a
lost connection has interrupted. Gloo has no abort that ends a wait: its operations end when a connection ends, or at
their timeout, after which the connections are unusable. But a receive that is interrupted in the middle never ends,
because Gloo has removed it from its lists and does not report an error for it. So the caller's thread waits in slices
of 0.1 s. Between slices, it calls `Running.look`, which raises once the group has ended or the call is late. Waits that
can't be sliced, such as those for messages, run on a thread that may be abandoned. If no thread waits for an operation,
such as a receive with a future, the thread that ends the group makes it fail. The core itself ends its waits at the
deadline.
"""

from __future__ import annotations

import copy
import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

from phalanx import _core
from phalanx._errors import Failure, GroupAborted, PhalanxError
from phalanx._errors.facts import MadeCall
from phalanx.backend.calls.tasks import Task, Tasks
from phalanx.backend.deadlines import LATE_S, LOOK_S, TELL_S
from phalanx.backend.failures.wording import report_due_s
from phalanx.backend.hosts.channels import Handle
from phalanx.backend.hosts.failures import Failures
from phalanx.backend.types import DTYPE_NAMES, REDUCE_NAMES
from phalanx.record.sites import call_site

_LATE, _SLICE = timedelta(seconds=LATE_S), timedelta(seconds=LOOK_S)
_HEAD = struct.Struct("<QBBBBiQ")
_OPS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
)


@dataclass
class Running:
    """A running collective.

    Attributes:
        call: The call as its caller described it.
        timeout_s: Seconds after `began_s` at which the waits of this call end.
        failures: Handler of failures, which knows whether the group has ended.
        landings: Thread for waits that can't be sliced.
        stall_s: Seconds after which the waiting call is reported; 0: never.
    """

    call: _core.Call
    timeout_s: float
    failures: Failures
    landings: Tasks
    stall_s: float
    site: str | None = None
    caller: FrameType | None = None  # frame of the waiting call, from which the site is found when needed
    seq: int = 0
    has_agreed: bool = False
    has_told: bool = False  # whether this rank has told the other ranks that it waits
    num_reports: int = 0
    num_steps: int = 0
    task: Task | None = None  # the task on the group's thread; None: the call runs on its caller's thread
    transfers: list[Any] = field(default_factory=list)
    """Transfers whose memory the engine may still read and write."""
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.op: str = self.call.op
        self.dtype: int = self.call.dtype
        self.item: int = self.call.item
        """Size in bytes of an element of the dtype in which the call is computed."""
        self.sizes: Sequence[int] = {"all_gather": self.call.out_counts, "reduce_scatter": self.call.in_counts}.get(
            self.op, ()
        )
        """Number of elements in each rank's block, if blocks differ and all ranks pass the same numbers."""

    def computed_in(self, dtype: int, item: int) -> Running:
        """Return this call computed in another dtype. Ranks still compare the dtype that their callers passed."""
        other = copy.copy(self)
        other.dtype, other.item = dtype, item
        return other

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.began_s + self.timeout_s - time.monotonic(), 0.001))

    @property
    def limit(self) -> timedelta:
        """Timeout for the engine: a little longer than the call's, so that it ends only abandoned operations."""
        return self.left + _LATE

    @property
    def has_splits(self) -> bool:
        return bool(self.call.in_counts or self.call.out_counts)

    def head(self) -> bytes:
        call = self.call
        count = _digest(self.sizes) if self.sizes else call.count
        return _HEAD.pack(self.seq, _OPS.index(self.op), call.dtype, call.code + 1, self.has_splits, call.root, count)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, handle: Handle) -> None:
        """Wait for an exchange; at intervals, handle signals and check that the call can still succeed."""
        while True:
            try:
                handle.wait(_SLICE)
                return
            except RuntimeError:
                if handle.is_completed():  # it failed, or it ended just after the slice
                    handle.wait(_SLICE)
                    return
            self.look()

    def land(self, handles: Sequence[Handle]) -> Task:
        """Start waiting for messages on a thread that can be abandoned; `wait_landed` waits for the result."""
        limit = self.limit
        return self.landings.submit(lambda: [handle.wait(limit) for handle in handles], keep=self.task)

    def wait_landed(self, landing: Task) -> None:
        """Wait for the messages of `landing`, which `land` has returned; at intervals, check as `wait` does."""
        while not landing.wait(LOOK_S):
            self.look()
        error = landing.error()
        if error is not None:
            raise error

    def look(self) -> None:
        """Raise if the call can no longer succeed or is late; report a long wait. Called at intervals."""
        waited_s = time.monotonic() - self.began_s
        if self.failures.ended:
            raise self.explain(GroupAborted("the group has ended"))
        if self.failures.is_ended_elsewhere():
            raise self.explain(GroupAborted("another rank has ended the group"))
        if waited_s > self.timeout_s:
            raise self.explain(self.timed_out())
        if not self.has_told and waited_s > min(TELL_S, (self.stall_s or self.timeout_s) / 2, self.timeout_s / 2):
            self.has_told = True
            self.failures.notices.tell_wait(self.seq)
        elif self.stall_s and waited_s > report_due_s(self.num_reports, self.stall_s):
            self.num_reports += 1
            self.failures.report_stall(self.op, self.seq, self.line(), waited_s, self.timeout_s)

    def look_from_outside(self) -> None:
        """End the call once it is long overdue, because the engine may forever block the thread that runs the call.

        This is called by the thread that waits for the task of this call.
        """
        if time.monotonic() > self.began_s + self.timeout_s + LATE_S:
            raise self.explain(self.timed_out())

    def timed_out(self, found: Failure | None = None) -> PhalanxError:
        suspects = () if found is None else found.ranks
        return self.failures.timed_out(self.op, self.seq, self.timeout_s, suspects)

    def explain(self, error: BaseException) -> BaseException:
        """End the group on all hosts and return the error that says why."""
        found = getattr(error, "failure", None)
        if found is not None and found.kind == "rank_missing":  # perhaps from a step, which sees only this host
            error = self.timed_out(found)
        return self.failures.end(error, self.op, self.seq, self.line(), self._made())

    def line(self) -> str:
        """Return the line of the script that made the call."""
        return call_site(self.caller) if self.site is None else self.site

    def _made(self) -> MadeCall:
        """Return the call as this rank made it."""
        call, members, site = self.call, self.failures.members, self.line()
        peer, global_ranks = members.peer(members.rank), members.global_ranks
        if self.op == "barrier":
            return MadeCall(**vars(peer), op=self.op, site=site)
        return MadeCall(
            **vars(peer),
            op=self.op,
            dtype=DTYPE_NAMES[call.dtype],
            count=None if self.has_splits else call.count,
            sizes=tuple(self.sizes),
            reduce_op=REDUCE_NAMES[call.code] if call.code >= 0 else "",
            root=global_ranks[call.root] if call.root >= 0 else None,
            site=site,
        )


def _digest(sizes: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(sizes)}Q", *sizes)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
