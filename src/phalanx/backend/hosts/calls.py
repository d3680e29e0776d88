"""A running collective of a group on several hosts."""

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
from phalanx._errors.facts import MadeCall, Peer
from phalanx.backend.types import DTYPE_NAMES, REDUCE_NAMES

LATE = timedelta(seconds=5)  # beyond its deadline, after which a call is over in any case
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
    """A running collective, which its caller described as `call`."""

    call: _core.Call
    timeout_s: float
    site: str | None = None
    caller: FrameType | None = None  # the waiting frame, if there is no site
    seq: int = 0
    has_agreed: bool = False
    has_told: bool = False  # whether the other ranks know that this one waits
    num_reports: int = 0
    num_steps: int = 0
    transfers: list[Any] = field(default_factory=list)
    """Transfers whose memory the engine may still read and write."""
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.op: str = self.call.op
        self.dtype: int = self.call.dtype
        self.item: int = self.call.item
        """Size in bytes of the elements in which it is computed."""
        self.sizes: Sequence[int] = {"all_gather": self.call.out_counts, "reduce_scatter": self.call.in_counts}.get(
            self.op, ()
        )
        """Number of elements in each rank's block, if they differ and the ranks agree on them."""

    def computed_in(self, dtype: int, item: int) -> Running:
        """Return this call on elements of another dtype; the ranks still agree on the caller's."""
        other = copy.copy(self)
        other.dtype, other.item = dtype, item
        return other

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.began_s + self.timeout_s - time.monotonic(), 0.001))

    @property
    def limit(self) -> timedelta:
        """Time after which an engine gives up an operation that nobody waits for any more."""
        return self.left + LATE

    @property
    def has_splits(self) -> bool:
        return bool(self.call.in_counts or self.call.out_counts)

    def head(self) -> bytes:
        call = self.call
        count = _digest(self.sizes) if self.sizes else call.count
        return _HEAD.pack(self.seq, _OPS.index(self.op), call.dtype, call.code + 1, self.has_splits, call.root, count)

    def made(self, peer: Peer, global_ranks: Sequence[int], site: str) -> MadeCall:
        """Return the call as made by `peer` at `site`."""
        call = self.call
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
