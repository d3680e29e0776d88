"""The store in which the hosts meet: host 0 opens it, the other hosts connect to it, and every wait has a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.doctor.deadline import UnansweredError, within
from phalanx.doctor.exercise import brief_error
from phalanx.doctor.finding import Finding, problem
from phalanx.doctor.hosts import links
from phalanx.doctor.hosts.messages import whole
from phalanx.host.ports import port_problem
from phalanx.wire.messages import GarbledError, Shape
from phalanx.wire.store import JsonStore
from phalanx.wire.waiting import wait_until

Send = Callable[[dict[str, Any]], None]

PATIENCE_S = 2.0  # time after which a line names the hosts that are missing
POLL_S = 0.02
STAGE_S = 20.0  # time in which all hosts must complete a stage of the meeting
_HELLO = "phalanx-doctor"
_HANDSHAKE_S = 2.0
_NAME_S = 5.0  # time in which the name of host 0 may still appear in DNS
_KNOCK_EVERY_S = 0.2


class NotMetError(Exception):
    """The hosts did not meet; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


class Bulletin(JsonStore):
    """Named values and counters shared by all hosts of the job."""

    def wait_for(self, key: str, shape: Shape, ends_s: float, whom: str) -> Any:
        """Wait for a value and return it.

        Raises:
            NotMetError: The key had no value by `ends_s`.
            GarbledError: The value does not have the shape.
        """
        value = wait_until(lambda: self.get(key, shape), ends_s, most_s=POLL_S)
        if value is None:
            found = f"gave up waiting for {whom}"
            raise NotMetError(problem("meeting", found, "see what phalanx doctor says on host 0"))
        return value

    def sync(self, name: str, members: Sequence[int]) -> bool:
        """Wait until all members have called this with the same name; return False if some did not call it in time."""
        ends_s = time.monotonic() + STAGE_S
        self.add(f"sync/{name}", STAGE_S)
        have_come = wait_until(lambda: self.count(f"sync/{name}") >= len(members) or None, ends_s, most_s=POLL_S / 4)
        return have_come is not None


def open_bulletin(port: int, num_hosts: int) -> Bulletin:
    """Return the bulletin, which this host serves as host 0.

    Raises:
        NotMetError: This host can't listen on `port`.
    """
    if why := port_problem(port):
        todo = "end it, or use another --master-port on all hosts"
        raise NotMetError(problem("meeting", f"host 0 can't listen: {why}", todo))
    timeout = timedelta(seconds=STAGE_S)
    bulletin = Bulletin(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout))
    bulletin.set(_HELLO, num_hosts)
    return bulletin


def come_to_bulletin(host: str, port: int, ends_s: float, send: Send) -> tuple[Bulletin, int]:
    """Return the bulletin of host 0, and the number of hosts that host 0 expects.

    Raises:
        NotMetError: Host 0 was not reached by `ends_s`, or another program answers at its address.
    """
    where = f"{host}:{port}"
    _knock(host, port, ends_s, send)
    todo = "a job may be running there, or host 0 was given another port: see host 0"
    timeout = timedelta(seconds=_HANDSHAKE_S)
    # with a deadline, because torch would wait forever for a server that accepts the connection but does not answer
    try:
        store = within(2 * _HANDSHAKE_S, lambda: dist.TCPStore(host, port, is_master=False, timeout=timeout))
    except Exception as error:
        why = str(error) if isinstance(error, UnansweredError) else brief_error(error)
        found = f"what answers at {where} is not the doctor of host 0: {why}"
        raise NotMetError(problem("meeting", found, todo)) from None
    bulletin = Bulletin(store)
    try:
        return bulletin, bulletin.wait_for(_HELLO, whole, time.monotonic() + PATIENCE_S, "")
    except (NotMetError, GarbledError):
        found = f"a store answers at {where}, and no doctor of host 0 is there"
        raise NotMetError(problem("meeting", found, todo)) from None


def _knock(host: str, port: int, ends_s: float, send: Send) -> None:
    """Return once `port` of host 0 accepts connections."""
    began_s = time.monotonic()
    name_ends_s = min(ends_s, began_s + _NAME_S)
    said, last = False, OSError()

    def connect() -> bool | None:
        """Return True once connected, None to try again, and False if the name did not resolve in time."""
        nonlocal said, last
        left_s = ends_s - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(links.TIMEOUT_S, left_s))).close()
            return True
        except OSError as error:
            last = error
        if isinstance(last, socket.gaierror) and time.monotonic() >= name_ends_s:
            return False
        if not said and time.monotonic() >= began_s + PATIENCE_S:
            said = True
            send({"waiting": f"for host 0 at {host}:{port}: {links.why_not(last)[0]}"})
        return None

    if wait_until(connect, ends_s, least_s=_KNOCK_EVERY_S, most_s=_KNOCK_EVERY_S):
        return
    why, todo = links.why_not(last)
    if isinstance(last, ConnectionRefusedError):
        todo = "start phalanx doctor on host 0 with the same --master-port; or a firewall there rejects it"
    waited_s = time.monotonic() - began_s
    found = f"host 0 at {host}:{port} was not reached within {waited_s:.0f} s: {why}"
    raise NotMetError(problem("meeting", found, todo))
