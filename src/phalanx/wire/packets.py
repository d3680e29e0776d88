"""Packets of JSON, one at a time, over a socket between the supervisor and a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.wire.messages import as_facts

MAX_PACKET_BYTES = 1 << 18


class PacketSocket:
    """One end of a connection; `alive` turns False when the other end has gone.

    Args:
        end: A connected ``SOCK_SEQPACKET`` socket, owned from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.alive: bool = True

    @staticmethod
    def pair() -> tuple[PacketSocket, socket.socket]:
        """Return our end, and the other for a child process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return PacketSocket(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packet: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send `packet`, and copies of `fds`; nothing happens if nobody is there any more."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [json.dumps(as_facts(packet)).encode()], list(fds))

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the packets that have come, without waiting for more."""
        while (packet := self._next(socket.MSG_DONTWAIT)) is not None:
            yield packet

    def wait(self) -> dict[str, Any] | None:
        """Return the next packet; None when the other end has gone."""
        return self._next(0)

    def _next(self, flags: int) -> dict[str, Any] | None:
        if not self.alive:
            return None
        try:
            data = self._socket.recv(MAX_PACKET_BYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # said once, by an end that has not read all; what it has sent comes after it
            data = self._socket.recv(MAX_PACKET_BYTES, flags)
        if not data:
            self.alive = False
            return None
        packet: dict[str, Any] = json.loads(data)
        return packet

    def close(self) -> None:
        self._socket.close()
