"""Reads torch's Flight Recorder for ranks on NCCL, whose collectives phalanx does not record.

If the job was told to open a pipe (``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``), a thread of NCCL's process group writes the
record to a file whenever it reads something from the pipe, even if the rank hangs. The thread checks the pipe once a
second, so the answer takes up to 1.3 s; stacks are read meanwhile. The file is a pickle of plain values, and is
unpickled without classes. Its entries are turned into a box, with numbers, groups and lines, so that other modules use
them like phalanx's own. Operations in flight are assumed to end in the order in which they began, as in one stream.

Tested with torch's own entries of Gloo and an imitated pipe, not with NCCL itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from phalanx._env import host_name
from phalanx._errors import printable
from phalanx.diagnose.stacks import folder_of
from phalanx.failure.last_words import owner_of
from phalanx.host.processes import Process, environment_of
from phalanx.record.box import Box, Event
from phalanx.wire.files import open_regular
from phalanx.wire.waiting import wait_until

ANSWERS_S = 1.3
"""Time for an answer: a rank checks its pipe once a second."""
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_LOOK_S = 0.02
_UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, EOFError, RecursionError, MemoryError,
    pickle.UnpicklingError,
)  # fmt: skip
_C10D = "torch/distributed/distributed_c10d.py"


@dataclasses.dataclass(frozen=True)
class Question:
    """A rank that was asked, the files in which it may answer, and when each was last written."""

    rank: int
    process: Process
    written_ns: Mapping[Path, int]

    def answer(self, deadline_s: float) -> Box | None:
        """Return the collectives in the rank's Flight Recorder; None if it does not answer in time."""
        return wait_until(self._look, deadline_s, most_s=_LOOK_S)

    def _look(self) -> Box | None:
        for path, before_ns in self.written_ns.items():
            if _written_ns(path) != before_ns and (box := self._read(path)) is not None:
                return box
        return None

    def _read(self, path: Path) -> Box | None:
        with contextlib.suppress(*_UNREADABLE), open_regular(path) as file:
            return box_of(_Plain(file).load(), self.rank, self.process)
        return None  # the file is missing, or still being written


def ask(rank: int, process: Process) -> Question | None:
    """Ask a rank to write its collectives to a file; None if it can't be asked."""
    environ = environment_of(process.pid)
    if not environ.get(_PIPE):
        return None
    home = environ.get("HOME", "")
    stems = [*(environ[name] for name in _FILES if environ.get(name)), "/tmp/nccl_trace_rank_"]
    stems.append(f"{environ.get('XDG_CACHE_HOME') or f'{home}/.cache'}/torch/comm_lib_trace_rank_")
    written_ns = {path: _written_ns(path) for path in (Path(f"{stem}{rank}") for stem in stems)}
    try:
        fd = os.open(f"{environ[_PIPE]}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the pipe does not exist, or nobody reads it
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return None
        os.write(fd, b"1\n")
    except OSError:
        return None
    finally:
        os.close(fd)
    return Question(rank, process, written_ns)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class _Plain(pickle.Unpickler):
    """Reads only values without classes, so that nothing in the file is executed."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def box_of(dump: dict[str, Any], rank: int, process: Process) -> Box:
    """Return a Flight Recorder's entries as the events of a black box."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    events = tuple(_events(dump["entries"], process.pid, offset_ns))
    num_events = max((event.number for event in events), default=0)
    return Box(rank, 0, process.pid, process.start_time, host_name(), offset_ns, num_events, events)


def _events(entries: list[dict[str, Any]], pid: int, offset_ns: int) -> Iterator[Event]:
    """Yield the entries as events of the main thread, because the recorder numbers threads differently."""
    folder = folder_of(pid)
    for entry in sorted(entries, key=lambda entry: int(entry["record_id"])):
        begun_ns = int(entry["time_created_ns"]) - offset_ns
        has_ended = entry["state"] == "completed" or bool(entry.get("retired"))
        ended_ns = int(entry["time_discovered_completed_ns"] or 0) - offset_ns
        frames = [(str(one["filename"]), str(one["name"]), int(one["line"])) for one in entry["frames"]]
        group, about = (printable(str(name)) for name in entry["process_group"])
        is_message = bool(entry["is_p2p"])
        yield Event(
            number=int(entry["record_id"]) + 1,
            begun_ns=begun_ns,
            ended_ns=max(ended_ns, begun_ns) if has_ended else 0,
            kind="message" if is_message else "collective",
            op=printable(_operation(str(entry["profiling_name"]), frames)),
            text="default" if about == "default_pg" else group,
            site=printable(_site(frames, folder)),
            thread=pid,
            seq=0 if is_message else int(entry["collective_seq_id"]),
            value=sum(math.prod(map(int, shape)) for shape in entry["input_sizes"]),
        )


def _operation(profiled: str, frames: list[tuple[str, str, int]]) -> str:
    """Return the name by which the caller knows the operation."""
    called = [name for file, name, _ in frames if file.endswith(_C10D) and not name.startswith("_")]
    return called[-1] if called else profiled.partition(":")[2].partition(" ")[0].strip("_") or profiled


def _site(frames: list[tuple[str, str, int]], folder: str) -> str:
    """Return the innermost line outside libraries."""
    return next((f"{file.removeprefix(folder)}:{line}" for file, _, line in frames if not owner_of(file)), "")
