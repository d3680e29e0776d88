"""One collective of a group on several hosts, on its way."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

from phalanx._errors import MadeCall, Peer
from phalanx.backend._types import DTYPE_NAMES, REDUCE_NAMES

LATE = timedelta(seconds=5)  # after its deadline, a call is over in any case
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
class Call:
    """One collective on its way."""

    op: str
    dtype: int = 0
    item: int = 0
    count: int = 0
    code: int = -1  # of the reduction, which ranks agree on
    root: int = -1
    asked_dtype: int | None = None  # where it is computed in another
    has_splits: bool = False
    sizes: Sequence[int] = ()  # of each rank's block, where they differ and ranks agree on them
    timeout_s: float = 0
    site: str | None = None
    caller: FrameType | None = None  # that waits, where there is no site
    seq: int = 0
    has_agreed: bool = False
    has_told: bool = False  # that it waits
    num_reports: int = 0
    num_steps: int = 0
    transfers: list[Any] = field(default_factory=list)
    """What the engine may still read and write."""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.began_s + self.timeout_s - time.monotonic(), 0.001))

    @property
    def limit(self) -> timedelta:
        """Time until an engine gives up what nobody waits for any more."""
        return self.left + LATE

    @property
    def named_dtype(self) -> int:
        """The dtype that the caller gave, which ranks agree on."""
        return self.dtype if self.asked_dtype is None else self.asked_dtype

    def head(self) -> bytes:
        op = _OPS.index(self.op)
        count = _digest(self.sizes) if self.sizes else self.count
        return _HEAD.pack(self.seq, op, self.named_dtype, self.code + 1, self.has_splits, self.root, count)

    def made(self, peer: Peer, global_ranks: Sequence[int], site: str) -> MadeCall:
        """Return the call as `peer` has made it, there."""
        if self.op == "barrier":
            return MadeCall(**vars(peer), op=self.op, site=site)
        return MadeCall(
            **vars(peer),
            op=self.op,
            dtype=DTYPE_NAMES[self.named_dtype],
            count=None if self.sizes or self.has_splits else self.count,
            sizes=tuple(self.sizes),
            reduce_op=REDUCE_NAMES[self.code] if self.code >= 0 else "",
            root=global_ranks[self.root] if self.root >= 0 else None,
            site=site,
        )


def _digest(sizes: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(sizes)}Q", *sizes)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
