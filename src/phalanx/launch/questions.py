"""Passes the question why a job does not go on to its other hosts: agents hear it from a user, and from each other.

A user's ``phalanx why`` connects to a socket of its host's agent, which counts the question in the nodes' store. The
agents of the other nodes see the count, look at their ranks, and put what they saw there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from phalanx._peer import peer_of

if TYPE_CHECKING:
    from torch.distributed import Store

_ASKED = "phalanx/why/asked"
_LOOK_S = 0.2  # between looks for a question of another node
ANSWER_S = 3.0
"""Within which the other nodes answer."""
_MOST_BYTES = 1 << 20


class Node(NamedTuple):
    """This node's part in an attempt: the store of that, its number among the nodes, and the questions asked on it."""

    store: Store
    rank: int
    num_nodes: int
    own: set[int]


def socket_of(supervisor_pid: int) -> str:
    """Return the address at which the agent of a supervisor hears questions: no file, seen on this host alone."""
    return f"\0phalanx-why-{supervisor_pid}"


def is_trusted(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    return peer_of(peer)[1] in (0, os.geteuid())


class Questions:
    """A thread of the agent that hears questions and answers those of other nodes.

    Args:
        supervisor_pid: Process whose ranks are asked about.
        node: Function that returns this node's part in the attempt that runs; None while there is none.
    """

    def __init__(self, supervisor_pid: int, node: Callable[[], Node | None]) -> None:
        self._supervisor_pid, self._node = supervisor_pid, node
        self._lock = threading.Lock()
        with contextlib.suppress(OSError, RuntimeError):  # the job goes on without it
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            listener.bind(socket_of(supervisor_pid))
            listener.listen()
            listener.settimeout(_LOOK_S)
            threading.Thread(target=self._run, args=(listener,), name="phalanx-why", daemon=True).start()

    def _run(self, listener: socket.socket) -> None:
        heard: Node | None = None
        num_heard = 0
        lost: Store | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                asking, _ = listener.accept()
                self._begin(self._pass_on, asking)
            node = self._node()
            if node is None or node.store is lost:
                continue
            if node is not heard:  # each attempt has a store of its own, and counts anew
                heard, num_heard = node, 0
            try:
                asked = node.store.add(_ASKED, 0)
            except Exception:  # its host is gone, and with it the attempt; each further question would be a traceback
                lost = node.store
                continue
            with self._lock:
                new = {*range(num_heard + 1, asked + 1)} - node.own
            num_heard = asked
            if new:
                self._begin(self._answer, node, max(new))

    def _begin(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=function, args=args, name="phalanx-why", daemon=True).start()

    def _answer(self, node: Node, number: int) -> None:
        """Put what this node's ranks do into the store."""
        command = [sys.executable, "-m", "phalanx", "why", "--json", "--here", str(self._supervisor_pid)]
        with contextlib.suppress(Exception):  # whoever has asked hears from this node no more than nothing
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=True
            )
            if len(done.stdout) < _MOST_BYTES:
                said = {"host": socket.gethostname(), "seen": json.loads(done.stdout)["ranks"]}
                node.store.set(f"{_ASKED}/{number}/{node.rank}", json.dumps(said))

    def _pass_on(self, asking: socket.socket) -> None:
        """Ask the other nodes, and send whoever asks here what they answered, a line for each."""
        with asking, contextlib.suppress(Exception):
            node = self._node()
            if node is None or not is_trusted(asking):
                return
            with self._lock:
                number = node.store.add(_ASKED, 1)
                node.own.add(number)
            silent = {f"{_ASKED}/{number}/{rank}" for rank in range(node.num_nodes) if rank != node.rank}
            deadline = time.monotonic() + ANSWER_S
            while silent and time.monotonic() < deadline:
                for key in [key for key in silent if node.store.check([key])]:
                    silent.remove(key)
                    asking.sendall(node.store.get(key) + b"\n")
                time.sleep(_LOOK_S / 4)
