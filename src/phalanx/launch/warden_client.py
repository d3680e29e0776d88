"""The supervisor's hold on its warden: start it, have it start and signal ranks, hear of their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from phalanx.launch import warden
from phalanx.launch.channel import Channel

_PRELOAD_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preload")


class Warden:
    """The process that is the parent of all ranks; owns the channel to it and its exit status.

    Args:
        command: What a rank runs.
        environ: What all ranks find; the warden's own environment.
        preload: Stop `command`, a Python interpreter's, in the site hook and fork it there.
        output_fd: Where the warden's own output goes, such as a warning of ``import torch``.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, preload: bool, output_fd: int) -> None:
        self.channel, theirs = Channel.pair()
        supervisor_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                warden.die_with_parent(supervisor_pid)
                os.setpgid(0, 0)  # Ctrl-C at the terminal is ours to pass on
                self.channel.close()
                _settle(output_fd)
                if preload:
                    _execute_preloading(command, environ, theirs)
                os.environ.clear()
                os.environ.update(environ)
                warden.serve(theirs, warden.execute(command))
            except BaseException as error:
                print(f"the process that was to start the ranks failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        theirs.close()

    def start_rank(
        self, rank: int, environ: Mapping[str, str], fds: Sequence[int], cpus: Sequence[int], argument: str = ""
    ) -> None:
        """Have a rank forked; ``{"started": pid, "rank": rank}`` will tell its pid."""
        packet = {"start": rank, "environ": environ, "cpus": cpus, "argument": argument, "warden": self.pid}
        self.channel.send(packet, fds)

    def signal(self, sig: int, pids: Sequence[int]) -> None:
        """Send `sig` to the process groups of ranks; one that has ended is left out."""
        self.channel.send({"signal": sig, "pids": list(pids)})

    def close(self) -> None:
        """End the warden and every process under it; return when all are gone."""
        self.channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        warden.end_children()  # of a warden that was killed

    def kill(self) -> None:
        """End it at once: before it has started a rank, it may be busy importing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _settle(output_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, number)
    os.close(null)


def _execute_preloading(command: Sequence[str], environ: Mapping[str, str], channel: socket.socket) -> None:
    os.set_inheritable(channel.fileno(), True)
    path = environ.get("PYTHONPATH")
    hooked = {
        **environ,
        "PYTHONPATH": f"{_PRELOAD_FOLDER}{os.pathsep}{path}" if path else _PRELOAD_FOLDER,
        warden.FD_VARIABLE: str(channel.fileno()),
    }
    os.execvpe(command[0], list(command), hooked)
