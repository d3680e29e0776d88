"""``phalanx top``: a live view of jobs, one picture of them, or JSON for programs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import phalanx
from phalanx import _env
from phalanx._command_line import Parser, UsageError
from phalanx._text import complain
from phalanx.diagnose.top.watch import FIRST_S, JobView, Watch
from phalanx.launch.run.metrics import listen, listening_problem, words_of_metrics
from phalanx.wire.web_server import is_loopback, split_address, url_of

FORMAT_VERSION = 1
_GPU_WAIT_S = 5.0
_WHO_READS = (
    "\nWhoever has this address can read names, logs and stacks of these jobs; they cross the network unencrypted."
)


def main(args: Sequence[str]) -> int:
    """Show jobs; return 1 if there is none, 2 if the requested job does not exist."""
    parser = make_parser()
    try:
        given = parser.parse_args(args)
    except UsageError as error:
        return parser.refuse(error, args)
    for flag, address in (("--metrics", given.metrics), ("--web", given.web)):
        if address and (problem := listening_problem(flag, address)):
            complain(f"phalanx top: {problem}")
            return 2
    try:
        watch = Watch(given.job or "", given.interval, counts=bool(given.metrics))
    except LookupError as error:
        complain(f"phalanx top: {error}")
        return 2
    if watch.where:
        complain(f"phalanx top: {watch.where}")
    with contextlib.closing(watch):
        if given.metrics:
            return _serve_metrics(watch, given.metrics)
        if given.web:
            return _serve_pages(watch, given.web, given.interval)
        if given.json:
            jobs = _look_twice(watch)
            print(as_json(jobs))
            return int(not jobs)
        return _show(watch, given.once, given.interval, bool(given.job))


def make_parser() -> Parser:
    """Return the parser of ``phalanx top``."""
    parser = Parser(
        "phalanx top",
        "phalanx top [JOB|PID] [flags]",
        "Show what the ranks of this user's jobs on this host are doing, whoever started them, and what they use; q "
        "quits. Where standard output is no terminal, print one picture and end.",
    )
    parser.add_argument(
        "job", nargs="?", metavar="JOB|PID", help="job, by its script, or by the pid of its launcher or of a rank"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--json", action="store_true", help="print one picture as JSON and end")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="seconds between two pictures (default: 1)"
    )
    parser.add_argument(
        "--metrics",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve metrics to Prometheus until Ctrl-C, for jobs that phalanx run has not started with --metrics",
    )
    parser.add_argument(
        "--web",
        type=_address,
        nargs="?",
        const="0",
        metavar="[HOST:]PORT",
        help="serve a live page for browsers until Ctrl-C (default: on loopback, on a free port)",
    )
    return parser


def _serve_pages(watch: Watch, address: str, interval_s: float) -> int:
    from phalanx.diagnose.web.web import new_token, serve_pages  # needs the packages of the extra web

    token = new_token()
    with listen(address) as listener:
        others = "" if is_loopback(listener.getsockname()[0]) else _WHO_READS
        print(f"{url_of(listener, f'/{token}/')}{others}", flush=True)
        serve_pages(watch, interval_s, listener, token)
    return 0


def _serve_metrics(watch: Watch, address: str) -> int:
    from phalanx.diagnose.metrics.metrics import serve_metrics  # needs the packages of the extra web

    with listen(address) as listener:
        print(words_of_metrics(listener), flush=True)
        serve_metrics(watch, listener)
    return 0


def as_json(jobs: Sequence[JobView]) -> str:
    """Return the JSON text that describes these jobs, with the version, the time and the host."""
    told: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "phalanx": phalanx.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": _env.host_name(),
        "jobs": [dataclasses.asdict(job) for job in jobs],
    }
    return json.dumps(told, indent=2)


def _address(text: str) -> str:
    try:
        split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be seconds from 0.1 to 3600, got {text!r}")
    return value


def _look_twice(watch: Watch) -> list[JobView]:
    watch.look()
    time.sleep(FIRST_S)
    return watch.look(_GPU_WAIT_S)


def _show(watch: Watch, is_once: bool, interval_s: float, is_one_job: bool) -> int:
    from rich.console import Console  # not imported for --json
    from rich.text import Text

    from phalanx.diagnose.top.screen import draw

    console = Console(highlight=False, soft_wrap=True)
    is_ascii = console.options.ascii_only
    if not is_once and console.is_terminal and not console.is_dumb_terminal:
        from phalanx.diagnose.top.live import watch_live

        jobs = watch_live(watch, console, interval_s, is_one_job)
        if jobs is None:
            return 0
    else:
        jobs = _look_twice(watch)
    console.print(Text("\n").join(draw(jobs, console.width, is_ascii)))
    return int(not jobs)
