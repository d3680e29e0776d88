"""What a rank exchanges with the ranks of other hosts during one collective.

First the ranks of a rail tell each other which call they are in, in slots of one size, with short messages in them.
Longer ones travel beside that, under a tag made of the call: where the calls differ, nothing meets and nothing is
misread.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from phalanx.backend._channels import FOR_EVER, Channel, Handle

INLINE_BYTES = 4096 - 64
_SLOT_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_OWN_TAGS = 1 << 30  # messages have those below
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Span(NamedTuple):
    """Bytes in memory."""

    address: int = 0
    size: int = 0

    def part(self, low: int, high: int) -> Span:
        return Span(self.address + low, high - low)

    def chunks(self) -> list[Span]:
        return [self.part(low, min(low + _CHUNK_BYTES, self.size)) for low in range(0, self.size, _CHUNK_BYTES)]

    def tensor(self) -> torch.Tensor:
        """Return the bytes, which must outlive the tensor."""
        if self.size == 0:
            return _NOTHING
        return torch.frombuffer((ctypes.c_uint8 * self.size).from_address(self.address), dtype=torch.uint8)


class Buffers:
    """Memory for the steps of a call, kept for the next."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def span(self, name: str, size: int) -> Span:
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = torch.empty(size, dtype=torch.uint8)
        return Span(kept.data_ptr(), size)


class Rail:
    """The ranks of one number, one on each host.

    Args:
        channel: To them, in the order of hosts.
        size: How many hosts there are.
        me: This host.
        wait: Waits for an exchange, and looks whether it can still succeed.
    """

    def __init__(self, channel: Channel, size: int, me: int, wait: Callable[[Handle], None]) -> None:
        self.channel = channel
        self.others = [h for h in range(size) if h != me]
        self._wait = wait
        num_bytes = len(self.others) * _SLOT_BYTES
        self._slots, self._answers = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        self._sizes = [0 if h == me else _SLOT_BYTES for h in range(size)]

    def agree(self, head: bytes, sends: Sequence[Span] = (), recvs: Sequence[Span] = ()) -> bool:
        """Tell the others which call this is, with up to INLINE_BYTES each to and from them; False: they differ.

        Args:
            sends: By host; this one's is not looked at. Empty: none.
            recvs: Likewise.
        """
        slots, answers = self._slots.data_ptr(), self._answers.data_ptr()
        length = len(head)
        for i, h in enumerate(self.others):
            slot = slots + i * _SLOT_BYTES
            ctypes.memmove(slot, head, length)
            if sends:
                ctypes.memmove(slot + 64, sends[h].address, sends[h].size)
        self._wait(self.channel.exchange(self._answers, self._slots, self._sizes, self._sizes))
        for i, h in enumerate(self.others):
            answer = answers + i * _SLOT_BYTES
            if ctypes.string_at(answer, length) != head:
                return False
            if recvs:
                ctypes.memmove(recvs[h].address, answer + 64, recvs[h].size)
        return True


class Transfer:
    """Longer messages of one step of a call, on their way."""

    def __init__(self, channel: Channel, head: bytes, step: int) -> None:
        self._channel = channel
        self._tag = _OWN_TAGS | (zlib.crc32(head + step.to_bytes(4, "little")) & (_OWN_TAGS - 1))
        self._handles: list[Handle] = []

    def start(self, peers: Sequence[int], sends: Sequence[Span], recvs: Sequence[Span]) -> None:
        """Begin to send and receive: spans by peer, as the channel numbers them; chunks follow each other."""
        for peer in peers:
            if recvs[peer].size:
                self._handles.append(self._channel.recv(recvs[peer].tensor(), peer, self._tag))
        for peer in peers:
            if sends[peer].size:
                self._handles.append(self._channel.send(sends[peer].tensor(), peer, self._tag))

    def finish(self) -> None:
        """Wait for what was started. Only what all ranks have agreed on may be waited for."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait(FOR_EVER)
