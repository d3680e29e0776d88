"""The receiving side of a replicator, which keeps snapshots of other hosts: a thread for each host that sends.

Strangers can reach the port. So a message must be complete within 20 s, a sender that is refused is disconnected, and
if descriptors run out, the listener pauses between two tries. Other nodes may know this node's id before the receiver
knows it; their offers wait until then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.layout import FETCHED_SLOT, HEAD_BYTES, MAGIC, PAGE_BYTES, Head, region_bytes
from phalanx.host.spare_memory import shortage
from phalanx.launch.deadlines import REPLICA_NAMED_S
from phalanx.launch.replicas.wire import PIECE, TAKEN, Wire

_MOST_HOSTS = 256  # limit for the hosts that send at the same time
_MOST_IMAGES = 4096  # limit for the images of one host
_AGAIN_S = 0.2


class _Offer(NamedTuple):
    """A snapshot that another host asks this host to keep."""

    heads: tuple[Head, ...]
    numbers: tuple[int, ...]
    safe: tuple[int, int]


class _Refusal(Exception):
    """Reason for not keeping a snapshot."""


class Receiver:
    """Keeps the snapshots that other hosts send.

    Args:
        listener: Bound socket.
        snapshots_fd: Memory in which snapshots are kept.
        run_id: Name of the job.

    Attributes:
        spent_s: Processor time spent on receiving snapshots; time spent on strangers is not counted.
    """

    def __init__(self, listener: socket.socket, snapshots_fd: int, run_id: str) -> None:
        self._me = ""
        self._is_known = threading.Event()  # whether `_me` is known
        self.spent_s: float = 0.0
        self._fd, self._run_id, self._listener = snapshots_fd, run_id, listener
        self._lock = threading.Lock()
        self._receiving: dict[int, Wire] = {}  # connections that are filling a region, by its offset
        self._lengths: dict[int, int] = {}  # lengths of the regions that have memory, by offset
        listener.listen(16)
        listener.setblocking(True)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def me(self) -> str:
        """Id of this node, which a sender has to name; "": not known yet."""
        return self._me

    @me.setter
    def me(self, name: str) -> None:
        self._me = name
        self._is_known.set()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
                if threading.active_count() > _MOST_HOSTS:
                    end.close()
                    continue
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                threading.Thread(target=self._serve, args=(Wire(end),), daemon=True).start()
            except OSError:
                time.sleep(_AGAIN_S)  # perhaps no descriptor is left; connections wait in the listener's queue

    def _serve(self, wire: Wire) -> None:
        with contextlib.closing(wire), contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            told = wire.hear()  # a sender sends its offer at once; silent or slow strangers time out
            while self._take(wire, told):
                told = wire.hear(waits=True)

    def _take(self, wire: Wire, told: Mapping[str, Any]) -> bool:
        """Receive and keep the offered snapshot, or answer why not; return whether another offer may follow."""
        offsets: list[int] = []
        began_s = time.thread_time()
        try:
            try:
                offer = self._read(told)
                wire.tell({"heard": True})  # sent first, because making room may take long
                with self._lock:
                    has_it = self._has(offer)
                    offsets = [] if has_it else self._make_room(offer, wire)
            except _Refusal as error:
                wire.tell({"refused": str(error)})
                return False
            wire.tell({"has": has_it})
            if has_it:
                return True
            for offset, head in zip(offsets, offer.heads, strict=True):
                self._receive(wire, offset, head)
            (length,) = PIECE.unpack(wire.receive(PIECE.size))
            with self._lock:
                if length or any(self._receiving.get(offset) is not wire for offset in offsets):
                    raise ValueError("no end of a copy")
                for offset, head in zip(offsets, offer.heads, strict=True):
                    os.pwrite(self._fd, head.pack(), offset)
            wire.send(TAKEN)
            return True
        finally:
            with self._lock:
                self.spent_s += time.thread_time() - began_s if offsets else 0.0
                for offset in offsets:
                    if self._receiving.get(offset) is wire:
                        del self._receiving[offset]

    def _read(self, told: Mapping[str, Any]) -> _Offer:
        """Return the offer in a message.

        Raises:
            ValueError, TypeError, KeyError: The message is not an offer of a node of this job.
            _Refusal: The message is meant for another node.
        """
        if not self._is_known.wait(REPLICA_NAMED_S):  # other nodes may know this node's id before this replicator does
            raise ValueError("nobody knows this node")
        if told["run_id"] != self._run_id or told["holder"] != self.me:
            raise _Refusal("another node has this address")
        numbers, sizes = told["numbers"], told["sizes"]
        attempt, step, world_size, first, *safe = _counts(
            [told[name] for name in ("attempt", "step", "world_size", "first_rank")] + told["safe"]
        )
        folder = bytes.fromhex(told["folder"])
        most = min(world_size, layout.MOST_OF_OTHERS)
        is_right = len(numbers) == len(sizes) <= _MOST_IMAGES and len(safe) == 2 and len(folder) == 16
        if not (is_right and numbers and all(number < most for number in _counts(numbers))):
            raise ValueError("no offer")
        if any(region_bytes(size) > layout.REGION_BYTES for size in _counts(sizes)):
            raise ValueError("no offer")
        heads = [Head(MAGIC, 1, step, size, world_size, attempt, folder, first, len(numbers)) for size in sizes]
        return _Offer(tuple(heads), tuple(numbers), (safe[0], safe[1]))

    # ------------------------------------------------------------ memory

    def _has(self, offer: _Offer) -> bool:
        """Return whether the whole snapshot is already here. It must then be left alone: ranks may be loading it."""
        return all(
            any(layout.head_at(self._fd, layout.region_of_others(number, slot)) == head for slot in range(FETCHED_SLOT))
            for number, head in zip(offer.numbers, offer.heads, strict=True)
        )

    def _make_room(self, offer: _Offer, wire: Wire) -> list[int]:
        """Allocate memory for the images, and return their offsets.

        Raises:
            _Refusal: There is not enough memory.
        """
        if layout.are_forbidden(self._fd):
            raise _Refusal("memory has run out there before")
        self._free_old(offer.safe)
        offsets = [self._choose(number, offer.safe) for number in offer.numbers]
        lengths = {offset: region_bytes(head.size_bytes) for offset, head in zip(offsets, offer.heads, strict=True)}
        more_bytes = sum(max(0, length - self._lengths.get(offset, 0)) for offset, length in lengths.items())
        held_bytes = os.fstat(self._fd).st_blocks * 512
        if more_bytes and (problem := shortage("with them, snapshots", held_bytes + more_bytes, held_bytes)):
            raise _Refusal(problem)
        for offset, length in lengths.items():
            if (other := self._receiving.pop(offset, None)) is not None:
                other.close()
            os.pwrite(self._fd, bytes(HEAD_BYTES), offset)
            try:
                os.posix_fallocate(self._fd, offset, length)
            except OSError as error:
                raise _Refusal(f"{sum(lengths.values()) >> 20} MiB can't be had: {error.strerror}") from None
            self._lengths[offset] = length
        self._receiving |= dict.fromkeys(offsets, wire)
        return offsets

    def _choose(self, number: int, safe: tuple[int, int]) -> int:
        """Return the offset of the image's region to overwrite: the older one, but never that of the safe snapshot."""
        found = []
        for slot in range(FETCHED_SLOT):
            offset = layout.region_of_others(number, slot)
            head = layout.head_at(self._fd, offset)
            moment = (head.attempt, head.step) if head is not None else (-1, -1)
            if moment != safe:
                found.append((moment, offset))
        return min(found)[1]

    def _free_old(self, safe: tuple[int, int]) -> None:
        """Free the regions of other hosts' images that are incomplete or from attempts before the safe snapshot's."""
        for offset in [*layout.used_regions(self._fd)]:
            if not layout.is_of_others(offset) or layout.is_fetched(offset) or offset in self._receiving:
                continue
            head = layout.head_at(self._fd, offset)
            if head is None or head.attempt < safe[0]:
                layout.release_region(self._fd, offset)
                self._lengths.pop(offset, None)

    def _receive(self, wire: Wire, offset: int, head: Head) -> None:
        length = region_bytes(head.size_bytes)
        at = 0
        with mmap.mmap(self._fd, length, offset=offset) as region, memoryview(region) as view:
            while at < head.size_bytes:
                (piece,) = PIECE.unpack(wire.receive(PIECE.size))
                if not 0 < piece <= head.size_bytes - at:
                    raise ValueError("no piece of an image")
                with view[PAGE_BYTES + at : PAGE_BYTES + at + piece] as target:
                    wire.receive_into(target)
                at += piece
                wire.send(TAKEN)


def _counts(numbers: Sequence[Any]) -> list[int]:
    """Return counts that another host has sent.

    Raises:
        ValueError: Not all of them are counts.
    """
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("no counts")
    return list(numbers)
