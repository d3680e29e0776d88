"""Notices between ranks on several hosts about the end of their group: in its store, otherwise by mail."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import Store

from phalanx._errors import Failure
from phalanx._errors.facts import MadeCall
from phalanx.backend.deadlines import GRACE_S, LOST_STORE_S, NOTE_S, RECONNECT_S, TABLE_S
from phalanx.backend.failures.members import Members
from phalanx.backend.hosts.mailbox import Mailbox, post
from phalanx.wire.messages import GarbledError, Shape, fits, understand
from phalanx.wire.store import JsonStore, StoreGoneError, StoreSilentError, wait_until


class Notices:
    """This rank's notices to the others, and theirs to it. No method raises if the store is slow or gone.

    Args:
        store: Store of this group alone.
        mailbox: Mailbox in which other ranks leave messages once the store is gone; None: there is none.
        boxes: Names of the other ranks' mailboxes, by rank.
    """

    def __init__(
        self, store: Store, members: Members, mailbox: Mailbox | None, boxes: Mapping[int, Sequence[Any]]
    ) -> None:
        self._store = _own_connection(store)
        self._mailbox, self._boxes = mailbox, boxes
        self._members = members
        self._departed: set[int] = set()
        self._opening = threading.RLock()  # the watcher and a thread that meets a failure both open the mailbox
        self._mail: Failure | None = None  # a group failure that came by mail

    # ---- the group failure -----------------------------------------------------------------------------------------

    def group_failure(self, *, is_patient: bool) -> Failure | None:
        """Return the failure with which another rank has ended the group; a patient caller waits a while for it."""

        def look() -> Failure | None:
            told: Failure | None = self._read("group_failure", Failure.from_facts)
            return told or self._open_mail()

        return wait_until(look, time.monotonic() + (GRACE_S if is_patient else 0))

    def settle(self, failure: Failure, lost: set[int]) -> Failure:
        """Make this the group failure unless another rank was first; return the one that holds."""
        facts = failure.to_facts()
        told = self._ask(lambda store: store.compare_set("group_failure", "", json.dumps(facts)))
        if told and (settled := group_failure_in(told)) is not None:
            return settled
        self._post(facts, lost)
        return failure

    def has_group_failure(self) -> bool:
        return bool(self._ask(lambda store: store.check(["group_failure"])))

    def note_told(self) -> None:
        """Let the others know that this rank knows the group failure."""
        self._ask(lambda store: store.add("num_told", 1))

    def are_told(self, num_ranks: int) -> bool:
        """Whether this many ranks know the group failure; also True if the store does not answer."""
        return int(self._ask(lambda store: store.add("num_told", 0), num_ranks)) >= num_ranks

    # ---- who leaves ------------------------------------------------------------------------------------------------

    def tell_leaving(self, lost: set[int]) -> None:
        """Say that this rank leaves in order."""
        if self._mailbox is None:
            self._write(f"left/{self._members.rank}", "")
        else:  # the store may have gone already, in order
            self._post({"left": self._members.rank}, lost)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it leaves in order."""
        if self._mailbox is None:
            return self._read(f"left/{rank}", str) is not None
        self._open_mail()
        return rank in self._departed

    def has_left_soon(self, rank: int) -> bool:
        """Whether a rank says so within a while: its note travels separately from the end of its connection."""
        return wait_until(lambda: self.has_left(rank) or None, time.monotonic() + NOTE_S) is not None

    def _open_mail(self) -> Failure | None:
        """Return a group failure that another rank has left here, and note which ranks have left the group."""
        with self._opening:
            while self._mailbox is not None and (message := self._mailbox.read()) is not None:
                if fits(message, {"left": int}):
                    self._departed.add(message["left"])
                else:
                    with contextlib.suppress(ValueError):
                        self._mail = self._mail or Failure.from_facts(message)
            return self._mail

    # ---- who is in which call --------------------------------------------------------------------------------------

    def calls(self, seq: int, call: MadeCall) -> tuple[MadeCall, ...]:
        """Write this rank's call, and return the calls of all ranks that write theirs in time."""
        self._write(f"call/{seq}/{self._members.rank}", call.to_facts())
        keys = [f"call/{seq}/{rank}" for rank in range(len(self._members.pids))]
        wait_until(lambda: self._ask(lambda store: store.check(keys), True) or None, time.monotonic() + TABLE_S)
        return tuple(self._call_of(rank, self._read(key, MadeCall.from_facts)) for rank, key in enumerate(keys))

    def _call_of(self, rank: int, told: MadeCall | None) -> MadeCall:
        who = vars(self._members.peer(rank))
        return MadeCall(**who) if told is None else replace(told, **who)

    def tell_wait(self, seq: int) -> None:
        """Say that this rank waits in a call."""
        self._write(f"waits/{self._members.rank}", seq)

    def waits_in(self, rank: int) -> int:
        """Return the number of the last call in which a rank has said that it waits; 0 if there is none."""
        return self._read(f"waits/{rank}", int) or 0

    # ---- store and mailboxes ---------------------------------------------------------------------------------------

    def expect_no_store(self) -> None:
        """Wait less for the store: the rank that serves it may be lost."""
        self._store.answer_s = LOST_STORE_S

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()

    def release(self) -> None:
        """Drop the store and do without it from now on."""
        self._store.close()
        self._store.is_gone = True
        del self._store.raw

    def _post(self, message: dict[str, Any], lost: set[int]) -> None:
        """Leave a message with the ranks that are still there."""
        post([box for rank, box in self._boxes.items() if rank not in lost], message, NOTE_S)

    def _read(self, key: str, shape: Shape) -> Any:
        """Return what a key says; None if it says nothing that a rank writes, or the store does not answer."""
        with contextlib.suppress(GarbledError, StoreGoneError, StoreSilentError):
            return self._store.get(key, shape)
        return None

    def _write(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self._ask(lambda store: store.set(key, text))

    def _ask(self, question: Callable[[Store], Any], otherwise: Any = None) -> Any:
        """Return the store's answer, or `otherwise` if none comes in time.

        The store is then left alone until it answers: the rank that serves it may be stopped, and may continue.
        """
        with contextlib.suppress(StoreGoneError, StoreSilentError):
            return self._store.ask(question)
        return otherwise


def group_failure_in(text: bytes) -> Failure | None:
    """Return the group failure that a rank has written; None if a rank would not write this."""
    with contextlib.suppress(GarbledError):
        failure: Failure = understand(text, Failure.from_facts)
        return failure
    return None


def _own_connection(store: Store) -> JsonStore:
    """Return the store over a connection of its own, since another thread may be waiting in this one.

    A server that has gone, or is stopped, lets whoever connects wait for minutes: then it is silent.
    """
    shared = JsonStore(store)
    try:
        return JsonStore(shared.ask(lambda store: store.clone(), RECONNECT_S))
    except StoreGoneError:  # or this kind of store can't be cloned
        return JsonStore(store)
    except StoreSilentError:
        return shared
    finally:
        shared.close()  # ends its thread, unless that still waits
