"""Last words: that a rank has left, and what ended the group where the store has gone with the rank that served it.

Each rank listens, and nobody reads: the kernel keeps what others leave there until this rank meets a failure itself.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

_READ_S = 0.2  # from one who has connected
_BACKLOG = 128


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


def post(boxes: Sequence[Sequence[Any]], message: Any, limit_s: float) -> None:
    """Leave a message in each box, given by name, that can be reached in time."""
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        links = {}
        for address, port, token in boxes:
            family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            link = stack.enter_context(socket.socket(family, kind, protocol))
            link.setblocking(False)
            link.connect_ex(where)
            selector.register(link, selectors.EVENT_WRITE, f"{token}\n{json.dumps(message)}".encode())
            links[link.fileno()] = link
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                with links[key.fd] as link, contextlib.suppress(OSError):  # that rank is gone
                    link.send(key.data)  # fits the buffer of a new connection; the reader awaits its end
