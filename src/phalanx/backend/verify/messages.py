"""Verifies every k-th message of each pair of ranks and each tag, on the receiver.

**The number of a message** is its place among the messages of one sender with one tag. The sender counts its sends.
The core matches the messages of a sender, in the order of sending, to receives, in the order of posting. So the
receiver counts its receives from that sender in the order of posting. A receive from any source is counted, too, once
it is matched and its sender is known.

Several threads may send and receive with the same tag. So a message is handed to the core, counted and sent on Gloo
under one lock (`_sending`), and a receive is posted and noted under another (`_lock`). Otherwise two messages could
swap their numbers.

**On Gloo**, the sender immediately sends the number and the bytes again; Gloo keeps them until the receiver asks. The
receiver asks once its receive is over. It reads the sender's messages in order until it has the right one, and keeps
the earlier ones for receives whose callers wait later. If the sender has left before Gloo delivered a message, the
message is not verified, since the program did nothing wrong; a printed line says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx._text import class_and_message
from phalanx._torch.replace import say_once
from phalanx.backend.calls.memory import Tensors, copied
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.work import PhalanxWork
from phalanx.backend.verify.cases import Moved, Parts, Unverifiable
from phalanx.backend.verify.oracle import Oracle, Unanswered
from phalanx.backend.verify.reports import Told, error_of, new_folder, save, tally
from phalanx.record.sites import call_site

_MOST_TAG = 0x7FFFFFFF  # largest tag of Gloo; tags of the core are signed 64-bit numbers
_HEAD = 2  # header of two integers: the message's number and its size in bytes

Stream = tuple[int, int]
"""Rank at the other end, and tag."""


@dataclass(eq=False)
class Receipt:
    """A receive: its work, its sender if the call names one, and its number once it is known."""

    work: PhalanxWork
    source: int
    tag: int
    site: str
    number: int = 0

    @property
    def sender(self) -> int:
        """Rank that sent the message; -1: not known yet."""
        return self.source if self.source >= 0 else int(getattr(self.work._handle, "source", -1))


class Messages:
    """The messages of one group that this rank sends and receives.

    Args:
        operations: Operations of the group.
        oracle: Gloo beside the group.
        every: Number k; every k-th message of each sender and tag is verified.
        name: Name of the group in messages.
    """

    def __init__(self, operations: Operations, oracle: Oracle, every: int, name: str) -> None:
        self._operations, self._oracle, self._every, self._name = operations, oracle, every, name
        self._rank = operations.ranks.rank
        self._num_sent: dict[Stream, int] = {}
        self._num_received: dict[Stream, int] = {}
        self._posted: dict[int, list[Receipt]] = {}  # by tag: receives whose number is not known yet
        self._told: dict[Stream, dict[int, torch.Tensor]] = {}  # by number: messages read while looking for a later one
        self._sending = threading.RLock()  # reentrant, like the other locks: a signal handler may interrupt a holder
        self._lock = threading.RLock()
        self._receiving = threading.RLock()

    def send(self, tensors: Tensors, dst: int, tag: int) -> PhalanxWork:
        with self._sending:  # held only briefly: no send waits for its receiver
            return self._send(tensors, dst, tag)

    def _send(self, tensors: Tensors, dst: int, tag: int) -> PhalanxWork:
        stream = dst, tag
        number = self._num_sent.get(stream, 0) + 1
        data = None
        if number % self._every == 0 and dst != self._rank:
            data = self._copied(tensors)
        work = self._operations.send(tensors, dst, tag)
        self._num_sent[stream] = number
        if data is not None:
            head = torch.tensor([number, data.numel()], dtype=torch.int64, device="cpu")
            for part in (head.view(torch.uint8), data)[: 1 + bool(data.numel())]:
                with contextlib.suppress(RuntimeError):  # the receiver has gone, and the message with it
                    self._oracle.send(part, dst, tag & _MOST_TAG)
        return work

    def recv(self, run: Callable[..., PhalanxWork], tensors: Tensors, source: int, tag: int) -> PhalanxWork:
        """Receive with `run`, a method of `Operations`; receive from any rank if `source` is -1."""
        args = (tensors, tag) if source < 0 else (tensors, source, tag)
        site = call_site()
        with self._lock:
            work = run(self._operations, *args)
            receipt = Receipt(work, source, tag, site)
            self._posted.setdefault(tag, []).append(receipt)
            self._number(tag)
        outcome: list[BaseException | None] = []

        def verify() -> None:
            if not outcome:  # once: a second wait must not read from Gloo again
                outcome.append(None)
                try:
                    self._verify(receipt, tensors)
                except Exception as error:
                    outcome[0] = error
            if outcome[0] is not None:
                raise outcome[0]

        work.settle_with(verify)
        return work

    def _copied(self, tensors: Tensors) -> torch.Tensor | None:
        made = Parts(self._operations.ranks)
        try:
            with torch.no_grad():
                made.send(tensors)
        except Unverifiable:
            return None
        return made.parts[0].given

    def _number(self, tag: int) -> None:
        """Number the receives of a tag, up to the first whose sender is unknown. The caller holds the lock."""
        waiting = self._posted[tag]
        while waiting and waiting[0].sender >= 0:
            receipt = waiting.pop(0)
            stream = receipt.sender, tag
            receipt.number = self._num_received[stream] = self._num_received.get(stream, 0) + 1

    def _number_of(self, receipt: Receipt) -> int:
        """Return the number of a receive that is over."""
        with self._lock:
            self._number(receipt.tag)
            if not receipt.number:  # an earlier receive from any source still waits
                waiting = self._posted[receipt.tag]
                before = [one for one in waiting[: waiting.index(receipt)] if one.sender == receipt.sender]
                return self._num_received.get((receipt.sender, receipt.tag), 0) + len(before) + 1
            return receipt.number

    def _verify(self, receipt: Receipt, tensors: Tensors) -> None:
        number, source, tag = self._number_of(receipt), receipt.sender, receipt.tag
        tally.num_called += 1
        if number % self._every or source == self._rank:
            return
        try:
            want = self._fetch((source, tag), number)
        except Unanswered:
            say_once("PHALANX_VERIFY: a message is not verified, because its sender has left the group")
            return
        tally.num_repeated += 1
        with torch.no_grad():
            found = Moved(want, tensors, lambda _, data: data).find(self._oracle)
        if found is None:
            return
        tally.num_wrong += 1
        me, sender = (self._operations.ranks.global_ranks[r] for r in (self._rank, source))
        folder = new_folder("recv")
        results = [copied(t) for t in tensors]
        sent = want.view(tensors[0].dtype) if not tensors[0].is_quantized else want
        what = f"recv of message {number} with tag {tag} from rank {sender} in group '{self._name}'"
        state = {"method": "recv", "args": [sent], "rank": 1, "world_size": 2, "call": what, "results": results}
        lost = save(state, folder, 1)
        told = Told(me, receipt.site, folder, found)
        error = error_of(me, what, "recv", 0, told, (me,), 2, lost)
        self._operations.shutdown(class_and_message(error))  # fails the group for the other ranks
        raise error

    def _fetch(self, stream: Stream, number: int) -> torch.Tensor:
        """Return the bytes of a message, read from Gloo."""
        source, tag = stream
        with self._receiving:
            kept = self._told.setdefault(stream, {})
            while number not in kept:
                head = torch.zeros(_HEAD, dtype=torch.int64, device="cpu")
                self._oracle.recv(head.view(torch.uint8), source, tag & _MOST_TAG)
                data = torch.empty(int(head[1]), dtype=torch.uint8, device="cpu")
                if data.numel():
                    self._oracle.recv(data, source, tag & _MOST_TAG)
                kept[int(head[0])] = data
            return kept.pop(number)
