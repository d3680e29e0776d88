"""The memory and the replicator of a host, without its supervisor."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.layout import MAGIC, PAGE_BYTES, Copy, Head, region_offset
from phalanx.wire.packets import PacketSocket

LIMIT_S = 60
FOLDER = b"f" * 16
MAIN = """
from phalanx.host import spare_memory
from phalanx.host.cgroups import Memory
from phalanx.launch.replicas import replicator, wire
spare_memory.host_memory = lambda: Memory({0} << 22, 0)
wire.REPLICA_HEARD_S = {1}
replicator._AGAIN_S = {2}
replicator.main()
"""


def write_snapshot(fd, moment, contents, *, safe=(0, 0), first_rank=0, world_size=2):
    """Write a snapshot as a host's ranks do, and ask for copies."""
    for local_rank, content in enumerate(contents):
        head = Head(MAGIC, 1, moment[1], len(content), world_size, moment[0], FOLDER, first_rank, len(contents))
        offset = region_offset(local_rank, moment[1] % 2)
        os.pwrite(fd, content, offset + PAGE_BYTES)
        os.pwrite(fd, head.pack(), offset)
    layout.ask_for_copy(fd, Copy(*moment, FOLDER, *safe))


class ReplicaHost:
    """A supervisor's memory, with its replicator.

    Attributes:
        fd: The memory.
        path: Where ranks open it.
        port: Port of the replicator.
    """

    def __init__(self, name, num_replicas=1, most_mib=1 << 20, *, heard_s=20.0, pauses_s=1.0, port=0, is_known=True):
        self.name = name
        self.fd = os.memfd_create("snapshots")
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        layout.want_replicas(self.fd, num_replicas)
        self.channel, theirs = PacketSocket.pair()
        with theirs, socket.create_server(("127.0.0.1", port)) as listener:
            self.port = listener.getsockname()[1]
            fds = [theirs.fileno(), listener.fileno(), self.fd]
            settings = json.dumps({"run_id": "job", "num_replicas": num_replicas})
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN.format(most_mib, heard_s, pauses_s), *map(str, fds), settings],
                pass_fds=fds,
            )
        if is_known:
            self.follow([])

    def follow(self, holders):
        told = [{"id": name, "host": name, "address": "127.0.0.1", "port": port} for name, port in holders]
        self.channel.send({"me": self.name, "holders": told})

    def write(self, moment, contents, *, safe=(0, 0), first_rank=0, world_size=2):
        """Write a snapshot as this host's ranks do, and ask for copies."""
        write_snapshot(self.fd, moment, contents, safe=safe, first_rank=first_rank, world_size=world_size)

    def await_copied(self, moment):
        """Return what the replicator notes once it has copied a snapshot."""
        deadline = time.monotonic() + LIMIT_S
        while (copied := layout.last_copied(self.fd)) is None or (copied.attempt, copied.step) != moment:
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.005)
        return copied

    def kept(self):
        """Return the moments of which this host keeps images of others, with their contents, by number."""
        return {
            (region.head.attempt, region.head.step, region.number): os.pread(
                self.fd, region.head.size_bytes, region.offset + PAGE_BYTES
            )
            for region in layout.whole_regions(self.fd)
            if not region.is_own
        }

    def close(self):
        self.channel.close()
        assert self.process.wait(LIMIT_S) == 0  # it ends with its supervisor
        os.close(self.fd)
