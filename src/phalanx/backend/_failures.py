"""How a group on several hosts ends: one verdict, the same on every rank.

The first rank that meets a failure writes the verdict into the group's store, ends the part of the group that shares
its memory and closes its connections. That wakes the watchers of the other ranks, who read the verdict there. Without
one, as when a whole host has vanished, those whose connections have ended are the culprits. If the store has gone with
the rank that served it, the verdict is left in the other ranks' mailboxes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import Store

from phalanx import _core, _errors
from phalanx._errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, GroupUnusable, PhalanxError, RankFailed
from phalanx._store import fits, one_of, understand
from phalanx.backend._calls import difference_between
from phalanx.backend._channels import Channel
from phalanx.backend._mailbox import Mailbox, post
from phalanx.backend._meeting import answer_within
from phalanx.backend._place import Place
from phalanx.backend._watcher import Watcher

_GRACE_S = 0.5  # for those who know more to say it
_TABLE_S = 0.2  # for those who meet the same mismatch
_NOTE_S = 0.3  # on its way from a rank that leaves
_STORE_S = 1.0  # for the store to answer
_LOST_STORE_S = 0.2  # where the rank that serves it may be lost
_POST_S = 0.3  # for last words to arrive
_POLL_S = 0.02
_WHERE = re.compile(r"rank \d+: [^\n]*? of group '[^']*'(?: at \S+?)?(?::(?= )|(?= timed out)) ?")
_KINDS = {kind.__name__: kind for kind in vars(_errors).values() if isinstance(kind, type)}
_VERDICT = {"kind": one_of(*_KINDS), "text": str, "ranks": [int], "facts": dict}
_FACTS = ("pid", "exit_code", "signal")
_VICTIM = "this rank is only its victim."
_LESS_TO_DO = (
    "If it printed no error, it had less to do: give every rank equally many batches (DistributedSampler, "
    "drop_last=True), or use join()."
)


class Failures:
    """What ends one group, for this rank.

    Args:
        store: Of the group alone.
        mailbox: Where other ranks leave a verdict once the store is gone; None: nowhere.
        boxes: Names of the other ranks' mailboxes.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        mailbox: Mailbox | None = None,
        boxes: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        clone = getattr(store, "clone", None)  # a connection of its own: another thread may wait in the store
        try:
            self._store: Store = clone() if clone else store
        except RuntimeError:  # a kind of store that has none
            self._store = store
        self._is_store_gone, self._store_s = False, _STORE_S
        self._unanswered: threading.Thread | None = None  # a question to the store that took too long
        self._mailbox, self._boxes = mailbox, boxes or {}
        self._place = place
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may abort or leave the group while its thread does
        self._verdict: dict[str, Any] | None = None
        self._why = ""
        self._unreachable: set[int] = set()  # ranks, once the group has ended
        self._has_lingered = False
        self._is_raised = False  # by an operation of this rank
        self._departed: set[int] = set()
        self._opening = threading.RLock()  # of the mailbox, by the watcher and whoever meets a failure
        self._mail: dict[str, Any] | None = None  # a verdict that came that way
        self._watcher: Watcher | None = None
        self._core: Any = None
        self._channels: Sequence[Channel] = ()

    def watch(self, core: _core.Group, channels: Sequence[Channel], on_end: Callable[[], None]) -> None:
        """Take what is to be ended; the last channel reaches all ranks.

        Args:
            on_end: Called once, by the thread that ends the group here, after it was.
        """
        self._core, self._channels, self._on_end = core, channels, on_end
        self._watcher = Watcher([item for channel in channels for item in channel.links.items()], self._notice)

    def _notice(self, rank: int) -> None:
        """The connection to a rank has ended (-1: perhaps one of them did): the group has, unless it left in order."""
        if self._why or (rank < 0 and not self.is_told()):
            return
        if rank >= 0 and (self.has_left(rank) or (rank not in self._silent() and self._has_left_soon(rank))):
            return
        with self._lock:
            is_first = not self._why
            if is_first:
                self._conclude(RuntimeError("a connection has ended"), "", 0, "", "")
        if is_first:
            self._on_end()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def has_failed(self) -> bool:
        return self._verdict is not None

    @property
    def ended(self) -> bool:
        return bool(self._why)

    def check(self, op: str) -> None:
        """Raise GroupUnusable if the group has ended, or belongs to the process that this one was forked from."""
        self.require_own_process(op)
        if self._why and (self._is_raised or self._verdict is None):
            raise self._unusable(op)

    def require_own_process(self, op: str) -> None:
        """Raise GroupUnusable in a forked child."""
        place = self._place
        if self.is_forked:
            raise GroupUnusable(
                f"{op} on group '{place.group}': this process was forked from rank {place.global_rank} after the group "
                "was made and is no rank of it; call init_process_group in the child",
                op=op,
            )

    def _unusable(self, op: str) -> GroupUnusable:
        return GroupUnusable(
            f"rank {self._place.global_rank}: {op} on group '{self._place.group}', which can no longer be used: "
            f"{self._why}\nDestroy the group and make a new one: destroy_process_group(), then init_process_group().",
            op=op,
        )

    def end(self, error: BaseException, op: str, seq: int, where: str, call: str) -> BaseException:
        """End the group on all of its hosts, and return the error that this rank raises.

        Args:
            error: Met by this rank, perhaps a consequence of what another has met.
            where: The operation, for messages.
            call: As its caller wrote it.
        """
        with self._lock:
            if self._why and self._verdict is None:  # this rank has left it meanwhile
                return self._unusable(op)
            is_first = not self._why
            self._conclude(error, op, seq, where, call)
            self._is_raised = True
        if is_first:
            self._on_end()
        self._linger()
        if not isinstance(error, RuntimeError):
            return error  # Ctrl-C and the like: this rank's own
        return self._rebuild(op, seq, where)

    def _conclude(self, error: BaseException, op: str, seq: int, where: str, call: str) -> None:
        """Find out what ended the group, or settle it, and end it here."""
        if self._verdict is not None:
            return
        silent = self._unreachable = self._silent()
        if silent or any(self._place.global_ranks[rank] == 0 for rank in self._lost()):
            self._store_s = _LOST_STORE_S
        # Whoever closes a connection has told why; nobody has where a host does not answer.
        found = self._find_verdict(is_patient=_is_consequence(error) and not silent)
        self._verdict = found or self._settle(self._judge(error, op, seq, where, call))
        self._why = self._verdict["text"]
        with contextlib.suppress(PhalanxError):
            self._core.abort(self._why.splitlines()[0])
        self.close_channels()
        self._ask(lambda: self._store.add("num_told", 1))

    def _rebuild(self, op: str, seq: int, where: str) -> PhalanxError:
        """Return the verdict as the error of an operation of this rank."""
        assert self._verdict is not None
        kind = _KINDS[self._verdict["kind"]]
        message = f"rank {self._place.global_rank}: {where}: {self._why}"
        by = self._verdict.get("by")
        if (
            isinstance(by, int)
            and 0 <= by < len(self._place.pids)
            and self._place.global_rank in self._verdict["ranks"]
        ):
            by = self._place.describe(by)
            message += f"\nThis process runs: {by} has lost the connection to it."
        facts = {name: self._verdict["facts"].get(name) for name in _FACTS} if kind is RankFailed else {}
        return kind(message, op=op, seq=seq, ranks=tuple(self._verdict["ranks"]), **facts)

    def _linger(self) -> None:
        """Let the others read the verdict before this rank, which may serve the store, goes on to its end.

        Every thread that has met the failure waits: any may be the one that ends the process.
        """
        num_ranks = len(self._place.pids) - len(self._unreachable)
        deadline = time.monotonic() + _GRACE_S
        while self._place.global_rank == 0 and not self._has_lingered and time.monotonic() < deadline:
            if self._ask(lambda: self._store.add("num_told", 0), num_ranks) >= num_ranks:
                break
            time.sleep(_POLL_S)
        self._has_lingered = True

    # ---- whose fault it is -----------------------------------------------------------------------------------------

    def _judge(self, error: BaseException, op: str, seq: int, where: str, call: str) -> dict[str, Any]:
        if isinstance(error, CollectiveMismatch) and not hasattr(error, "is_told"):
            return self._tabulate(seq, where, call)
        if isinstance(error, PhalanxError):
            text = _WHERE.sub("", str(error), count=1)
            for rank, number in enumerate(self._place.global_ranks):
                text = re.sub(rf"rank {number} \(pid \d+\)(?! on host)", self._place.describe(rank), text)
            facts = {name: getattr(error, name, None) for name in _FACTS}
            return {"kind": type(error).__name__, "text": text, "ranks": error.ranks, "facts": facts}
        if isinstance(error, RuntimeError):
            return self._judge_lost(error)
        text = f"{self._place.describe(self._place.rank)} left it in the middle: {type(error).__name__}: {error}"
        return {"kind": "GroupAborted", "text": text, "ranks": [self._place.global_rank], "facts": {}}

    def _judge_lost(self, error: RuntimeError) -> dict[str, Any]:
        """Name the ranks whose connections have ended."""
        place = self._place
        lost = self._lost()
        found = self._find_verdict(is_patient=False)  # whoever closed a connection because of one has told it before
        if found is not None:
            return found
        if not lost:
            return {
                "kind": "PhalanxError",
                "text": f"the bridge between hosts failed: {error}",
                "ranks": [],
                "facts": {},
            }
        left = [rank for rank in lost if self.has_left(rank)]
        lost = left or lost
        named = place.describe_all(lost)
        if left:
            text = f"{named} left the group (destroy_process_group)\n{_LESS_TO_DO}"
        elif len(lost) == 1:
            text = f"{named} is gone: its process has ended, or the network to its host is broken"
        else:
            text = f"{place.describe_by_host(lost)} do not answer: their processes have ended, or the network is broken"
        if not left:
            text += f"\nLook at what was printed there last; {_VICTIM}"
        numbers = [place.global_ranks[rank] for rank in lost]
        facts = {"pid": place.pids[lost[0]]}
        return {"kind": "RankFailed", "text": text, "ranks": numbers, "facts": facts, "by": place.rank}

    def _lost(self) -> list[int]:
        """Return the ranks a connection to which has ended."""
        links = (item for channel in self._channels for item in channel.links.items())
        return sorted({rank for rank, link in links if link.is_lost})

    def _silent(self) -> set[int]:
        """Return the ranks whose hosts do not answer: nothing comes from them, and nothing reaches them."""
        return {rank for channel in self._channels for rank, link in channel.links.items() if link.is_silent}

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it goes in order."""
        if self._mailbox is None:
            return self._read(f"left/{rank}") is not None
        self._open_mail()
        return rank in self._departed

    def _has_left_soon(self, rank: int) -> bool:
        """Whether it says so within a while: its note takes another way than the end of its connection."""
        deadline = time.monotonic() + _NOTE_S
        while not self.has_left(rank):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _open_mail(self) -> dict[str, Any] | None:
        """Return a verdict that another rank has left here, and note who has left the group."""
        with self._opening:
            while self._mailbox is not None and (message := self._mailbox.read()) is not None:
                if fits(message, {"left": int}):
                    self._departed.add(message["left"])
                elif fits(message, _VERDICT):
                    self._mail = self._mail or message
            return self._mail

    def _tabulate(self, seq: int, where: str, call: str) -> dict[str, Any]:
        """Return what each rank called, of those who say it in time."""
        place = self._place
        site = where.partition(" at ")[2]
        mine = call + f" at {site}" * bool(site)
        self._ask(lambda: self._store.set(f"call/{seq}/{place.rank}", mine))
        keys = [f"call/{seq}/{rank}" for rank in range(len(place.pids))]
        deadline = time.monotonic() + _TABLE_S
        while time.monotonic() < deadline and not self._ask(lambda: self._store.check(keys), True):
            time.sleep(_POLL_S)
        lines, ranks, calls = [], [], [call]
        for rank, key in enumerate(keys):
            told = (self._read(key) or b"").decode()
            said = told or "waits, or has not called yet"
            lines.append(f"  rank {place.global_ranks[rank]}: {said} (host {place.hosts[rank]})")
            if told and told.partition(" at ")[0] != call:
                ranks.append(place.global_ranks[rank])
                calls.append(told.partition(" at ")[0])
        what, advice = difference_between(calls)
        text = "\n".join([f"the ranks of this group {what}", *lines, advice])
        return {"kind": "CollectiveMismatch", "text": text, "ranks": ranks, "facts": {}}

    def mismatch(self, op: str, seq: int) -> CollectiveMismatch:
        """Return the error of a rank whose peer on another host is in another call; `end` writes the table."""
        return CollectiveMismatch("the ranks of this group made calls that do not fit together", op=op, seq=seq)

    def wrong_split(self, op: str, seq: int, rank: int, sent: int, expected: int) -> CollectiveMismatch:
        """Return the error of an all_to_all whose sizes do not fit."""
        text = (
            f"{self._place.describe(rank)} sends {sent} elements to rank {self._place.global_rank}, which expects "
            f"{expected}\nMake input_split_sizes[j] of rank i equal output_split_sizes[i] of rank j."
        )
        return CollectiveMismatch(text, op=op, seq=seq, ranks=(self._place.global_ranks[rank],), is_told=True)

    # ---- those who do not come -------------------------------------------------------------------------------------

    def tell_wait(self, seq: int) -> None:
        """Tell the ranks of other hosts that this one waits in a call."""
        self._ask(lambda: self._store.set(f"waits/{self._place.rank}", str(seq)))

    def report_stall(self, where: str, seq: int, waited_s: float, timeout_s: float) -> None:
        """Print which ranks of other hosts do not come; those of this host are the core's to name."""
        place, absent = self._place, self._absent(seq)
        if not absent:
            return
        lines = [
            f"phalanx: rank {place.global_rank}: {where} has waited {waited_s:.1f} s for {place.describe_all(absent)} "
            f"(timeout {timeout_s:g} s)",
            *(f"  {place.describe(rank)} has not called #{seq}, or only just" for rank in absent),
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)

    def timed_out(self, op: str, seq: int, timeout_s: float) -> CollectiveTimeout:
        return self.too_late(op, seq, timeout_s, self._absent(seq), "ranks of other hosts")

    def too_late(self, op: str, seq: int, timeout_s: float, absent: Sequence[int], others: str) -> CollectiveTimeout:
        """Return the error of a wait for the `absent` ranks; if nobody knows which they are, for `others`."""
        text = (
            f"timed out after {timeout_s:g} s waiting for {self._place.describe_all(absent) or others}\n"
            "Pass a larger timeout to init_process_group if that is slow but right."
        )
        ranks = tuple(self._place.global_ranks[rank] for rank in absent)
        return CollectiveTimeout(text, op=op, seq=seq, ranks=ranks)

    def _absent(self, seq: int) -> list[int]:
        """Return the ranks of other hosts that have not said that they wait in this call or a later one."""
        place = self._place
        absent = []
        for rank, host in enumerate(place.hosts):
            if host != place.hosts[place.rank] and int(self._read(f"waits/{rank}") or 0) < seq:
                absent.append(rank)
        return absent

    def is_told(self) -> bool:
        """Whether a rank has written a verdict that this one can only read about."""
        if all(channel.ends_waits for channel in self._channels):
            return False
        return bool(self._ask(lambda: self._store.check(["verdict"]), False))

    # ---- the store -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Say that this rank goes in order, and close its connections."""
        if self.is_forked:  # they are the parent's, and its threads stayed there
            return
        with self._lock:
            if not self._why:
                self._why = "this rank has left it"
                if self._mailbox is None:
                    self._ask(lambda: self._store.set(f"left/{self._place.rank}", ""))
                else:  # the store may have gone already, in order
                    self._post({"left": self._place.rank})
            self.close_channels()
        self.stop_watching()
        self._on_end = lambda: None  # it refers to what refers to this
        if self._mailbox is not None:
            self._mailbox.close()

    def release(self) -> bool:
        """After `leave`, and when nobody is in a call: give back the connections; False if an engine is yet busy."""
        self._is_store_gone = True
        gone: Any = None
        self._store = self._core = gone
        self._channels = [channel for channel in self._channels if not channel.destroy()]
        return not self._channels

    def stop_watching(self) -> None:
        """Take no more notice of the other ranks."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def _find_verdict(self, *, is_patient: bool) -> dict[str, Any] | None:
        deadline = time.monotonic() + (_GRACE_S if is_patient else 0)
        while True:
            told = self._read("verdict")
            if told is not None and (verdict := verdict_in(told)) is not None:
                return verdict
            if (left := self._open_mail()) is not None:
                return left
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)

    def _settle(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Make this the group's verdict, unless another rank was first; return which holds."""
        told = self._ask(lambda: self._store.compare_set("verdict", "", json.dumps(verdict)), None)
        if told and (settled := verdict_in(told)) is not None:
            return settled
        self._post(verdict)
        return verdict

    def _post(self, message: dict[str, Any]) -> None:
        """Leave a message with the ranks that are still there."""
        lost = {rank for rank, link in self._channels[-1].links.items() if link.is_lost}
        post([box for rank, box in self._boxes.items() if rank not in lost], message, _POST_S)

    def _read(self, key: str) -> bytes | None:
        """Return what a key says; None if it is not there, or the store does not answer."""
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _ask(self, question: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return what the store says, or `otherwise` if it does not answer in time.

        It is then not asked again until it has: the rank that serves it may be stopped, and go on.
        """
        if self._is_store_gone or (self._unanswered is not None and self._unanswered.is_alive()):
            return otherwise
        thread, answer = answer_within(question, self._store_s)
        if not answer:
            self._unanswered = thread
            self._is_store_gone = not thread.is_alive()
        return answer[0] if answer else otherwise


def verdict_in(text: bytes) -> dict[str, Any] | None:
    """Return the verdict that a rank has written, None if it is nothing that a rank writes."""
    try:
        return understand(text, _VERDICT)
    except ValueError:
        return None


def _is_consequence(error: BaseException) -> bool:
    """Whether another rank may know more: a connection that ended, a group that another rank ended."""
    if isinstance(error, GroupAborted):
        return not hasattr(error, "is_own")
    return isinstance(error, RuntimeError) and not isinstance(error, PhalanxError)
