"""Copies this host's snapshots into other hosts' memory, and keeps theirs in this host's memory. Imports no torch.

The supervisor starts one replicator per host, at the lowest priority. The replicator is a process of its own because
the agent's heartbeats must not wait for copies, and because the ranks' group is busy with training. One thread sends;
for each host that sends to this one, one thread receives. Images are sent from the memfd of the snapshots with
`sendfile`, and the other host's replicator receives them into its own memfd.

The protocol runs over TCP. An **offer** (a line of JSON) says which images will follow, and which snapshot the holder
must not overwrite with them. The holder confirms at once that it has received the offer. When it has made room, it
answers that it is ready for the images; otherwise it answers why not. The images follow in pieces, each preceded by its
length and answered by a byte. `sendfile` does not copy: if a rank writes into a page before its piece has been
answered, the new bytes may be sent. So at the end the sender checks that no rank has written into the images, and only
then tells the holder to mark them as whole.

**Training goes first.** A piece has as many bytes as the link carries in 4 ms (8 KiB at least), and is answered before
the next piece is sent. So a message of the ranks never waits behind more than one piece. After each piece, the link is
left alone for as long as the piece took. A rate limit (SO_MAX_PACING_RATE) would need a number that nobody knows. After
a copy, the process rests until copying has cost no more than 1 % of the processors' time on average. Training loses
about three times as much, because this 1 % includes neither the kernel's work for the link nor the effect of colder
caches.

**If the replicator dies,** the supervisor starts it again after a pause that doubles each time. The new process waits
out the pause itself, so the supervisor needs no timer. The supervisor keeps the listener open, so the port that other
nodes know stays the same. During the pause, ranks still ask for replicas, so the safe snapshot stays until a newer one
has been copied. If a host is lost during the pause, the safe snapshot is the one that is needed.

`phalanx.checkpoint.memory.slots` has the rules for which snapshot may be overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.layout import PAGE_BYTES, Copied, Copy, Region
from phalanx.host.cgroups import usable_cpus
from phalanx.launch.replicas.receiver import Receiver
from phalanx.launch.replicas.wire import PIECE, Wire
from phalanx.wire.packets import PacketSocket

_LOOK_S = 0.05
_AGAIN_S, _MOST_AGAIN_S = 1.0, 60.0  # first and longest pause before a holder that failed is asked again
_SAID_FAILURES = 2  # failures in a row before a line is shown; a single one may be the loss of a host
_MOST_FAILURES = 3  # a snapshot is left with fewer replicas once each holder has failed this often
_PIECE_S = 0.004
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 8 << 10, 8 << 20
_REST, _SLOW_REST = 1.0, 4.0  # rest after a piece, in multiples of its duration; the second value applies to slow links
_SHARE_OF_CPUS = 0.01  # fraction of the CPUs' time for copying and receiving; training loses about three times as much


class Refused(Exception):
    """A holder refuses the snapshot; the message is the holder's reason."""


class Changed(Exception):
    """A rank has overwritten the snapshot that was being copied, or the ranks now want another snapshot copied."""


class Replicator:
    """Sends snapshots to the holders of this node, whenever the node's ranks want a snapshot copied.

    Args:
        channel: Channel to the supervisor.
        listener: Socket to which other nodes connect.
        snapshots_fd: Memory of the snapshots.
        run_id: Name of the job.
        num_replicas: Number of other nodes that should have a copy of each snapshot.
    """

    def __init__(
        self, channel: PacketSocket, listener: socket.socket, snapshots_fd: int, run_id: str, num_replicas: int
    ) -> None:
        self._channel, self._fd, self._run_id, self._num_replicas = channel, snapshots_fd, run_id, num_replicas
        self._receiver = Receiver(listener, snapshots_fd, run_id)
        self._holders: list[dict[str, Any]] = []
        self._wires: dict[str, Wire] = {}
        self._num_failures: dict[str, int] = {}  # failures in a row, by holder
        self._asked_again_s: dict[str, float] = {}  # time to ask a failed holder again, by holder
        self._done: Copy | None = None
        self._has: set[str] = set()  # holders that have the snapshot that is being copied
        self._copying: Copy | None = None
        self._piece_bytes = _LEAST_PIECE_BYTES
        self._rests_until_s = 0.0
        self._cpu_s = 0.0  # processor time that had been spent when the current rest began
        self._said: set[str] = set()

    def run(self) -> None:
        """Copy what the ranks ask for until the supervisor has gone."""
        self._cpu_s = self._spent_s()
        layout.note_replicator_started(self._fd)
        while self._hear(_LOOK_S):
            wanted = layout.asked_copy(self._fd)
            now_s = time.monotonic()
            if wanted is None or wanted == self._done or not self._receiver.me or now_s < self._rests_until_s:
                continue
            if regions := self._whole(wanted):
                self._copy(wanted, regions)

    def _hear(self, timeout_s: float) -> bool:
        """Process the supervisor's messages; return whether the supervisor is alive."""
        if select.select([self._channel.fileno()], [], [], timeout_s)[0]:
            for packet in self._channel.receive():
                self._holders = packet["holders"]
                self._receiver.me = packet["me"]
                self._num_failures.clear()
                self._asked_again_s.clear()
                self._has.clear()
                self._rests_until_s = 0.0  # no rest: replicas that were lost with a node are replaced immediately
                for name in self._wires.keys() - {holder["id"] for holder in self._holders}:
                    self._wires.pop(name).close()
        return self._channel.alive

    def _whole(self, wanted: Copy) -> list[Region]:
        """Return the regions of a snapshot if all ranks of this host have written theirs; otherwise an empty list."""
        moment = wanted.attempt, wanted.step, wanted.folder
        found = [
            region
            for region in layout.whole_regions(self._fd)
            if region.is_own and (region.head.attempt, region.head.step, region.head.folder) == moment
        ]
        return found if found and len(found) == found[0].head.num_here else []

    def _copy(self, wanted: Copy, regions: list[Region]) -> None:
        began_s = time.monotonic()
        if wanted != self._copying:
            self._copying, self._has = wanted, set()
        problems = []
        has_come_back = False
        for holder in self._holders:
            name = holder["id"]
            if len(self._has) == self._num_replicas:
                break
            if name in self._has or time.monotonic() < self._asked_again_s.get(name, 0.0):
                continue
            try:
                self._send(holder, wanted, regions)
                self._has.add(name)
                num = self._num_failures.pop(name, 0)
                has_come_back |= num >= _SAID_FAILURES
            except Refused as error:
                self._wires.pop(name, Wire(None)).close()  # the holder has closed its end as well
                problems.append(f"{holder['host']} keeps no replica ({error})")
            except Changed:
                return
            except (OSError, ValueError, KeyError) as error:
                self._note_failure(holder, str(error))
        is_enough = len(self._has) >= min(self._num_replicas, len(self._holders))
        now_s = time.monotonic()
        again_s = [self._asked_again_s[name] for name, num in self._num_failures.items() if num < _MOST_FAILURES]
        if again_s and not is_enough:
            self._rests_until_s = min(again_s)
            return
        cpu_before_s, self._cpu_s = self._cpu_s, self._spent_s()
        self._rests_until_s = now_s + (self._cpu_s - cpu_before_s) / (_SHARE_OF_CPUS * len(usable_cpus()))
        self._done = wanted
        took_ms = int(1e3 * (now_s - began_s))
        layout.note_copied(self._fd, Copied(wanted.attempt, wanted.step, len(self._has), took_ms))
        if not is_enough:
            self._say_once(problems)
        elif has_come_back:
            self._said.clear()
            self._channel.send({"say": "replicas of this host's snapshots are being kept again"})

    def _spent_s(self) -> float:
        """Return the processor time spent on sending and receiving snapshots, without the time spent on strangers."""
        return time.thread_time() + self._receiver.spent_s

    def _note_failure(self, holder: Mapping[str, Any], error: str) -> None:
        name = holder["id"]
        self._wires.pop(name, Wire(None)).close()
        num = self._num_failures[name] = self._num_failures.get(name, 0) + 1
        pause_s = min(_AGAIN_S * 2 ** (num - 1), _MOST_AGAIN_S)
        self._asked_again_s[name] = time.monotonic() + pause_s
        if num == _SAID_FAILURES:
            again = "it will be asked again after increasing pauses"
            self._say_once([f"{holder['host']} accepts none now ({error}): {again}"])

    def _say_once(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._said:
                self._said.add(problem)
                self._channel.send({"say": f"replicas of this host's snapshots: {problem}"})

    # ------------------------------------------------------------ one copy

    def _send(self, holder: dict[str, Any], wanted: Copy, regions: list[Region]) -> None:
        """Send a snapshot to a holder, which then keeps it.

        Raises:
            Refused: The holder refuses the snapshot.
            Changed: The snapshot was overwritten, or is no longer wanted.
            OSError, ValueError: The connection has ended, or a stranger is at the other end.
        """
        wire = self._wires.get(holder["id"])
        if wire is None:
            wire = self._wires[holder["id"]] = Wire.to(holder["address"], holder["port"])
        head = regions[0].head
        answer = wire.ask(
            {
                "run_id": self._run_id, "holder": holder["id"], "attempt": wanted.attempt, "step": wanted.step,
                "folder": wanted.folder.hex(), "world_size": head.world_size, "first_rank": head.first_rank,
                "numbers": [region.number for region in regions], "sizes": [r.head.size_bytes for r in regions],
                "safe": [wanted.safe_attempt, wanted.safe_step],
            }
        )  # fmt: skip
        if "refused" in answer:
            raise Refused(str(answer["refused"])[:200])
        if answer["has"]:
            return
        for region in regions:
            at, end = region.offset + PAGE_BYTES, region.offset + PAGE_BYTES + region.head.size_bytes
            while at < end:
                at += self._send_piece(wire, at, min(self._piece_bytes, end - at))
                if not self._hear(0) or layout.asked_copy(self._fd) not in (None, wanted):
                    raise self._give_up(holder)
        if any(layout.head_at(self._fd, region.offset) != region.head for region in regions):
            raise self._give_up(holder)
        wire.commit()

    def _give_up(self, holder: dict[str, Any]) -> Changed:
        self._wires.pop(holder["id"], Wire(None)).close()
        return Changed()

    def _send_piece(self, wire: Wire, at: int, length: int) -> int:
        """Send a piece, wait until it has arrived, and then leave the link to the ranks for a while."""
        began_s = time.monotonic()
        wire.send(PIECE.pack(length))
        wire.send_file(self._fd, at, length)
        wire.await_byte()
        took_s = max(time.monotonic() - began_s, 1e-5)
        fitting = length * _PIECE_S / took_s
        self._piece_bytes = int(min(max(fitting, _LEAST_PIECE_BYTES), 2 * self._piece_bytes, _MOST_PIECE_BYTES))
        time.sleep((_SLOW_REST if fitting < _LEAST_PIECE_BYTES else _REST) * took_s)
        return length


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(19)
    channel = PacketSocket(socket.socket(fileno=int(sys.argv[1])))
    listener = socket.socket(fileno=int(sys.argv[2]))
    settings = json.loads(sys.argv[4])
    Replicator(channel, listener, int(sys.argv[3]), settings["run_id"], settings["num_replicas"]).run()
    os._exit(0)
