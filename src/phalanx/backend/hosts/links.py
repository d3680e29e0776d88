"""Watches the connections between hosts from outside the engine that opened them.

**No heartbeats of ours.** A thread that sent them would be stopped with its process, delayed by the interpreter's
lock, or would keep sending while the rank is deadlocked. A process that computes for an hour or is stopped in a
debugger is alive, and its kernel shows it: the kernel acknowledges data, and answers probes of idle connections and of
those whose reader takes nothing. So idle connections have the kernel's keepalive, and the watcher looks at all of them
with ``TCP_INFO`` five times in ``PHALANX_SILENCE_S``. A host is silent once its kernel has owed an answer for that
long: data sent after its last acknowledgement, or two probes, are unanswered. (One probe may be: a kernel answers at
most two a second.)

So a host that lost power or its cable is noticed although nothing is sent. A busy host never is, nor one whose ranks
are stopped and whose kernel answers each probe that its buffer is full; TCP_USER_TIMEOUT can't tell the two apart. A
virtual machine that is paused whole counts as lost, since its kernel does not answer. A process that dies has its
connections closed by its kernel at once.

**Gloo's sockets are closed from outside**, since Gloo offers no way to end a wait (see `running`). The sockets that it
opened while it connected are found by their inodes, duplicated, identified by the addresses at their ends, watched,
and shut down to end a group. They are also made to close at ``exec``, or a program that a rank has started would hold
the connections of the rank after its death. MPI can't end a wait at all: there the watcher asks the store for a
failure every 0.2 s, and so does each slice of waiting.
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

_MOST_KEPT = 127  # probes: MAX_TCP_KEEPCNT
_ESTABLISHED = 1  # linux/tcp_states.h
_PROBES, _UNACKED = 3, 24  # offsets in struct tcp_info, linux/tcp.h; times are in milliseconds
_LAST_DATA_SENT, _LAST_DATA_RECV, _LAST_ACK_RECV = 44, 52, 56
_INFO_BYTES = 60
_RTO_MAX_MS = 44  # option of Linux 6.15 and newer
_LOOKS = 5  # per silence_s
_MOST_PROBES = 1  # may be unanswered: a kernel answers at most two per second (net.ipv4.tcp_invalid_ratelimit)


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
        # The kernel ends the connection later than `look`, in case this process holds up the watching thread.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(max(1, round(silence_s)) + 2, _MOST_KEPT))
        with contextlib.suppress(OSError):  # without it, probes of a stopped reader come ever more slowly
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
        # After an acknowledgement later than the last send, the rest may stay unacknowledged: a full reader drops it.
        owes_data = _number(info, _UNACKED) > 0 and acked_s > sent_s
        owes = owes_data or info[_PROBES] > 0
        heard_s = now_s - min(acked_s, _seconds(info, _LAST_DATA_RECV))
        if (
            not owes or heard_s > self._asked_s or now_s - self._looked_s > self._silence_s
        ):  # this rank itself was stopped
            self._asked_s = now_s
        self._looked_s = now_s
        is_overdue = now_s - self._asked_s >= self._silence_s
        was_late, self._is_late = (
            self._is_late,
            is_overdue and owes_data,
        )  # twice in a row: data just sent is still travelling
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
        """Shut the connection down, for the engine and for the other rank, too."""
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
    """Make the kernel end this process's connections to a TCPStore's port once they are silent.

    TCP_USER_TIMEOUT is safe here: requests are so short that even a stopped store has room for them.
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
    """Return the target and the descriptor of everything that an engine may have opened."""
    return {
        (target, fd)
        for fd, target in open_files().items()
        if target.startswith(("socket:", "pipe:", "anon_inode:[event"))
    }


@contextlib.contextmanager
def closed_at_exec() -> Iterator[set[tuple[str, int]]]:
    """Mark descriptors that an engine opens in the block close-on-exec; connections must not outlive this process.

    The context's value is a set that holds their targets and descriptors after the block.
    """
    known = engine_descriptors()
    opened: set[tuple[str, int]] = set()
    yield opened
    opened |= engine_descriptors() - known
    for _, fd in opened:
        with contextlib.suppress(OSError):  # closed since
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
