"""Ends a group on several hosts with one shared failure, the same on every rank.

The first rank that meets a failure writes it into the group's store unless the store already holds one
(``compare_set``), ends the core group on its host and closes its connections. The closed connections wake the watchers
of the other ranks: threads that sleep in ``poll`` while the rank computes. The watchers read the failure and end the
group. Each rank then raises the failure at its next operation, and the message begins with that operation. If no
failure was written, because a whole host has vanished, the ranks whose connections have ended are the culprits. Rank 0,
which may serve the store, stays up to half a second longer, so that the other ranks can read the failure. If the store
has ended together with the rank that served it, the failure goes to the other ranks' mailboxes (see `mailbox`).

**Stalls and timeouts** are reported for the call that the user made. A rank that has waited in a call for a second says
so in the group's store; a rank that has not said so counts as missing, on this host or another. The core knows only one
host and only the steps of a call, so its reports are dropped except those about messages.

**Nothing is left after the last group.** A rank that leaves ends its threads and releases the engine, the connections
and the memory explicitly, because something may still refer to the group: a traceback holds frames, and frames hold
everything. The same holds for failed groups. Only a busy engine can't be destroyed, since its destructor would wait for
a call in another thread, or for a receive that a lost connection has interrupted; Gloo ends such a receive at its
deadline, or never if it belongs to a message. The rank tries again to release a busy engine when it leaves its next
group. Two things remain, both torch's: its TCPStore lives as long as any group made with it is referenced, and libuv,
which implements the store, keeps one pipe for the life of the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import Store

from phalanx import _core
from phalanx._errors import Failure, GroupAborted, PhalanxError, address
from phalanx._errors.facts import MadeCall, SizeDispute, Standing
from phalanx._text import class_and_message
from phalanx.backend.deadlines import GRACE_S
from phalanx.backend.failures.members import Members
from phalanx.backend.failures.wording import error_of, report_stall, words
from phalanx.backend.hosts.channels import Channel
from phalanx.backend.hosts.mailbox import Mailbox
from phalanx.backend.hosts.notices import Notices
from phalanx.backend.hosts.watcher import Watcher
from phalanx.wire.waiting import wait_until


class Failures:
    """This rank's part in ending one group.

    Args:
        store: Store of this group alone.
        members: Identity of the ranks.
        mailbox: This rank's mailbox, where other ranks leave a group failure if the store is gone; None with MPI.
        boxes: Names of the other ranks' mailboxes, by rank.
    """

    def __init__(
        self,
        store: Store,
        members: Members,
        mailbox: Mailbox | None = None,
        boxes: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        self.notices = Notices(store, members, mailbox, boxes or {})
        self.members = members
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler may abort or leave while its thread holds the lock
        self._group_failure: Failure | None = None
        self._has_ended = False  # if True while `_group_failure` is None, this rank has left the group normally
        self._unreachable: set[int] = set()  # ranks whose mailboxes can't be reached; filled when the group ends
        self._has_lingered = False
        self._is_raised = False  # whether an operation of this rank has raised the group failure
        self._watcher: Watcher | None = None
        self._core: _core.Group = None
        self._channels: Sequence[Channel] = ()

    def watch(self, core: _core.Group, channels: Sequence[Channel], on_end: Callable[[], None]) -> None:
        """Start to watch the connections, and remember what to end if one of them ends.

        Args:
            core: Core group of this host's ranks.
            channels: Channels to other hosts, the last of which reaches all ranks.
            on_end: Function that is called once after the group has ended here, on the thread that ended it.
        """
        self._core, self._channels, self._on_end = core, channels, on_end
        self._watcher = Watcher([item for channel in channels for item in channel.links.items()], self._notice)

    def _notice(self, rank: int) -> None:
        """End the group because the connection to `rank` has ended, unless that rank left normally.

        If `rank` is -1 (connections can't be watched), end the group here if another rank has ended it.
        """
        if self._has_ended or (rank < 0 and not self._is_told()):
            return
        if rank >= 0 and (
            self.notices.has_left(rank) or (rank not in self._silent() and self.notices.has_left_soon(rank))
        ):
            return
        with self._lock:
            is_first = not self._has_ended
            if is_first:
                self._conclude(lambda: self._lost_connection("a connection has ended"), is_patient=True)
        if is_first:
            self._on_end()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def ended(self) -> bool:
        return self._has_ended

    def check(self, op: str) -> None:
        """Raise GroupUnusable in a forked child, or if this rank has left the group or raised the group failure."""
        self.require_own_process(op)
        if self._has_ended and (self._is_raised or self._group_failure is None):
            raise self._unusable(op)

    def require_own_process(self, op: str) -> None:
        """Raise GroupUnusable in a forked child."""
        if self.is_forked:
            raise error_of(self._failure("forked", op))

    def refuse_nested(self, op: str, site: str, interrupted: str) -> None:
        """Raise GroupUnusable for a call by a signal handler that interrupted another call."""
        detail = f"{interrupted} of group '{self.members.group}'"
        culprits = self.members.peers([self.members.rank])
        raise error_of(self._failure("nested", op, site=site, detail=detail, culprits=culprits))

    def _unusable(self, op: str) -> PhalanxError:
        return error_of(self._failure("unusable", op, cause=self._group_failure))

    def _failure(self, kind: str, op: str = "", seq: int = 0, **facts: Any) -> Failure:
        """Return a failure met by this rank."""
        return Failure(kind=kind, rank=self.members.global_rank, group=self.members.group, op=op, seq=seq, **facts)

    def declare(self, kind: str, why: str) -> None:
        """End the group on all hosts with a failure of this `kind`, by this rank's own decision."""
        me = self.members.peer(self.members.rank)
        self._end(lambda: self._failure(kind, culprits=(me,), detail=why), is_patient=False)

    def end(self, error: BaseException, op: str, seq: int, site: str, call: MadeCall | None) -> BaseException:
        """End the group on all hosts and return the error that this rank raises.

        Args:
            error: Error that this rank has met, perhaps a consequence of another rank's error.
            op: Operation of this rank.
            seq: Number of its collective; 0 for a message.
            site: Line of its call.
            call: Call that this rank has made; None for a message.
        """
        # A rank writes its failure before it closes a connection or ends the core group. So if this may have caused the
        # error, look for a written failure first.
        is_consequence = isinstance(error, RuntimeError) and not isinstance(error, PhalanxError)
        shared = self._end(
            lambda: self._cause_of(error, op, seq, site, call),
            is_patient=is_consequence or isinstance(error, GroupAborted),
        )
        if shared is None:
            return self._unusable(op)
        if not isinstance(error, RuntimeError):
            return error  # an interruption of this rank, such as Ctrl-C, is raised as it is
        me = self.members.global_rank
        by = shared.by or self.members.named(shared.rank)
        by_another = by if by.rank != me else None
        group = self.members.group
        return error_of(replace(shared, rank=me, group=group, op=op, seq=seq, site=site, by=by_another))

    def _end(self, cause: Callable[[], Failure], *, is_patient: bool) -> Failure | None:
        """End the group unless it has ended; return the group failure, or None if this rank has left normally."""
        with self._lock:
            if self._has_ended and self._group_failure is None:
                return None
            is_first = not self._has_ended
            self._conclude(cause, is_patient=is_patient)
            self._is_raised = True
        if is_first:
            self._on_end()
        self._linger()
        return self._group_failure

    def _conclude(self, cause: Callable[[], Failure], *, is_patient: bool) -> None:
        """Find the group failure, or make `cause()` the group failure, and end the group on this rank."""
        if self._group_failure is not None:
            return
        silent = self._unreachable = self._silent()
        if silent or any(self.members.global_ranks[rank] == 0 for rank in self._lost()):
            self.notices.expect_no_store()
        found = self.notices.group_failure(is_patient=is_patient and not silent)  # a silent host has written nothing
        self._group_failure = found or self.notices.settle(cause(), self._cut_off())
        self._has_ended = True
        with contextlib.suppress(PhalanxError):
            self._core.abort(words(self._group_failure).splitlines()[0])
        self.close_channels()
        self.notices.note_told()

    def _linger(self) -> None:
        """Give the other ranks time to read the group failure before this rank, which may serve the store, ends.

        Every thread that has met the failure waits here, because any of them may end the process.
        """
        num_ranks = len(self.members.pids) - len(self._unreachable)
        if self.members.global_rank == 0 and not self._has_lingered:
            wait_until(
                lambda: self._has_lingered or self.notices.are_told(num_ranks) or None, time.monotonic() + GRACE_S
            )
        self._has_lingered = True

    # ---- whose fault it is -----------------------------------------------------------------------------------------

    def _cause_of(self, error: BaseException, op: str, seq: int, site: str, call: MadeCall | None) -> Failure:
        found = getattr(error, "failure", None)
        if found is not None and found.kind == "calls_differ" and call is not None:
            return self._tabulate(op, seq, call)
        if found is not None:
            return replace(self.members.locate(found), op=op, seq=seq, site=site)
        if isinstance(error, RuntimeError) and not isinstance(error, PhalanxError):
            return replace(self._lost_connection(str(error)), op=op, seq=seq, site=site)
        if isinstance(error, PhalanxError) and not isinstance(error, GroupAborted):
            return self._failure("refused", op, seq, site=site, detail=str(error))
        why = str(error) if isinstance(error, GroupAborted) else class_and_message(error)
        return self._failure(
            "aborted", op, seq, site=site, culprits=self.members.peers([self.members.rank]), detail=why
        )

    def _lost_connection(self, why: str) -> Failure:
        """Return the group failure if there is one, else one that blames the ranks whose connections have ended."""
        members = self.members
        lost = self._lost()
        # A rank that closes a connection because of a failure has first written the failure.
        found = self.notices.group_failure(is_patient=False)
        if found is not None:
            return found
        if not lost:
            return self._failure("refused", detail=f"the bridge between hosts failed: {why}{address('rank-lost')}")
        has_left = self.notices.has_left_soon if any(map(self.notices.has_left, lost)) else self.notices.has_left
        gone = [rank for rank in lost if not has_left(rank)]
        if not gone:
            return self._failure("rank_left", culprits=members.peers(lost))
        return self._failure("rank_lost", culprits=members.peers(gone), hosts=members.whole_hosts(gone))

    def _lost(self) -> list[int]:
        """Return the ranks whose connections to this one have ended."""
        links = (item for channel in self._channels for item in channel.links.items())
        return sorted({rank for rank, link in links if link.is_lost})

    def _silent(self) -> set[int]:
        """Return the ranks whose hosts have stopped responding."""
        return {rank for channel in self._channels for rank, link in channel.links.items() if link.is_silent}

    def _cut_off(self) -> set[int]:
        """Return the ranks that mail can't reach."""
        return {rank for rank, link in self._channels[-1].links.items() if link.is_lost}

    def _tabulate(self, op: str, seq: int, call: MadeCall) -> Failure:
        """Return the failure with a table of calls, which shows the call of each rank that writes its call in time."""
        members = self.members
        calls = self.notices.calls(seq, call)
        differ = [rank for rank, one in enumerate(calls) if one.op and one.asked != call.asked]
        return self._failure(
            "calls_differ", op, seq, site=call.site, calls=calls, culprits=members.peers(differ)
        )  # fmt: skip

    def mismatch(self, op: str, seq: int) -> PhalanxError:
        """Return the error for a peer on another host that is in another call; `end` adds the table of calls."""
        return error_of(self._failure("calls_differ", op, seq))

    def wrong_split(self, op: str, seq: int, rank: int, sent: int, expected: int) -> PhalanxError:
        """Return the error for an all_to_all whose sizes do not match."""
        one, me = self.members.peers([rank, self.members.rank])
        sizes = SizeDispute(one=one, count=sent, other=me, other_count=expected)
        return error_of(self._failure("sizes_differ", op, seq, sizes=sizes, culprits=(one,)))

    def wrong_message(self, expected: MadeCall, sent: MadeCall) -> PhalanxError:
        """Return the error for a receive that does not match the message."""
        culprit = self.members.named(sent.rank)
        return error_of(self._failure("message_differs", "recv", calls=(expected, sent), culprits=(culprit,)))

    # ---- missing ranks ---------------------------------------------------------------------------------------------

    def report_stall(self, op: str, seq: int, site: str, waited_s: float, timeout_s: float) -> None:
        """Print which ranks are missing from a call."""
        missing = self._missing(op, seq, timeout_s, self._absent(seq), "")
        if missing.culprits:
            report_stall(replace(missing, site=site), waited_s)

    def timed_out(self, op: str, seq: int, timeout_s: float, suspects: Sequence[int] = ()) -> PhalanxError:
        """Return the error for a call that not all ranks made in time.

        Args:
            suspects: Ranks (of the world) that the error blames if every rank has said that it waits.
        """
        ranks = self.members.global_ranks
        absent = self._absent(seq) or [ranks.index(rank) for rank in suspects if rank in ranks]
        return self.too_late(op, seq, timeout_s, absent, "other ranks")

    def too_late(self, op: str, seq: int, timeout_s: float, absent: Sequence[int], others: str) -> PhalanxError:
        """Return the error for a wait that timed out: it names the ranks in `absent` or, if that is empty, `others`."""
        return error_of(self._missing(op, seq, timeout_s, absent, others))

    def _missing(self, op: str, seq: int, timeout_s: float, absent: Sequence[int], others: str) -> Failure:
        culprits = self.members.peers(absent)
        standings = tuple(Standing(**vars(peer)) for peer in culprits)
        return self._failure(
            "rank_missing", op, seq, timeout_s=timeout_s, culprits=culprits, standings=standings, detail=others
        )

    def _absent(self, seq: int) -> list[int]:
        """Return the other ranks that have not said that they wait in this call or a later one."""
        others = (rank for rank in range(len(self.members.pids)) if rank != self.members.rank)
        return [rank for rank in others if self.notices.waits_in(rank) < seq]

    def is_ended_elsewhere(self) -> bool:
        """Whether a rank has ended the group, even if this rank has not noticed yet."""
        return self._core.told or self._is_told()

    def _is_told(self) -> bool:
        """Whether a rank has written why the group ended. Always False if closed connections announce the end."""
        if all(channel.ends_waits for channel in self._channels):
            return False
        return self.notices.has_group_failure()

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Announce that this rank leaves the group normally, and close its connections."""
        if self.is_forked:  # the connections and the threads belong to the parent
            return
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self.notices.tell_leaving(self._cut_off())
            self.close_channels()
        self.stop_watching()
        self._on_end = lambda: None  # breaks a reference cycle
        self.notices.close()

    def release(self) -> bool:
        """Free the connections after `leave`, unless a call still uses an engine; return whether they were freed."""
        self._core = None
        self._channels = [channel for channel in self._channels if not channel.destroy()]
        if self._channels:
            return False
        self.notices.release()
        return True

    def stop_watching(self) -> None:
        """Stop watching the other ranks."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def close_channels(self) -> None:
        for channel in self._channels:
            channel.close()
