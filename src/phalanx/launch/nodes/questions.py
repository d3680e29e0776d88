"""Forwards the question of ``phalanx why`` to the other nodes, and answers the questions of those nodes.

The command connects to a socket of its host's agent, which asks the agents of the other nodes. Each agent that is asked
starts a process that gathers evidence about the ranks of its node, and sends back the output.
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
from typing import Any

from phalanx.launch.nodes.links import Links
from phalanx.wire.lines import as_line
from phalanx.wire.peer import peer_of

ANSWER_S = 3.0
"""Time for the other nodes to answer."""
_MOST_BYTES = 1 << 20
_MOST_AT_ONCE = 8
_GATHER = "phalanx.diagnose.why.other_hosts"


def socket_of(supervisor_pid: int) -> str:
    """Return the abstract socket address at which the agent of a supervisor accepts questions."""
    return f"\0phalanx-why-{supervisor_pid}"


def is_trusted(peer: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user or to root."""
    return peer_of(peer)[1] in (0, os.geteuid())


class _Look:
    """The process that gathers evidence for another node."""

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
    """Accepts, forwards and answers questions, as part of the agent's loop.

    Args:
        supervisor_pid: Process id of this node's supervisor.
        selector: Selector of the agent's loop.
        links: Links to the other nodes.
    """

    def __init__(self, supervisor_pid: int, selector: selectors.BaseSelector, links: Links) -> None:
        self._supervisor_pid, self._selector, self._links = supervisor_pid, selector, links
        self._asking: dict[
            int, tuple[socket.socket, float, set[str]]
        ] = {}  # socket of the user, deadline, nodes that have not answered
        self._looks: list[_Look] = []
        self._num_asked = 0
        with contextlib.suppress(OSError):  # without a socket, the job runs but accepts no questions
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._listener.bind(socket_of(supervisor_pid))
            self._listener.listen()
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        """Forward a user's question to the other nodes."""
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

            self._links.tell_all(ask)

    def received(self, peer: str, message: dict[str, Any]) -> None:
        """Handle a question or an answer of another node."""
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
                with contextlib.suppress(ValueError):  # the output of a process that failed is not sent
                    self._links.tell(look.peer, {"answers": look.number, "said": json.loads(look.said)})
            self._end(look)

    def _end(self, look: _Look) -> None:
        self._looks.remove(look)
        self._selector.unregister(look.pipe)
        look.pipe.close()
        look.process.kill()
        look.process.wait()

    def look(self) -> None:
        """Finish the questions that have been fully answered or have taken too long."""
        now_s = time.monotonic()
        for look in [look for look in self._looks if now_s > look.ends_s]:
            self._end(look)
        for number in [it for it, (_, ends_s, silent) in self._asking.items() if not silent or now_s > ends_s]:
            asking, _, silent = self._asking.pop(number)
            with asking, contextlib.suppress(OSError):
                asking.sendall(as_line({"num_silent": len(silent)}))
