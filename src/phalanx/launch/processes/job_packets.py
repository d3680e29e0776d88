"""Packets between a client and a warm process, one per message, with descriptors if there are any.

Both are the same user's, and the same Python, so messages are marshalled: json would take longer to import than to use.
"""

from __future__ import annotations

import _socket
import contextlib
import marshal
import os
import sys
from collections.abc import Sequence
from typing import Any

MAX_FDS = 253  # SCM_MAX_FD of the kernel
HANDSHAKE = "ready"
"""What a warm process says first; anything else is why it can't serve."""
_MAX_BYTES = 1 << 20
_INT_BYTES = 4


def send(connection: _socket.socket, *message: Any, fds: Sequence[int] = ()) -> bool:
    """Send a message with copies of `fds`; return whether the other end is still there.

    Raises:
        OSError: The message is too large for a packet.
    """
    array = b"".join(fd.to_bytes(_INT_BYTES, sys.byteorder) for fd in fds)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array)] if fds else []
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendmsg([marshal.dumps(list(message))], rights, _socket.MSG_NOSIGNAL)
        return True
    return False


def receive(connection: _socket.socket) -> tuple[list[Any], list[int]]:
    """Return the next message and its descriptors; nothing once the other end has gone, or after the timeout."""
    fds: list[int] = []
    try:
        data, rights, _, _ = connection.recvmsg(
            _MAX_BYTES, _socket.CMSG_SPACE(MAX_FDS * _INT_BYTES), _socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, array in rights:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                fds += memoryview(array[: len(array) // _INT_BYTES * _INT_BYTES]).cast("i")
        return list(marshal.loads(data)), fds
    except (OSError, ValueError, EOFError, TypeError):  # not a message of ours, or none
        for fd in fds:
            os.close(fd)
        return [], []


def is_open(connection: _socket.socket) -> bool:
    """Whether the other end is still there, as far as can be known without waiting."""
    connection.settimeout(0)
    try:
        return bool(connection.recv(1, _socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
