"""The process that becomes the reaper and the forker of a warm job.

A rank reaches its script by returning from the site hook. If the supervisor itself forked the forker, ranks would have
to return through the supervisor's own calls. So a process is forked before the supervisor begins, and becomes reaper
and forker when the supervisor asks for it.
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
from phalanx.launch.processes.ahead import Imports
from phalanx.launch.processes.descendants import hold_signals
from phalanx.launch.processes.forker import draw_anew, serve, way_into_script
from phalanx.launch.processes.interpreter import Interpreter, show_command_line
from phalanx.launch.processes.reaper import fork_forker
from phalanx.wire.packets import PacketSocket


@dataclasses.dataclass(frozen=True)
class Loaded:
    """State that a warm process passes on to its jobs.

    Attributes:
        interpreter: Interpreter of the process, which can still be made to run any script.
        environ: Environment in which the process has imported torch.
        imports: Record of the modules that the process has imported.
        before: Modules that Python itself had loaded when it started.
        shared: Modules that ranks keep; all other modules belong to the supervisor.
        words: Output of the imports, which each job prints.
        tell: Pipe through which a job tells the warm process how many seconds to stay, as a C double.
    """

    interpreter: Interpreter
    environ: Mapping[str, str]
    imports: Imports
    before: Collection[str]
    shared: Collection[str]
    words: bytes
    tell: int


class Spare:
    """The supervisor's handle for the process that `fork_spare` has forked.

    Attributes:
        pid: Process id of that process, which is a child of the supervisor.
        client_pid: Process id of the client, which stands for the job at the terminal.
    """

    def __init__(self, pid: int, client_pid: int, channel: PacketSocket) -> None:
        self.pid = pid
        self.client_pid = client_pid
        self._channel = channel

    def adopt(self, command: Sequence[str], environ: Mapping[str, str], fds: Sequence[int]) -> None:
        """Turn the process into the reaper of a forker that runs `command`.

        Args:
            fds: Three descriptors: the forker's channel, the pipe through which the supervisor learns the forker's pid,
                and the forker's output.
        """
        self._channel.send([list(command), dict(environ)], fds)
        self._channel.close()


def fork_spare(loaded: Loaded, client_pid: int) -> Spare | None:
    """Return the spare, a child of this process; return None in the ranks, which then run their script."""
    supervisor_pid = os.getpid()
    ours, theirs = PacketSocket.pair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Spare(pid, client_pid, ours)
    ours.close()
    try:
        _become_forker(PacketSocket(theirs), loaded, supervisor_pid)
    except BaseException as error:
        print(f"the process that was to start the ranks failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    return None


def _become_forker(channel: PacketSocket, loaded: Loaded, supervisor_pid: int) -> None:
    """Wait until the supervisor adopts this process; return in a rank."""
    packet, fds = channel.take()
    channel.close()
    if packet is None:
        os._exit(0)
    command, environ = packet
    forkers_fd, tell, output_fd = fds
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
    serve(socket.socket(fileno=forkers_fd), begin, can_go_on=can_go_on)


def forget_all_but(shared: Collection[str]) -> None:
    """Forget every imported module that is not in `shared`.

    Otherwise, a script that imports a module of its own with the same name would get ours.
    """
    for name in set(sys.modules).difference(shared):
        module = sys.modules.pop(name)
        for path in getattr(module, "__path__", ()):
            sys.path_importer_cache.pop(path, None)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            with contextlib.suppress(AttributeError):
                delattr(sys.modules[parent], child)
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None and os.path.exists(path):  # cached while the path did not exist
            del sys.path_importer_cache[path]
    _draw_anew()


def _draw_anew() -> None:
    """Redo what modules did once at import, such as seeding; otherwise all jobs of a warm process share the result.

    This is not needed for ``tempfile``, which reseeds itself in each process, or for ``uuid`` and ``secrets``, which
    use the kernel's random numbers.
    """
    draw_anew()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "logging" in sys.modules:  # relativeCreated counts from this time, in nanoseconds since Python 3.13
        logging = sys.modules["logging"]
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # type: ignore[attr-defined]
