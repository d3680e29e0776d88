"""Which rank was the cause, what it said last, and what to do about it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Sequence

from phalanx._env import PREEMPTED_CODE
from phalanx.launch.causes import is_victim
from phalanx.launch.cpus import format_ranges
from phalanx.launch.notes import has_made_room
from phalanx.launch.tracebacks import EXCEPTION, STYLE, TORCH_PREFIX, TRACEBACK, class_name

_MAX_SHOWN_LINES = 40
_IGNORED = ("Exception ignored in", "Exception in thread")
_TERMINATED = re.compile(r"terminate called after throwing an instance of '([\w:]+)'\s+what\(\):\s+(.*)")


@dataclasses.dataclass(frozen=True)
class LastWords:
    """What a rank wrote last on stderr: its exception if there was one, and the lines worth showing."""

    kind: str = ""
    message: str = ""
    lines: tuple[str, ...] = ()
    is_traceback: bool = False

    @classmethod
    def of(cls, stderr_tail: bytes) -> LastWords:
        text = STYLE.sub("", stderr_tail.decode(errors="replace"))
        lines = [TORCH_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
        starts = [number for number, line in enumerate(lines) if TRACEBACK.match(line)]
        # What did not end the process counts only if nothing else is there.
        starts = [n for n in starts if n == 0 or not lines[n - 1].startswith(_IGNORED)] or starts
        if crash := [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]:
            stacks = [line for line in lines[crash[-1] :] if not line.startswith("Extension modules: ")]
            # An exception that native code did not catch comes before.
            kind, message = (found[1], found[2]) if (found := _TERMINATED.search(text)) else ("", "")
            shown = [f"{kind}: {message}", *stacks] if kind else stacks
            return cls(kind, message, tuple(shown[:_MAX_SHOWN_LINES]))
        if not starts:
            return cls(lines=tuple(lines[-_MAX_SHOWN_LINES // 2 :]))
        block = lines[starts[-1] :]
        for number, line in enumerate(block[1:], 1):
            if line and not line[0].isspace() and (found := EXCEPTION.match(line)):
                # What follows a traceback, such as a warning at exit, is not part of it: a blank line ends it.
                rest = next((end for end in range(number, len(block)) if not block[end]), len(block))
                block = block[: max(rest, number + 1)]
                if len(block) > _MAX_SHOWN_LINES:
                    half = _MAX_SHOWN_LINES // 2
                    block = [*block[:half], f"  ... {len(block) - 2 * half} lines ...", *block[-half:]]
                return cls(found[1], found[2] or "", tuple(block), is_traceback=True)
        return cls(lines=tuple(block[:_MAX_SHOWN_LINES]), is_traceback=True)

    @property
    def summary(self) -> str:
        """The exception in one line; empty when there was none."""
        return (f"{self.kind}: {self.message}" if self.message else self.kind) if self.kind else ""


@dataclasses.dataclass
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: -1: not a rank, but the process that starts them.
        returncode: Exit code, or minus the signal.
        asked: We had told it to end, so it is nobody's cause.
        folder: Of its logs.
        host: Where it ran; empty: here.
    """

    rank: int
    pid: int
    returncode: int
    asked: bool
    last_words: LastWords
    folder: str
    when_s: float
    host: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else "the process that starts the ranks"

    @property
    def log(self) -> str:
        return os.path.join(self.folder, "stderr.log" if self.rank >= 0 else "launch.log")

    @property
    def failed(self) -> bool:
        return self.returncode != 0 and not self.asked

    @property
    def made_room(self) -> bool:
        """Whether it was asked to end, has saved its state, and can go on from there."""
        return self.returncode == PREEMPTED_CODE and has_made_room(self.folder)

    @property
    def raised(self) -> str:
        """Class of the exception that ended it; empty if none did. One that it has caught and printed did not."""
        by_exception = self.returncode in (1, -signal.SIGABRT)
        return class_name(self.last_words.kind) if by_exception else ""

    @property
    def is_victim(self) -> bool:
        """Whether it failed because a peer had gone before it."""
        return bool(self.raised) and is_victim([self.raised], self.last_words.message)

    @property
    def exit_code(self) -> int:
        """What a shell would report: 128 plus the signal, if one ended the rank."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def describe(self) -> str:
        if self.returncode < 0:
            how = f"was killed by {signal_name(-self.returncode)}"
        elif self.raised:
            how = f"raised {self.raised} and exited with code {self.returncode}"
        else:
            how = f"exited with code {self.returncode}"
        where = f" on {self.host}" if self.host else ""
        return f"{self.name} (pid {self.pid}{where}) {how}"


def find_culprit(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the rank whose end was the cause: never a victim if another failed; a signal before a code; the first."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (end.is_victim, end.returncode > 0, end.when_s), default=None)


def report(culprit: RankEnd, ends: Sequence[RankEnd], *, hint: str) -> str:
    """Return the last words of a job that failed: the victims in a line, then the cause."""
    lines = []
    victims = sorted((end for end in ends if end.failed and end.rank != culprit.rank), key=lambda end: end.rank)
    ended = sorted(end.rank for end in ends if end.asked)
    if victims:
        said = "; ".join(f"rank {end.rank} {_end_in_brief(end)}" for end in victims[:4])
        more = f" and {len(victims) - 4} more" if len(victims) > 4 else ""
        lines.append(f"phalanx run: failed after the cause: {said}{more}")
    if ended:
        who = f"rank {ended[0]} was" if len(ended) == 1 else f"ranks {format_ranges(ended)} were"
        lines.append(f"phalanx run: {who} then ended")
    lines.append(f"phalanx run: {culprit.describe()}; exit code {culprit.exit_code}")
    lines += [f"  {line}" for line in culprit.last_words.lines]
    where = f"{culprit.host}:" if culprit.host else ""
    lines.append(f"  log: {where}{culprit.log}")
    if hint:
        lines.append(f"  hint: {hint}")
    return "\n".join(lines) + "\n"


def _end_in_brief(end: RankEnd) -> str:
    if end.raised:
        return end.raised
    return signal_name(-end.returncode) if end.returncode < 0 else f"exit code {end.returncode}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def write_error_file(end: RankEnd) -> None:
    """Write ``error.json`` in the form of torch's ``@record``, unless the rank has written its own."""
    path = os.path.join(end.folder, "error.json")
    if os.path.exists(path):
        return
    content = {
        "message": {
            "message": end.last_words.summary or end.describe(),
            "extraInfo": {"py_callstack": "\n".join(end.last_words.lines), "timestamp": str(int(time.time()))},
        },
        "rank": end.rank,
        "pid": end.pid,
        "host": socket.gethostname(),
        "exit_code": end.returncode if end.returncode >= 0 else None,
        "signal": signal_name(-end.returncode) if end.returncode < 0 else None,
    }
    with contextlib.suppress(OSError), open(path, "w") as file:  # the disk may be what failed
        json.dump(content, file, indent=1)


# ---------------------------------------------------------------- hints


_HINTS_BY_SIGNAL = {
    signal.SIGILL: "an instruction that this processor lacks: a library was built for a newer one",
    signal.SIGSEGV: "native code crashed, called from the Python line above",
    signal.SIGBUS: "a mapped file or shared memory ran out: look at the disk and at /dev/shm",
    signal.SIGABRT: "native code gave up; its reason is in the log",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGXCPU: "the limit of CPU time was reached (ulimit -t)",
}

_HINTS_BY_TEXT = (
    (r"doesn't have MPI built in", "this torch has no MPI: use init_process_group('phalanx'), or gloo"),
    (r"^ModuleNotFoundError: No module named '([\w]+)", "install it where the ranks run: {python} -m pip install {1}"),
    (r"^ImportError", "the package is there but not whole: try it alone with {python} -c 'import ...'"),
    (r"EADDRINUSE|[Aa]ddress already in use", "the port is taken: leave --master-port out, and a free one is used"),
    (
        r"CUDA out of memory|OutOfMemoryError",
        "the GPU is full: smaller batch, or see which process holds it: nvidia-smi",
    ),
    (r"^MemoryError|can't allocate memory", "no memory left: smaller batch, or fewer ranks"),
    (
        r"not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver|invalid device ordinal",
        "not enough GPUs for these ranks: --nproc-per-node gpu starts one rank per GPU",
    ),
    (r"unrecognized arguments: --local[-_]rank", "the script wants no --local-rank: leave --no-use-env out"),
    (r"No space left on device", "the disk or /dev/shm is full"),
)


def hint_for(end: RankEnd, *, num_oom_kills: int, python: str) -> str:
    """Return what to do about it in one line; empty when nothing is known to help.

    Args:
        num_oom_kills: By the kernel since the job began.
        python: The interpreter of the ranks.
    """
    if end.returncode == -signal.SIGKILL:
        if num_oom_kills:
            return (
                "the kernel has just killed for want of memory: smaller batch, fewer ranks, or fewer DataLoader workers"
            )
        return "somebody killed it from outside: a person, a job limit, or a container's memory limit"
    if -end.returncode in _HINTS_BY_SIGNAL:
        return _HINTS_BY_SIGNAL[signal.Signals(-end.returncode)]
    text = "\n".join([end.last_words.summary, *end.last_words.lines])
    for pattern, hint in _HINTS_BY_TEXT:
        if found := re.search(pattern, text, re.MULTILINE):
            return hint.replace("{python}", python).replace("{1}", found[1] if found.re.groups else "")
    return ""
