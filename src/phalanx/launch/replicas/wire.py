"""A connection between the replicators of two hosts: lines of JSON, and pieces of images."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from phalanx.launch.nodes.messages import as_line, read_line

PIECE = struct.Struct("<L")
"""Length of the piece that follows; 0: that was all, and it is good."""
TAKEN = b"."
_BULK = 2  # priority of packets behind which no others wait
_CONNECT_S = 3.0
_SILENCE_S = 20.0  # in the midst of a copy, and for all of a message
_HEARD_S = 5.0  # until the other end says that it has heard an offer
_MOST_BYTES = 1 << 20  # of a line
_BUFFER_BYTES = 1 << 20
_AHEAD_BYTES = 1 << 16


class Wire:
    """One end.

    Args:
        end: Connected socket, owned from now on; None: there is none.
    """

    def __init__(self, end: socket.socket | None) -> None:
        self._socket = end
        if end is not None:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK)
            end.settimeout(_SILENCE_S)

    @staticmethod
    def to(address: str, port: int) -> Wire:
        """Connect.

        Raises:
            OSError: Nobody answers.
        """
        return Wire(socket.create_connection((address, port), _CONNECT_S))

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
            waits: Whether its first byte may take for ever.
            within_s: Time for all of it, however slowly it drips; default: as long as any silence may last.

        Raises:
            OSError: The other end has gone, or takes too long.
            ValueError: It is no message.
        """
        line = bytearray()
        limit_s = _SILENCE_S if within_s is None else within_s
        ends_s = math.inf if waits else time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer within {limit_s:g} s")
            self._end.settimeout(None if left_s == math.inf else left_s)
            try:
                ahead = self._receive(_AHEAD_BYTES, socket.MSG_PEEK)  # what follows the line is not ours to read
            except TimeoutError:
                continue
            line += self.receive(ahead.find(b"\n") + 1 or len(ahead))
            ends_s = min(ends_s, time.monotonic() + limit_s)  # for all of it: a stranger may send it byte by byte
            if len(line) > _MOST_BYTES:
                raise ValueError("no message")
        self._end.settimeout(_SILENCE_S)
        return read_line(line)

    def ask(self, offer: Mapping[str, Any]) -> dict[str, Any]:
        """Make an offer and return the answer.

        The other end says at once that it has heard it: a process that is stopped, or that is just being started
        again, is not waited for as long as one that makes room.

        Raises:
            OSError, ValueError: As in `hear`.
        """
        self.tell(offer)
        answer = self.hear(within_s=_HEARD_S)
        return self.hear() if "heard" in answer else answer

    def _receive(self, length: int, flags: int = 0) -> bytes:
        came = self._end.recv(length, flags)
        if not came:
            raise ConnectionResetError("the connection has ended")
        return came

    def receive(self, length: int) -> bytes:
        """Return exactly so many bytes."""
        came = b""
        while len(came) < length:
            came += self._receive(length - len(came))
        return came

    def receive_into(self, memory: memoryview) -> None:
        """Fill `memory`."""
        at = 0
        while at < len(memory):
            count = self._end.recv_into(memory[at : at + _BUFFER_BYTES])
            if count == 0:
                raise ConnectionResetError("the connection has ended")
            at += count

    def send(self, data: bytes) -> None:
        self._end.sendall(data)

    def send_file(self, fd: int, at: int, length: int) -> None:
        """Send bytes of a file. What is written there before they have come is sent in their place."""
        end = at + length
        while at < end:
            try:
                at += os.sendfile(self.fileno(), fd, at, end - at)
            except BlockingIOError:  # a socket with a timeout does not block
                if not select.select([], [self.fileno()], [], _SILENCE_S)[1]:
                    raise TimeoutError("the other end takes nothing") from None

    def await_byte(self) -> None:
        """Return when the other end has taken what was sent."""
        if self._receive(1) != TAKEN:
            raise ValueError("the other end has not taken it")

    def commit(self) -> None:
        """Tell the other end that what it has is good, and wait until it knows."""
        self.send(PIECE.pack(0))
        self.await_byte()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
