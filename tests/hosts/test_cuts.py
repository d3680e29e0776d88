"""Connections between hosts are destroyed at random moments; stopped ranks are waited for. Every wait ends in time.

Short here; PHALANX_TEST_LONG=1 (`make stress`) runs the full counts. A failure names its seed.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from phalanx import PhalanxError
from phalanx.testing import await_release, reached, spawn_ranks

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
NUM_CUTS = 200 if LONG else 6
NUM_PAIRS, NUM_PAUSES = (10, 10) if LONG else (2, 2)
TIMEOUT_S = 30.0
NAMED_WITHIN_S = 5.0  # of a loaded machine; the timeout is far
MEBI = 1 << 20


def connections():
    """Return this rank's connections to others."""
    group = dist.group.WORLD._operations._core
    channels = (group._steps._everyone, group._steps._rail._channel)
    return [link._socket for channel in channels for link in channel.links.values()]


def cut_when_told():
    """Reset a connection, which both ends see as if the network had, or shut it down."""
    way, port = await_release("cut")
    connection = next(one for one in connections() if one.getsockname()[1] == port)
    if way == "shut":
        connection.shutdown(socket.SHUT_RDWR)
    else:
        nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
        ctypes.CDLL(None).connect(connection.fileno(), nowhere, len(nowhere))


def move_bytes(kind, rank, world_size):
    """Run one operation that keeps connections busy."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    if kind == "large":
        dist.all_reduce(torch.ones(16 * MEBI))
    elif kind == "small":
        dist.all_reduce(torch.ones(4))
    elif kind == "middle":
        dist.broadcast(torch.ones(MEBI // 8), src=0)
    elif kind == "messages":
        sent = dist.isend(torch.ones(4 * MEBI), after)
        dist.recv(torch.empty(4 * MEBI), before)
        sent.wait()
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty(world_size * MEBI), torch.ones(world_size * MEBI))
    else:
        for work in [dist.all_reduce(torch.ones(MEBI), async_op=True) for _ in range(3)]:
            work.get_future().wait() if kind == "futures" else work.wait()


WAYS = ("reset", "shut", "destroy")
KINDS = ("large", "small", "middle", "messages", "all_to_all", "async", "futures")


def move_until_cut(rank, world_size, kind):
    reached("up", [connection.getsockname()[1] for connection in connections()])
    threading.Thread(target=cut_when_told, daemon=True).start()
    while True:
        try:
            move_bytes(kind, rank, world_size)
        except PhalanxError:
            return time.monotonic()
        except RuntimeError:  # a future's error loses its class
            if kind != "futures":
                raise
            return time.monotonic()


def cut_one(seed):
    generator = random.Random(seed)
    kind, way = KINDS[seed % len(KINDS)], WAYS[seed % len(WAYS)]
    hosts = generator.choice([[1, 1], [1, 1, 1], [2, 2]])
    num = sum(hosts)
    with spawn_ranks(move_until_cut, num, kind, hosts=hosts, group_timeout_s=TIMEOUT_S) as ranks:
        ports = ranks.wait_until_reached("up")
        time.sleep(generator.random() * 0.3)  # the random moment
        owner = generator.randrange(num)
        port = generator.choice(ports[owner])
        cut_at = time.monotonic()
        if way == "destroy":
            subprocess.run(["ss", "-K", "-tn", "sport", "=", f":{port}"], check=True, capture_output=True)
        else:
            ranks.release("cut", (way, port), ranks=[owner])
        outcomes = ranks.join(TIMEOUT_S + 10)  # also the ends of the processes
    for outcome in outcomes:
        # Gloo writes on a thread that nothing guards: there, an error that no network causes ends the process.
        if way == "destroy" and outcome.rank == owner and outcome.exitcode == -signal.SIGABRT:
            assert not outcome.hung
            print(f"seed {seed}: Gloo aborted rank {owner}")
            continue
        assert outcome.ok, f"{kind} {way} {hosts}: {outcome}"
        took_s = outcome.value - cut_at
        assert took_s < NAMED_WITHIN_S, f"{kind} {way} {hosts}: {took_s:.1f} s"


def test_every_wait_ends_when_a_connection_is_destroyed():
    if os.geteuid() or not shutil.which("ss"):
        pytest.skip("ending a connection from outside takes root and ss")
    first = random.SystemRandom().randrange(1 << 30) if LONG else 1
    for seed in range(first, first + NUM_CUTS):
        try:
            cut_one(seed)
        except BaseException as error:
            raise AssertionError(f"cut_one({seed})") from error


# ---------------------------------------------------------------- ranks that are stopped


def move_through_pauses(rank, world_size, kind, folder, num_pauses):
    for number in range(num_pauses):
        reached(f"busy {number}")
        is_over = torch.zeros(1)
        while not is_over:
            move_bytes(kind, rank, world_size)
            is_over += os.path.exists(f"{folder}/{number}")
            dist.all_reduce(is_over)
        reached(f"gone on {number}")


def pause_a_pair(seed, folder):
    """Stop a rank of two again and again while bytes move; return for how long each time."""
    generator = random.Random(seed)
    kind = KINDS[seed % len(KINDS)] if LONG else ("large", "messages")[seed]
    os.mkdir(folder)
    options = {"hosts": [1, 1], "init_method": "tcp", "group_timeout_s": 60}
    paused_s = []
    with spawn_ranks(move_through_pauses, 2, kind, folder, NUM_PAUSES, **options) as ranks:
        for number in range(NUM_PAUSES):
            ranks.wait_until_reached(f"busy {number}", timeout_s=60)
            victim = generator.randrange(2)  # rank 0 serves the store
            paused_s.append(generator.triangular(2, 30, 4) if LONG else 2.5)
            time.sleep(generator.random() * 0.3)
            ranks.stop(victim)
            time.sleep(paused_s[-1])
            open(f"{folder}/{number}", "w").close()
            ranks.resume(victim)
            ranks.wait_until_reached(f"gone on {number}", timeout_s=60)
        outcomes = ranks.join(60)
    assert all(outcome.ok for outcome in outcomes), f"{kind}: {outcomes}"
    return paused_s


def test_a_stopped_rank_is_waited_for(tmp_path):
    first = random.SystemRandom().randrange(1 << 30) if LONG else 0
    seeds = range(first, first + NUM_PAIRS)
    with ThreadPoolExecutor(NUM_PAIRS) as pool:
        paused_s = list(pool.map(lambda seed: pause_a_pair(seed, str(tmp_path / str(seed))), seeds))
    assert sum(map(len, paused_s)) == NUM_PAIRS * NUM_PAUSES, paused_s
