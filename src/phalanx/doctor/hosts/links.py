"""Probes from host to host over plain sockets: reachability, round-trip time and bandwidth.

Every host listens on a port assigned by the system, as the engines do. Each connection is one measurement: the caller
sends the listener's token and the kind of probe. The listener answers small messages with its wall clock, and counts
the bytes of a stream.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from typing import NamedTuple

TIMEOUT_S = 2.0
_TOKEN_BYTES = 16
_PING, _STREAM = b"p", b"s"
_STAMP = struct.Struct("!d")
_COUNTED = struct.Struct("!Qd")
_NUM_TRIPS = 20
_BLOCK_BYTES = 1 << 18
_FEWEST_BLOCKS = 4  # at least this many blocks are sent, even if that takes longer than planned
_SLOW_START = 0.25  # fraction of a stream's duration, at its beginning, that is not counted
_MOST_CALLERS = 256
_LAST_S = 1e12  # latest plausible time, some 30,000 years from now
_LEAST_S = 1e-6  # shortest plausible stream


class Trip(NamedTuple):
    """Result of sending small messages: the median round-trip time, and how far the other host's clock is ahead."""

    round_trip_s: float
    clock_ahead_s: float


class Listener:
    """Answers probes until `close`; a caller needs its `port` and `token`."""

    def __init__(self) -> None:
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("0.0.0.0", 0))
        self.port: int = self._socket.getsockname()[1]
        self.token: str = os.urandom(_TOKEN_BYTES).hex()
        threading.Thread(target=self._accept, name="doctor-listener", daemon=True).start()

    def _accept(self) -> None:
        for _ in range(_MOST_CALLERS):
            try:
                caller, _ = self._socket.accept()
            except OSError:  # close() was called
                return
            threading.Thread(target=self._answer, args=(caller,), name="doctor-answer", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), caller:
            caller.settimeout(10 * TIMEOUT_S)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(caller, _TOKEN_BYTES).hex() != self.token:
                return
            if _receive(caller, 1) == _STREAM:
                caller.sendall(_COUNTED.pack(*_count(caller)))
                return
            while caller.recv(1):
                caller.sendall(_STAMP.pack(time.time()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._socket.close()


def _count(caller: socket.socket) -> tuple[int, float]:
    """Return the number of bytes and the seconds of a stream, without its slow start."""
    room = bytearray(_BLOCK_BYTES)
    marks, total = [], 0
    while num := caller.recv_into(room):
        total += num
        marks.append((time.perf_counter(), total))
    if len(marks) < 2:
        return total, 0.0
    first_s, last_s = marks[0][0], marks[-1][0]
    # Counting begins at the last mark within the slow start: the next mark may be so much later, if the receiver was
    # delayed, that little would be left to count.
    began_s, skipped = [mark for mark in marks if mark[0] <= first_s + _SLOW_START * (last_s - first_s)][-1]
    return total - skipped, last_s - began_s


def connect(address: str, port: int, token: str) -> socket.socket:
    """Return a connection to the listener at this address and port.

    Raises:
        OSError: The connection failed; see `why_not`.
    """
    connection = socket.create_connection((address, port), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes.fromhex(token))
    return connection


def measure_trip(connection: socket.socket) -> Trip:
    """Send small messages back and forth, one at a time; return their median time, and how the clocks differ."""
    connection.sendall(_PING)
    trips, best = [], (float("inf"), 0.0)
    for _ in range(_NUM_TRIPS):
        sent_wall_s, sent_s = time.time(), time.perf_counter()
        connection.sendall(b"?")
        (there_s,) = _STAMP.unpack(_receive(connection, _STAMP.size))
        took_s = time.perf_counter() - sent_s
        if not 0 <= there_s < _LAST_S:
            raise OSError(errno.EPROTO, "its answer is not a plausible time")
        trips.append(took_s)
        # Cristian 1989: assume that the other clock was read halfway through the trip. The shortest trip has the least
        # error.
        best = min(best, (took_s, there_s - (sent_wall_s + took_s / 2)))
    return Trip(sorted(trips)[_NUM_TRIPS // 2], best[1])


def measure_stream(connection: socket.socket, duration_s: float = 0.3) -> float:
    """Send as much as possible for `duration_s`; return the bytes per second that the receiver counted."""
    connection.sendall(_STREAM)
    block, num_sent, ends_s = bytes(_BLOCK_BYTES), 0, time.perf_counter() + duration_s
    while time.perf_counter() < ends_s or num_sent < _FEWEST_BLOCKS:
        connection.sendall(block)
        num_sent += 1
    connection.shutdown(socket.SHUT_WR)
    num_bytes, seconds = _COUNTED.unpack(_receive(connection, _COUNTED.size))
    if not 0 <= seconds < _LAST_S or (num_bytes and seconds < _LEAST_S):
        raise OSError(errno.EPROTO, "its answer is not a plausible time")
    return num_bytes / seconds if seconds else 0.0


def _receive(connection: socket.socket, num: int) -> bytes:
    data = b""
    while len(data) < num:
        part = connection.recv(num - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
        data += part
    return data


def why_not(error: OSError) -> tuple[str, str]:
    """Return the meaning of a connection error, and what to do about it."""
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})", "use an address, or add the name to DNS or /etc/hosts"
    if isinstance(error, TimeoutError):
        return (
            "no answer (timeout)",
            "a firewall or security group drops it, or the host is down: allow all TCP ports between the hosts",
        )
    if isinstance(error, ConnectionRefusedError):
        return "connection refused", "the host is there and nothing listens, or its firewall rejects: see both"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return (
            f"no route ({error.strerror})",
            "the host is down or its firewall rejects; or see ip route, and that all are in one network",
        )
    return error.strerror or str(error), "see ip addr and ip route on both hosts"


def schedule(num: int, most: int = 6) -> list[list[tuple[int, int]]]:
    """Return rounds of (sender, receiver) pairs; within a round, each host is in at most one pair.

    All rounds together cover every pair in both directions; at most the first `most` rounds are returned.

    Source: the circle method for round-robin tournaments.
    """
    seats: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(a, b) for a, b in zip(seats, reversed(seats), strict=True) if a is not None and b is not None]
        forth = [(a, b) for a, b in pairs[: len(pairs) // 2] if a != b]
        rounds += [forth, [(b, a) for a, b in forth]]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds[:most]
