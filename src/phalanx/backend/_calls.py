"""One collective of a group on several hosts, on its way."""

from __future__ import annotations

import copy
import hashlib
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

from phalanx import _core
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


_CALL = re.compile(
    r"(\w+)\((?:(?P<dtypes>\w+), (?P<sizes>count=\d+|split sizes|sizes=\[[^]]*\])(?:, op=(?P<ops>\w+))?"
    r"(?:, (?P<roots>(?:src|dst)=\d+))?)?\)"
)
_FIELDS = {"dtypes": "dtypes", "sizes": "sizes", "ops": "reduce operations", "roots": "roots"}


def difference_between(calls: Sequence[str]) -> tuple[str, str]:
    """Return what calls (as `Call.text` writes them) disagree about, and what to do about it, as the core says it."""
    order = "ake every rank of the group call the same collectives in the same order."
    parts = [found for call in calls if (found := _CALL.fullmatch(call))]
    names = [name for field, name in _FIELDS.items() if len({part[field] for part in parts}) > 1]
    if len(parts) < len(calls) or len({part[1] for part in parts}) > 1 or not names:
        return "called different collectives", f"M{order}"
    fields = " and ".join(names)
    advice = f"Make the {fields} the same on every rank; if these calls do not belong together, m{order}"
    return f"called {parts[0][1]} with different {fields}", advice


@dataclass
class Running:
    """A collective on its way, which its caller described as `call`."""

    call: _core.Call
    timeout_s: float
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

    def __post_init__(self) -> None:
        self.op: str = self.call.op
        self.dtype: int = self.call.dtype
        self.item: int = self.call.item
        """Of the elements that it is computed in."""
        self.sizes: Sequence[int] = {"all_gather": self.call.out_counts, "reduce_scatter": self.call.in_counts}.get(
            self.op, ()
        )
        """Of each rank's block, where they differ and ranks agree on them."""

    def computed_in(self, dtype: int, item: int) -> Running:
        """Return the same on elements of another dtype than the caller's, on which ranks agree."""
        other = copy.copy(self)
        other.dtype, other.item = dtype, item
        return other

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.began_s + self.timeout_s - time.monotonic(), 0.001))

    @property
    def limit(self) -> timedelta:
        """Time until an engine gives up what nobody waits for any more."""
        return self.left + LATE

    @property
    def has_splits(self) -> bool:
        return bool(self.call.in_counts or self.call.out_counts)

    def head(self) -> bytes:
        call = self.call
        count = _digest(self.sizes) if self.sizes else call.count
        return _HEAD.pack(self.seq, _OPS.index(self.op), call.dtype, call.code + 1, self.has_splits, call.root, count)

    def text(self, global_ranks: Sequence[int]) -> str:
        """Return the call as its caller wrote it."""
        call = self.call
        if self.op == "barrier":
            return "barrier()"
        text = f"{self.op}({DTYPE_NAMES[call.dtype]}, "
        if self.sizes:
            text += f"sizes={list(self.sizes)}"
        else:
            text += "split sizes" if self.has_splits else f"count={call.count}"
        if call.code >= 0:
            text += f", op={REDUCE_NAMES[call.code]}"
        if call.root >= 0:
            text += f", {'src' if self.op in ('broadcast', 'scatter') else 'dst'}={global_ranks[call.root]}"
        return text + ")"


def _digest(sizes: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(sizes)}Q", *sizes)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
