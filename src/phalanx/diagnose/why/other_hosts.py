"""Evidence from the other hosts of a job: the side that asks for it, and the side that gathers it.

The launchers of a job pass the question on to each other. Each runs this module, which looks at the ranks of its host
and prints them as one `HostEvidence`. A host that has answered need not have reported all its ranks: while a job
starts, a host may answer before it has forked its ranks. The agent that passes a question on reports at the end how
many hosts did not answer. Another host's JSON may hold anything, so it is accepted only if it fits the dataclass that
should have been sent (`read_value`), with bounded sizes and 64-bit numbers; otherwise it is left out as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
import time

from phalanx import _env
from phalanx.diagnose.jobs import Job, find_job
from phalanx.diagnose.stacks import Stacks, Thread
from phalanx.diagnose.why.activity import Activity, Look
from phalanx.diagnose.why.evidence import Elsewhere, RankSeen, gather, with_native
from phalanx.diagnose.why.findings import conclude
from phalanx.launch.nodes.questions import ANSWER_S, is_trusted, socket_of
from phalanx.wire.messages import parse_json, read_value

_TIME_S = ANSWER_S + 0.5  # time for the answers, including their transfer
_NATIVE_S = 0.7
_MOST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class RankEvidence:
    """Evidence about one rank, as one host sends it to another."""

    doing: Activity
    threads: tuple[Thread, ...]
    problem: str


@dataclasses.dataclass(frozen=True)
class HostEvidence:
    """Evidence about the ranks of one host, as that host sends it to another."""

    host: str
    ranks: tuple[RankEvidence, ...]

    def seen(self) -> list[RankSeen]:
        """Return the ranks in the form of local evidence."""
        return [
            RankSeen(
                dataclasses.replace(one.doing, host=self.host[:80]),
                Look(one.doing.pid, None, Stacks(one.threads, one.problem)),
            )
            for one in self.ranks
        ]


class OtherHosts:
    """A question to the other hosts of a job, passed on by the job's launcher."""

    def __init__(self, job: Job) -> None:
        self._deadline = time.monotonic() + _TIME_S
        self._asked: socket.socket | None = None
        here = {rank.rank for rank in job.ranks}
        if job.launcher != "phalanx run" or len(here) >= job.world_size:
            return
        with contextlib.suppress(OSError):
            asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            asked.settimeout(_TIME_S)
            try:
                asked.connect(socket_of(job.launcher_pid))
                self._asked = asked if is_trusted(asked) else None
            finally:
                if self._asked is None:
                    asked.close()

    def answers(self) -> Elsewhere:
        """Return the evidence that other hosts send in time; evidence that can't be understood is left out."""
        if self._asked is None:
            return Elsewhere()
        received = b""
        with self._asked, contextlib.suppress(OSError):
            while len(received) < _MOST_BYTES:
                self._asked.settimeout(max(self._deadline - time.monotonic(), 0.01))
                if not (more := self._asked.recv(1 << 16)):
                    break
                received += more
        found: list[HostEvidence] = []
        is_complete = False
        for line in received.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                message = parse_json(line)
                if isinstance(message, dict) and "num_silent" in message:  # the launcher's last line
                    is_complete = message["num_silent"] == 0
                else:
                    found.append(read_value(message, HostEvidence))
        seen = tuple(rank for evidence in found for rank in evidence.seen())
        return Elsewhere(seen, tuple(evidence.host for evidence in found), is_complete)


def main() -> None:
    """Print this host's evidence about the job of the process on the command line; a launcher passes the output on."""
    evidence = gather(find_job(sys.argv[1]))
    evidence = with_native(evidence, conclude(evidence).culprits, _NATIVE_S)
    ranks = [
        RankEvidence(one.doing, one.native or one.look.stacks.threads, one.look.stacks.problem) for one in evidence.seen
    ]
    print(json.dumps(dataclasses.asdict(HostEvidence(_env.host_name(), tuple(ranks)))))


if __name__ == "__main__":
    main()
