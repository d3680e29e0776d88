"""Notices that this host is about to be taken away: a file that appears, or a provider's metadata service.

Two threads ask, one for each kind, since a name or a file system may hang. Nothing depends on the wall clock.

**A file that was there before is no notice.** A host that was drained is started again by the same command, with the
file of its last notice still in place; if that counted, it would leave for ever. So only a change since the start is a
notice, and a line names what was left over. The provider's own answer counts whenever it says so, since it speaks of
this machine. Where no other node stays, a notice becomes a SIGTERM to the ranks, because snapshots in memory go with
the last host.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

LOOK_EVERY_S = 1.0
ASK_EVERY_S = 5.0
"""What AWS advises; Google, Azure and AWS give 30 s, 30 s and two minutes of warning."""
_LIMIT_S = 2.0
_MOST_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Service:
    """Metadata service of a provider.

    Attributes:
        url: Address that is asked.
        headers: Headers of the request.
        token_url: Address that gives a token for the request, by PUT; empty: it needs none.
        is_notice: Function that tells from an answer whether this host is to go.
    """

    url: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    token_url: str = ""
    is_notice: Callable[[str], bool] = lambda answer: answer.strip().upper() not in ("FALSE", "NONE")


def _azure_takes(answer: str) -> bool:
    events = json.loads(answer).get("Events", [])
    return any(event.get("EventType") in ("Preempt", "Terminate") for event in events)


SERVICES: Mapping[str, Service] = {
    # 404 until there is a notice.
    "aws": Service(
        "http://169.254.169.254/latest/meta-data/spot/instance-action",
        token_url="http://169.254.169.254/latest/api/token",
    ),
    "gcp": Service(
        "http://metadata.google.internal/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    ),
    "azure": Service(
        "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
        {"Metadata": "true"},
        is_notice=_azure_takes,
    ),
}


class Notices:
    """Watches until a notice comes, and then says so once.

    Args:
        file: File that appears, or that is touched; empty: none. One that is there at the beginning is left over from
            another job, perhaps this host's last one, and would end each new one.
        url: Address that answers 200, or a name of `SERVICES`; empty: none.
        tell: Function that a thread calls with the notice in words.
        tell_leftover: Function that a thread calls with the file that is no notice.
    """

    def __init__(self, file: str, url: str, tell: Callable[[str], None], tell_leftover: Callable[[str], None]) -> None:
        self._file, self._tell, self._tell_leftover = file, tell, tell_leftover
        self._service = SERVICES.get(url) or (Service(url) if url else None)
        self._said = threading.Lock()
        self._has_looked = threading.Event()
        # Neither waits for the other: a file system that hangs keeps no provider's warning away.
        for watch in filter(None, (self._watch_file if file else None, self._watch_service if url else None)):
            threading.Thread(target=watch, name="phalanx-notices", daemon=True).start()
        if file:
            self._has_looked.wait(_LIMIT_S)  # what appears from now on is a notice, unless the file system hangs

    def _watch_file(self) -> None:
        first = _stamp_of(self._file)
        self._has_looked.set()
        if first is not None:
            self._tell_leftover(self._file)
        while _stamp_of(self._file) in (None, first):
            threading.Event().wait(LOOK_EVERY_S)
        self._say(f"{self._file} is there")

    def _watch_service(self) -> None:
        assert self._service is not None
        while not asks_to_go(self._service):
            threading.Event().wait(ASK_EVERY_S)
        self._say(f"{self._service.url} says that this host is to go")

    def _say(self, notice: str) -> None:
        if self._said.acquire(blocking=False):  # the first of two
            self._tell(notice)


def _stamp_of(file: str) -> tuple[int, int] | None:
    """Return what changes when a file is made anew or touched; None if there is none."""
    try:
        found = os.lstat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def asks_to_go(service: Service) -> bool:
    """Return whether a service says that this host is to go; one that does not answer says nothing."""
    headers = dict(service.headers)
    try:
        if service.token_url:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            headers["X-aws-ec2-metadata-token"] = _ask(service.token_url, asked, method="PUT")
        return service.is_notice(_ask(service.url, headers))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, http.client.HTTPException):
        return False


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    # Metadata is this host's own: no proxy can know it.
    opener: Any = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_LIMIT_S) as answer:
        if answer.status != 200:
            raise urllib.error.HTTPError(url, answer.status, "no notice", answer.headers, None)
        return str(answer.read(_MOST_BYTES).decode(errors="replace"))
