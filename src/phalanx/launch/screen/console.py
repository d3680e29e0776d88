"""The output of a job, on a terminal or in pipes: the output of its ranks, and the launcher's own lines in between."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial

from phalanx._text import broken_at
from phalanx.failure.tracebacks import Stream
from phalanx.launch.job import Job
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.output import Screen, prefix, printable
from phalanx.launch.screen.ranks import Output, Rank
from phalanx.launch.screen.warning_filter import FilteredStream, WarningFilter
from phalanx.record.run_folder import LAUNCH_LOG, RunFolder

_STREAMS = {"stdout": 1, "stderr": 2}


class Console:
    """Shows the streams of all ranks, and writes each to its log.

    Args:
        is_ending: Function that returns whether the launcher is ending; output that nobody reads is then dropped.
        on_closed: Function to call once, when the reader of our output has gone.

    Attributes:
        out: Screen of our stdout.
        err: Screen of our stderr; the same screen as `out` if both are a terminal.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        events: EventLoop,
        is_ending: Callable[[], bool],
        on_closed: Callable[[], None],
    ) -> None:
        self._job, self._folder, self._events = job, folder, events
        self.out: Screen
        self.err: Screen
        self.out, self.err = (Screen(fd, is_ending, on_closed) for fd in _STREAMS.values())
        if self.out.is_terminal and self.err.is_terminal:
            self.err = self.out  # one cursor, so its position is tracked once
        self._num_shown = 0
        self._filter: WarningFilter

    # ------------------------------------------------------------ streams of ranks

    def begin_attempt(self, num_local_ranks: int) -> None:
        """Forget the warnings that were gathered from ranks of an earlier attempt."""
        self._num_shown = len(self._job.shown_ranks) if self._job.shown_ranks else num_local_ranks
        self._filter = WarningFilter(self.err.write_lines, self._num_shown)

    def open_rank(self, number: int, local_rank: int, folder: str) -> Rank:
        """Return a rank that has not started yet, with streams of its own."""
        job = self._job
        live_rank = job.shown_ranks[0] if job.shown_ranks else 0
        outputs: list[Output] = []
        for name, stream in _STREAMS.items():
            screen = self.out if name == "stdout" else self.err
            shown = job.shown_ranks is None or local_rank in job.shown_ranks
            kept_off = _bits(job.redirects, local_rank) & ~_bits(job.tees, local_rank) & stream
            line_prefix, log_path, filtered = self._way_of(name, number, folder)
            output = Output(
                screen, line_prefix, log_path,
                live=screen.is_terminal and local_rank == live_rank, shown=shown and not kept_off, filtered=filtered,
            )  # fmt: skip
            self._events.watch_output(output)
            outputs.append(output)
        return Rank(number, folder, outputs[0], outputs[1])

    def keep_rank(self, before: Rank, number: int, folder: str) -> Rank:
        """Return a rank of a new attempt; it keeps the process and the streams of the rank `before`."""
        for output, name in zip(before.outputs, _STREAMS, strict=True):
            output.go_on(*self._way_of(name, number, folder))
        return Rank(number, folder, *before.outputs, pid=before.pid)

    def _way_of(self, name: str, number: int, folder: str) -> tuple[bytes, str, Callable[[Stream], Stream] | None]:
        """Return the prefix, the log file and the filter of a rank's stream."""
        screen = self.out if name == "stdout" else self.err
        filtered = partial(FilteredStream, self._filter, number) if name == "stderr" and self._num_shown > 1 else None
        return prefix(number, colour=screen.is_terminal), os.path.join(folder, f"{name}.log"), filtered

    def is_holding(self, ranks: Sequence[Rank]) -> bool:
        """Return whether output is held back for a moment: a traceback, or a warning that other ranks may repeat."""
        return self._filter.is_waiting or any(rank.stderr.is_holding for rank in ranks)

    def release_late(self, ranks: Sequence[Rank]) -> None:
        """Show output that has been held back for long enough."""
        for rank in ranks:
            rank.stderr.release_late()
        self._filter.flush(late_only=True)

    def end_attempt(self) -> None:
        """Show the warnings that have been gathered."""
        self._filter.flush()

    # ------------------------------------------------------------ our own words

    def say(self, text: str) -> None:
        """Write a line of the launcher; if a debugger's prompt is open, write the line above the prompt."""
        if self.out.borrower is None:
            self.out.end_line()
            self.err.end_line()
        line = f"phalanx run: {text}\n"
        self.err.write_lines(printable(self._broken(line)))
        self._log(printable(line))

    def say_last(self, text: str) -> None:
        """Write the final report of the job unchanged."""
        self.out.end_line()
        self.err.end_line()
        self.err.write(printable(self._broken(text)))
        self._log(printable(text))

    def _broken(self, text: str) -> str:
        """Return the text with lines broken between words to fit the terminal, if there is one."""
        if not self.err.is_terminal:
            return text
        try:
            width = os.get_terminal_size(self.err.fd).columns
        except OSError:  # the terminal has hung up
            return text
        return "".join(f"{line}\n" for line in broken_at(width, text.split("\n")[:-1]))

    def _log(self, words: bytes) -> None:
        """Append to the launcher's own log. Errors are ignored: the ranks' logs report a full disk."""
        with contextlib.suppress(OSError), open(os.path.join(self._folder.path, LAUNCH_LOG), "ab") as file:
            file.write(words)

    def close(self) -> None:
        """Restore the terminal."""
        with contextlib.suppress(BrokenPipeError):
            self.out.show_cursor()


def _bits(streams: tuple[int, ...], local_rank: int) -> int:
    return streams[local_rank] if streams else 0
