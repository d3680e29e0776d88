"""How a rank ended, and which of several failures was the cause."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

from phalanx._text import named
from phalanx.launch.causes import is_victim
from phalanx.launch.failure import LastWords, RankEnd, alike, signal_name
from phalanx.launch.folding import fold
from phalanx.launch.hints import hint_for
from phalanx.launch.tracebacks import find_last_block

_NEWLINE = "\n"
_MAX_ROWS = 14  # of the culprit's traceback: the interpreter prints that of the call, and the cause, above it


@dataclasses.dataclass
class Outcome:
    """How a rank ended.

    Attributes:
        rank: Rank that ended.
        pid: Process id of the rank.
        value: Result of the function, if it returned.
        error: Exception that the rank raised, or None.
        traceback: Remote traceback; after a fatal signal or a hang, the stacks of all threads.
        exitcode: Exit code of the rank, or minus the number of the signal that ended it.
        hung: Whether the rank was killed because it had not ended at the time limit.
        ended_by_us: Whether the rank was told to end because another had failed.
        when_s: Time of the failure on the machine's monotonic clock.
    """

    rank: int
    pid: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    hung: bool = False
    ended_by_us: bool = False
    when_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.exitcode == 0 and self.error is None and not self.hung

    @property
    def signal(self) -> int | None:
        """Signal that ended the rank, as a ``signal.Signals`` if it has a name; None if no signal did."""
        code = self.exitcode
        if code is None or code >= 0:
            return None
        with contextlib.suppress(ValueError):  # a real-time signal
            return signal.Signals(-code)
        return -code

    @property
    def is_victim(self) -> bool:
        """Whether the rank raised because a peer was gone."""
        error = self.error
        return error is not None and is_victim((kind.__name__ for kind in type(error).__mro__), str(error))

    @property
    def how(self) -> str:
        """Words for how the rank ended, such as "was killed by SIGKILL"."""
        if self.ok:
            how = "returned"
        elif self.ended_by_us:
            how = "was ended"
        elif self.hung:
            how = "hung and was killed at the limit"
        elif self.error is not None:
            how = f"raised {type(self.error).__name__}: {self.error}"
        elif self.signal is not None:
            how = f"was killed by {signal_name(self.signal)}"
        else:
            how = f"exited with code {self.exitcode} before its function returned"
        return how

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) {self.how}"


class RankError(RuntimeError):
    """A rank failed. The error describes the first true failure.

    Attributes:
        rank: Rank that failed first.
        pid: Process id of that rank.
        exitcode: Exit code of that rank, or minus the number of the signal that ended it.
        signal: Signal that ended that rank, or None.
        error: Exception that the rank raised, or None.
        traceback: Remote traceback of that rank.
        hung: Ranks that hung.
        outcomes: Outcomes of all ranks, in rank order.
    """

    def __init__(self, message: str, culprit: Outcome, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message, culprit, outcomes)
        self.rank: int = culprit.rank
        self.pid: int = culprit.pid
        self.exitcode: int | None = culprit.exitcode
        self.signal: int | None = culprit.signal
        self.error: BaseException | None = culprit.error
        self.traceback: str = culprit.traceback
        self.hung: list[int] = [outcome.rank for outcome in outcomes if outcome.hung]
        self.outcomes: list[Outcome] = list(outcomes)

    def __str__(self) -> str:
        return str(self.args[0])


RankError.__module__ = "phalanx"  # where users import it from


def first_true_failure(outcomes: Sequence[Outcome], timeout_s: float = 0.0, *, folds: bool = False) -> RankError:
    """Return the error that names the cause and, in a line for all that ended alike, what became of the others.

    Args:
        timeout_s: The limit, for the line that names ranks that hung.
        folds: Whether only the user's frames of the traceback are shown; `RankError.traceback` has all.
    """

    def order(outcome: Outcome) -> tuple[int, float]:
        if outcome.hung or outcome.ended_by_us:
            return 3, outcome.when_s
        if outcome.error is None:
            return 0, outcome.when_s
        return (2 if outcome.is_victim else 1), outcome.when_s

    failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=order)
    culprit, others = failed[0], failed[1:]
    lines = [f"{str(culprit).partition(_NEWLINE)[0]} [world_size {len(outcomes)}]"]
    if hung := [outcome.rank for outcome in failed if outcome.hung]:
        lines.append(f"  limit {timeout_s:g} s passed or a peer failed; hung: ranks {hung}")
    lines += _in_groups(others, culprit)
    if folds and culprit.error is not None:
        # The first line has the first of the message.
        lines += _folded(culprit.traceback.splitlines())
        if hint := hint_for(_end_of(culprit), [_end_of(outcome) for outcome in outcomes]):
            lines.append(f"  hint: {hint}")
    else:
        for outcome in [culprit, *others] if culprit.hung else [culprit]:
            if outcome.traceback:
                lines += [f"--- rank {outcome.rank}:", outcome.traceback.rstrip()]
    error = RankError("\n".join(lines), culprit, outcomes)
    error.__cause__ = culprit.error
    return error


def _in_groups(others: Sequence[Outcome], culprit: Outcome) -> list[str]:
    groups: dict[str, list[int]] = {}
    for outcome in others:
        groups.setdefault(_brief(outcome, culprit), []).append(outcome.rank)
    return [f"  {named('rank', ranks)}: {what}" for what, ranks in groups.items()]


def _brief(outcome: Outcome, culprit: Outcome) -> str:
    if outcome.ended_by_us:
        return "ended because of it"
    error, its = outcome.error, culprit.error
    if error and its and alike(type(error).__name__, str(error)) == alike(type(its).__name__, str(its)):
        return "the same error"
    if outcome.is_victim:
        return f"raised {type(outcome.error).__name__}"
    return outcome.how.partition(_NEWLINE)[0]


def _end_of(outcome: Outcome) -> RankEnd:
    words = LastWords.of(outcome.traceback.encode())
    code = 0 if outcome.ok else (outcome.exitcode or 1)
    return RankEnd(outcome.rank, outcome.pid, code, outcome.ended_by_us, words, "", outcome.when_s)


def _folded(traceback: Sequence[str]) -> list[str]:
    block = find_last_block(traceback)
    if block is None:
        return []
    shown = fold(block.lines, _MAX_ROWS)
    heads = [n for n, line in enumerate(shown) if line.startswith(f"{block.kind}:") or line == block.kind]
    number = heads[-1] if heads else 0  # of several in a chain the last was raised
    return [*shown[:number], *(f"  {line}" for line in shown[number + 1 :])]
