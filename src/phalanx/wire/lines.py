"""Messages over a stream socket, each a line of JSON."""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any

from phalanx.wire.messages import as_facts, understand

_MOST_BYTES = 1 << 20
_AHEAD_BYTES = 1 << 16


def as_line(message: Any) -> bytes:
    return json.dumps(as_facts(message)).encode() + b"\n"


def read_line(line: bytes | bytearray) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        ValueError: The line does not contain a message.
    """
    message: dict[str, Any] = understand(line, dict)
    return message


def receive_line(
    end: socket.socket, limit_s: float, *, waits: bool = False, most_bytes: int = _MOST_BYTES
) -> dict[str, Any]:
    """Return the next message without reading beyond it; the socket keeps its timeout.

    Args:
        limit_s: Time limit for the whole message, because an unknown sender may send it byte by byte.
        waits: Whether to wait for the first byte without a limit; `limit_s` then begins with that byte.

    Raises:
        OSError: The other end has closed the connection, or takes too long.
        ValueError: The line is not a message.
    """
    line = bytearray()
    timeout, ends_s = end.gettimeout(), math.inf if waits else time.monotonic() + limit_s
    try:
        while not line.endswith(b"\n"):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer within {limit_s:g} s")
            end.settimeout(None if left_s == math.inf else left_s)
            try:
                ahead = end.recv(_AHEAD_BYTES, socket.MSG_PEEK)
            except TimeoutError:
                continue
            if not ahead:
                raise ConnectionResetError("the connection has ended")
            line += end.recv(ahead.find(b"\n") + 1 or len(ahead))
            ends_s = min(ends_s, time.monotonic() + limit_s)
            if len(line) > most_bytes:
                raise ValueError("no message")
    finally:
        end.settimeout(timeout)
    return read_line(line)
