"""The process at the other end of a UNIX socket. Imports little, because clients of warm processes must start fast."""

from __future__ import annotations

import _socket

_UCRED_BYTES = 12  # struct ucred: pid, uid, gid


def peer_of(connection: _socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the process at the other end."""
    found = memoryview(connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _UCRED_BYTES)).cast("i")
    return found[0], found[1] & 0xFFFFFFFF
