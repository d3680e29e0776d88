"""What the ranks of a job on other hosts are doing, asked of ``phalanx run`` there through the one here.

Which hosts have answered is told apart from which ranks were reported: while a job starts, a host answers before it
has forked all of its ranks. The agent that passes a question on says last how many hosts were silent. Another host's
JSON may be anything, so it becomes the dataclass that was sent (`read_as`), with bounded sizes and 64-bit numbers, or
is left out as a whole; no reader checks a type of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from typing import Any

from phalanx._errors.facts import read_as
from phalanx.diagnose.jobs import Job
from phalanx.diagnose.stacks import Stacks, Thread
from phalanx.diagnose.why.activity import Activity, Look
from phalanx.diagnose.why.answer import Heard, RankSeen
from phalanx.launch.nodes.questions import ANSWER_S, is_trusted, socket_of
from phalanx.wire.files import parse_json

_TIME_S = ANSWER_S + 0.5  # for its way, too
_MOST_BYTES = 64 << 20


class OtherHosts:
    """A question that is under way to the other hosts of a job, if somebody here passes it on."""

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

    def answers(self) -> Heard:
        """Return what other hosts tell until the time is up; what can't be understood is left out."""
        if self._asked is None:
            return Heard()
        said = b""
        with self._asked, contextlib.suppress(OSError):
            while len(said) < _MOST_BYTES:
                self._asked.settimeout(max(self._deadline - time.monotonic(), 0.01))
                if not (more := self._asked.recv(1 << 16)):
                    break
                said += more
        seen: list[RankSeen] = []
        hosts: list[str] = []
        are_all = False
        for line in said.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                told = parse_json(line)
                if "num_silent" in told:  # the last word of whoever has passed the question on
                    are_all = told["num_silent"] == 0
                    continue
                host = str(told["host"])[:80]
                seen += [_read(host, one) for one in told["seen"]]
                hosts.append(host)
        return Heard(tuple(seen), tuple(hosts), are_all)


def _read(host: str, facts: dict[str, Any]) -> RankSeen:
    """Return a rank as another host wrote it with `why.as_json`.

    Raises:
        ValueError: It did not.
    """
    doing = dataclasses.replace(read_as(facts, Activity), host=host)
    stacks = Stacks(read_as(facts["threads"], tuple[Thread, ...]), read_as(facts["problem"], str))
    return RankSeen(doing, Look(doing.pid, None, stacks))
