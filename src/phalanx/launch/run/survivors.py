"""Ranks whose processes outlive the failure of another rank: told to stop, awaited, and given a new place.

A rank that has asked for it (`phalanx.resilient`, or a Trainer) holds a connection to the supervisor. When an attempt
is over, it is told to stop, and a thread of it aborts every process group. Its present or next collective raises, the
stack unwinds, all groups are destroyed, and the rank reports that it waits; to the supervisor that is an end with
`LastWords` like any other. The next attempt sends it its environment and forks the other ranks. On several nodes the
order "stop" does the same, and the agreement knows nothing of it. `phalanx.session.survival` is the side of the rank.

- **Who does not stop** within 2 s, by coming to a collective, is ended and forked anew. No signal interrupts it: an
  exception in the middle of a loader or of native code leaves a state that nobody has thought of.
- **Forkers.** A kept process is the child of the forker that forked it. The standby forks the others; the relieved
  forker stays until its last rank has ended.
- **Boxes and logs.** The streams stay, and go into the folder of the new attempt from there on. The box is saved and
  its pages are freed rather than truncated: the mapping of a kept rank must not lose its pages.
- **Fallbacks,** each reported in a line: another number of local ranks, a kernel that killed for want of memory, a
  process that can't be kept.
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
    """The connections of the ranks that have asked to be kept.

    Args:
        is_on: Whether any may be kept.
        on_wait: Function to call with the pid of a process that has left its groups, and waits.
        on_refusal: Function to call with the pid of a process that can't be kept after all, and with the reason; empty:
            it is done.

    Attributes:
        path: Socket at which ranks ask; empty: none is kept, or there is no place for a socket.
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
        """Have a process leave its groups, and wait."""
        self._connections[pid].send({"stop": True})

    def place(self, pid: int, environ: Mapping[str, str]) -> None:
        """Make a process that waits a rank of the next attempt."""
        self._connections[pid].send({"environ": environ})

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid, user = peer_of(connection)
        if pid in self._connections:  # it may have left that one, of which we are only about to hear
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
