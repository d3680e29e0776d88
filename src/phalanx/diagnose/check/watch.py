"""Runs the first steps of a script as a trial, and watches its ranks' black boxes until there is a result.

``phalanx check`` adds no checks to a rank: black boxes hold what was called, and the core compares calls anyway. The
job is started in the way of ``phalanx tune`` (`tune.trial_job`): its ranks stop at an optimizer step. The boxes are
read from the supervisor's memory.

The trial ends when all ranks have taken their steps or made enough calls, when the job ends, when it stalls, or when
the time is up (`result.Stop`). If all ranks are in a call and no event is recorded for two seconds, the job has
stalled. A rank that is in no call may be computing: eight ranks on two cores can take long for a step. So the job has
then stalled only if that rank has also used hardly any CPU for some seconds. Before a trial that hangs is ended, it is
examined as ``phalanx why`` examines a job: a box holds the last call of a rank, but only the rank's stack shows where
the rank is now.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx import _env
from phalanx.diagnose.check.calls import Record
from phalanx.diagnose.check.result import Stop
from phalanx.diagnose.jobs import find_ranks
from phalanx.diagnose.why.evidence import gather
from phalanx.diagnose.why.findings import conclude
from phalanx.diagnose.why.wording import answer
from phalanx.host.processes import awaited_by, process_of
from phalanx.launch import rank_trial
from phalanx.record.box import Box, boxes_held_by, load_boxes
from phalanx.tune.trial_job import TrialJob
from phalanx.wire.waiting import wait_until

_LOOK_S = 0.25
_BLOCKED_S = 2.0  # seconds without progress after which a job has stalled, if all its ranks wait
_IDLE_SHARE = 0.1  # a rank in no known call that uses less than this share of a CPU is not computing


class Watch:
    """The trial of a script.

    Args:
        words: Flags, script and arguments for ``phalanx run``.
        num_ranks: Number of the trial's ranks.
        num_steps: Optimizer steps that each rank takes.
        num_calls: Number of calls of each rank after which the trial may end; 0 if only steps count.
        stall_s: Seconds without progress after which waiting ranks count as stalled.
    """

    def __init__(
        self, words: Sequence[str], room: str, num_ranks: int, *, num_steps: int, num_calls: int, stall_s: float
    ) -> None:
        self._num_ranks, self._num_calls, self._stall_s = num_ranks, num_calls, stall_s
        environ = {**rank_trial.variables(room, {}, num_steps), "PHALANX_STALL_S": str(stall_s)}
        self._job = TrialJob(words, room, num_ranks, environ | {_env.REPLACE_VARIABLE: "gloo"})
        self._progress = (0.0, time.monotonic())  # total number of events, and the time of its last change
        self._idle: dict[int, tuple[float, float]] = {}  # CPU seconds by rank, and the time of reading them

    @property
    def printed(self) -> str:
        """The last part of the job's output."""
        return self._job.printed

    def close(self) -> None:
        """End the job, and wait until it is gone."""
        self._job.end()

    def run(self, deadline: float) -> tuple[Record, Stop]:
        """Watch until the trial stops, at `deadline` at the latest; return the ranks' calls and the reason."""
        found = wait_until(lambda: self._look(deadline), math.inf, least_s=_LOOK_S, most_s=_LOOK_S)
        assert found is not None  # `_look` returns a result at the deadline
        return found

    def _look(self, deadline: float) -> tuple[Record, Stop] | None:
        in_step = self._job.who_told(0)
        has_ended = self._job.has_ended  # checked before the boxes are read, so the boxes of an ended job are final
        boxes = self._boxes()
        record = Record.of(boxes)
        if len(in_step) == self._num_ranks:
            return record, Stop("steps")
        if has_ended:
            return Record.of(self._saved() or boxes), Stop("ended", self._job.code)
        if self._num_calls and self._least_calls(record) >= self._num_calls:
            return record, Stop("calls")
        if self._has_stalled(boxes, record, in_step):
            return record, Stop("stalled", in_step=in_step, answer=self._ask())
        if time.monotonic() >= deadline:
            return record, Stop("late", answer=self._ask())
        return None

    def _ask(self) -> str:
        """Return what ``phalanx why`` says of the job now; empty if no rank runs."""
        with contextlib.suppress(LookupError, OSError):
            evidence = gather(find_ranks(str(self._job.pid)))
            return answer(evidence, conclude(evidence))
        return ""

    def _least_calls(self, record: Record) -> int:
        return min((len(record.calls.get(rank, ())) for rank in range(self._num_ranks)), default=0)

    def _boxes(self) -> list[Box]:
        """Return the boxes of the running job, whose launcher holds them."""
        with contextlib.suppress(OSError, ValueError):  # the job has ended, or a box is just being created
            launchers = self._job.pid, *awaited_by(self._job.pid)  # for a warm start, the awaited launcher
            return next(filter(None, (list(boxes_held_by(pid)) for pid in launchers)), [])
        return []

    def _saved(self) -> list[Box]:
        """Return the boxes that the launcher left when its job ended."""
        for folder in Path(self._job.log_dir).glob("*/blackbox/attempt_0"):
            return [*load_boxes(folder).boxes]
        return []

    def _has_stalled(self, boxes: Sequence[Box], record: Record, in_step: Sequence[int]) -> bool:
        """Whether nothing progresses while ranks wait: either all ranks wait, or the other ranks do not compute."""
        now = time.monotonic()
        waits = record.waiting()
        # Notes are left out: a rank writes a note about a long wait, and waiting is no progress.
        newest = [max((event.number for event in box.events if event.kind != "note"), default=0) for box in boxes]
        state = sum(newest) + len(waits) / 10_000
        if state != self._progress[0] or not waits:
            self._progress, self._idle = (state, now), {}
            return False
        still_s = now - self._progress[1]
        others = [box for box in boxes if box.rank not in waits and box.rank not in in_step]
        if not others and len(boxes) == self._num_ranks:
            return still_s >= _BLOCKED_S
        for box in others:
            process = process_of(box.pid)
            used = process.cpu_s if process is not None else 0.0
            began_used, began = self._idle.setdefault(box.rank, (used, now))
            if now - began < self._stall_s:
                return False
            if used - began_used > _IDLE_SHARE * (now - began):
                self._idle[box.rank] = used, now
                return False
        return still_s >= self._stall_s and len(boxes) == self._num_ranks
