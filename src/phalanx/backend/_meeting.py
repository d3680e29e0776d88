"""How the ranks of a new group tell each other what they bring: through the group's store, in a limited time."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from phalanx._errors import CollectiveTimeout, PhalanxError

_PART = timedelta(seconds=1)
_EARLY_S = 0.1  # before the deadline: an error then is none of lateness


@dataclass(frozen=True)
class Meeting:
    """What a rank brings to the meeting of its group."""

    store: Store
    rank: int
    size: int
    name: str
    global_ranks: list[int]
    timeout_s: float
    deadline: float

    @property
    def me(self) -> int:
        return self.global_ranks[self.rank]

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def get(self, key: str, what: str) -> Any:
        """Return what `key` of the store says; a missing one is a timeout that names the ranks that did not come."""
        try:
            self.store.wait([key], timedelta(seconds=self.left_s))
            return json.loads(self.store.get(key))
        except Exception as error:
            if self.left_s > _EARLY_S:
                raise PhalanxError(
                    f"rank {self.me}: init_process_group: the job's store is gone ({error}). Look at what the rank or "
                    "launcher that serves it, most often rank 0, printed last.",
                    op="join",
                ) from error
            ranks = self._absent()
            if ranks:
                what = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come"
            raise CollectiveTimeout(
                f"rank {self.me}: init_process_group: {what} within the timeout. "
                "Start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE (or init_method).",
                op="join",
                ranks=ranks,
            ) from error

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def share(self, key: str, value: Any) -> list[Any]:
        """Give every rank of the group what this one brings; return what each has brought."""
        self.set(f"{key}/{self.rank}", value)
        return [self.get(f"{key}/{r}", f"rank {other} did not answer") for r, other in enumerate(self.global_ranks)]

    def part(self) -> None:
        """Before all raise an error that they share: rank 0, which may serve the store, goes last."""
        with contextlib.suppress(Exception):  # it has gone, or one of them: the error counts
            self.set(f"parted/{self.rank}", "")
            if self.me == 0:
                self.store.wait([f"parted/{r}" for r in range(self.size)], _PART)

    def _absent(self) -> tuple[int, ...]:
        """Return the ranks that have not said hello, none if the store cannot tell."""
        try:
            return tuple(other for r, other in enumerate(self.global_ranks) if not self.store.check([f"hello/{r}"]))
        except Exception:  # it may have gone with the rank that served it
            return ()
