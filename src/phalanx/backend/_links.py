"""The connections between hosts, watched beside the engine that has opened them.

A process that computes for an hour or is stopped in a debugger is alive, and its kernel says so: it acknowledges what
comes, and answers the probes of an idle connection and those of one whose reader takes nothing. A host that has lost
power or its cable answers nothing. TCP_USER_TIMEOUT can't tell these apart: it ends a connection whose reader takes
nothing although each of its probes is answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

_KEEPALIVE_S = 1  # the kernel's shortest
_MOST_KEPT = 127  # probes: MAX_TCP_KEEPCNT
_ESTABLISHED = 1  # linux/tcp_states.h
_PROBES, _UNACKED = 3, 24  # offsets in struct tcp_info, linux/tcp.h; times are in milliseconds
_LAST_DATA_SENT, _LAST_DATA_RECV, _LAST_ACK_RECV = 44, 52, 56
_INFO_BYTES = 60
_RTO_MAX_MS = 44  # option of Linux 6.15 and newer
_LOOKS = 5  # in the time of a silence
_MOST_PROBES = 1  # unanswered: a kernel answers at most two a second (net.ipv4.tcp_invalid_ratelimit)
_SHORTEST_S = 0.25  # of a silence: an acknowledgement may be delayed, or have been sent again


class Link:
    """A connection to another rank.

    Args:
        connection: A descriptor of its own for it.
        silence_s: Seconds for which the other kernel may leave something unanswered.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._socket = connection
        self._silence_s = max(silence_s, _SHORTEST_S)
        self._is_silent = self._is_late = False
        self._asked_s = self._looked_s = time.monotonic()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        # The kernel comes after `look`, for where this process holds its thread back.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(max(1, round(silence_s)) + 2, _MOST_KEPT))
        with contextlib.suppress(OSError):  # else the probes of a stopped reader come ever more slowly
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _KEEPALIVE_S * 1000)

    @property
    def period_s(self) -> float:
        """How often to `look`."""
        return self._silence_s / _LOOKS

    def fileno(self) -> int:
        return self._socket.fileno()

    def look(self) -> bool:
        """Return whether the other host is silent: it owes an answer, and gave none in `silence_s` of looks."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        sent_s, acked_s = _seconds(info, _LAST_DATA_SENT), _seconds(info, _LAST_ACK_RECV)
        now_s = time.monotonic()
        # What was acknowledged after it was last sent may stay unacknowledged: a reader without room drops it.
        owes_data = _number(info, _UNACKED) > 0 and acked_s > sent_s
        owes = owes_data or info[_PROBES] > 0
        heard_s = now_s - min(acked_s, _seconds(info, _LAST_DATA_RECV))
        if not owes or heard_s > self._asked_s or now_s - self._looked_s > self._silence_s:  # or this rank was stopped
            self._asked_s = now_s
        self._looked_s = now_s
        is_overdue = now_s - self._asked_s >= self._silence_s
        was_late, self._is_late = self._is_late, is_overdue and owes_data  # twice: what was just sent is on its way
        has_ignored_probes = is_overdue and info[_PROBES] > _MOST_PROBES
        self._is_silent = self._is_silent or has_ignored_probes or (self._is_late and was_late)
        return self._is_silent

    @property
    def is_lost(self) -> bool:
        if self._is_silent or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED

    @property
    def is_silent(self) -> bool:
        """Whether it is lost although nobody has told its end: the other host does not answer."""
        if self._is_silent or not self.is_lost:
            return self._is_silent
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return _seconds(info, _LAST_ACK_RECV) > self._silence_s + _KEEPALIVE_S

    def shut(self) -> None:
        """End the connection, also for the engine that has it, and for the other rank."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close this descriptor; nobody may ask about the connection any more."""
        self._socket.close()


def _number(info: bytes, offset: int) -> int:
    return int.from_bytes(info[offset : offset + 4], sys.byteorder)


def _seconds(info: bytes, offset: int) -> float:
    return _number(info, offset) / 1e3


def watch_store(port: int, silence_s: float) -> None:
    """Have the kernel end this process's connections to a port, a TCPStore's, once they are silent.

    Requests are short: a store that is stopped still has room for them, so TCP_USER_TIMEOUT does not end it.
    """
    for _, fd in sockets():
        connection = duplicate(fd)
        if connection is None:
            continue
        with connection:
            if connection.getpeername()[1] == port:
                Link(connection, silence_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def sockets() -> list[tuple[str, int]]:
    """Return inode and descriptor of the sockets of this process."""
    return [(target, fd) for target, fd in _descriptors() if target.startswith("socket:")]


def engine_descriptors() -> set[tuple[str, int]]:
    """Return target and descriptor of what an engine of connections may have opened."""
    return {
        (target, fd) for target, fd in _descriptors() if target.startswith(("socket:", "pipe:", "anon_inode:[event"))
    }


def _descriptors() -> Iterator[tuple[str, int]]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            yield os.readlink(f"/proc/self/fd/{entry}"), int(entry)


@contextlib.contextmanager
def closed_at_exec() -> Iterator[set[tuple[str, int]]]:
    """Keep what an engine opens meanwhile from programs that this process starts: there, connections would outlive it.

    The set that it gives holds target and descriptor of all that, afterwards.
    """
    known = engine_descriptors()
    opened: set[tuple[str, int]] = set()
    yield opened
    opened |= engine_descriptors() - known
    for _, fd in opened:
        with contextlib.suppress(OSError):  # closed since
            os.set_inheritable(fd, False)


def duplicate(fd: int) -> socket.socket | None:
    """Return a socket object of its own for a TCP connection; None for any other."""
    try:
        connection = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            connection.getpeername()
            return connection
    connection.close()
    return None
