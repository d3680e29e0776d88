"""Processes that survive the failure of another rank: they are told to stop, awaited, and given a new rank.

A rank that asks to be kept (`phalanx.resilient`, or a Trainer) connects to the supervisor. When an attempt is over, the
supervisor tells the rank to stop, and one of the rank's threads aborts every process group. The rank's current or next
collective then raises, the stack unwinds, all groups are destroyed, and the rank reports that it is waiting. The
supervisor treats this report as an ending, with `LastWords` like any other. For the next attempt, the supervisor sends
the waiting process a new environment, and forks the other ranks. On several nodes, the agent's "stop" has the same
effect; other nodes need not know which processes are kept. The rank's side is `phalanx.session.survival`.

- **A rank that has not stopped** after 2 s, because it reached no collective, is ended and forked again. It is not
  interrupted by a signal, because an exception in the middle of a loader or of native code would leave an undefined
  state.
- **Forkers.** A kept process is the child of the forker that forked it. The standby forks the other ranks. The forker
  that the standby has relieved stays until its own last rank has ended.
- **Boxes and logs.** The streams stay open, and continue in the folder of the new attempt. The box is saved, and its
  pages are freed rather than truncated, because a kept rank still maps them.
- **No process is kept** if the number of local ranks or of their threads changes, or if the kernel killed a rank for
  lack of memory. If a single process can't be kept, its rank gets a new process, and a line gives the reason that the
  old process reported.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial

from phalanx.launch.screen.events import EventLoop
from phalanx.wire.packets import PacketSocket
from phalanx.wire.peer import peer_of
from phalanx.wire.places import make_path


class Survivors:
    """Connections of the ranks that have asked to be kept.

    Args:
        is_on: Whether ranks may be kept.
        on_wait: Function to call with the pid of a process that has left its groups and is waiting.
        on_refusal: Function to call with the pid of a process that can't be kept, and with the reason; an empty reason
            means that the process has disconnected.

    Attributes:
        path: Socket to which ranks connect; empty: no rank is kept, or no socket could be made.
    """

    def __init__(
        self,
        events: EventLoop,
        on_wait: Callable[[int], None],
        on_refusal: Callable[[int, str], None],
        *,
        is_on: bool,
    ) -> None:
        self._events, self._on_wait, self._on_refusal = events, on_wait, on_refusal
        self._connections: dict[int, PacketSocket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path: str = ""
        if not is_on:
            return
        with contextlib.suppress(OSError):
            path = make_path("survivors")
            self._listener.bind(path)
            self._listener.listen(socket.SOMAXCONN)
            self.path = path
            events.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for pid in list(self._connections):
            self._forget(pid)
        if self.path:
            self._events.unwatch(self._listener.fileno())
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._listener.close()

    def has(self, pid: int) -> bool:
        """Return whether that process has asked to be kept."""
        return pid in self._connections

    def stop(self, pid: int) -> None:
        """Tell a process to leave its groups and wait."""
        self._connections[pid].send({"stop": True})

    def place(self, pid: int, environ: Mapping[str, str]) -> None:
        """Make a waiting process a rank of the next attempt."""
        self._connections[pid].send({"environ": environ})

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid, user = peer_of(connection)
        if pid in self._connections:  # a process may reconnect before the end of its old connection is noticed
            self._hear(pid)
        if user != os.geteuid() or pid in self._connections:
            connection.close()
            return
        self._connections[pid] = PacketSocket(connection)
        self._events.watch(connection.fileno(), partial(self._hear, pid))

    def _hear(self, pid: int) -> None:
        channel = self._connections[pid]
        for packet in channel.receive():
            if "waits" in packet:
                self._on_wait(pid)
            elif "refuses" in packet:
                self._on_refusal(pid, str(packet["refuses"]))
                return self._forget(pid)
        if not channel.alive:
            self._on_refusal(pid, "")
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        channel = self._connections.pop(pid)
        self._events.unwatch(channel.fileno())
        channel.close()
