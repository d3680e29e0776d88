"""One rank as the supervisor sees it: a process and two streams.

A traceback that begins on a rank's stderr is not shown on the screen at once. If the rank ends, the traceback goes into
the report of the failure. If the rank does not end within 5 s (30 s after torch's own prefix, which only an uncaught
exception has), it has evidently continued, and the traceback is shown. The logs get everything at once. A log that
can't be written does not end the job: training may write to another disk, and the disk of the logs may be full because
of the logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import termios
import time
import tty
from collections.abc import Callable

from phalanx._env import PREEMPTED_CODE
from phalanx.failure.ending import Ending, last_words_in, read_stderr, write_error_file
from phalanx.failure.last_words import LastWords
from phalanx.failure.tracebacks import HeldTracebacks, Stream
from phalanx.failure.victims import is_victim
from phalanx.launch.processes.descendants import has_ended
from phalanx.launch.screen.output import LineStream, LiveStream, Screen
from phalanx.record.notes import has_ended_for_restart, was_preempted

_LOST_INTERRUPT = re.compile(rb"^Exception ignored [^\n]*\n(?:[ T][^\n]*\n)*KeyboardInterrupt", re.MULTILINE)
_MAX_READS = 64  # number of buffers: more than a full pipe holds
_TAIL_BYTES = 64 * 1024  # size of the part of stderr that is kept


class Output:
    """A stream of a rank, which is read here, kept in a log and shown on a screen.

    Args:
        live: Whether the stream has a terminal of its own and is shown character by character.
        filtered: Function that puts a filter in front of the shown stream; None: no filter.

    Attributes:
        fd: The launcher's end of the pipe or terminal; reading it does not block.
        rank_fd: The rank's end of the pipe or terminal, until this end is handed over.
        tail: Last part of the output, which is searched for the cause of a failure.
        log_problem: Reason why the log is incomplete; "" if it is complete.
        ended: Whether no process can write to the stream any more.
    """

    def __init__(
        self,
        screen: Screen,
        line_prefix: bytes,
        log_path: str,
        *,
        live: bool,
        shown: bool,
        filtered: Callable[[Stream], Stream] | None = None,
    ) -> None:
        self._screen = screen
        self._live, self._shown = live, shown
        self.log_problem: str = ""
        self.ended: bool = False
        self.fd: int
        self.rank_fd: int
        self.fd, self.rank_fd = _open_terminal(screen) if live else os.pipe()
        os.set_blocking(self.fd, False)
        try:
            self._open(line_prefix, log_path, filtered)
        except OSError:
            os.close(self.fd)
            os.close(self.rank_fd)
            raise

    def _open(self, line_prefix: bytes, log_path: str, filtered: Callable[[Stream], Stream] | None) -> None:
        try:
            self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115 closed with the stream
        except OSError as error:
            self.log_problem = error.strerror or str(error)
            self._log = open(os.devnull, "ab", buffering=0)  # noqa: SIM115 closed with the stream
        self.tail: bytes = b""
        self._num_lost = 0  # number of times that the rank has printed and dropped a KeyboardInterrupt
        kind = LiveStream if self._live else LineStream
        view: Stream = kind(self._screen, line_prefix)
        self._view = HeldTracebacks(filtered(view) if filtered else view) if self._shown else None

    def go_on(self, line_prefix: bytes, log_path: str, filtered: Callable[[Stream], Stream] | None) -> None:
        """Continue with the log and prefix of another attempt, for which the process was kept."""
        self._log.close()
        self._open(line_prefix, log_path, filtered)

    def carry(self) -> bool:
        """Forward available output, at most one buffer; return whether there may be more."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return False
        except OSError:  # EIO: no process has the other side of the terminal open
            data = b""
        self.ended = not data
        if data:
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
            try:
                self._log.write(data)
            except OSError as error:  # the disk is full; training continues
                self.log_problem = error.strerror or str(error)
            if self._view is not None:
                self._view.feed(data)
        return bool(data)

    def drain(self, *, drops_last_words: bool = False) -> None:
        """Forward all remaining output of a rank that has ended, with the unfinished last line.

        Args:
            drops_last_words: Whether to drop a traceback that is still held back, because the report of the failure
                shows it.
        """
        for _ in range(_MAX_READS):  # a limit, because a process that escaped from the rank may write forever
            if not self.carry():
                break
        if self._view is not None:
            if drops_last_words:
                self._view.settle()
            self._view.finish()

    @property
    def is_holding(self) -> bool:
        """Whether a traceback is held back until it is known whether the rank ends with this traceback."""
        return self._view is not None and self._view.is_holding

    def release_late(self) -> None:
        """Show a traceback that was held back, if the rank has evidently continued."""
        if self._view is not None:
            self._view.release_late()

    def hide_interrupts(self) -> None:
        """Hide tracebacks of KeyboardInterrupt from now on."""
        if self._view is not None:
            self._view.hides_interrupts = True

    def lost_interrupt(self) -> bool:
        """Return whether, since the last call, Python in the rank has printed and dropped a KeyboardInterrupt."""
        before, self._num_lost = self._num_lost, len(_LOST_INTERRUPT.findall(self.tail))
        return self._num_lost > before

    def has_room(self, columns: str) -> bool:
        """Return whether lines as long as `columns`, the value of COLUMNS, fit the stream's terminal, if it has one."""
        if not self._live or not columns.isdecimal():
            return True
        room = os.get_terminal_size(self.fd).columns
        return not room or int(columns) <= room

    def resize(self) -> None:
        """Give the rank's terminal, if it has one, the size of the screen; the kernel notifies the rank."""
        if self._live:
            _copy_size(self._screen, self.fd)

    def close(self) -> None:
        if self.rank_fd >= 0:
            self.hand_over()
        os.close(self.fd)
        self._log.close()
        if self._view is not None:
            with contextlib.suppress(BrokenPipeError):
                self._view.finish()

    def hand_over(self) -> None:
        """Close our copy of the rank's end, because the rank now has a copy of its own."""
        os.close(self.rank_fd)
        self.rank_fd = -1


class Rank:
    """A rank of one attempt, from the request to start it until its end has been reported.

    Attributes:
        pause: Failure of the rank, if its process waits for the next attempt.
    """

    def __init__(self, rank: int, folder: str, stdout: Output, stderr: Output, pid: int = 0) -> None:
        self.rank = rank
        self.folder = folder
        self.stdout = stdout
        self.stderr = stderr
        self.pid = pid  # 0 until the forker has forked the rank
        self.asked_to_end = False
        self.was_killed = False  # whether the supervisor has sent SIGKILL to the rank
        self.end: Ending | None = None
        self.pause: Ending | None = None

    @property
    def outputs(self) -> tuple[Output, Output]:
        return self.stdout, self.stderr

    @property
    def is_running(self) -> bool:
        """Whether the rank is part of this attempt: it has not ended, and does not wait for the next attempt."""
        return self.end is None and self.pause is None

    @property
    def is_kept(self) -> bool:
        """Whether the rank's process waits for the next attempt."""
        return self.end is None and self.pause is not None

    def has_ended(self) -> bool:
        """Return whether the process has ended; the kernel knows before the forker reports it."""
        if self.end is not None:
            return True
        return bool(self.pid) and has_ended(self.pid)

    @property
    def said_why(self) -> bool:
        """Whether the rank has printed an exception that no other rank caused; it then has ended or will soon end."""
        words = self._last_words()
        return bool(words.kind) and not is_victim(words)

    def _last_words(self) -> LastWords:
        return last_words_in(self.folder, self.pid, self.stderr.tail)

    def record_end(self, status: int, *, is_reported: bool) -> Ending:
        """Record the rank's wait status and read its remaining output.

        Args:
            is_reported: Whether the failure will be reported, so that this rank's last words need not be shown now.
        """
        code = os.waitstatus_to_exitcode(status)
        self._drain(is_reported=is_reported and code != 0)
        is_crash = code < 0 and not self.asked_to_end  # even if the rank raised earlier: stderr shows the crash
        words = read_stderr(self.stderr.tail) if is_crash else self._last_words() if code else LastWords()
        self.end = self._outcome(code, words)
        if self.end.failed:
            write_error_file(self.end)
        return self.end

    def record_pause(self) -> Ending:
        """Record that an exception ended the rank's part in this attempt; its process waits for the next attempt."""
        self._drain(is_reported=True)
        code = PREEMPTED_CODE if has_ended_for_restart(self.folder) else 1
        self.pause = self._outcome(code, self._last_words())
        return self.pause

    def _drain(self, *, is_reported: bool) -> None:
        self.stdout.drain()
        self.stderr.drain(drops_last_words=is_reported)

    def _outcome(self, code: int, words: LastWords) -> Ending:
        return Ending(
            rank=self.rank,
            pid=self.pid,
            exitcode=code,
            ended_by_us=self.asked_to_end,
            preempted=code == PREEMPTED_CODE and was_preempted(self.folder),
            ended_for_restart=code == PREEMPTED_CODE and has_ended_for_restart(self.folder),
            killed_by_another=self.asked_to_end and code == -signal.SIGKILL and not self.was_killed,
            last_words=words,
            folder=self.folder,
            when_s=time.monotonic(),
        )


def _open_terminal(screen: Screen) -> tuple[int, int]:
    """Return the launcher's side and the rank's side of a terminal that is as large as the screen."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)  # so that newlines are translated once, by the real terminal
    modes = termios.tcgetattr(theirs)
    modes[3] |= termios.ICANON  # but Ctrl-D must end the rank's input, as it ends ours
    modes[6][termios.VEOF] = b"\x04"
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    _copy_size(screen, theirs)
    return ours, theirs


def _copy_size(screen: Screen, fd: int) -> None:
    with contextlib.suppress(OSError):
        lines = os.get_terminal_size(screen.fd).lines
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, screen.room_of(0), 0, 0))
