"""A connection between the replicators of two hosts: lines of JSON, and pieces of images."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

from phalanx.launch.deadlines import REPLICA_CONNECT_S, REPLICA_HEARD_S, REPLICA_SILENCE_S
from phalanx.wire.lines import as_line, receive_line

PIECE = struct.Struct("<L")
"""Length of the piece that follows; 0: the copy is complete and valid."""
TAKEN = b"."
_BULK = 2  # SO_PRIORITY: other traffic goes first
_BUFFER_BYTES = 1 << 20


class Wire:
    """One end of a connection between two replicators.

    Args:
        end: Connected socket, owned from now on; None: this object stands for a closed connection.
    """

    def __init__(self, end: socket.socket | None) -> None:
        self._socket = end
        if end is not None:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK)
            end.settimeout(REPLICA_SILENCE_S)

    @staticmethod
    def to(address: str, port: int) -> Wire:
        """Connect to the replicator of another host.

        Raises:
            OSError: Nobody answers.
        """
        return Wire(socket.create_connection((address, port), REPLICA_CONNECT_S))

    @property
    def _end(self) -> socket.socket:
        if self._socket is None:
            raise OSError("the connection is closed")
        return self._socket

    def fileno(self) -> int:
        return self._end.fileno()

    def tell(self, message: Mapping[str, Any]) -> None:
        self._end.sendall(as_line(message))

    def hear(self, *, waits: bool = False, within_s: float | None = None) -> dict[str, Any]:
        """Return the next message.

        Args:
            waits: Whether to wait for the first byte without a limit.
            within_s: Time limit for the whole message; default: `REPLICA_SILENCE_S`.

        Raises:
            OSError: The other end has closed the connection, or takes too long.
            ValueError: The data received is not a message.
        """
        return receive_line(self._end, REPLICA_SILENCE_S if within_s is None else within_s, waits=waits)

    def ask(self, offer: Mapping[str, Any]) -> dict[str, Any]:
        """Make an offer and return the answer.

        Making room may take long, so the other end acknowledges the offer first. If the acknowledgement does not arrive
        soon, the other process is suspended or restarting, and the call fails.

        Raises:
            OSError, ValueError: As in `hear`.
        """
        self.tell(offer)
        answer = self.hear(within_s=REPLICA_HEARD_S)
        return self.hear() if "heard" in answer else answer

    def _receive(self, length: int) -> bytes:
        came = self._end.recv(length)
        if not came:
            raise ConnectionResetError("the connection has ended")
        return came

    def receive(self, length: int) -> bytes:
        """Return exactly `length` bytes."""
        came = b""
        while len(came) < length:
            came += self._receive(length - len(came))
        return came

    def receive_into(self, memory: memoryview) -> None:
        """Receive bytes into `memory` until it is full."""
        at = 0
        while at < len(memory):
            count = self._end.recv_into(memory[at : at + _BUFFER_BYTES])
            if count == 0:
                raise ConnectionResetError("the connection has ended")
            at += count

    def send(self, data: bytes) -> None:
        self._end.sendall(data)

    def send_file(self, fd: int, at: int, length: int) -> None:
        """Send bytes of a file. If bytes are overwritten before they have arrived, the new bytes may arrive instead."""
        end = at + length
        while at < end:
            try:
                at += os.sendfile(self.fileno(), fd, at, end - at)
            except BlockingIOError:  # a socket with a timeout is non-blocking in the kernel
                if not select.select([], [self.fileno()], [], REPLICA_SILENCE_S)[1]:
                    raise TimeoutError("the other end takes nothing") from None

    def await_byte(self) -> None:
        """Wait for the byte by which the other end confirms a piece."""
        if self._receive(1) != TAKEN:
            raise ValueError("the other end has not taken it")

    def commit(self) -> None:
        """Tell the other end that its copy is complete, and wait for its answer."""
        self.send(PIECE.pack(0))
        self.await_byte()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
