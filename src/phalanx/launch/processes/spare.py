"""The process that becomes the reaper and the forker of a warm job.

A rank goes on into its script by returning from the site hook. So the forker is not forked from within the supervisor,
whose calls it could not leave, but from a process that was forked before the supervisor began, and that turns into
reaper and forker when the supervisor asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from phalanx import _env
from phalanx.host.descriptors import take_streams
from phalanx.launch.processes import job_packets
from phalanx.launch.processes.ahead import Imports
from phalanx.launch.processes.forker import draw_anew, hold_signals, serve, way_into_script
from phalanx.launch.processes.interpreter import Interpreter, show_command_line
from phalanx.launch.processes.reaper import fork_forker


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A warm process's state that its jobs need.

    Attributes:
        interpreter: Interpreter of the process, which can go on into any script.
        environ: Environment with which it has imported torch.
        imports: Modules that it has imported.
        before: Modules that Python itself had loaded at start.
        shared: Modules that ranks keep; the others are the supervisor's.
        words: Output of its imports.
        tell: Pipe on which it is told how long it is to stay, as a C double.
    """

    interpreter: Interpreter
    environ: Mapping[str, str]
    imports: Imports
    before: Collection[str]
    shared: Collection[str]
    words: bytes
    tell: int


class Spare:
    """The supervisor's hold on it.

    Attributes:
        pid: Process id; it is a child of this process.
        client_pid: Process that stands for the job at the terminal.
    """

    def __init__(self, pid: int, client_pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.client_pid = client_pid
        self._channel = channel

    def adopt(self, command: Sequence[str], environ: Mapping[str, str], fds: Sequence[int]) -> None:
        """Have it become the reaper of a forker that runs `command`.

        Args:
            fds: Channel of the forker, pipe on which the supervisor is told its pid, descriptor for its output.
        """
        job_packets.send(self._channel, list(command), dict(environ), fds=fds)
        self._channel.close()


def fork_spare(loaded: Loaded, client_pid: int) -> Spare | None:
    """Return the spare, a child of this process; None in a rank of it, which is to go on into its script."""
    supervisor_pid = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return Spare(pid, client_pid, ours)
    ours.close()
    try:
        _become_forker(theirs, loaded, supervisor_pid)
    except BaseException as error:
        print(f"the process that was to start the ranks failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    return None


def _become_forker(channel: socket.socket, loaded: Loaded, supervisor_pid: int) -> None:
    """Wait for the supervisor's word; return in a rank."""
    message, fds = job_packets.receive(channel)
    channel.close()
    if not message:
        os._exit(0)
    command, environ = message
    channel_fd, tell, output_fd = fds
    channel = socket.socket(fileno=channel_fd)
    os.setpgid(0, 0)
    take_streams(output_fd)
    os.close(output_fd)
    hold_signals()
    fork_forker(supervisor_pid, tell)
    os.write(2, loaded.words)
    _env.replace_all(environ)
    forget_all_but(loaded.shared)
    loaded.interpreter.will_run(command)
    show_command_line(b"".join(os.fsencode(word) + b"\0" for word in command))
    begin, can_go_on = way_into_script(command, loaded.before, loaded.imports)
    serve(channel, begin, can_go_on=can_go_on)


def forget_all_but(shared: Collection[str]) -> None:
    """Make this process one that has imported those modules alone, and just now: a script may have namesakes."""
    for name in set(sys.modules).difference(shared):
        module = sys.modules.pop(name)
        for path in getattr(module, "__path__", ()):
            sys.path_importer_cache.pop(path, None)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            with contextlib.suppress(AttributeError):
                delattr(sys.modules[parent], child)
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None and os.path.exists(path):  # it was not there yet
            del sys.path_importer_cache[path]
    _draw_anew()


def _draw_anew() -> None:
    """Draw again what modules drew when they were imported; else all jobs of a warm process would have the same.

    ``tempfile`` draws in each process, ``uuid`` and ``secrets`` each time.
    """
    draw_anew()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "logging" in sys.modules:  # from which its relativeCreated counts: in nanoseconds since Python 3.13
        logging = sys.modules["logging"]
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # type: ignore[attr-defined]
