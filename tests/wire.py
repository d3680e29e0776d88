"""The process that is a host of `tests.namespaces`: it holds the namespaces, and is the host's end of the wire.

``python wire.py NAME RATE_BIT_S DELAY_S`` in fresh namespaces. Every packet that comes in waits here, in the kernel's
NFQUEUE, for as long as a line of that rate and length would have taken: one packet after the other at the rate, then
the delay. (Linux has tc-netem for this, but many kernels are built without it; and a token bucket lets a small message
pass as if the line had no rate.) Only the first bytes of a packet are copied to this process.

When standard input ends, however the parent did, every process in the host is killed and the namespaces go.
"""

from __future__ import annotations

import collections
import os
import select
import signal
import socket
import struct
import sys
import time

# Numbers of linux/netfilter/nfnetlink.h, nf_tables.h, nf_tables_compat.h and nfnetlink_queue.h.
_NETLINK_NETFILTER = 12
_QUEUE, _TABLES = 3, 10  # subsystems
_REQUEST, _ACK, _CREATE, _APPEND = 1, 4, 0x400, 0x800
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_MOST_QUEUED = 1 << 20  # packets
_FRAME_BYTES = 38  # of Ethernet around each packet: preamble, header, checksum, gap
_RECEIVE_BYTES = 64 << 20
_OWN_DELAY_S = 5e-5  # to wake up twice for a packet; taken from the delay that was asked for


ENTRY_FLAG = "/proc/sys/kernel/domainname"  # of this namespace alone, and of no other use: says whether one may enter


def _attr(kind: int, *values: bytes | int | str) -> bytes:
    """Return a netlink attribute; several values are nested attributes, an int is four bytes in network order."""
    data = b""
    for value in values:
        if isinstance(value, str):
            value = value.encode() + b"\0"
        data += struct.pack(">I", value) if isinstance(value, int) else value
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _nested(kind: int, *values: bytes) -> bytes:
    return _attr(kind | 0x8000, *values)


def _message(kind: int, flags: int, family: int, number: int, *attrs: bytes) -> bytes:
    body = struct.pack(">BBH", family, 0, number) + b"".join(attrs)
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 0, 0) + body


def _send(netlink: socket.socket, message: bytes) -> None:
    """Send a message that asks for an answer, and raise the error that it says."""
    netlink.send(message)
    error = -struct.unpack_from("=i", netlink.recv(65536), 16)[0]
    if error:
        raise OSError(error, os.strerror(error))


def _queue_what_comes_in() -> None:
    """Add the rule of nf_tables that sends every packet that is not from this host itself to queue 0."""
    loopback = struct.pack("=I", socket.if_nametoindex("lo"))
    not_own = (
        _nested(1, _attr(1, "meta"), _nested(2, _attr(1, 1), _attr(2, 4))),  # register 1 = incoming interface
        _nested(1, _attr(1, "cmp"), _nested(2, _attr(1, 1), _attr(2, 1), _nested(3, _attr(1, loopback)))),  # !=
    )
    to_queue = _nested(1, _attr(1, "target"), _nested(2, _attr(1, "NFQUEUE"), _attr(2, 0), _attr(3, bytes(8))))
    table, chain, rule = _TABLES << 8, _TABLES << 8 | 3, _TABLES << 8 | 6
    ours, hook = _attr(1, "wire"), _nested(4, _attr(1, 1), _attr(2, 0))  # LOCAL_IN, priority 0
    ipv4, expressions = socket.AF_INET, _nested(4, *not_own, to_queue)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        _send(
            netlink,
            _message(_BATCH_BEGIN, 0, 0, _TABLES)
            + _message(table, _CREATE, ipv4, 0, ours)
            + _message(chain, _CREATE, ipv4, 0, ours, _attr(3, "in"), hook, _attr(7, "filter"))
            + _message(rule, _CREATE | _APPEND | _ACK, ipv4, 0, ours, _attr(2, "in"), expressions)
            + _message(_BATCH_END, 0, 0, _TABLES),
        )


def _open_queue() -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    netlink.setsockopt(socket.SOL_SOCKET, 33, _RECEIVE_BYTES)  # SO_RCVBUFFORCE: a full buffer would drop packets
    config = _QUEUE << 8 | 2
    _send(netlink, _message(config, _ACK, 0, 0, _attr(1, struct.pack(">BBH", 1, 0, socket.AF_INET))))  # bind
    copy = struct.pack(">IB", 4, 2)  # the packet's first 4 bytes: the IPv4 header's, with its length
    whole = (_attr(4, 4), _attr(5, 4))  # segments of a large send stay together
    _send(netlink, _message(config, _ACK, 0, 0, _attr(2, copy), _attr(3, _MOST_QUEUED), *whole))
    netlink.setblocking(False)
    return netlink


def _run_wire(netlink: socket.socket, rate_bit_s: float, delay_s: float) -> None:
    """Delay what comes in until standard input ends."""
    delay_s = max(delay_s - _OWN_DELAY_S, 0.0)
    on_the_way: collections.deque[tuple[float, bytes]] = collections.deque()
    byte_s = 8 / rate_bit_s if rate_bit_s else 0.0
    sources: tuple[socket.socket | int, ...] = (netlink, 0)
    free_s = 0.0  # when the line has sent what came before
    while True:
        wait_s = max(on_the_way[0][0] - time.monotonic(), 0) if on_the_way else None
        ready = select.select(sources, [], [], wait_s)[0]
        if 0 in ready:
            return
        now = time.monotonic()
        while ready:
            try:
                packet = netlink.recv(256)
            except BlockingIOError:
                break
            length = packet[-2] << 8 | packet[-1]
            free_s = max(free_s, now) + (length + _FRAME_BYTES * (1 + length // 1500)) * byte_s
            on_the_way.append((free_s + delay_s, packet[24:28]))
        last = None
        while on_the_way and on_the_way[0][0] <= now:
            last = on_the_way.popleft()[1]
        if last is not None:  # it and all before it may pass
            netlink.send(_message(_QUEUE << 8 | 3, 0, 0, 0, _attr(2, struct.pack(">I", 1) + last)))


def kill_all(pid: int) -> None:
    """Kill every process in the network namespace of `pid`, except `pid`, and those that they start meanwhile."""
    here, alive = os.readlink(f"/proc/{pid}/ns/net"), True
    while alive:
        alive = False
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if int(name) != pid and os.readlink(f"/proc/{name}/ns/net") == here:
                    os.kill(int(name), signal.SIGKILL)
                    alive = True
            except OSError:  # ended meanwhile; a zombie has no namespace
                continue
        time.sleep(0.001)


def _write_entry_flag(word: str) -> None:
    with open(ENTRY_FLAG, "w") as file:
        file.write(word)


def main() -> None:
    name, rate_bit_s, delay_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    socket.sethostname(name)
    _write_entry_flag("open")
    for algorithm in ("cubic", "reno"):  # what hosts usually have; this machine's default may be another
        try:
            with open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as file:
                file.write(algorithm)
            break
        except OSError:  # not in this kernel, or not for namespaces
            continue
    netlink = None
    if rate_bit_s or delay_s:
        netlink = _open_queue()
        _queue_what_comes_in()
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a wire does not wait for a busy core
    print("ready", flush=True)
    try:
        if netlink:
            _run_wire(netlink, rate_bit_s, delay_s)
        else:
            sys.stdin.read()
    finally:
        _write_entry_flag("closed")
        kill_all(os.getpid())


if __name__ == "__main__":
    main()
