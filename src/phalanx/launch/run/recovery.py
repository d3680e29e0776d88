"""Measures the recovery after a loss or a planned restart, and prints one line with the time of each phase.

The line of a loss is also saved beside the black boxes.

All times are by this host's clock. The launcher itself notes four of them: the first sign of the loss, the moment when
it learned of the loss, the end of the last rank, and the start of the next attempt. The black box of the host's first
rank gives the beginning and end of ``checkpoint.load`` and of the first step. One rank is enough, since a step needs
all ranks. Times of different hosts are never compared: each launcher reports its own times. If a node was lost, the
first sign is the end of its connection, or the last message from it.

For this purpose, ``checkpoint.load`` records one phase and one note in the box of its rank. The supervisor reads the
box 20 times a second for a minute after a restart, then once a second, until the line is printed. The box of the
previous attempt, which shows how many steps are repeated, is read only when a step has ended: until then, the starting
ranks need the cores. If a rank records more than 8,192 events between two reads, its first step may be lost, and the
last phase is called ``first step seen`` or ``first collective seen``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.failure.ending import Ending
from phalanx.failure.losses import Loss, folder_of, save_loss, words_of
from phalanx.launch.nodes.messages import LossSign
from phalanx.record.beginning import Before, Beginning, is_numbered, num_repeated, read_before
from phalanx.record.box import SUFFIX, Box, Event, Tail, load_box

_PAUSE_S, _LATER_PAUSE_S = 0.05, 1.0  # pauses between two reads, at first and later
_SOON_S = 60.0  # time after the start for which the shorter pause applies
_RAISED_S = 0.5  # an error that ended a step is recorded, or ends its rank, within this time


class Recovery:
    """Follows each loss of a rank or node until the first step after the loss.

    Args:
        run: Folder of the run.
        say: Function that prints the line.
        agrees: Whether nodes have to agree before ranks are started.
    """

    def __init__(self, run: Path, say: Callable[[str], None], *, agrees: bool) -> None:
        self._run, self._say, self._agrees = run, say, agrees
        self._attempt = self._ended = -1  # numbers of the current attempt and of the attempt that the loss ended
        self._began_s = self._told_s = 0.0
        self._loss: Loss | None = None  # the loss after which no step has completed yet
        self._is_planned = False  # whether the last attempt was ended on purpose
        self._marks: dict[str, float] = {}  # the end of each phase, in order
        self._first_rank = -1  # first rank of this host in the current attempt
        self._before: Before | None = None
        self._tail: Tail | None = None
        self._seen = Beginning()
        self._next_s = 0.0

    # ------------------------------------------------------------ events of the supervisor

    def told_to_end(self) -> None:
        """Record that the ranks have just been told to end."""
        self._told_s = self._told_s or time.monotonic()

    def lost_rank(self, culprit: Ending, ends: Sequence[Ending]) -> None:
        """Record why an attempt failed. Call this before the next attempt starts."""
        self._lost(Loss(ending=culprit), ends)

    def lost_node(self, lost: Ending, sign: LossSign | None, ends: Sequence[Ending]) -> None:
        """Record the loss of a node, and how this node noticed the loss; `sign` is None if it did not notice."""
        loss = Loss(ending=lost, node_sign="left")
        if sign is None or sign.noticed_s < self._began_s:  # this node did not notice the loss in this attempt
            self._lost(loss, ends)
            return
        silent_s = sign.noticed_s - sign.since_s if sign.how == "silent" else 0.0
        loss = dataclasses.replace(loss, node_sign=sign.how, silent_s=silent_s, num_ranks=sign.num_ranks)
        self._lost(loss, ends, since_s=sign.since_s, noticed_s=sign.noticed_s)

    def planned(self, ends: Sequence[Ending]) -> None:
        """Record that an attempt was ended on purpose. Call this before the next attempt starts."""
        self._lost(None, ends)

    def _lost(self, loss: Loss | None, ends: Sequence[Ending], *, since_s: float = 0.0, noticed_s: float = 0.0) -> None:
        """Record the end of an attempt; `loss` is None for a planned restart."""
        failed_s = [end.when_s for end in ends if end.failed]
        now_s = time.monotonic()
        first_s = min(filter(None, (since_s, self._told_s, *failed_s)), default=now_s)
        self._marks = {"": first_s}
        if loss is not None:
            self._mark("noticed", noticed_s or self._told_s or first_s)
        self._mark("ended", max((end.when_s for end in ends), default=first_s))
        self._ended, self._first_rank, self._before = self._attempt, min((end.rank for end in ends), default=-1), None
        self._is_planned = loss is None
        loss = loss or Loss(ending=Ending(rank=-1, pid=-1))
        self._loss = dataclasses.replace(loss, at_s=time.time() - (now_s - first_s))
        self._save()

    def begin(self, places: Sequence[tuple[int, int]]) -> None:
        """Record that the ranks of the next attempt are about to be started.

        Args:
            places: Open file and offset of each rank's box; the caller still owns the files.
        """
        self._attempt += 1
        self._began_s, self._told_s = time.monotonic(), 0.0
        self._tail, self._next_s = None, 0.0
        if self._loss is not None and places:
            if self._agrees:
                self._mark("agreed", self._began_s)
            self._tail, self._seen = Tail(*places[0]), Beginning(int(self._began_s * 1e9))

    # ------------------------------------------------------------ records of the ranks

    def within(self, timeout_s: float | None) -> float | None:
        """Return the supervisor's `timeout_s`, shortened to the time until the next read."""
        if self._tail is None:
            return timeout_s
        pause_s = max(0.0, self._next_s - time.monotonic())
        return pause_s if timeout_s is None else min(timeout_s, pause_s)

    def look(self, *, ends: Sequence[Ending] | None = None) -> None:
        """Read the box of the first rank; print the line once the first step is done.

        Args:
            ends: Endings of the ranks of this attempt; None: the ranks are running.
        """
        now_s = time.monotonic()
        if self._tail is None or (now_s < self._next_s and ends is None):
            return
        self._next_s = now_s + (_PAUSE_S if now_s - self._began_s < _SOON_S else _LATER_PAUSE_S)
        try:
            box = self._tail.read()
        except (OSError, ValueError):  # the script has overwritten the box
            self._tail = None
            return
        if box is not None:
            self._seen.add(box)
            self._judge(ends)

    def _judge(self, ends: Sequence[Ending] | None) -> None:
        seen = self._seen
        if self._loss is None or not seen.has_ended_any:
            return
        if self._before is None:  # read only now, because ranks that start need the cores
            self._before = read_before(self._box_before())
        first = seen.first(self._before)
        if first is None or self._may_have_failed(first, ends):
            return
        if seen.loading_ns is not None:
            begun_ns, ended_ns = seen.loading_ns
            self._mark("started", begun_ns / 1e9)
            self._mark("loaded", ended_ns / 1e9)
        elif not seen.has_gap:
            self._mark("started", first.begun_ns / 1e9)
        what = "first step" if first.kind == "step" else "first collective"
        self._mark(f"{what} seen" if seen.has_gap else what, first.ended_ns / 1e9)
        is_first = not seen.has_gap
        self._loss = dataclasses.replace(
            self._loss,
            step=first.seq if is_first and is_numbered(first) else None,
            loaded_step=0 if seen.loaded_step is None and seen.loading_ns is not None else seen.loaded_step,
            num_repeated=num_repeated(self._before, first, seen.loaded_step) if is_first else None,
        )
        self._save()
        self._say(words_of(self._loss))
        self._loss = self._tail = None

    def _may_have_failed(self, first: Event, ends: Sequence[Ending] | None) -> bool:
        """Return whether the first step or collective does not count, because an error ended, or may have ended, it."""
        known = self._seen.has_failed(first)
        if known is not None:
            return known
        if ends is not None:
            return any(end.failed for end in ends)
        return time.monotonic() - first.ended_ns / 1e9 < _RAISED_S

    def _box_before(self) -> Box | None:
        with contextlib.suppress(ValueError):
            return load_box(folder_of(self._run, self._ended) / f"rank_{self._first_rank}{SUFFIX}")
        return None

    # ------------------------------------------------------------ marks

    def _mark(self, phase: str, when_s: float) -> None:
        """Record the end of a phase, which is never earlier than the end of the previous phase."""
        self._marks[phase] = max(when_s, *self._marks.values())

    def _save(self) -> None:
        assert self._loss is not None
        times = [*self._marks.values()]
        took = zip([*self._marks][1:], times, times[1:], strict=False)
        phases_s = {name: end_s - begin_s for name, begin_s, end_s in took}
        self._loss = dataclasses.replace(self._loss, phases_s=phases_s)
        if self._is_planned:  # nothing was lost, so nothing is saved
            return
        with contextlib.suppress(OSError):  # for example a full disk; the line is on the screen anyway
            save_loss(self._loss, self._run, self._ended)
