"""Start the ranks, carry their output, and end them all when one fails.

One thread and one loop. The loop wakes for output, for a signal, for the end of
a rank, or for the end of a grace period; nothing in it blocks. Each rank leads a
process group, so that what it has started ends with it, and dies with the
supervisor (PR_SET_PDEATHSIG), however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import selectors
import signal
import struct
import subprocess
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence

from phalanx.launch.environment import free_port, rank_environment
from phalanx.launch.output import LineStream, LiveStream, Screen, prefix

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_KILL_WAIT_S = 5.0  # after SIGKILL: only the kernel can make this pass
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded before any fork


@dataclasses.dataclass(kw_only=True)
class Job:
    """What to run: `command` on each of `num_ranks` ranks of this machine."""

    command: Sequence[str]
    num_ranks: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: a free one
    run_id: str = "none"  # torchrun's default
    grace_s: float = 30.0  # between SIGTERM and SIGKILL


def run(job: Job) -> int:
    """Run `job` and return the exit code for the shell.

    0 if every rank exits with 0. Otherwise the code of the rank that failed first, 128
    plus the signal if one ended it. When the supervisor itself is told to end: 128 plus
    that signal. No rank lives when this returns.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-run-") as folder, _Supervisor() as supervisor:
        try:
            supervisor.start(job, folder)
            return supervisor.watch(job.grace_s)
        except BrokenPipeError:  # whoever read our output has gone
            return 128 + signal.SIGPIPE


class _Rank:
    """One process and its two outputs."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.streams: dict[int, LineStream | LiveStream] = {}  # by the descriptor we read

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal_group(self, sig: int) -> None:
        # Safe from reuse of the number: only reap() frees it, and then we do not come here.
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sig)

    def reap(self) -> bool:
        """Return whether the rank has just ended; what it had started ends then too."""
        pid = self.process.pid
        # WNOWAIT keeps the number taken until its group is gone.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.signal_group(signal.SIGKILL)
        self.process.wait()
        return True

    @property
    def exit_code(self) -> int:
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def describe_end(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"rank {self.rank} (pid {self.process.pid}) exited with code {code}"
        name = signal.Signals(-code).name
        return f"rank {self.rank} (pid {self.process.pid}) was killed by {name}"


class _Supervisor:
    """Owns the ranks, the descriptors and, while it stands, this process's signals."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._out, self._err = Screen(1), Screen(2)
        if self._out.is_terminal and self._err.is_terminal:
            self._err = self._out  # one cursor, so one account of where it stands
        self._signals: list[int] = []
        self._previous: dict[int, object] = {}

    def __enter__(self) -> _Supervisor:
        # Handlers only note the signal; the byte that Python writes to the pipe wakes the loop.
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for sig in _FORWARDED:
            if signal.getsignal(sig) is not signal.SIG_IGN:  # nohup stays nohup
                self._previous[sig] = signal.signal(sig, lambda got, _: self._signals.append(got))
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.signal_group(signal.SIGKILL)
        for rank in self._ranks:
            if rank.running:
                rank.process.wait()
            for fd in list(rank.streams):
                self._close(rank, fd)
        signal.set_wakeup_fd(-1)
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)  # type: ignore[arg-type]
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ------------------------------------------------------------ start

    def start(self, job: Job, folder: str) -> None:
        port = job.master_port or free_port()
        for rank in range(job.num_ranks):
            environ = rank_environment(
                os.environ,
                rank=rank,
                world_size=job.num_ranks,
                master_addr=job.master_addr,
                master_port=port,
                run_id=job.run_id,
                error_file=os.path.join(folder, "attempt_0", str(rank), "error.json"),
            )
            os.makedirs(os.path.dirname(environ["TORCHELASTIC_ERROR_FILE"]))
            self._start_rank(rank, job.command, environ)

    def _start_rank(self, rank: int, command: Sequence[str], environ: dict[str, str]) -> None:
        screens = list(dict.fromkeys((self._out, self._err)))
        if not _is_live(rank, self._out):
            screens = [self._out, self._err]
        ends = [_output_ends(rank, screen) for screen in screens]
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=ends[0].rank_fd,
                stderr=ends[-1].rank_fd,
                preexec_fn=_bind_to(os.getpid()),
            )
        except BaseException:
            for end in ends:
                os.close(end.our_fd)
            raise
        finally:
            for end in ends:
                os.close(end.rank_fd)
        started = _Rank(rank, process)
        self._ranks.append(started)
        for end, screen in zip(ends, screens, strict=True):
            kind = LiveStream if end.live else LineStream
            started.streams[end.our_fd] = kind(screen, prefix(rank, colour=screen.is_terminal))
            os.set_blocking(end.our_fd, False)
            self._selector.register(end.our_fd, selectors.EVENT_READ, started)

    # ------------------------------------------------------------ watch

    def watch(self, grace_s: float) -> int:
        """Return the job's exit code once every rank has ended."""
        culprit: _Rank | None = None
        received: int | None = None
        deadline: float | None = None  # of the present grace period
        ended = 0
        while any(rank.running for rank in self._ranks):
            self._wait(deadline)
            for sig in self._take_signals():
                if received is not None:
                    deadline = time.monotonic()  # asked a second time: at once
                else:
                    received, deadline = sig, time.monotonic() + grace_s
                    self._say(f"{signal.Signals(sig).name}: ending {self._count(ended)}")
                    self._signal_all(sig)
            just_ended = [rank for rank in self._ranks if rank.running and rank.reap()]
            ended += len(just_ended)
            for rank in just_ended:
                self._drain(rank)
            failed = [rank for rank in just_ended if rank.process.returncode != 0]
            if failed and culprit is None and received is None:
                # Several at one look: a signal is a cause more often than a code.
                culprit = min(failed, key=lambda rank: (rank.process.returncode > 0, rank.rank))
                num_others = sum(rank.running for rank in self._ranks)
                deadline = time.monotonic() + grace_s
                self._signal_all(signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                self._signal_all(signal.SIGKILL)
                deadline = time.monotonic() + _KILL_WAIT_S
        if received is not None:
            return 128 + received
        if culprit is None:
            return 0
        others = f"; {num_others} other rank{'s' * (num_others != 1)} ended" if num_others else ""
        self._say(f"{culprit.describe_end()}{others}; exit code {culprit.exit_code}")
        return culprit.exit_code

    def _count(self, ended: int) -> str:
        left = len(self._ranks) - ended
        return f"{left} rank{'s' * (left != 1)}"

    def _wait(self, deadline: float | None) -> None:
        """Carry output until something else may have happened."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            else:
                self._carry(key.data, key.fd)

    def _carry(self, rank: _Rank, fd: int) -> bool:
        """Give on what lies in one pipe, at most one buffer; return whether there may be more."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the last holder of a terminal's other side has gone
            data = b""
        if data:
            rank.streams[fd].feed(data)
        else:
            self._close(rank, fd)
        return bool(data)

    def _drain(self, rank: _Rank) -> None:
        """Give on the last words of a rank that has ended, and close its pipes."""
        for fd in list(rank.streams):
            while fd in rank.streams and self._carry(rank, fd):
                pass
            if fd in rank.streams:
                self._close(rank, fd)

    def _close(self, rank: _Rank, fd: int) -> None:
        stream = rank.streams.pop(fd)
        self._selector.unregister(fd)
        os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            stream.finish()

    def _take_signals(self) -> Iterator[int]:
        while self._signals:
            yield self._signals.pop(0)

    def _signal_all(self, sig: int) -> None:
        for rank in self._ranks:
            rank.signal_group(sig)
            rank.signal_group(signal.SIGCONT)  # a stopped rank could not obey

    def _say(self, text: str) -> None:
        self._out.end_line()
        self._err.end_line()
        self._err.write_line(f"phalanx run: {text}\n".encode())


@dataclasses.dataclass
class _OutputEnds:
    our_fd: int
    rank_fd: int
    live: bool


def _is_live(rank: int, screen: Screen) -> bool:
    return rank == 0 and screen.is_terminal


def _output_ends(rank: int, screen: Screen) -> _OutputEnds:
    """Return a pipe, or for rank 0 on a terminal a terminal, so that its progress bar shows."""
    if not _is_live(rank, screen):
        return _OutputEnds(*os.pipe(), live=False)
    ours, theirs = os.openpty()
    tty.setraw(theirs)  # line ends are translated once, by the real terminal
    columns, lines = os.get_terminal_size(screen.fd)
    room = max(20, columns - len(prefix(rank, colour=False)))
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, room, 0, 0))
    return _OutputEnds(ours, theirs, live=True)


def _bind_to(supervisor_pid: int) -> Callable[[], None]:
    """Return what a rank does between fork and exec: lead a group, die with the supervisor."""

    def bind() -> None:
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor_pid:  # it died before the line above
            os._exit(128 + signal.SIGKILL)

    return bind
