"""Last words: that a rank has left, and what ended the group where the store has gone with the rank that served it.

Each rank listens, and nobody reads: the kernel keeps what others leave there until this rank meets a failure itself.
First words too: that a rank reaches another is tried here before the engine, which can't fail to connect in order.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

_READ_S = 0.2  # from one who has connected
_BACKLOG = 4096  # or as many as the kernel allows


class Mailbox:
    """Where other ranks leave a message for this one.

    Args:
        address: Of the interface on which the others reach this rank.
    """

    def __init__(self, address: str) -> None:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(where, family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._token = secrets.token_hex(16)  # so that a stranger's connection is not taken for a message
        self.name = (address, self._socket.getsockname()[1], self._token)

    def read(self) -> Any:
        """Return the first message that lies here, None if there is none."""
        with contextlib.suppress(OSError):  # nobody is there, or the box is closed
            while True:
                sender, _ = self._socket.accept()
                with sender, contextlib.suppress(OSError, ValueError):
                    sender.settimeout(_READ_S)
                    with sender.makefile("rb") as stream:
                        token, _, text = stream.read().partition(b"\n")
                    if secrets.compare_digest(token, self._token.encode()):
                        return json.loads(text)
        return None

    def close(self) -> None:
        self._socket.close()


def post(boxes: Sequence[Sequence[Any]], message: Any, limit_s: float) -> dict[int, str]:
    """Leave a message in each box, given by name; return why not, of those that could not be reached in time."""
    deadline = time.monotonic() + limit_s
    failed = dict.fromkeys(range(len(boxes)), "no answer")
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for number, (address, port, _) in enumerate(boxes):
            family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            link = stack.enter_context(socket.socket(family, kind, protocol))
            link.setblocking(False)
            error = link.connect_ex(where)
            if error in (0, errno.EINPROGRESS):
                selector.register(link, selectors.EVENT_WRITE, (number, link))
            else:
                failed[number] = os.strerror(error)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                number, link = key.data
                selector.unregister(link)
                failed[number] = _leave(link, f"{boxes[number][2]}\n{json.dumps(message)}".encode())
    return {number: why for number, why in failed.items() if why}


def _leave(link: socket.socket, data: bytes) -> str:
    """Send what fits the buffer of a new connection, and end it, for which the reader waits; return what prevents."""
    with link:
        error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return os.strerror(error)
        try:
            link.send(data)
        except OSError as gone:
            return gone.strerror or str(gone)
    return ""
