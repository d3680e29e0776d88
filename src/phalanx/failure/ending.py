"""The one type that describes how a rank ended, in memory, in files and between hosts.

Every launcher describes the end of a rank with an `Ending`. The report, the notes for waiting ranks, the files of a run
and the messages between nodes all contain endings, so a death has the same facts and the same words everywhere. Other
processes get the copy that `Ending.for_others` makes, with a short traceback.

`find_culprit` picks the ending that caused the other endings. The rank that seems to fail first is often only a victim:
when a rank dies, its sockets close at once, and a peer may fail because of that and be reported first. So
`find_culprit` takes victims last, prefers signals to exit codes, and then earlier ends to later ones. ``phalanx run``,
`phalanx.spawn` and `run_ranks` all use this order. If only victims have failed, the launcher waits up to 3 s for the
other ranks to end or to report a cause before it ends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from phalanx._text import signal_name
from phalanx.failure import last_words as words_file
from phalanx.failure.folding import fold
from phalanx.failure.last_words import LastWords
from phalanx.failure.tracebacks import STYLE, TORCH_PREFIX, find_last_block
from phalanx.failure.victims import is_victim
from phalanx.record.run_folder import LAUNCH_LOG
from phalanx.wire.messages import LOCAL, between

_MAX_PLAIN_LINES = 5  # last lines of output kept for a rank that raised nothing; the screen has shown them anyway
_ERROR_FILE = "error.json"
_MOST_LINE, _MOST_KIND, _MOST_MESSAGE = 300, 200, 1000  # characters sent to other processes
_MOST_RANKS = _MOST_PIDS = 1 << 31
_MOST_CODE, _MOST_SIGNAL = 255, 64


@dataclasses.dataclass(kw_only=True)
class Ending:
    """How a rank ended, under any launcher of phalanx.

    Attributes:
        rank: Rank that ended; -1 for the process that starts the ranks.
        pid: Process id of the rank.
        exitcode: Exit code of the rank, or minus the number of the signal that ended it; None while it lives.
        value: Result of the function, if it returned.
        error: Exception that the rank raised, or None. Always None under ``phalanx run``, where `last_words` describe
            it.
        last_words: Exception that ended the rank, or its last output; after a hang, the stacks of all threads.
        hung: Whether the rank was killed because it had not ended by the time limit.
        ended_by_us: Whether the launcher made the rank end, so that the rank is not the cause.
        killed_by_another: Whether a SIGKILL from elsewhere ended the rank after the launcher had asked it to end.
        preempted: Whether the rank ended because it was asked to, in such a way that it can resume.
        ended_for_restart: Whether the rank ended for a planned restart, perhaps before its own launcher knew of the
            restart.
        skipped: Whether the rank skipped the test or expected its failure, so that the rank is not the cause.
        folder: Folder of the rank's logs.
        host: Host on which the rank ran; empty for this host.
        when_s: Time of the failure by the monotonic clock of the rank's host.

    Example:
        >>> [outcome] = phalanx.testing.run_ranks(divmod, 1, expect_failures=True)
        >>> outcome.value, outcome.describe()
        ((0, 0), '...')
    """

    rank: Annotated[int, between(-1, _MOST_RANKS)]
    pid: Annotated[int, between(-1, _MOST_PIDS)]
    exitcode: Annotated[int, between(-_MOST_SIGNAL, _MOST_CODE)] | None = None
    value: Any = dataclasses.field(default=None, metadata=LOCAL)
    error: BaseException | None = dataclasses.field(default=None, metadata=LOCAL)
    last_words: LastWords = dataclasses.field(default_factory=LastWords)
    hung: bool = False
    ended_by_us: bool = False
    killed_by_another: bool = False
    preempted: bool = False
    ended_for_restart: bool = False
    skipped: bool = False
    folder: str = ""
    host: str = ""
    when_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function, or the script, ran to completion."""
        return self.exitcode == 0 and self.error is None and not self.hung

    @property
    def failed(self) -> bool:
        return not (self.ok or self.ended_by_us or self.skipped)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else "the process that starts the ranks"

    @property
    def log(self) -> str:
        return os.path.join(self.folder, "stderr.log" if self.rank >= 0 else LAUNCH_LOG)

    @property
    def traceback(self) -> str:
        """Remote traceback; after a fatal signal or a hang, the stacks of all threads."""
        return "\n".join(self.last_words.lines)

    @property
    def signal(self) -> int | None:
        """Signal that ended the rank, as a ``signal.Signals`` if it has a name; None if no signal did."""
        if self.exitcode is None or self.exitcode >= 0:
            return None
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            return signal.Signals(-self.exitcode)
        return -self.exitcode

    @property
    def code(self) -> int | None:
        """Exit code; None if a signal ended the rank, or the rank still runs."""
        return None if self.exitcode is None or self.exitcode < 0 else self.exitcode

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 plus the signal, if one ended the rank."""
        code = self.exitcode or 0
        return 128 - code if code < 0 else code

    @property
    def raised(self) -> str:
        """Class of the exception that ended the rank; "" if none did, even if the rank printed one that it caught."""
        by_exception = self.last_words.is_told or self.exitcode in (1, -signal.SIGABRT)
        return self.last_words.name if by_exception else ""

    @property
    def is_victim(self) -> bool:
        """Whether the rank raised because a peer was gone, or only suffers from the failure of another rank."""
        return bool(self.raised) and is_victim(self.last_words)

    @property
    def how(self) -> str:
        """How the rank ended, such as "was killed by SIGKILL"."""
        return self._how(message=True)

    @property
    def exit_words(self) -> str:
        """How the rank's process ended, such as "exited with code 1 (ValueError: no)", even if the rank returned."""
        code = self.exitcode or 0
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return f"{how} ({self.last_words.summary})" if self.raised and self.last_words.kind else how

    def for_others(self, num_rows: int = 0) -> Ending:
        """Return a copy for other processes: plain data, short enough for a packet.

        Args:
            num_rows: Rows of the screen that the traceback may take; 0 for no traceback.
        """
        words = self.last_words
        brief = dataclasses.replace(
            words,
            # Short enough for a packet, even if JSON takes twelve bytes for each character.
            kind=words.kind[:_MOST_KIND],
            message=words.message[:_MOST_MESSAGE],
            lines=tuple(line[:_MOST_LINE] for line in fold(words.lines, num_rows)) if num_rows else (),
            site=words.site[:_MOST_LINE],
            failure=None,
        )
        return dataclasses.replace(self, value=None, error=None, last_words=brief)

    def describe(self, *, message: bool = False) -> str:
        """Return a phrase that says which rank ended, and how.

        Args:
            message: Whether to give the first line of the exception's message in place of the exit code.
        """
        where = f" on {self.host}" if self.host else ""
        return f"{self.name} (pid {self.pid}{where}) {self._how(message=message)}"

    def _how(self, *, message: bool) -> str:
        if self.ok:
            return "returned"
        if self.ended_by_us:
            return "was ended"
        if self.hung:
            return "hung and was killed at the limit"
        if self.exitcode is not None and self.exitcode < 0:
            return f"was killed by {signal_name(-self.exitcode)}"
        if self.raised and message:
            return f"raised {self.raised}" + (f": {self.last_words.message}" if self.last_words.message else "")
        if self.exitcode == 0:
            return "ended without a result: by os._exit(0), or its descriptors were closed"
        by = f"raised {self.raised} and " if self.raised else ""
        return f"{by}exited with code {self.exitcode}"

    def __str__(self) -> str:
        return self.describe(message=True)


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

    Example:
        >>> def fail(rank):
        ...     raise KeyError(rank)
        >>> try:
        ...     phalanx.spawn(fail, nprocs=1)
        ... except phalanx.RankError as error:
        ...     print(error.rank, repr(error.error))
        0 KeyError(0)
    """

    def __init__(self, message: str, culprit: Ending, outcomes: Sequence[Ending]) -> None:
        super().__init__(message, culprit, outcomes)
        self.rank: int = culprit.rank
        self.pid: int = culprit.pid
        self.exitcode: int | None = culprit.exitcode
        self.signal: int | None = culprit.signal
        self.error: BaseException | None = culprit.error
        self.traceback: str = culprit.traceback
        self.hung: list[int] = [outcome.rank for outcome in outcomes if outcome.hung]
        self.outcomes: list[Ending] = list(outcomes)

    def __str__(self) -> str:
        return str(self.args[0])


RankError.__module__ = "phalanx"  # where users import it from


def find_culprit(outcomes: Iterable[Ending]) -> Ending | None:
    """Return the ending that caused the other endings; None if no rank failed.

    Hangs and victims come last. Signals come before exit codes, and a rank whose failure ended a group comes before the
    ranks that this failure was reported to. If all that is equal, earlier ends come before later ends.
    """
    return min((outcome for outcome in outcomes if outcome.failed), key=_order, default=None)


def _order(outcome: Ending) -> tuple[object, ...]:
    failure = outcome.last_words.failure
    has_heard = failure is not None and failure.by is not None
    return outcome.hung, outcome.is_victim, (outcome.exitcode or 0) >= 0, has_heard, outcome.when_s


def alike(one: LastWords, other: LastWords) -> bool:
    """Whether two ranks failed alike, judging by the facts; unstructured text is compared without its numbers."""
    return bool(one.kind) and _gist(one) == _gist(other)


def _gist(words: LastWords) -> tuple[object, ...]:
    """Return a key that is the same for ranks that failed alike."""
    failure = words.failure
    if failure is None:
        return words.name, re.sub(r"\d+", "N", words.message)
    if failure.calls or failure.sizes is not None:  # a mismatch: each rank's words describe its own call
        return words.name, failure.group
    return words.name, failure.kind, failure.group, failure.ranks, re.sub(r"\d+", "N", failure.detail)


# ---------------------------------------------------------------- reading and writing last words


def read_stderr(tail: bytes) -> LastWords:
    """Return the exception that a rank printed; if it printed none, its last lines."""
    text = STYLE.sub("", tail.decode(errors="replace"))
    # Where an exception is raised in a function's first line, Python prints spaces in place of carets. Keep them:
    # an empty line would end the traceback.
    lines = [line.rstrip() or line * line.startswith("    ") for line in text.splitlines()]
    block = find_last_block(lines)
    if block is None:
        return LastWords(lines=tuple(TORCH_PREFIX.sub("", line) for line in lines[-_MAX_PLAIN_LINES:]))
    shown = words_file.cropped_lines(block.lines)
    return LastWords(block.kind, block.message, shown, site=words_file.site_of(block.lines))


def last_words_in(folder: str, pid: int, stderr_tail: bytes) -> LastWords:
    """Return the last words of a rank of ``phalanx run``: those in its folder, else those on its stderr."""
    return words_file.read(os.path.join(folder, _ERROR_FILE), pid) or read_stderr(stderr_tail)


def write_error_file(outcome: Ending) -> None:
    """Write ``error.json`` in the form of torch's ``@record``, unless the rank has written its own."""
    path = os.path.join(outcome.folder, _ERROR_FILE)
    if os.path.exists(path):
        return
    words, code = outcome.last_words, outcome.exitcode or 0
    record = words.record(outcome.rank, outcome.pid, words.summary or outcome.describe())
    record["exception"]["is_victim"] = outcome.is_victim
    ends = {"exit_code": code if code >= 0 else None, "signal": signal_name(-code) if code < 0 else None}
    with contextlib.suppress(OSError):  # a full disk may be the failure itself
        words_file.write(path, {**record, **ends})
