"""Packets between two processes of one host and one user, optionally with descriptors.

Packets are JSON. A warm process and its clients use marshal instead: they run the same Python, and a client, which only
hands a job over, would spend more time on importing json than on using it. For the same reason, this module imports
almost nothing.
"""

from __future__ import annotations

import _socket
import contextlib
import marshal
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

MAX_FDS = 253
"""Largest number of descriptors that one packet can carry: the kernel's SCM_MAX_FD."""
_MAX_BYTES = 1 << 20
_INT_BYTES = 4


class PacketSocket:
    """One end of a connection.

    Args:
        end: A connected ``SOCK_SEQPACKET`` socket, which the new object owns from now on.
        marshals: Whether packets are encoded with marshal instead of JSON.

    Attributes:
        alive: Whether the other end was still open at the last operation.
    """

    def __init__(self, end: _socket.socket, *, marshals: bool = False) -> None:
        self.end, self._marshals = end, marshals
        self.alive: bool = True

    @staticmethod
    def pair() -> tuple[PacketSocket, socket.socket]:
        """Return the two ends of a new connection: ours, and that for a child process."""
        import socket

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return PacketSocket(ours), theirs

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, packet: Any, fds: Sequence[int] = ()) -> None:
        """Send `packet` with copies of `fds`; do nothing if the other end is closed.

        Raises:
            OSError: The packet is too large.
        """
        data = marshal.dumps(packet) if self._marshals else _as_json(packet)
        array = b"".join(fd.to_bytes(_INT_BYTES, sys.byteorder) for fd in fds)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array)] if fds else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.end.sendmsg([data], rights, _socket.MSG_NOSIGNAL)

    def receive(self) -> Iterator[Any]:
        """Yield the packets that have arrived, without waiting for more."""
        while (packet := self._packet_alone(_socket.MSG_DONTWAIT)) is not None:
            yield packet

    def wait(self) -> Any:
        """Wait for the next packet and return it; return None if the other end is closed."""
        return self._packet_alone(0)

    def take(self, flags: int = 0) -> tuple[Any, list[int]]:
        """Return the next packet and its descriptors; None and [] if the other end is closed or no packet arrives."""
        fds: list[int] = []
        try:
            data, rights = self._next(flags) if self.alive else (b"", [])
            for level, kind, array in rights:
                if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                    fds += memoryview(array[: len(array) // _INT_BYTES * _INT_BYTES]).cast("i")
            if data:
                return marshal.loads(data) if self._marshals else _read_json(data), fds
            self.alive = False
        except (BlockingIOError, TimeoutError):
            pass
        except (OSError, ValueError, EOFError, TypeError):  # the data is not a valid packet
            self.alive = False
        for fd in fds:
            os.close(fd)
        return None, []

    def _packet_alone(self, flags: int) -> Any:
        packet, fds = self.take(flags)
        for fd in fds:
            os.close(fd)
        return packet

    def _next(self, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        size = _socket.CMSG_SPACE(MAX_FDS * _INT_BYTES)
        try:
            data, rights, _, _ = self.end.recvmsg(_MAX_BYTES, size, flags | _socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # raised once if the other end left data unread; packets may still follow
            data, rights, _, _ = self.end.recvmsg(_MAX_BYTES, size, flags | _socket.MSG_CMSG_CLOEXEC)
        return data, rights

    def is_open(self) -> bool:
        """Return, without waiting, whether the other end seems to be open. Makes the socket non-blocking."""
        self.end.settimeout(0)
        try:
            return bool(self.end.recv(1, _socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self.end.close()


def _as_json(packet: Any) -> bytes:
    import json

    from phalanx.wire.messages import as_facts

    return json.dumps(as_facts(packet)).encode()


def _read_json(data: bytes) -> Any:
    import json

    return json.loads(data)
