"""Python stacks of running and stopped processes, read from outside by py-spy, and the holder of the GIL.

The process is not halted and need not cooperate: py-spy reads its memory without ptrace (``--nonblocking``). That takes
20 ms, works on stopped processes and interrupts no system call of the job. If a stack changed while it was read, it is
read again.

Native frames need ptrace, a halt of milliseconds, and the symbols of large libraries. So native frames are read only
for a culprit (a rank that the others wait for) that sleeps in native code with the GIL. In addition, every thread of
the process must be in a system call that the kernel restarts after a halt. Other system calls (recv with a time limit,
accept, epoll_wait, semop) would fail with EINTR. For a culprit in such a call, a line tells the user which command
reads native frames.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from phalanx.failure.last_words import owner_of
from phalanx.host.kernel import number_inside, ptrace_scope, status_of
from phalanx.host.processes import process_of, working_folder

_LIBRARY = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+|src(?=/phalanx/))/")
# seconds before each try: a stack may have changed while it was read, or the host may lack a resource for a moment
_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2)
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a stack.

    Attributes:
        function: Name of the function; Python's qualified name if that is known.
        file: Path of the source file, relative to the library's folder or to the process's current folder; for a native
            frame, the name of the library.
        line: Line number; 0 if it is unknown, as in native frames.
        owner: Package that the file belongs to, ``Python`` or ``native``; empty for the user's own code.
    """

    function: str
    file: str
    line: int
    owner: str

    @property
    def name(self) -> str:
        """Name of the function, without its class and the like."""
        return self.function.rpartition(".")[2]

    @property
    def site(self) -> str:
        """Place of the frame in its source, such as ``data.py:88``."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclasses.dataclass(frozen=True)
class Thread:
    """A Python thread of a process.

    Attributes:
        number: The kernel's id of the thread; for the main thread, the pid.
        is_active: Whether the thread was running when its stack was read.
        owns_gil: Whether the thread held the global interpreter lock.
        frames: The frames, innermost first.
    """

    number: int
    name: str
    is_active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]

    @property
    def own_frames(self) -> tuple[Frame, ...]:
        """The frames of the user's own code."""
        return tuple(frame for frame in self.frames if not frame.owner)


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The stacks of a process.

    Attributes:
        threads: The Python threads, the main thread first; empty if they could not be read.
        problem: Reason why the threads could not be read, and what to do about it; empty if they were read.
    """

    threads: tuple[Thread, ...] = ()
    problem: str = ""


def find_py_spy() -> str:
    """Return the path of py-spy, beside this Python or on the PATH; empty if it is not installed."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy") or ""


def read_stacks(pids: Sequence[int], timeout_s: float = 1.0, *, native: bool = False) -> dict[int, Stacks]:
    """Return the stacks of processes, all read at once.

    Args:
        timeout_s: Time limit for all processes together; stacks that are not read by then have a `problem` instead.
        native: Whether to read native frames, too. This halts the process meanwhile, and takes ten times as long.
    """
    if not pids:
        return {}
    deadline = time.monotonic() + timeout_s
    with concurrent.futures.ThreadPoolExecutor(min(len(pids), _AT_ONCE)) as pool:
        found = pool.map(functools.partial(_read, deadline=deadline, native=native), pids)
        return dict(zip(pids, found, strict=True))


def _read(pid: int, deadline: float, native: bool) -> Stacks:
    """Return the stacks of one process; a stack that changed while it was read is read again."""
    program = find_py_spy()
    if problem := _obstacle(pid) or ("" if program else _NO_PY_SPY):
        return Stacks(problem=problem)
    command = [program, "dump", "--json", "--native" if native else "--nonblocking", "--pid", str(pid)]
    said = ""
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            break
        except OSError as error:
            return Stacks(problem=f"{program} can't be started: {error.strerror}")
        if done.returncode == 0:
            return Stacks(_threads(pid, json.loads(done.stdout)))
        said = done.stderr
        if process_of(pid) is None or "python version" in said:
            break
    return Stacks(problem=_why_not(pid, said))


def _threads(pid: int, dumped: Sequence[dict[str, Any]]) -> tuple[Thread, ...]:
    folder = folder_of(pid)
    own_number = number_inside(pid)  # the number that py-spy reports
    threads = [
        Thread(
            number=pid if one["os_thread_id"] == own_number else one["os_thread_id"] or 0,
            name=one["thread_name"] or "",
            is_active=one["active"],
            owns_gil=one["owns_gil"],
            frames=tuple(_frame(frame, folder) for frame in one["frames"]),
        )
        for one in dumped
    ]
    return tuple(sorted(threads, key=lambda thread: thread.number != pid))


def folder_of(pid: int) -> str:
    """Return the current folder of a process with a trailing slash; empty if it is unknown."""
    folder = working_folder(pid)
    return folder and os.path.join(folder, "")


def _frame(facts: dict[str, Any], folder: str) -> Frame:
    path = facts["filename"] or facts["module"] or ""
    if facts["module"]:  # set only for native frames: their library
        return Frame(facts["name"], os.path.basename(facts["module"]), 0, "native")
    owner = "" if path == "<string>" else owner_of(path)  # "<string>": code given to python -c
    shown = _LIBRARY.sub("", path) if owner else path.removeprefix(folder)
    return Frame(facts["name"], shown, facts["line"], owner)


# ---- why stacks can't be read --------------------------------------------------------------------------------------

_NO_PY_SPY = "py-spy is not installed: pip install py-spy, or phalanx-torch[diagnose]"


def _obstacle(pid: int) -> str:
    """Return why this process can't read the memory of `pid`, and the setting to change; empty if it can."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except FileNotFoundError:
        return "it has ended"
    except PermissionError:
        return _denied(pid)
    except OSError as error:
        return f"its memory can't be opened: {error.strerror}"
    return ""


def _denied(pid: int) -> str:
    owner = _users_of(pid)
    if owner and os.geteuid() not in (0, *owner):
        return f"it belongs to user {owner[0]}: look as that user, or as root"
    scope = ptrace_scope()
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3, which forbids it to everybody until the host reboots"
    if scope and os.geteuid() != 0:
        return f"kernel.yama.ptrace_scope is {scope}: sudo sysctl kernel.yama.ptrace_scope=0, or look as root"
    return (
        "this container lacks permission: start it with --cap-add SYS_PTRACE (Kubernetes: "
        "securityContext.capabilities.add)"
    )


def _users_of(pid: int) -> list[int]:
    """Return the real, effective and saved user of a process; empty if the process has ended."""
    return [int(word) for word in status_of(pid).get("Uid", "").split()[:3]]


def _why_not(pid: int, said: str) -> str:
    """Return why py-spy could not read a process, from what it printed."""
    if process_of(pid) is None:
        return "it has ended"
    if "python version" in said.lower():
        return "it runs no Python that py-spy can read"
    if "ermission" in said or "not permitted" in said:
        return "a sandbox forbids process_vm_readv: start the container with --cap-add SYS_PTRACE"
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.lstrip()[0].isdigit()]
    return f"py-spy could not read it: {lines[0].removeprefix('Error: ')}" if lines else "py-spy took too long"
