"""What the ranks of a group on several hosts tell each other of its end: in its store, by mail once that has gone."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import Store

from phalanx._errors import Failure, MadeCall
from phalanx._store import fits, understand
from phalanx.backend._deadlines import GRACE_S, LOST_STORE_S, NOTE_S, POLL_S, STORE_S, TABLE_S
from phalanx.backend._mailbox import Mailbox, post
from phalanx.backend._members import Members


class Notices:
    """What this rank tells the others, and hears from them. Nothing raises where the store is slow, or has gone.

    Args:
        store: Of the group alone.
        mailbox: Where other ranks leave what they have to tell once the store is gone; None: nowhere.
        boxes: Names of the other ranks' mailboxes.
    """

    def __init__(
        self, store: Store, members: Members, mailbox: Mailbox | None, boxes: Mapping[int, Sequence[Any]]
    ) -> None:
        clone = getattr(store, "clone", None)  # a connection of its own: another thread may wait in the store
        try:
            self._store: Store = clone() if clone else store
        except RuntimeError:  # a kind of store that has none
            self._store = store
        self._is_store_gone, self._store_s = False, STORE_S
        self._unanswered: threading.Thread | None = None  # a question to the store that took too long
        self._mailbox, self._boxes = mailbox, boxes
        self._members = members
        self._departed: set[int] = set()
        self._opening = threading.RLock()  # of the mailbox, by the watcher and whoever meets a failure
        self._mail: Failure | None = None  # a verdict that came that way

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def verdict(self, *, is_patient: bool) -> Failure | None:
        """Return what another rank says has ended the group; a patient one waits a while for it."""
        deadline = time.monotonic() + (GRACE_S if is_patient else 0)
        while True:
            told = self._read("verdict")
            if told is not None and (verdict := verdict_in(told)) is not None:
                return verdict
            if (left := self._open_mail()) is not None:
                return left
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def settle(self, verdict: Failure, lost: set[int]) -> Failure:
        """Make this the group's verdict, unless another rank was first; return which holds."""
        facts = verdict.to_facts()
        told = self._ask(lambda: self._store.compare_set("verdict", "", json.dumps(facts)), None)
        if told and (settled := verdict_in(told)) is not None:
            return settled
        self._post(facts, lost)
        return verdict

    def has_verdict(self) -> bool:
        return bool(self._ask(lambda: self._store.check(["verdict"]), False))

    def note_told(self) -> None:
        """Let the others know that this rank knows the verdict."""
        self._ask(lambda: self._store.add("num_told", 1))

    def are_told(self, num_ranks: int) -> bool:
        """Whether so many ranks know the verdict; also if the store does not say."""
        return bool(self._ask(lambda: self._store.add("num_told", 0), num_ranks) >= num_ranks)

    # ---- who leaves ------------------------------------------------------------------------------------------------

    def tell_leaving(self, lost: set[int]) -> None:
        """Say that this rank goes in order."""
        if self._mailbox is None:
            self._ask(lambda: self._store.set(f"left/{self._members.rank}", ""))
        else:  # the store may have gone already, in order
            self._post({"left": self._members.rank}, lost)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it goes in order."""
        if self._mailbox is None:
            return self._read(f"left/{rank}") is not None
        self._open_mail()
        return rank in self._departed

    def has_left_soon(self, rank: int) -> bool:
        """Whether a rank says so within a while: its note takes another way than the end of its connection."""
        deadline = time.monotonic() + NOTE_S
        while not self.has_left(rank):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _open_mail(self) -> Failure | None:
        """Return a verdict that another rank has left here, and note who has left the group."""
        with self._opening:
            while self._mailbox is not None and (message := self._mailbox.read()) is not None:
                if fits(message, {"left": int}):
                    self._departed.add(message["left"])
                else:
                    self._mail = self._mail or _verdict_of(message)
            return self._mail

    # ---- who is in which call --------------------------------------------------------------------------------------

    def calls(self, seq: int, call: MadeCall) -> tuple[MadeCall, ...]:
        """Return what each rank has called, of those who say it in time; this one says it, too."""
        self._ask(lambda: self._store.set(f"call/{seq}/{self._members.rank}", json.dumps(call.to_facts())))
        keys = [f"call/{seq}/{rank}" for rank in range(len(self._members.pids))]
        deadline = time.monotonic() + TABLE_S
        while time.monotonic() < deadline and not self._ask(lambda: self._store.check(keys), True):
            time.sleep(POLL_S)
        return tuple(self._call_of(rank, self._read(key)) for rank, key in enumerate(keys))

    def _call_of(self, rank: int, told: bytes | None) -> MadeCall:
        """Return what a rank has called, by what it has told."""
        who = vars(self._members.peer(rank))
        with contextlib.suppress(ValueError):
            if told is not None:
                return replace(MadeCall.from_facts(understand(told, dict)), **who)
        return MadeCall(**who)

    def tell_wait(self, seq: int) -> None:
        """Say that this rank waits in a call."""
        self._ask(lambda: self._store.set(f"waits/{self._members.rank}", str(seq)))

    def waits_in(self, rank: int) -> int:
        """Return the number of the call in which a rank has said that it waits, 0 if in none."""
        with contextlib.suppress(ValueError):
            return int(self._read(f"waits/{rank}") or 0)
        return 0

    # ---- store and mailboxes ---------------------------------------------------------------------------------------

    def expect_no_store(self) -> None:
        """Wait less for the store: the rank that serves it may be lost."""
        self._store_s = LOST_STORE_S

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()

    def release(self) -> None:
        """Hold the store no longer, and do without it."""
        self._is_store_gone = True
        gone: Any = None
        self._store = gone

    def _post(self, message: dict[str, Any], lost: set[int]) -> None:
        """Leave a message with the ranks that are still there."""
        post([box for rank, box in self._boxes.items() if rank not in lost], message, NOTE_S)

    def _read(self, key: str) -> bytes | None:
        """Return what a key says; None if it is not there, or the store does not answer."""
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _ask(self, question: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return what the store says, or `otherwise` if it does not answer in time.

        It is then not asked again until it has: the rank that serves it may be stopped, and go on.
        """
        if self._is_store_gone or (self._unanswered is not None and self._unanswered.is_alive()):
            return otherwise
        thread, answer = _answer_within(question, self._store_s)
        if not answer:
            self._unanswered = thread
            self._is_store_gone = not thread.is_alive()
        return answer[0] if answer else otherwise


def verdict_in(text: bytes) -> Failure | None:
    """Return the verdict that a rank has written, None if it is nothing that a rank writes."""
    try:
        return _verdict_of(understand(text, dict))
    except ValueError:
        return None


def _verdict_of(facts: dict[str, Any]) -> Failure | None:
    with contextlib.suppress(ValueError):
        return Failure.from_facts(facts)
    return None


def _answer_within(question: Callable[[], Any], limit_s: float) -> tuple[threading.Thread, list[Any]]:
    """Ask a store, whose answers have no deadline of their own; return who asks, and the answer, empty if none came."""
    answer: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # it has gone; whoever asks knows what that means
            answer.append(question())

    thread = threading.Thread(target=ask, name="phalanx-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    return thread, answer
