"""One collective of a group on several hosts, on its way."""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

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

    def text(self, global_ranks: Sequence[int]) -> str:
        """Return the call as its caller wrote it."""
        if self.op == "barrier":
            return "barrier()"
        text = f"{self.op}({DTYPE_NAMES[self.named_dtype]}, "
        if self.sizes:
            text += f"sizes={list(self.sizes)}"
        else:
            text += "split sizes" if self.has_splits else f"count={self.count}"
        if self.code >= 0:
            text += f", op={REDUCE_NAMES[self.code]}"
        if self.root >= 0:
            text += f", {'src' if self.op in ('broadcast', 'scatter') else 'dst'}={global_ranks[self.root]}"
        return text + ")"


def _digest(sizes: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(sizes)}Q", *sizes)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
