"""Notices that this host is about to be preempted: a file that appears, or a provider's metadata service.

Each kind has its own polling thread, since a name lookup or a file system may hang. Nothing depends on the wall clock.

**A file that exists at the start is no notice.** When the command is started again on a drained host, the file of the
last notice may still exist. If that file counted, the host would leave again at once. So only a change after the start
is a notice, and a line names the leftover file. The provider's answer always counts, since it is about this very
machine. If no other node stays, a notice becomes a SIGTERM to the ranks, so that they save to disk: snapshots in memory
are lost with the last host.
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
"""Pause between two polls, as AWS recommends. Google and Azure announce a preemption 30 s ahead, AWS two minutes."""
_LIMIT_S = 2.0
_MOST_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Service:
    """A provider's metadata service.

    Attributes:
        url: Address to query.
        headers: Headers of the request.
        token_url: Address that returns a token for the request in answer to PUT; empty: no token is needed.
        is_notice: Function that returns whether an answer is a notice.
    """

    url: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    token_url: str = ""
    is_notice: Callable[[str], bool] = lambda answer: answer.strip().upper() not in ("FALSE", "NONE")


def _azure_takes(answer: str) -> bool:
    events = json.loads(answer).get("Events", [])
    return any(event.get("EventType") in ("Preempt", "Terminate") for event in events)


SERVICES: Mapping[str, Service] = {
    # The answer is 404 until there is a notice.
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
    """Watches for a notice, and reports the first one.

    Args:
        file: File whose appearance or change is a notice; empty: no file is watched.
        url: Address whose answer 200 is a notice, or a key of `SERVICES`; empty: no address is polled.
        tell: Function that a thread calls with the text of the notice.
        tell_leftover: Function that a thread calls with `file` if the file already existed at the start.
    """

    def __init__(self, file: str, url: str, tell: Callable[[str], None], tell_leftover: Callable[[str], None]) -> None:
        self._file, self._tell, self._tell_leftover = file, tell, tell_leftover
        self._service = SERVICES.get(url) or (Service(url) if url else None)
        self._said = threading.Lock()
        self._has_looked = threading.Event()
        # The file and the service have a thread each, so that a hanging file system does not delay the provider's
        # warning.
        for watch in filter(None, (self._watch_file if file else None, self._watch_service if url else None)):
            threading.Thread(target=watch, name="phalanx-notices", daemon=True).start()
        if file:
            self._has_looked.wait(_LIMIT_S)  # so that any later change is noticed; limited, as a file system may hang

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
        self._say(f"{self._service.url} says that this host will be taken away")

    def _say(self, notice: str) -> None:
        if self._said.acquire(blocking=False):  # only the first of two notices is reported
            self._tell(notice)


def _stamp_of(file: str) -> tuple[int, int] | None:
    """Return a value that changes when the file is replaced or touched; None if there is no file."""
    try:
        found = os.lstat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def asks_to_go(service: Service) -> bool:
    """Return whether a metadata service announces the end of this host; False if it does not answer."""
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
    # A metadata service is local to its host, so no proxy can reach it.
    opener: Any = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_LIMIT_S) as answer:
        if answer.status != 200:
            raise urllib.error.HTTPError(url, answer.status, "no notice", answer.headers, None)
        return str(answer.read(_MOST_BYTES).decode(errors="replace"))
