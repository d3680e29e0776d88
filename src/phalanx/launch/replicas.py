"""The process that copies a node's snapshots to other nodes, and keeps theirs, as the supervisor sees it.

It is a process of its own, so that neither the supervisor nor the agent ever waits for a large copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from phalanx._snapshots import want_replicas
from phalanx.launch.events import EventLoop
from phalanx.launch.links import open_door
from phalanx.launch.packets import PacketSocket
from phalanx.launch.warden import die_with_parent, hold_signals

# Not with -m, which would let a json.py in the current folder take the library's place.
_RUN = "import sys; sys.path[:] = filter(None, sys.path); from phalanx.launch.replicator import main; main()"


class Replicas:
    """The process that keeps this node's snapshots on other nodes, and theirs here.

    Args:
        events: Loop of the supervisor.
        say: Function that shows a line.
        snapshots_fd: Memory of the snapshots.
        num_replicas: Number of other nodes that are to have each of them.

    Attributes:
        pid: Process that copies.
        port: Port on which it takes what other nodes send.
    """

    def __init__(
        self, events: EventLoop, say: Callable[[str], None], snapshots_fd: int, run_id: str, num_replicas: int
    ) -> None:
        self._events, self._say, self._fd = events, say, snapshots_fd
        want_replicas(snapshots_fd, num_replicas)
        supervisor_pid = os.getpid()
        with contextlib.closing(open_door(0)) as door:
            self.port: int = door.getsockname()[1]
            self._channel, theirs = PacketSocket.pair()
            self.pid: int = os.fork()
            if self.pid == 0:
                try:
                    die_with_parent(supervisor_pid)
                    hold_signals()
                    os.setpgid(0, 0)
                    fds = [theirs.fileno(), door.fileno(), snapshots_fd]
                    for fd in fds:
                        os.set_inheritable(fd, True)
                    settings = json.dumps({"run_id": run_id, "num_replicas": num_replicas})
                    os.execv(sys.executable, [sys.executable, "-c", _RUN, *map(str, fds), settings])
                finally:
                    os._exit(1)
            theirs.close()
        self._events.watch(self._channel.fileno(), self._hear)

    def follow(self, view: Mapping[str, Any]) -> None:
        """Tell the process which nodes keep this node's snapshots from now on, as `holders.told_of` has written it."""
        self._channel.send(view)

    def _hear(self) -> None:
        for packet in self._channel.receive():
            self._say(packet["say"])
        if not self._channel.alive:
            self._events.unwatch(self._channel.fileno())
            want_replicas(self._fd, 0)  # the ranks are not to wait for any
            self._say("the process that copies snapshots to other hosts has ended: no new replicas are made")

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(KeyError):
            self._events.unwatch(self._channel.fileno())
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
