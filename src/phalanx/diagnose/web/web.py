"""The server of the live page.

**Who may read.** The address contains a token, 128 random bits, as its first part; any other address is answered by
404. The token is compared in constant time. Pages name no other site and send no referrer, so the token does not leak.
A server on loopback answers only to names of loopback, see `web_server`.

**What it can do.** It answers GET with pages, and POST with the answers of ``why`` and ``stacks``, one at a time. It
writes nothing. The policy of contents allows no script but ``live.js``, and all that comes from a job is escaped.
"""

from __future__ import annotations

import hmac
import json
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from phalanx._errors import printable
from phalanx.diagnose.jobs import find_job
from phalanx.diagnose.stacks_command import lines_of as lines_of_stacks
from phalanx.diagnose.top.watch import Watch
from phalanx.diagnose.web import views
from phalanx.diagnose.web.logs import newest_lines
from phalanx.diagnose.web.pictures import Pictures, Seen
from phalanx.diagnose.why.evidence import look_at
from phalanx.diagnose.why.why import examine, lines_of
from phalanx.train.report.metrics import read_metrics
from phalanx.train.report.page import style
from phalanx.train.report.report import report_of
from phalanx.wire.web_server import serve

_NUM_THREADS = 72
_MOST_STREAMS = 60  # each takes a thread as long as its page is open
_MOST_QUERY, _MOST_VALUE = 2048, 256  # characters
_PING_S = 2.0  # at the latest, something is sent, which shows whether the browser is still there
_STACKS_S = 3.0
_HEADERS = [
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]


class _Refused(Exception):
    """A request that is not answered; carries the status and what to say."""

    def __init__(self, status: str, words: str = "") -> None:
        super().__init__(status, words)
        self.status, self.words = status, words


class _Answer(NamedTuple):
    """What is sent: a text as a whole, or a stream of events."""

    kind: str
    parts: Iterable[bytes]


class Site:
    """The pages about the jobs of a watch, as a WSGI application.

    Args:
        token: First part of each address that is answered.
    """

    def __init__(self, pictures: Pictures, token: str) -> None:
        self._pictures, self._token = pictures, token.encode()
        self._streams = threading.Semaphore(_MOST_STREAMS)
        self._asking = threading.Lock()
        self._drawn: dict[tuple[str, ...], tuple[int, views.Parts]] = {}  # by view: number of the look, and the parts

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        try:
            answer = self._answer(environ)
        except _Refused as refused:
            start(refused.status, [("Content-Type", "text/plain; charset=utf-8"), *_HEADERS])
            return [f"{refused.words}\n".encode()]
        start("200 OK", [("Content-Type", f"{answer.kind}; charset=utf-8"), *_HEADERS])
        return answer.parts

    def _answer(self, environ: dict[str, Any]) -> _Answer:
        token, slash, name = environ["PATH_INFO"].removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            raise _Refused("404 Not Found", "Take the whole address that phalanx top has printed.")
        query = environ.get("QUERY_STRING", "")
        if len(query) > _MOST_QUERY:
            raise _Refused("414 URI Too Long")
        given = {key: values[0][:_MOST_VALUE] for key, values in parse_qs(query).items()}
        gets: dict[str, Callable[[dict[str, str]], _Answer]] = {
            "": self._page, "job": self._page, "rank": self._page, "events": self._events, "logs": self._logs,
            "report": self._report, "style.css": self._style, "live.js": self._script,
        }  # fmt: skip
        posts = {"why": self._why, "stacks": self._stacks}
        method = environ["REQUEST_METHOD"]
        handler = (posts if method == "POST" else gets).get(name)
        if method not in ("GET", "POST") or handler is None:
            raise _Refused("404 Not Found", "There is no such page.")
        given.setdefault("view", name)
        return handler(given)

    # ------------------------------------------------------------ pages

    def _page(self, given: dict[str, str]) -> _Answer:
        view = given["view"]
        with self._pictures.listened():
            self._pictures.await_fresh(_PING_S)
            parts = self._parts(given)
        more = {"job": views.questions() + views.log_view(), "rank": views.questions()}.get(view, "")
        title = "Jobs" if not view else self._job(given).view.name
        return _text("text/html", views.shell(title, view, parts, more))

    def _parts(self, given: dict[str, str]) -> views.Parts:
        """Return the parts of a view, drawn once for each look, however many browsers show it."""
        key = (given["view"], given.get("job", ""), given.get("rank", ""))
        with self._pictures.lock:
            number = self._pictures.number
            if key not in self._drawn or self._drawn[key][0] != number:
                drawn = self._draw(given)
                self._drawn = {one: known for one, known in self._drawn.items() if known[0] == number}
                self._drawn[key] = (number, drawn)
            return self._drawn[key][1]

    def _draw(self, given: dict[str, str]) -> views.Parts:
        if given["view"] == "job":
            return views.job_page(self._job(given))
        if given["view"] == "rank":
            job = self._job(given)
            rank = next((one for one in job.view.ranks if str(one.rank) == given.get("rank")), None)
            if rank is None:
                raise _Refused("404 Not Found", "This job has no such rank on this host.")
            return views.rank_page(job, rank)
        return views.overview([*self._pictures.jobs.values()])

    def _job(self, given: dict[str, str]) -> Seen:
        job = self._pictures.jobs.get(given.get("job", ""))
        if job is None:
            raise _Refused("404 Not Found", "There is no such job, or it has ended long ago.")
        return job

    def _report(self, given: dict[str, str]) -> _Answer:
        folder = self._job(given).trainer_folder
        try:
            return _text("text/html", report_of(folder, read_metrics(folder)))
        except (OSError, IndexError):
            raise _Refused("404 Not Found", "This job has recorded nothing yet.") from None

    def _logs(self, given: dict[str, str]) -> _Answer:
        folder = self._job(given).view.folder
        return _text("text/plain", "\n".join(newest_lines(folder, given.get("rank", ""), given.get("find", ""))))

    def _style(self, given: dict[str, str]) -> _Answer:
        return _text("text/css", style() + _beside("web.css"))

    def _script(self, given: dict[str, str]) -> _Answer:
        return _text("text/javascript", _beside("live.js"))

    # ------------------------------------------------------------ events

    def _events(self, given: dict[str, str]) -> _Answer:
        self._parts(given)  # refuses an unknown view before the stream begins
        if not self._streams.acquire(blocking=False):
            raise _Refused("503 Service Unavailable", "Too many pages are open.")
        return _Answer("text/event-stream", _Stream(self._changes(given), self._streams.release))

    def _changes(self, given: dict[str, str]) -> Iterator[bytes]:
        """Yield the parts of a view that have changed, after each look."""
        sent: views.Parts = {}
        number: int | None = -1
        with self._pictures.listened():
            while number is not None:
                try:
                    parts = self._parts(given)
                except _Refused:
                    return
                changed = {name: html for name, html in parts.items() if sent.get(name) != html}
                sent = parts
                yield f"data: {json.dumps(changed)}\n\n".encode()
                number = self._pictures.after(self._pictures.number, _PING_S)

    # ------------------------------------------------------------ questions

    def _why(self, given: dict[str, str]) -> _Answer:
        def ask(job: Seen) -> Iterable[str]:
            evidence, finding = examine(job.view.folder if job.has_ended else str(_pid_of(job)))
            return lines_of(evidence, finding)

        return self._asked(given, ask)

    def _stacks(self, given: dict[str, str]) -> _Answer:
        def ask(job: Seen) -> Iterable[str]:
            seen = look_at(find_job(str(_pid_of(job))), _STACKS_S)
            return lines_of_stacks(
                [one for one in seen if given.get("rank", str(one.doing.rank)) == str(one.doing.rank)]
            )

        return self._asked(given, ask)

    def _asked(self, given: dict[str, str], ask: Callable[[Seen], Iterable[str]]) -> _Answer:
        job = self._job(given)
        if not self._asking.acquire(blocking=False):
            raise _Refused("429 Too Many Requests", "Another question is being answered.")
        try:
            return _text("text/plain", "\n".join(printable(line) for line in ask(job)))
        except (LookupError, OSError) as error:
            return _text("text/plain", printable(str(error.args[0] if error.args else error), keep="\n"))
        finally:
            self._asking.release()


class _Stream:
    """A stream of events; the server calls `close` when the browser has gone."""

    def __init__(self, changes: Iterator[bytes], release: Callable[[], None]) -> None:
        self._changes, self._release = changes, release

    def __iter__(self) -> Iterator[bytes]:
        return self._changes

    def close(self) -> None:
        self._changes.close()  # type: ignore[attr-defined]
        self._release()


def _pid_of(job: Seen) -> int:
    return job.view.launcher_pid or job.view.ranks[0].pid


def _text(kind: str, text: str) -> _Answer:
    return _Answer(kind, [text.encode("utf-8", "replace")])


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(16)


def serve_pages(watch: Watch, interval_s: float, listener: socket.socket, token: str) -> None:
    """Serve the pages until Ctrl-C."""
    pictures = Pictures(watch, interval_s)

    def leave(number: int, frame: FrameType | None) -> None:
        pictures.close()  # otherwise the server would wait for open pages
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    try:
        serve(Site(pictures, token), listener, _NUM_THREADS)
    finally:
        pictures.close()
