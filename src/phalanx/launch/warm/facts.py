"""Inherited properties of a process. A warm process serves only jobs that would inherit the same properties."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import site
import sys
import sysconfig
from collections.abc import Mapping

from phalanx import _env

# Lines of proc_pid_status(5) whose values a process inherits.
_STATUS = re.compile(
    r"^(Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp\w*|Speculation\w+|Cpus_allowed|Mems_allowed|SigIgn|THP_enabled):\t(.*)$",
    re.MULTILINE,
)
_FILES = ("cgroup", "limits", "oom_score_adj", "attr/current", "coredump_filter")
_NAMESPACES = ("cgroup", "ipc", "mnt", "pid_for_children", "time_for_children", "user")
_ENTERED = ("net", "uts")  # namespaces that a process may enter, and that do not influence an import of torch
_IOPRIO_GET = {"x86_64": 251, "aarch64": 31}.get(platform.machine())
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_SHIFT = 1, 13
_libc = ctypes.CDLL(None, use_errno=True)

# Variables that may differ: shells, terminals, sessions and test runners set them per command, launchers per rank.
_OF_SESSIONS = """
    _ PWD OLDPWD SHLVL COLUMNS LINES TERM COLORTERM TERM_PROGRAM TERM_PROGRAM_VERSION TERM_SESSION_ID WINDOWID
    WINDOW STY TMUX TMUX_PANE SSH_TTY SSH_CLIENT SSH_CONNECTION SSH_AUTH_SOCK GPG_TTY DISPLAY XAUTHORITY
    XDG_SESSION_ID DBUS_SESSION_BUS_ADDRESS KITTY_WINDOW_ID KITTY_PID VTE_VERSION HISTFILE PS1 PROMPT_COMMAND
    INVOCATION_ID JOURNAL_STREAM PYTEST_CURRENT_TEST
"""
_READ_LATER = (_env.LAUNCH_VARIABLES | set(_OF_SESSIONS.split())) - {_env.REPLACE_VARIABLE}


def facts_of(pid: int | str) -> dict[str, str]:
    """Return the properties that a process has inherited and passes on, by name; `pid` may be "self"."""
    with open(f"/proc/{pid}/status") as file:
        facts: dict[str, str] = dict(_STATUS.findall(file.read()))
    for name in _FILES:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:
            facts[name] = file.read()
    for name in _NAMESPACES:
        with contextlib.suppress(OSError):
            facts[f"{name} namespace"] = os.readlink(f"/proc/{pid}/ns/{name}")
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/numa_maps") as file:
        facts["memory policy"] = file.readline().split()[1]  # what numactl sets
    root = os.stat(f"/proc/{pid}/root/")
    number = os.getpid() if pid == "self" else int(pid)  # not 0, for which the kernel answers differently
    facts["root folder"] = f"{root.st_dev} {root.st_ino}"
    facts["nice"] = str(os.getpriority(os.PRIO_PROCESS, number))
    facts["scheduling"] = f"{os.sched_getscheduler(number)} {os.sched_getparam(number).sched_priority}"
    if _IOPRIO_GET is not None:
        priority = _libc.syscall(_IOPRIO_GET, _IOPRIO_WHO_PROCESS, number)
        has_class = priority >> _IOPRIO_CLASS_SHIFT > 0  # without a class, the level depends on past I/O
        facts["I/O priority"] = str(priority) if has_class else ""
    return facts


def difference(pid: int) -> str:
    """Return the name of a property that this process and process `pid` would pass on differently; empty if none."""
    try:
        ours, theirs = facts_of("self"), facts_of(pid)
    except OSError as error:
        return f"/proc/{pid}: {error.strerror}"
    return next((name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)), "")


def enter_namespaces(pid: int) -> None:
    """Enter the network and UTS (host name) namespaces of process `pid`, where they differ from this process's.

    Raises:
        OSError: Process `pid` has ended, or this process may not enter the namespaces.
    """
    for name in _ENTERED:
        path = f"/proc/{pid}/ns/{name}"
        if os.readlink(path) == os.readlink(f"/proc/self/ns/{name}"):
            continue
        namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.setns(namespace, 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)
        finally:
            os.close(namespace)


def changed_variable(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the name of a differing variable that may matter when a process starts; empty if there is none."""
    names = sorted(ours.keys() | theirs.keys())
    return next((name for name in names if name not in _READ_LATER and ours.get(name) != theirs.get(name)), "")


def relative_path(environ: Mapping[str, str]) -> str:
    """Return an entry of PYTHONPATH that depends on the current folder, in quotes; empty if there is none."""
    entries = environ["PYTHONPATH"].split(os.pathsep) if environ.get("PYTHONPATH") else []
    return next((repr(entry) for entry in entries if not os.path.isabs(entry)), "")


class Watch:
    """Watches the files that this process has loaded: the interpreter, package folders, every imported module."""

    def __init__(self) -> None:
        libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        folders = {*site.getsitepackages(), site.getusersitepackages(), *libraries}
        paths = {os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg"), *folders}
        paths |= {_zip_of(entry) for entry in sys.path}
        for folder in folders:
            with contextlib.suppress(OSError):
                paths |= {os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth")}
        for module in list(sys.modules.values()):
            paths.add(getattr(module, "__file__", None) or "")
        self._before = {path: _signature(path) for path in paths if os.path.isabs(path)}
        self._imported = {name.partition(".")[0] for name in sys.modules}
        others = set(sys.path).difference(folders)
        self._namesakes = {folder: self._namesakes_in(folder) for folder in others}

    def changed(self) -> str:
        """Return a file or folder that has changed since this process started; empty if none has."""
        for path, before in self._before.items():
            if _signature(path) != before:
                return path
        # In the user's own folders, only a new file with the name of an imported module matters.
        return next((path for path, before in self._namesakes.items() if self._namesakes_in(path) != before), "")

    def _namesakes_in(self, folder: str) -> set[str]:
        """Return the top-level names of imported modules that a file or folder in `folder` also has."""
        with contextlib.suppress(OSError):
            return self._imported.intersection(name.partition(".")[0] for name in os.listdir(folder))
        return set()


def _zip_of(entry: str) -> str:
    """Return the zip file of an entry of ``sys.path``: the file that contains the entry, or the entry itself.

    The result is "" for a folder. The zip file is watched because ``zipimport`` caches the directories of zip files.
    """
    if os.path.isdir(entry):
        return ""
    above = entry
    while (above := os.path.dirname(above)) not in ("", "/"):
        if os.path.isfile(above):
            return above
    return entry


def _signature(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
