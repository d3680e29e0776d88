"""Notices between ranks on several hosts, about their calls and the group's end: in the store, or else by mail."""

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
from phalanx.wire.store import JsonStore, StoreGoneError
from phalanx.wire.waiting import StoreSilentError, wait_until


class Notices:
    """The notices that this rank sends and receives. No method raises if the store is slow or gone.

    Args:
        store: Store of this group alone.
        mailbox: This rank's mailbox, where other ranks leave messages once the store is gone; None with MPI.
        boxes: Names of the other ranks' mailboxes, by rank.
    """

    def __init__(
        self, store: Store, members: Members, mailbox: Mailbox | None, boxes: Mapping[int, Sequence[Any]]
    ) -> None:
        self._store = _own_connection(store)
        self._mailbox, self._boxes = mailbox, boxes
        self._members = members
        self._departed: set[int] = set()
        self._opening = threading.RLock()  # the watcher and any thread that meets a failure may read the mailbox
        self._mail: Failure | None = None  # a group failure that arrived by mail

    # ---- the group failure -----------------------------------------------------------------------------------------

    def group_failure(self, *, is_patient: bool) -> Failure | None:
        """Return the failure with which another rank has ended the group; with `is_patient`, wait a while for it."""

        def look() -> Failure | None:
            told: Failure | None = self._read("group_failure", Failure.from_facts)
            return told or self._open_mail()

        return wait_until(look, time.monotonic() + (GRACE_S if is_patient else 0))

    def settle(self, failure: Failure, lost: set[int]) -> Failure:
        """Make `failure` the group failure, unless another rank has already written one; return the group failure."""
        facts = failure.to_facts()
        told = self._ask(lambda store: store.compare_set("group_failure", "", json.dumps(facts)))
        if told and (settled := group_failure_in(told)) is not None:
            return settled
        self._post(facts, lost)
        return failure

    def has_group_failure(self) -> bool:
        return bool(self._ask(lambda store: store.check(["group_failure"])))

    def note_told(self) -> None:
        """Count this rank among those that know the group failure."""
        self._ask(lambda store: store.add("num_told", 1))

    def are_told(self, num_ranks: int) -> bool:
        """Whether this many ranks know the group failure; also True if the store does not answer."""
        return int(self._ask(lambda store: store.add("num_told", 0), num_ranks)) >= num_ranks

    # ---- who leaves ------------------------------------------------------------------------------------------------

    def tell_leaving(self, lost: set[int]) -> None:
        """Tell the other ranks that this rank leaves the group normally."""
        if self._mailbox is None:
            self._write(f"left/{self._members.rank}", "")
        else:  # not in the store, because the rank that serves it may have left normally, too
            self._post({"left": self._members.rank}, lost)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has announced that it leaves normally."""
        if self._mailbox is None:
            return self._read(f"left/{rank}", str) is not None
        self._open_mail()
        return rank in self._departed

    def has_left_soon(self, rank: int) -> bool:
        """Like `has_left`, but waits a while: the note may arrive later than the end of the connection."""
        return wait_until(lambda: self.has_left(rank) or None, time.monotonic() + NOTE_S) is not None

    def _open_mail(self) -> Failure | None:
        """Read the mailbox: return the group failure if one has arrived, and note which ranks have left the group."""
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
        """Write this rank's call; return the calls of all ranks, without details if a rank does not write in time."""
        self._write(f"call/{seq}/{self._members.rank}", call.to_facts())
        keys = [f"call/{seq}/{rank}" for rank in range(len(self._members.pids))]
        wait_until(lambda: self._ask(lambda store: store.check(keys), True) or None, time.monotonic() + TABLE_S)
        return tuple(self._call_of(rank, self._read(key, MadeCall.from_facts)) for rank, key in enumerate(keys))

    def _call_of(self, rank: int, told: MadeCall | None) -> MadeCall:
        who = vars(self._members.peer(rank))
        return MadeCall(**who) if told is None else replace(told, **who)

    def tell_wait(self, seq: int) -> None:
        """Write that this rank waits in call number `seq`."""
        self._write(f"waits/{self._members.rank}", seq)

    def waits_in(self, rank: int) -> int:
        """Return the number that a rank has last written with `tell_wait`; 0 if there is none."""
        return self._read(f"waits/{rank}", int) or 0

    # ---- store and mailboxes ---------------------------------------------------------------------------------------

    def expect_no_store(self) -> None:
        """Wait more briefly for the store from now on, because the rank that serves it may be lost."""
        self._store.answer_s = LOST_STORE_S

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()

    def release(self) -> None:
        """Drop the reference to the store; from now on, the store counts as gone."""
        self._store.close()
        self._store.is_gone = True
        del self._store.raw

    def _post(self, message: dict[str, Any], lost: set[int]) -> None:
        """Mail a message to all ranks that are not lost."""
        post([box for rank, box in self._boxes.items() if rank not in lost], message, NOTE_S)

    def _read(self, key: str, shape: Shape) -> Any:
        """Return the value of a key; None if it does not have this shape, or the store does not answer."""
        with contextlib.suppress(GarbledError, StoreGoneError, StoreSilentError):
            return self._store.get(key, shape)
        return None

    def _write(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self._ask(lambda store: store.set(key, text))

    def _ask(self, question: Callable[[Store], Any], otherwise: Any = None) -> Any:
        """Return the store's answer, or `otherwise` if none arrives in time.

        After a timeout, the store gets no further request until the late answer arrives. That answer may still arrive,
        because the process that serves the store may only be suspended (SIGSTOP).
        """
        with contextlib.suppress(StoreGoneError, StoreSilentError):
            return self._store.ask(question)
        return otherwise


def group_failure_in(text: bytes) -> Failure | None:
    """Return the group failure that `text` holds; None if `text` is not what a rank would write."""
    with contextlib.suppress(GarbledError):
        failure: Failure = understand(text, Failure.from_facts)
        return failure
    return None


def _own_connection(store: Store) -> JsonStore:
    """Return the store over a connection of its own, since another thread may be waiting on the shared one.

    Connecting to a server that is gone or suspended would take minutes, so the attempt ends after `RECONNECT_S`.
    """
    shared = JsonStore(store)
    try:
        return JsonStore(shared.ask(lambda store: store.clone(), RECONNECT_S))
    except StoreGoneError:  # the server is gone, or this kind of store can't be cloned
        return JsonStore(store)
    except StoreSilentError:
        return shared
    finally:
        shared.close()  # ends the thread of `shared`, unless that thread still waits for the store
