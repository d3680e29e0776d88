"""Mail between ranks for when the store is gone: a note that a rank has left normally, or why the group ended.

The store ends with the process that serves it, which is often rank 0. So each rank listens on a socket, but does not
read from it: the kernel keeps messages until this rank itself meets a failure. Once the store is gone, ranks send
failures to these sockets. Ranks that leave normally always send a note there, so that the end of their connections is
not mistaken for a death.

Before the engine connects, each rank also posts a test message to the mailbox of every rank on another host, and all
ranks share a list of the ranks that some rank could not reach. So the error about a closed port names both ends, on
every rank, during the meeting. After this test, no rank is so late that Gloo stops waiting for it. If Gloo did stop
waiting, it would free the connection, but its listener would still find the connection when the late rank connects, and
the process would end with SIGSEGV (gdb: ``Pair::connectCallback`` under ``Listener::haveConnection``).

Anybody on the network can connect. So a mailbox spends at most one second of its life on strangers, keeps only a few of
their connections, and stops reading from a connection as soon as the token is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from phalanx.backend.deadlines import MAIL_LOOK_S, STRANGERS_S
from phalanx.wire.messages import understand

_BACKLOG = 4096  # or as many as the kernel allows
_MOST_OPEN = 64
_MOST_BYTES = 1 << 20  # largest size of a message; a group failure may list every rank


class _Letter:
    """A connection and the data received on it: a line with the token, then the message."""

    def __init__(self, sender: socket.socket, token: str) -> None:
        self._sender, self._key = sender, f"{token}\n".encode()
        self._data = b""
        self.is_over = False
        sender.setblocking(False)

    def take(self) -> dict[str, Any] | None:
        """Read the available data; return the message once it is complete."""
        try:
            while not self.is_over:
                key, text = self._data[: len(self._key)], self._data[len(self._key) :]
                is_known = secrets.compare_digest(key, self._key)
                limit = len(self._key) - len(key) + is_known * (_MOST_BYTES - len(text))
                piece = self._sender.recv(limit) if limit > 0 else b""
                self._data += piece
                if not piece:  # the data has ended, or the sender is unknown, or its message is too long
                    self.is_over = True
                    return understand(text, dict) if is_known else None
        except BlockingIOError:  # the rest has not arrived yet
            pass
        except (OSError, ValueError):
            self.is_over = True
        return None

    def fileno(self) -> int:
        return self._sender.fileno()

    def close(self) -> None:
        self._sender.close()


class Mailbox:
    """A socket at which other ranks leave messages for this one.

    Args:
        address: Address at which the other ranks reach this one.

    Attributes:
        name: Address, port and token; a sender needs all three.
    """

    def __init__(self, address: str) -> None:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(where, family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._token = secrets.token_hex(16)  # a message without this token is from a stranger
        self._open: list[_Letter] = []
        self._patience_s = STRANGERS_S
        self.name = (address, self._socket.getsockname()[1], self._token)

    def read(self) -> dict[str, Any] | None:
        """Return the next message, or None if there is none. Returns within a moment, whatever strangers do."""
        deadline = time.monotonic() + MAIL_LOOK_S
        while True:
            is_empty = self._accept()
            for letter in list(self._open):
                message = letter.take()
                if letter.is_over:
                    self._open.remove(letter)
                    letter.close()
                if message is not None:
                    return message
            begin_s = time.monotonic()
            if begin_s >= deadline or (is_empty and (not self._open or self._patience_s <= 0)):
                return None
            if not is_empty:
                continue
            news = select.poll()
            with contextlib.suppress(ValueError):  # the mailbox was closed meanwhile
                for fd in (self._socket.fileno(), *(letter.fileno() for letter in self._open)):
                    news.register(fd, select.POLLIN)
            news.poll(min(deadline - begin_s, self._patience_s) * 1e3)
            self._patience_s -= time.monotonic() - begin_s

    def _accept(self) -> bool:
        """Accept waiting connections, dropping the oldest if there are many; return whether all were accepted."""
        for _ in range(_MOST_OPEN):
            try:
                sender, _ = self._socket.accept()
            except OSError:  # nobody is waiting, or the mailbox is closed
                return True
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(0).close()
            self._open.append(_Letter(sender, self._token))
        return False

    def close(self) -> None:
        self._socket.close()
        while self._open:
            self._open.pop().close()


def post(boxes: Sequence[Sequence[Any]], message: dict[str, Any], limit_s: float) -> dict[int, str]:
    """Leave a message in each mailbox; return the index of each that was not reached in time, and the reason."""
    deadline = time.monotonic() + limit_s
    failed = dict.fromkeys(range(len(boxes)), "no answer")
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for number, (address, port, _) in enumerate(boxes):
            try:
                family, kind, protocol, _, where = socket.getaddrinfo(
                    address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
                )[0]
                link = stack.enter_context(socket.socket(family, kind, protocol))
                link.setblocking(False)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
                error = link.connect_ex(where)
            except (OSError, OverflowError, ValueError) as refused:  # not an address, or too many open files
                failed[number] = str(refused)
                continue
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
    """Send data, which must fit the buffer of a new connection; close `link`; return the error or, without one, ""."""
    with link:
        error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return os.strerror(error)
        try:
            link.send(data)
        except OSError as gone:
            return gone.strerror or str(gone)
    return ""
