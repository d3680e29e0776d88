"""The supervisor's handle for its forker: starts it, asks it to start and signal ranks, and learns when they end.

A suspended forker (``pkill -STOP -f train.py``) can neither start nor end ranks, and the whole job would wait for it.
So the supervisor sends a SIGCONT with every request. If an attempt ends while its forker is still importing torch, the
ranks of that attempt are never started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx import _env
from phalanx.host.descriptors import take_streams
from phalanx.launch.deadlines import KILL_S
from phalanx.launch.processes import forker
from phalanx.launch.processes.descendants import end_children, hold_signals, reap
from phalanx.launch.processes.reaper import fork_forker
from phalanx.wire.packets import PacketSocket

if TYPE_CHECKING:
    from phalanx.launch.processes.spare import Spare

_PRELOAD_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preload")


class Forker:
    """Handle for the forker, the parent of all ranks; owns the channel to the forker, and the forker's exit status.

    The reaper is a child of this process and the parent of the forker. It kills all ranks if both this process and the
    forker are killed.

    Args:
        command: Command of a rank.
        environ: Environment of the forker, and of all ranks.
        preload: Whether `command` is a Python interpreter, to be held in the site hook, where ranks are forked.
        output_fd: Descriptor for the forker's own output, such as a warning of ``import torch``.
        descriptors: RLIMIT_NOFILE of a rank, soft and hard.
        settings: Variables to set while torch is imported; only with `preload`.
        modules_files: Files in which ranks name further modules to import; only with `preload`; see `ahead.replay`.
        left_out: Packages not to import, even if a rank names them.
        spare: Process that has imported torch, and becomes the reaper and the forker; only with `preload`.

    Attributes:
        pid: Process id of the forker.
        reaper_pid: Process id of the reaper, which is the forker's parent and a child of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        preload: bool,
        output_fd: int,
        descriptors: tuple[int, int],
        settings: Mapping[str, str] = MappingProxyType({}),
        modules_files: Sequence[str] = (),
        left_out: Sequence[str] = (),
        spare: Spare | None = None,
    ) -> None:
        self._descriptors = descriptors
        self._status: int | None = None
        self.channel: PacketSocket
        self.channel, theirs = PacketSocket.pair()
        supervisor_pid = os.getpid()
        told, tell = os.pipe()
        if spare is not None:
            spare.adopt(command, environ, (theirs.fileno(), tell, output_fd))
        self.reaper_pid: int = os.fork() if spare is None else spare.pid
        if self.reaper_pid == 0:
            try:
                os.setpgid(0, 0)  # out of the terminal's group, because the supervisor passes Ctrl-C on
                self.channel.close()
                os.close(told)
                _forget_handlers()
                take_streams(output_fd)
                hold_signals()
                fork_forker(supervisor_pid, tell)
                if preload:
                    _execute_preloading(command, environ, theirs, settings, [modules_files, left_out])
                _env.replace_all(environ)
                forker.serve(theirs, forker.execute(command))
            except BaseException as error:
                print(f"the process that was to start the ranks failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        theirs.close()
        os.close(tell)
        self.pid: int = int(os.read(told, 32) or self.reaper_pid)
        os.close(told)

    def start_rank(
        self, rank: int, environ: Mapping[str, str], fds: Sequence[int], cpus: Sequence[int], argument: str = ""
    ) -> None:
        """Ask the forker to fork a rank; its answer ``{"started": pid, "rank": rank}`` reports the rank's pid."""
        packet = {
            "start": rank,
            "environ": environ,
            "cpus": cpus,
            "argument": argument,
            "descriptors": self._descriptors,
        }
        self._send(packet, fds)

    def signal(self, sig: int, pids: Sequence[int], *, groups: bool) -> None:
        """Send `sig` to ranks, with `groups` also to processes that they have started; skip ranks that have ended."""
        self._send({"signal": sig, "pids": list(pids), "groups": groups})

    def _send(self, packet: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        self.channel.send(packet, fds)
        self.go_on()

    def go_on(self) -> None:
        """Send SIGCONT to the forker: a suspended forker can neither carry out requests nor end."""
        if self.channel.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGCONT)

    def status(self) -> int:
        """Return the forker's wait status. Call this only after the channel has closed: the forker then ends soon."""
        if self._status is None:
            self._status = reap(self.reaper_pid, KILL_S)  # the reaper ends with the forker's status
        return signal.SIGKILL if self._status is None else self._status

    def close(self, keep: Collection[int] = ()) -> None:
        """End the forker and every process under it; return when all are gone.

        Args:
            keep: Children of this process to spare.
        """
        self.channel.close()
        self.go_on()
        self.status()
        end_children(keep)  # also ends orphans of a forker that was killed

    def kill(self) -> None:
        """Kill the forker. While it is still importing, it reads no requests, so it can't be asked to end."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _forget_handlers() -> None:
    """Remove the supervisor's signal handlers."""
    signal.set_wakeup_fd(-1)
    for sig in (*signal.valid_signals(), signal.SIGTTIN):
        if callable(signal.getsignal(sig)) or sig == signal.SIGTTIN:
            signal.signal(sig, signal.SIG_DFL)


def _execute_preloading(
    command: Sequence[str],
    environ: Mapping[str, str],
    channel: socket.socket,
    settings: Mapping[str, str],
    modules: Sequence[Sequence[str]],
) -> None:
    os.set_inheritable(channel.fileno(), True)
    hooked = {
        **with_hook(environ),
        forker.FD_VARIABLE: str(channel.fileno()),
        forker.SETTINGS_VARIABLE: json.dumps(dict(settings)),
        forker.MODULES_VARIABLE: json.dumps(modules),
    }
    os.execvpe(command[0], list(command), hooked)


def with_hook(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a Python interpreter runs our site hook before its script."""
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": f"{_PRELOAD_FOLDER}{os.pathsep}{path}" if path else _PRELOAD_FOLDER}
