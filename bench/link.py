"""``python -m bench.link serve ADDRESS``, and on another host ``… measure ADDRESS``: the speed of plain TCP.

The second command prints a line of JSON: the round-trip time of a small message, and bytes per second. These are
measured for one stream to the server, and for two streams at the same time, one in each direction.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

_PORT = 29499
_CHUNK = 1 << 20
_ROUND_TRIPS = 300
_STREAM_S = 0.6  # approximate duration of each stream
_WAIT_S = 60.0


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK))
    while num_bytes:
        sent = connection.send(chunk[: min(num_bytes, _CHUNK)])
        num_bytes -= sent


def _receive(connection: socket.socket, num_bytes: int) -> None:
    chunk = bytearray(_CHUNK)
    while num_bytes:
        got = connection.recv_into(chunk, min(num_bytes, _CHUNK))
        if not got:
            raise ConnectionError("the other side of the link has ended")
        num_bytes -= got


def _both(connection: socket.socket, num_bytes: int) -> None:
    sender = threading.Thread(target=_send, args=(connection, num_bytes))
    sender.start()
    _receive(connection, num_bytes)
    sender.join()


def serve(address: str) -> None:
    """Serve one client that runs `measure`; each line from the client announces the transfer that follows."""
    with socket.create_server((address, _PORT)) as listener:
        connection = listener.accept()[0]
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        actions: dict[str, Callable[[socket.socket, int], None]] = {"one": _receive, "both": _both}
        while line := _line(connection):
            what, num_bytes = line.split()
            if what in actions:
                actions[what](connection, int(num_bytes))
            connection.sendall(b"\n")


def _line(connection: socket.socket) -> str:
    """Read a line, without reading beyond the newline; return "" at the end of the connection."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return ""
        line += byte
    return line.decode()


def measure(address: str) -> dict[str, float]:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            connection = socket.create_connection((address, _PORT), timeout=_WAIT_S)
            break
        except ConnectionRefusedError:  # the other side is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)

    def seconds(what: str, num_bytes: int) -> float:
        start = time.perf_counter()
        connection.sendall(f"{what} {num_bytes}\n".encode())
        if what == "one":
            _send(connection, num_bytes)
        elif what == "both":
            _both(connection, num_bytes)
        _line(connection)
        return time.perf_counter() - start

    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        facts = {"round_trip_s": statistics.median(seconds("ping", 0) for _ in range(_ROUND_TRIPS))}
        for what in ("one", "both"):
            num_bytes = _CHUNK
            while (took := seconds(what, num_bytes)) < _STREAM_S / 4:
                num_bytes *= 4
            num_bytes = int(num_bytes * _STREAM_S / took)
            facts[f"{what}_bytes_s"] = num_bytes / statistics.median(seconds(what, num_bytes) for _ in range(3))
    return facts


def main() -> None:
    what, address = sys.argv[1:]
    if what == "serve":
        serve(address)
    else:
        print(json.dumps(measure(address)))


if __name__ == "__main__":
    main()
