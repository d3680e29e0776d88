"""Passes on the question why a job does not continue: agents hear it from a user, and from each other.

A user's ``phalanx why`` connects to a socket of its host's agent, which asks the agents of the other nodes. Each starts
a process that gathers the evidence about its ranks, and passes that on as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from typing import Any, Protocol

from phalanx.wire.lines import as_line
from phalanx.wire.peer import peer_of

ANSWER_S = 3.0
"""Within which the other nodes answer."""
_MOST_BYTES = 1 << 20
_MOST_AT_ONCE = 8
_GATHER = "phalanx.diagnose.why.other_hosts"


class Wire(Protocol):
    """What carries questions and answers."""

    def tell(self, peer: str, message: dict[str, Any]) -> None:
        """Send a message to one node."""

    def tell_all(self, make: Any) -> None:
        """Send every node the message that is made for it."""


def socket_of(supervisor_pid: int) -> str:
    """Return the address at which the agent of a supervisor hears questions: no file, seen on this host alone."""
    return f"\0phalanx-why-{supervisor_pid}"


def is_trusted(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    return peer_of(peer)[1] in (0, os.geteuid())


class _Look:
    """A look at this node's ranks that is under way for another node."""

    def __init__(self, peer: str, number: int, supervisor_pid: int) -> None:
        self.peer, self.number = peer, number
        self.ends_s = time.monotonic() + ANSWER_S
        self.said = bytearray()
        command = [sys.executable, "-m", _GATHER, str(supervisor_pid)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout
        os.set_blocking(self.pipe.fileno(), False)


class Questions:
    """Hears questions, passes them on and answers those of other nodes, as part of the agent's loop.

    Args:
        supervisor_pid: Process whose ranks are asked about.
        selector: Selector of the agent's loop.
        wire: Links to the other nodes.
    """

    def __init__(self, supervisor_pid: int, selector: selectors.BaseSelector, wire: Wire) -> None:
        self._supervisor_pid, self._selector, self._wire = supervisor_pid, selector, wire
        self._asking: dict[int, tuple[socket.socket, float, set[str]]] = {}  # users who wait, until when, for whom
        self._looks: list[_Look] = []
        self._num_asked = 0
        with contextlib.suppress(OSError):  # the job goes on without it
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._listener.bind(socket_of(supervisor_pid))
            self._listener.listen()
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        """Pass a user's question on."""
        with contextlib.suppress(OSError):
            asking, _ = self._listener.accept()
            if not is_trusted(asking) or len(self._asking) >= _MOST_AT_ONCE:
                asking.close()
                return
            asking.settimeout(ANSWER_S)
            self._num_asked += 1
            silent: set[str] = set()
            self._asking[self._num_asked] = asking, time.monotonic() + ANSWER_S, silent

            def ask(peer: str) -> dict[str, Any]:
                silent.add(peer)
                return {"asks": self._num_asked}

            self._wire.tell_all(ask)

    def received(self, peer: str, message: dict[str, Any]) -> None:
        """Take in what another node asks or answers."""
        if "asks" in message and len(self._looks) < _MOST_AT_ONCE:
            with contextlib.suppress(OSError):
                look = _Look(peer, int(message["asks"]), self._supervisor_pid)
                self._looks.append(look)
                self._selector.register(look.pipe, selectors.EVENT_READ, lambda: self._read(look))
        elif "answers" in message and (waiting := self._asking.get(message["answers"])):
            asking, _, silent = waiting
            with contextlib.suppress(OSError):
                asking.sendall(as_line(message["said"]))
            silent.discard(peer)

    def _read(self, look: _Look) -> None:
        with contextlib.suppress(BlockingIOError):
            if more := os.read(look.pipe.fileno(), 1 << 16):
                look.said += more
                return
            if len(look.said) < _MOST_BYTES:
                with contextlib.suppress(ValueError):  # it has failed, and the node that asked hears nothing
                    self._wire.tell(look.peer, {"answers": look.number, "said": json.loads(look.said)})
            self._end(look)

    def _end(self, look: _Look) -> None:
        self._looks.remove(look)
        self._selector.unregister(look.pipe)
        look.pipe.close()
        look.process.kill()
        look.process.wait()

    def look(self) -> None:
        """End what is complete or has taken too long."""
        now_s = time.monotonic()
        for look in [look for look in self._looks if now_s > look.ends_s]:
            self._end(look)
        for number in [it for it, (_, ends_s, silent) in self._asking.items() if not silent or now_s > ends_s]:
            asking, _, silent = self._asking.pop(number)
            with asking, contextlib.suppress(OSError):
                asking.sendall(as_line({"num_silent": len(silent)}))
