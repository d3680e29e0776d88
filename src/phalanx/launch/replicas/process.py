"""The supervisor's handle for the replicator, which copies this node's snapshots to other nodes and keeps theirs.

The replicator is a process of its own, so that neither the supervisor nor the agent ever waits for a large copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.checkpoint.memory.layout import note_replicator_ended, want_replicas
from phalanx.host.ports import bound_socket
from phalanx.launch.processes.descendants import start_helper
from phalanx.launch.screen.events import EventLoop
from phalanx.wire.packets import PacketSocket

# Not started with -m, which would let a json.py in the current folder shadow the standard library's.
_RUN = "import sys; sys.path[:] = filter(None, sys.path); from phalanx.launch.replicas.replicator import main; main()"
_FIRST_PAUSE_S = 0.5  # pause before the first restart; each later pause is twice as long
_MOST_PAUSE_S = 60.0


class Replicas:
    """The replicator of this node.

    If the replicator ends, it is started again, after a pause that doubles each time. During the pause, the newest
    snapshot that has replicas is kept, here and on the other nodes.

    Args:
        events: Loop of the supervisor.
        say: Function that shows a line.
        snapshots_fd: Memory of the snapshots.
        num_replicas: Number of other nodes that should have a copy of each snapshot.
        keep_list: Children of the supervisor that are spared when ranks are killed; this class adds the replicator.

    Attributes:
        pid: Process id of the replicator.
        port: Port on which the replicator receives snapshots from other nodes.
    """

    def __init__(
        self,
        events: EventLoop,
        say: Callable[[str], None],
        snapshots_fd: int,
        run_id: str,
        num_replicas: int,
        keep_list: list[int],
    ) -> None:
        self._events, self._say, self._fd, self._keep_list = events, say, snapshots_fd, keep_list
        self._settings: str = json.dumps({"run_id": run_id, "num_replicas": num_replicas})
        self._view: Mapping[str, Any] | None = None
        self._pause_s = _FIRST_PAUSE_S
        want_replicas(snapshots_fd, num_replicas)
        self._listener: socket.socket = bound_socket()  # kept open, because other nodes know its port
        self.port: int = self._listener.getsockname()[1]
        self._start(0.0)

    def _start(self, pause_s: float) -> None:
        self._channel, theirs = PacketSocket.pair()
        with theirs:
            fds = [theirs.fileno(), self._listener.fileno(), self._fd]
            self.pid: int = start_helper(_RUN, fds, self._settings, pause_s=pause_s)
        self._keep_list.append(self.pid)
        self._events.watch(self._channel.fileno(), self._hear)
        if self._view is not None:
            self._channel.send(self._view)

    def follow(self, view: Mapping[str, Any]) -> None:
        """Tell the replicator which nodes keep this node's snapshots from now on; `holders.told_of` returns `view`."""
        self._view = view
        self._channel.send(view)

    def _hear(self) -> None:
        for packet in self._channel.receive():
            self._say(packet["say"])
        if not self._channel.alive:
            self._end()
            note_replicator_ended(self._fd)
            self._say(
                "the process that copies snapshots to other hosts has ended: no new replicas are made until it is "
                f"started again, in {self._pause_s:g} s"
            )
            self._start(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _end(self) -> None:
        with contextlib.suppress(KeyError):
            self._events.unwatch(self._channel.fileno())
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._keep_list.remove(self.pid)

    def close(self) -> None:
        """End the replicator."""
        self._end()
        self._listener.close()
