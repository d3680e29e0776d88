"""Watches the connections between hosts from outside the engine that opened them.

**No heartbeats of our own.** A thread that sends heartbeats is suspended together with its process, is delayed by the
interpreter's lock, and keeps sending while the rank is deadlocked. The kernels answer for their processes instead: even
if a process computes for an hour or is suspended in a debugger, its kernel acknowledges data. The kernel also answers
probes of connections that are idle or whose process reads nothing. So idle connections use the kernel's keepalive, and
the watcher checks all connections with ``TCP_INFO`` five times in ``PHALANX_SILENCE_S``. A host counts as silent once
its kernel has owed an answer for that long, to data sent after its last acknowledgement or to two probes. (One
unanswered probe means nothing: a kernel answers at most two probes a second.)

So a host that lost power or its cable is noticed even if nothing is sent, and a host that is busy or whose ranks are
suspended does not count as lost. TCP_USER_TIMEOUT could not distinguish a suspended rank from a lost host, because the
kernel of a suspended reader answers every probe only with "my buffer is full". A virtual machine that is paused as a
whole counts as lost, since its kernel does not answer. When a process dies, its kernel closes its connections at once.

**Gloo's sockets are closed from outside**, since Gloo offers no way to end a wait (see `running`). The sockets that
Gloo opened while connecting are found by their inodes, duplicated, identified by the addresses at their ends, watched,
and shut down to end a group. They are also made to close at ``exec``; otherwise, a program that a rank has started
would keep the rank's connections open after the rank's death. MPI can't end a wait at all. So with MPI, the watcher
asks the store every 0.2 s whether the group has failed, and a waiting call asks after every slice of its wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator

from phalanx.backend.deadlines import KEEPALIVE_S, LEAST_SILENCE_S
from phalanx.host.processes import open_files

_MOST_KEPT = 127  # largest number of probes that the kernel allows: MAX_TCP_KEEPCNT
_ESTABLISHED = 1  # linux/tcp_states.h
_PROBES, _UNACKED = 3, 24  # offsets in struct tcp_info, linux/tcp.h; times are in milliseconds
_LAST_DATA_SENT, _LAST_DATA_RECV, _LAST_ACK_RECV = 44, 52, 56
_INFO_BYTES = 60
_RTO_MAX_MS = 44  # option of Linux 6.15 and newer
_LOOKS = 5  # number of looks during silence_s
_MOST_PROBES = 1  # unanswered probes to tolerate: a kernel answers two a second (tcp_invalid_ratelimit)


class Link:
    """A connection to another rank.

    Args:
        connection: Duplicate of the engine's descriptor, owned by this object.
        silence_s: Seconds for which the other kernel may owe an answer.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._socket = connection
        self._silence_s = max(silence_s, LEAST_SILENCE_S)
        self._is_silent = self._is_late = False
        self._asked_s = self._looked_s = time.monotonic()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        # The kernel itself ends the connection a little later, in case something in this process delays the watcher.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(max(1, round(silence_s)) + 2, _MOST_KEPT))
        with contextlib.suppress(OSError):  # without this option, a suspended reader is probed at growing intervals
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, KEEPALIVE_S * 1000)

    @property
    def period_s(self) -> float:
        """Seconds between calls of `look`."""
        return self._silence_s / _LOOKS

    def fileno(self) -> int:
        return self._socket.fileno()

    def look(self) -> bool:
        """Return whether the other host is silent: it has owed an answer in all looks of the last `silence_s`."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        sent_s, acked_s = _seconds(info, _LAST_DATA_SENT), _seconds(info, _LAST_ACK_RECV)
        now_s = time.monotonic()
        # If an acknowledgement arrived after the last send, the host owes nothing, even if data is unacknowledged: a
        # reader whose buffer is full drops data and never acknowledges it.
        owes_data = _number(info, _UNACKED) > 0 and acked_s > sent_s
        owes = owes_data or info[_PROBES] > 0
        heard_s = now_s - min(acked_s, _seconds(info, _LAST_DATA_RECV))
        if (
            not owes or heard_s > self._asked_s or now_s - self._looked_s > self._silence_s
        ):  # in the last case, this process itself was suspended, so the looks prove nothing
            self._asked_s = now_s
        self._looked_s = now_s
        is_overdue = now_s - self._asked_s >= self._silence_s
        was_late, self._is_late = (
            self._is_late,
            is_overdue and owes_data,
        )  # must hold in two checks in a row, because data that was just sent is still on its way
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
        """Whether the connection is lost because the other host does not respond."""
        if self._is_silent or not self.is_lost:
            return self._is_silent
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return _seconds(info, _LAST_ACK_RECV) > self._silence_s + KEEPALIVE_S

    def shut(self) -> None:
        """Shut the connection down, also for the engine and the other rank."""
        with contextlib.suppress(OSError):  # it has already ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close this descriptor; the link must not be used any more."""
        self._socket.close()


def _number(info: bytes, offset: int) -> int:
    return int.from_bytes(info[offset : offset + 4], sys.byteorder)


def _seconds(info: bytes, offset: int) -> float:
    return _number(info, offset) / 1e3


def watch_store(port: int, silence_s: float) -> None:
    """Let the kernel end this process's connections to a TCPStore's port once the other side is silent.

    TCP_USER_TIMEOUT is safe here: requests are so short that the buffer of a suspended server has room for them.
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
    """Return the inode and the descriptor of each socket of this process."""
    return [(target, fd) for fd, target in open_files().items() if target.startswith("socket:")]


def engine_descriptors() -> set[tuple[str, int]]:
    """Return the target and the number of every open descriptor of the kinds that engines open."""
    return {
        (target, fd)
        for fd, target in open_files().items()
        if target.startswith(("socket:", "pipe:", "anon_inode:[event"))
    }


@contextlib.contextmanager
def closed_at_exec() -> Iterator[set[tuple[str, int]]]:
    """Mark the descriptors that an engine opens in the block as close-on-exec, so that no other program inherits them.

    The context yields a set. After the block, this set holds the target and the number of each of these descriptors.
    """
    known = engine_descriptors()
    opened: set[tuple[str, int]] = set()
    yield opened
    opened |= engine_descriptors() - known
    for _, fd in opened:
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            os.set_inheritable(fd, False)


def duplicate(fd: int) -> socket.socket | None:
    """Return a duplicate of a TCP connection as a socket object; None if `fd` is anything else."""
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
