"""The parent of the ranks: forks them, reports their ends, and lets nothing outlive the supervisor.

The forker has one thread and no output of its own, so its forks are as clean as new processes. It receives requests
from the supervisor over a socket. When that socket closes, however the supervisor ended, the forker kills the ranks and
all processes that they have started, and exits. The forker is a child subreaper, and so is each rank: a process whose
parent has died becomes a child of its rank. Once the rank has died, too, the process becomes a child of the forker,
which kills it. So no daemon of a rank escapes or outlives the rank. Before the forker reports the end of a rank, it
kills all processes that this rank has started; it does not touch other ranks.

**Ranks are forked inside the user's own interpreter.** The forker is ``python train.py`` itself, held before the script
is opened: a ``sitecustomize`` of ours is first on ``PYTHONPATH``, imports torch, and serves the supervisor's requests.
A rank is a fork that returns from that hook; the interpreter then continues and runs the script. The alternative is to
run the script with `runpy` from a server. But then tracebacks would show the frames of `runpy`, multiprocessing's spawn
and pickle would not find the stand-in for ``__main__``, and ``-m``, zip files and folders would each need an imitation
of what Python does.

**In some cases a rank executes the command (execve) instead:**

- with ``--no-preload`` or ``--no-python``;
- if the user lets OpenMP bind threads to CPUs (``OMP_PLACES`` and the like): OpenMP chooses the CPUs when torch is
  imported, and all ranks would get the same CPUs;
- if threads or a device are in use before the fork, because another module that Python loads when it starts uses them;
- if the script's folder has a module, such as its own ``json.py``, with the name of a module that torch needs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import termios
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from phalanx import _env
from phalanx._text import is_terminal
from phalanx.debugging import attached
from phalanx.host.block_pool import obey_launcher
from phalanx.launch import rank_trial
from phalanx.launch.processes.ahead import Hidden, Imports, begin_log, replay
from phalanx.launch.processes.descendants import (
    SUPERVISORS_SIGNALS,
    adopt_orphans,
    die_with_parent,
    end_children,
    outlive_parent,
)
from phalanx.launch.rank import watch_torch
from phalanx.rendezvous import solo
from phalanx.wire import messages as _messages  # noqa: F401 here, so that `way_into_script` sees its imports
from phalanx.wire.packets import PacketSocket

FD_VARIABLE = "PHALANX_FORKER_FD"
MODULES_VARIABLE = "PHALANX_FORKER_MODULES"
SETTINGS_VARIABLE = "PHALANX_FORKER_SETTINGS"
_libc = ctypes.CDLL(None)  # loaded before any fork

# Modules that ranks share, imported once before the forks. No module in this list may start a thread or use a device.
RANK_MODULES = (
    "torch",
    "torch.distributed",
    "phalanx._torch.dynamo",
    "phalanx._torch.shield",
    "phalanx.backend.groups",
    "phalanx.record.gloo",
    "phalanx.rendezvous.handler",
    "phalanx.session.session",
)

Begin = Callable[[Mapping[str, Any]], None]


def serve(end: socket.socket, begin: Begin, **hello: object) -> None:
    """Carry out the supervisor's requests until it closes its socket; return only in a forked rank, after `begin`.

    Packets from the supervisor are JSON objects: ``{"start": rank, "environ": ...}`` with the three descriptors of a
    rank, or ``{"signal": number, "pids": [...], "groups": bool}``, where ``groups`` says whether to signal also the
    processes that those ranks have started. Packets to the supervisor: ``{"ready": true}``, ``{"started": pid, "rank":
    r}`` and ``{"ended": pid, "status": s}`` with `s` as from ``os.waitpid``.
    """
    adopt_orphans()
    forker_pid, reaper = os.getpid(), os.pidfd_open(os.getppid())
    outlive_parent()  # from here on, this process must outlive supervisor and reaper, to clean up
    channel = PacketSocket(end)
    living: dict[int, int] = {}  # pidfd of each rank, by its pid
    channel.send({"ready": True, **hello})
    while True:
        poll = select.poll()
        for fd in (channel.fileno(), reaper, *living.values()):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        for pid in [pid for pid, fd in living.items() if fd in ready]:
            _bury(channel, living, pid)
        if not ready & {channel.fileno(), reaper}:
            continue
        packet, fds = channel.take() if reaper not in ready else (None, [])
        if packet is None:
            end_children()
            os._exit(0)
        if "start" in packet:
            ours, its = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for fd in (end.detach(), reaper, ours.detach(), *living.values()):
                    os.close(fd)
                _become_rank(packet, fds, forker_pid)
                its.shutdown(socket.SHUT_WR)
                its.recv(1)  # returns once the supervisor knows of this rank; only then may the rank end
                its.close()
                return begin(packet)
            its.close()
            for fd in fds:
                os.close(fd)
            ours.recv(1)  # returns once the rank has died, or leads a process group and so can be signalled
            living[pid] = os.pidfd_open(pid)
            channel.send({"started": pid, "rank": packet["start"]})
            ours.close()
        else:
            for pid in living.keys() & set(packet["pids"]):
                if packet["groups"]:
                    _signal_group(pid, packet["signal"])
                else:
                    os.kill(pid, packet["signal"])


def _bury(channel: PacketSocket, living: dict[int, int], pid: int) -> None:
    """Reap a rank that has ended, kill all processes that it has started, and report its end."""
    # Until waitpid, no other process can get this pid, so the process group with this number is the rank's.
    _signal_group(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(living.pop(pid))
    end_children(living)  # processes that had left the rank's group; orphans of living ranks are not our children
    channel.send({"ended": pid, "status": status})


def _signal_group(pid: int, sig: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty, or runs as another user
        os.killpg(pid, sig)


def _become_rank(packet: Mapping[str, Any], fds: Sequence[int], forker_pid: int) -> None:
    """Make the forked process a rank: session, streams, CPUs, environment."""
    die_with_parent(forker_pid)
    adopt_orphans()  # so that daemons of this rank become its children, and end with the rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISORS_SIGNALS)
    os.setsid()  # so that the rank can't open the terminal: using it in the background would suspend the rank
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        if fd > 2:
            os.close(fd)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, packet["descriptors"])  # the user's limit: we have raised our own
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if packet["cpus"]:
        with contextlib.suppress(OSError):  # the cpuset has changed meanwhile; an unpinned rank is slower, not wrong
            os.sched_setaffinity(0, packet["cpus"])
    _env.update({**packet["environ"], _env.PROCESS_VARIABLE: str(os.getpid())})


def execute(command: Sequence[str]) -> Begin:
    """Return a function that makes a forked rank run `command`."""

    def begin(packet: Mapping[str, Any]) -> None:
        for sig in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals; the program must not
            signal.signal(sig, signal.SIG_DFL)
        argv = list(command)
        if packet["argument"]:  # insert it right after the script or the module
            argv.insert(3 if command[1] == "-m" else 2, packet["argument"])
        try:
            os.execvp(command[0], argv)
        except OSError as error:
            print(f"phalanx run: can't execute {command[0]!r}: {error.strerror}", file=sys.stderr)
            os._exit(127 if error.errno == errno.ENOENT else 126)

    return begin


def serve_preloaded(loaded_before: Collection[str]) -> None:
    """Import what ranks share, and serve the supervisor; return only in a rank, which then runs its script.

    If a rank can't run its script as if nothing had been imported, it executes the command (execve) instead.

    Args:
        loaded_before: Modules that Python itself loads when it starts.
    """
    channel = socket.socket(fileno=int(_env.take(FD_VARIABLE)))
    modules = json.loads(_env.take(MODULES_VARIABLE))
    settings = json.loads(_env.take(SETTINGS_VARIABLE))
    try:
        _prepare_and_serve(channel, modules, settings, loaded_before)
    except BaseException as error:  # Python's site module would ignore the error, and run the script here
        print(f"the process that starts the ranks failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def _prepare_and_serve(
    channel: socket.socket,
    modules: Sequence[Sequence[str]],
    settings: Mapping[str, str],
    loaded_before: Collection[str],
) -> None:
    gc.disable()  # imports leave little garbage, and the collector takes a sixth of the imports' time
    imports = Imports()
    trouble = import_shared(imports, settings)
    unfit = set[str]()
    modules_files, left_out = modules
    if modules_files and not trouble:
        unfit = replay([_read_json(path) for path in modules_files], imports, left_out)
        atexit.register(gc.unfreeze)  # runs when a rank exits; otherwise libraries report frozen objects as leaked
    gc.freeze()  # so that the collector does not touch these pages, and they stay shared
    gc.enable()
    begin, can_go_on = way_into_script(sys.orig_argv, loaded_before, imports)
    serve(channel, begin, trouble=trouble, unfit=sorted(unfit), can_go_on=can_go_on and not trouble and not unfit)


def import_shared(imports: Imports, settings: Mapping[str, str]) -> str:
    """Import what every rank needs; return why an import failed, or "".

    Args:
        settings: Variables that the script sets before it imports torch.
    """
    with imports.noted({**settings, **dict.fromkeys(_env.OBEYED_BY_RANKS)}):
        for name in RANK_MODULES:
            try:
                __import__(name)
            except BaseException as error:  # ignored, because the script will get and report the same error
                return f"{type(error).__name__}: {error}"
    return ""


def way_into_script(command: Sequence[str], loaded_before: Collection[str], imports: Imports) -> tuple[Begin, bool]:
    """Return the function that begins a rank, and whether the rank continues from here or executes the command."""
    can_go_on = not has_threads_or_devices() and not _hides_modules_of_the_script(command, loaded_before)
    return (partial(_go_on, imports, loaded_before) if can_go_on else execute(command)), can_go_on


def _read_json(path: str) -> Any:
    with open(path) as file:
        return json.load(file)


def has_threads_or_devices() -> bool:
    """Return whether threads or a device are in use, for example by another site hook; a fork would break them.

    OpenBLAS's threads do not count: OpenBLAS ends them before a fork and starts them again afterwards.
    """
    threading, cuda = sys.modules.get("threading"), sys.modules.get("torch.cuda")
    has_threads = threading is not None and threading.active_count() > 1
    return has_threads or (cuda is not None and cuda.is_initialized())


def _hides_modules_of_the_script(command: Sequence[str], loaded_before: Collection[str]) -> bool:
    """Whether the script's folder has a module, such as a json.py, with the name of a module that we have imported."""
    if getattr(sys.flags, "safe_path", False):
        return False
    first = command[1]
    path = os.getcwd() if first == "-m" else os.path.realpath(first)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    names = {name.removesuffix(".py") for name in os.listdir(folder) if name.endswith(".py")}
    names |= {name for name in os.listdir(folder) if os.path.exists(os.path.join(folder, name, "__init__.py"))}
    return not names.isdisjoint({name.partition(".")[0] for name in sys.modules} - set(loaded_before))


def _leave_libraries_alone() -> None:
    """Skip, at exit, the destructors of libraries that this process shares with the forker.

    The destructors of torch alone take longer than the rest of the interpreter's shutdown, and free only what the
    kernel frees anyway. Destructors of libraries that the script has loaded still run. Nothing is skipped if a library
    was preloaded (LD_PRELOAD), because it may do its work at exit, as profilers do.
    """
    if not _env.environment().get("LD_PRELOAD") and hasattr(_libc, "on_exit"):
        _libc.on_exit(_libc._exit, None)  # calls _exit with the exit status
        _libc.__cxa_atexit(_libc.fflush, None, None)  # registered later, so fflush runs before _exit


def draw_anew() -> None:
    """Reseed generators that were seeded at import: otherwise all forks would draw the same numbers.

    This is not needed for ``random``, which reseeds itself after a fork, or for GPUs, whose generators start from a
    constant.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _go_on(imports: Imports, loaded_before: Collection[str], packet: Mapping[str, Any]) -> None:
    """Undo what a rank shares with its siblings only because they were forked from one process."""
    _leave_libraries_alone()
    if "torch" in sys.modules:
        obey_launcher()
        solo.watch()
        watch_torch()
        rank_trial.begin()
    attached.listen()
    # The script gets a fresh namespace, because the collector would never free the objects of a frozen one.
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    if "__annotations__" in main.__dict__:
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if packet["argument"]:
        sys.argv.insert(1, packet["argument"])
    for stream in (sys.stdout, sys.stderr):
        if is_terminal(stream):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    draw_anew()
    Hidden(imports, loaded_before, _on_return)
    if _env.environment().get(_env.SNAPSHOT_VARIABLE):  # set if ranks may be restarted
        begin_log({*packet["environ"], _env.PROCESS_VARIABLE})


def _on_return(package: str, names: Sequence[str]) -> None:
    if names:
        _say_change(package, names)
    if package in ("torch", "phalanx"):
        from phalanx._torch import replace

        replace.obey_script()


def _say_change(package: str, names: Sequence[str]) -> None:
    has, it = ("has", "it") if len(names) == 1 else ("have", "them")
    print(
        f"phalanx: {', '.join(names)} {has} changed since {package} was imported ahead of the script, and may have no "
        f"effect on it; set {it} for phalanx run itself, or use --no-preload",
        file=sys.stderr,
        flush=True,
    )
