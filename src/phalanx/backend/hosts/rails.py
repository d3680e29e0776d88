"""The exchange between ranks of different hosts during one collective.

The first exchange of a call carries its fingerprint (number, operation, dtype, count, reduction, root) and up to 1280
bytes of the message: together one Ethernet packet. So a small message costs one exchange, and ranks that made different
calls notice this before any data is misread. Each rank then writes its call into the store, and all ranks raise an
error with the same table of calls. Longer messages follow separately. Their tag is derived from the call, so a message
never meets a receive of a different call.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx import _core
from phalanx._ranges import share
from phalanx.backend.hosts.channels import Channel, Handle
from phalanx.backend.hosts.running import Running

_SLOT_BYTES = 1344  # fills one Ethernet packet, together with the engine's own header
_HEAD_BYTES = 64
INLINE_BYTES = _SLOT_BYTES - _HEAD_BYTES
# Measured: up to these sizes, one step that sends whole messages is faster than two steps that send parts.
_WHOLE_BYTES = 256 * 1024  # limit on the total that one rank sends to all other hosts
_PAIR_BYTES = 16 << 20  # limit if there are only two hosts: one step then sends no more bytes than two
_OWN_TAGS = 1 << 30  # tags from this one on belong to collectives, smaller tags to messages
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Span(NamedTuple):
    """A range of bytes in memory."""

    address: int = 0
    size: int = 0

    def part(self, low: int, high: int) -> Span:
        return Span(self.address + low, high - low)

    def tensor(self) -> torch.Tensor:
        """Return a tensor over these bytes, which must outlive it."""
        if self.size == 0:
            return _NOTHING
        return torch.frombuffer((ctypes.c_uint8 * self.size).from_address(self.address), dtype=torch.uint8)


class Buffers:
    """Scratch memory for the steps of a call, kept for later calls."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def span(self, name: str, size: int) -> Span:
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = torch.empty(size, dtype=torch.uint8)
        return Span(kept.data_ptr(), size)


class Rail:
    """The ranks that have the same local number on their hosts: one per host, in the order of hosts.

    Args:
        channel: Channel that joins these ranks.
        num_hosts: Number of hosts.
        host: Index of this host.
        buffers: Scratch memory for arriving data.
    """

    def __init__(self, channel: Channel, num_hosts: int, host: int, buffers: Buffers) -> None:
        self._channel, self._num_hosts, self._host, self._buffers = channel, num_hosts, host, buffers
        self._others = [h for h in range(num_hosts) if h != host]
        num_bytes = len(self._others) * _SLOT_BYTES
        self._slots, self._answers = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        self._sizes = [0 if h == host else _SLOT_BYTES for h in range(num_hosts)]

    def agree(self, running: Running, sends: Sequence[Span] = (), recvs: Sequence[Span] = ()) -> None:
        """Check, once per call, that all ranks of the rail made the call.

        The check can also carry small spans of data (up to INLINE_BYTES), one per host.

        Raises:
            CollectiveMismatch: A rank of another host is in another call.
        """
        if running.has_agreed:
            return
        head = running.head()
        slots, answers = self._slots.data_ptr(), self._answers.data_ptr()
        for i, h in enumerate(self._others):
            slot = slots + i * _SLOT_BYTES
            ctypes.memmove(slot, head, len(head))
            if sends:
                ctypes.memmove(slot + _HEAD_BYTES, sends[h].address, sends[h].size)
        running.wait(self._channel.exchange(self._answers, self._slots, self._sizes, self._sizes, running.limit))
        for i, h in enumerate(self._others):
            answer = answers + i * _SLOT_BYTES
            if ctypes.string_at(answer, len(head)) != head:
                raise running.failures.mismatch(running.op, running.seq)
            if recvs:
                ctypes.memmove(recvs[h].address, answer + _HEAD_BYTES, recvs[h].size)
        running.has_agreed = True

    def swap(self, running: Running, sends: Sequence[Span], recvs: Sequence[Span]) -> None:
        """Exchange bytes with every other host: one span per host; this host's own span is ignored."""
        largest = max(max(sends[h].size, recvs[h].size) for h in self._others)
        if not running.has_agreed and largest <= INLINE_BYTES:
            self.agree(running, sends, recvs)
            return
        transfer = Transfer(self._channel, running)
        transfer.start(running, self._others, sends, recvs)
        self.agree(running)
        transfer.finish(running)

    def combine(self, running: Running, data: Span, kernel: int) -> None:
        """Reduce `data`, which has the same length on all hosts, in place and in the order of hosts."""
        if data.size <= (_PAIR_BYTES if self._num_hosts == 2 else _WHOLE_BYTES // len(self._others)):
            self.reduce_parts(running, [data] * self._num_hosts, kernel)
        else:  # each host reduces one part and gives the other hosts the result
            bounds = bounds_of(data.size // running.item, self._num_hosts, running.item)
            parts = [data.part(low, high) for low, high in bounds]
            self.reduce_parts(running, parts, kernel)
            self.swap(running, [parts[self._host]] * self._num_hosts, parts)

    def reduce_parts(self, running: Running, parts: Sequence[Span], kernel: int) -> None:
        """Send each host its part, and reduce the parts that the other hosts send into this host's own part."""
        theirs = self._spans(parts[self._host].size)
        self.swap(running, parts, theirs)
        self._reduce(running, theirs, parts[self._host], kernel)

    def _reduce(self, running: Running, theirs: Sequence[Span], mine: Span, kernel: int) -> None:
        addresses = [span.address for span in theirs]
        addresses[self._host] = mine.address
        _core.reduce_buffers(mine.address, addresses, running.dtype, kernel, mine.size // running.item)

    def _spans(self, size: int) -> list[Span]:
        """Return scratch memory for a message of `size` bytes from every other host."""
        room = self._buffers.span("theirs", len(self._others) * size)
        places = (h - (h > self._host) for h in range(self._num_hosts))
        return [room.part(place * size, (place + 1) * size) for place in places]


class Transfer:
    """The longer messages of one step of a call."""

    def __init__(self, channel: Channel, running: Running) -> None:
        running.num_steps += 1
        name = running.head() + running.num_steps.to_bytes(4, "little")
        self._channel = channel
        self._tag = _OWN_TAGS | (zlib.crc32(name) & (_OWN_TAGS - 1))
        self._handles: list[Handle] = []
        running.transfers.append(self)

    def start(self, running: Running, peers: Sequence[int], sends: Sequence[Span], recvs: Sequence[Span]) -> None:
        """Start to send and to receive one span per peer; `peers` are numbers in the channel."""
        for peer in peers:
            if recvs[peer].size:
                self._handles.append(self._channel.recv(recvs[peer].tensor(), peer, self._tag))
        for peer in peers:
            if sends[peer].size:
                self._handles.append(self._channel.send(sends[peer].tensor(), peer, self._tag))
        self._landing = running.land(self._handles)

    def finish(self, running: Running) -> None:
        """Wait for the messages. Call this only once all ranks have agreed on the call."""
        running.wait_landed(self._landing)
        self._handles = []

    def drain(self) -> None:
        """Wait, after the connections have been closed, until the engine no longer touches the memory."""
        if self._handles:
            self._channel.drain(self._handles)


def bounds_of(count: int, num_parts: int, item: int) -> list[tuple[int, int]]:
    """Return the ranges, in bytes, of `count` elements cut into parts."""
    parts = (share(count, part, num_parts) for part in range(num_parts))
    return [(part.start * item, part.stop * item) for part in parts]
