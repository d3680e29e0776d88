"""Saves of this process that are still being written: calls that read the same folder wait for these saves.

Such a call waits only for saves of its own job. `load`, which every rank calls, waits for this rank's part, and then
for the other ranks in a collective that it needs anyway. A call that one rank makes alone waits until no rank holds the
lock on the draft's file ``writing``. A lock ends with its process, so the remains of a killed job do not count as a
save in progress. A save of another job is only reported, because it may take long, or fail.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait

from phalanx.checkpoint.disk.folder import Draft, Writing
from phalanx.wire.waiting import wait_until

_MOST_S = 600.0  # longest wait for a save
_YOUNG_S = 10.0  # a rank that has not begun to write after this time never will
_LOOK_EVERY_S = 0.02


class PendingSaves:
    """The last save of this process, and earlier ones that may still run."""

    def __init__(self) -> None:
        self._saves: list[tuple[Future[str], Draft, Writing]] = []

    def add(self, future: Future[str], draft: Draft, writing: Writing) -> None:
        """Add a save whose `future` is done when this rank has written its part."""
        self._saves = [save for save in self._saves if not save[0].done()]
        self._saves.append((future, draft, writing))

    def await_own(self) -> None:
        """Wait until this rank has written its part of each save, or has failed to write it."""
        wait([future for future, _, _ in self._saves], _MOST_S)

    def await_every_rank(self) -> None:
        """Wait until every rank has written its part of each save, so that every save that can succeed is published."""
        self.await_own()
        begin_s = time.monotonic()

        def are_over() -> bool | None:
            is_young = time.monotonic() - begin_s < _YOUNG_S
            return not any(draft.is_under_way(is_young=is_young) for _, draft, _ in self._saves) or None

        wait_until(are_over, begin_s + _MOST_S, least_s=_LOOK_EVERY_S, most_s=_LOOK_EVERY_S)

    def forget(self) -> None:
        """Drop all saves in a forked child, which has no threads to write them and must not keep the drafts marked."""
        for _, _, writing in self._saves:
            writing.end()
        self._saves = []


pending: PendingSaves = PendingSaves()
