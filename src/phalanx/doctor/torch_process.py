"""The doctor's side of the process that has torch: starts the process, reads its packets, kills it at the end."""

from __future__ import annotations

import dataclasses
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from phalanx._text import signal_name
from phalanx.doctor.finding import Finding, problem
from phalanx.doctor.torch_side import command
from phalanx.wire.packets import PacketSocket

Say = Callable[[str], None]

# time limit for all tests on one host that need torch; importing torch from a cold disk may take most of this time
_TORCH_S = 40.0
_ENGINE_S = 6.0
_END_S = 2.0


@dataclasses.dataclass(kw_only=True)
class Met:
    """Result of the meeting with the other hosts.

    Attributes:
        findings: Problems of this host in the meeting; on host 0, also findings about other hosts or several hosts.
        hosts: Facts of the hosts that arrived.
        level: Worst level of the whole job.
        rank: Node rank of this host; None if no rank was assigned.
    """

    findings: list[Finding]
    hosts: list[dict[str, Any]]
    level: str
    rank: int | None = None


class TorchProcess:
    """Owns the process, the socket to it and a file with its output, until the end of a ``with`` block."""

    def __init__(self, role: dict[str, Any]) -> None:
        self._settings = {"engine_deadline_s": _ENGINE_S, "role": role}

    def __enter__(self) -> TorchProcess:
        self._stderr = tempfile.TemporaryFile()
        self._packets, theirs = PacketSocket.pair()
        with theirs:
            self._process = subprocess.Popen(
                command(theirs.fileno(), self._settings),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # the processes that it has forked end with it
        self._process.wait()
        self._packets.close()
        self._stderr.close()

    def examine(self) -> dict[str, Any]:
        """Return the process's facts ``torch``, ``gpus`` and ``engines``; and ``died``: how it died, "" if alive."""
        told: dict[str, Any] = {"engines": [], "died": ""}
        ends_s = time.monotonic() + _TORCH_S
        while True:
            packet = self._next(ends_s)
            if packet is None:
                told["died"] = self._death(_TORCH_S)
                return told
            if "engine" in packet:
                told["engines"].append(packet)
                told.pop("begins", None)
            elif "engines" in packet or "error" in packet.get("torch", {}):
                return {**told, **{key: packet[key] for key in packet if key == "torch"}}
            else:
                told |= packet

    def meet(self, go: Mapping[str, Any], limit_s: float, say: Say) -> Met:
        """Make the process take part in the meeting; return the result of the meeting."""
        self._packets.send(go)
        findings: list[Finding] = []
        ends_s = time.monotonic() + limit_s
        while (packet := self._next(ends_s)) is not None:
            if "waiting" in packet:
                say(f"waiting {packet['waiting']}")
            elif "finding" in packet:
                findings.append(Finding(**packet["finding"]))
            else:
                return Met(findings=findings, hosts=packet["hosts"], level=packet["job"], rank=packet["rank"])
        found = f"the meeting with the other hosts was not held: {self._death(limit_s)}"
        todo = "see torch above; nothing is known of the other hosts"
        return Met(findings=[*findings, problem("meeting", found, todo)], hosts=[], level="problem")

    def _next(self, ends_s: float) -> dict[str, Any] | None:
        """Return the next packet; None if the process has ended or the time is up."""
        left_s = max(0.0, ends_s - time.monotonic())
        if not self._packets.alive or not select.select([self._packets], [], [], left_s)[0]:
            return None
        return self._packets.wait()

    def _death(self, limit_s: float) -> str:
        """Return how the process ended, with the last line of its output, or that it does not answer."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"no answer within {limit_s:g} s"
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"it ended with {how}{': ' * bool(last)}{last[:200]}"
