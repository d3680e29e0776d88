"""``python -m bench.web``: how fast the live page and the metrics of 64 ranks answer, and what they cost.

A job of 64 ranks records five steps a second in black boxes, and its metrics.jsonl has 100,000 steps. Measured are the
first page, the server's CPU time for each second with one page and with 50 pages open, and a scrape of the metrics.
``python -m bench.top`` measures what the looks, which the page shares with `top`, cost a job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bench import record
from bench.report import machine_facts, verdict_line

_START_S = 120.0
_MOST_FIRST_S, _MOST_UPDATE, _MOST_SCRAPE_S = 0.5, 0.05, 0.05
_NUM_PAGES = 50


def _cpu_s(pid: int) -> float:
    """Return the CPU time that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_START_S) as answer:
        data: bytes = answer.read()
    return data


def _await_line(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(pattern, line):
            return found[0]
    raise SystemExit("".join(said))


@contextlib.contextmanager
def _started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "phalanx", *words]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environ
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _open_pages(url: str, num: int) -> list[socket.socket]:
    parts = urlsplit(url)
    job = re.search(rb"job\?job=\d+", _get(url))
    assert job is not None
    pages = []
    for _ in range(num):
        page = socket.create_connection((parts.hostname, parts.port), _START_S)
        query = job[0].decode().partition("?")[2]
        page.sendall(f"GET {parts.path}events?view=job&{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        pages.append(page)
    return pages


def _read_for(pages: list[socket.socket], seconds: float) -> int:
    """Read what the server sends; return the number of bytes."""
    deadline, num_bytes = time.monotonic() + seconds, 0
    while (left := deadline - time.monotonic()) > 0:
        for page in select.select(pages, [], [], left)[0]:
            num_bytes += len(page.recv(1 << 20))
    return num_bytes


def _share_of_cpu(pid: int, url: str, num: int, seconds: float) -> tuple[float, float]:
    """Return the server's CPU time, and the bytes that it sends, for each second with so many pages of a job open."""
    pages = _open_pages(url, num)
    _read_for(pages, 5.0)  # the curves of the past
    before = _cpu_s(pid)
    num_bytes = _read_for(pages, seconds)
    spent = _cpu_s(pid) - before
    for page in pages:
        page.close()
    return spent / seconds, num_bytes / seconds


def measure(num_ranks: int, num_steps: int, seconds: float) -> dict[str, float]:
    """Return each measured value by its name, in seconds or as a share of a CPU."""
    found: dict[str, float] = {}
    with contextlib.ExitStack() as ended:
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-bench-")))
        command = ["run", "--nproc-per-node", str(num_ranks), "--no-pin", "--metrics", "0", "-m"]
        job = ended.enter_context(_started(folder, *command, "bench.web_worker", "--steps", str(num_steps)))
        metrics = _await_line(job, r"http://\S+")
        deadline = time.monotonic() + _START_S
        while not re.search(rb'steps_total{[^}]*rank="%d"' % (num_ranks - 1), _get(metrics)):
            if time.monotonic() > deadline:
                raise SystemExit("the job does not train")
            time.sleep(0.5)
        found["scrape"] = statistics.median(_seconds(metrics) for _ in range(10))
        top = ended.enter_context(_started(folder, "top", str(job.pid), "--web", "0"))
        url = _await_line(top, r"http://\S+")
        time.sleep(2.0)
        found["first page"] = _seconds(url)
        time.sleep(5.0)  # the past has been read
        query = re.search(rb"job\?job=\d+", _get(url))
        assert query is not None
        found["page of the job"] = statistics.median(_seconds(url + query[0].decode()) for _ in range(5))
        for num in (1, _NUM_PAGES):
            found[f"{num} open"], found[f"bytes {num}"] = _share_of_cpu(top.pid, url, num, seconds)
    return found


def _seconds(url: str) -> float:
    begun = time.perf_counter()
    _get(url)
    took = time.perf_counter() - begun
    time.sleep(2.0)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100_000, help="steps in metrics.jsonl")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement with open pages")
    record.add_arguments(parser)
    args = parser.parse_args()
    found = measure(args.ranks, args.steps, args.seconds)
    rows = [
        ["a scrape of the metrics", found["scrape"], None], ["the first page", found["first page"], None],
        ["the page of the job", found["page of the job"], None],
        ["one page open, share of a CPU", None, found["1 open"]],
        [f"{_NUM_PAGES} pages open, share of a CPU", None, found[f"{_NUM_PAGES} open"]],
    ]  # fmt: skip
    table = record.Table("web", [("", "text"), ("median", "seconds"), ("share", "fraction")], rows)
    record.write(args.json, args.note, machine_facts(""), [table], found)
    print(verdict_line(found["scrape"] <= _MOST_SCRAPE_S, f"a scrape takes {found['scrape'] * 1e3:.0f} ms"))
    for name in ("first page", "page of the job"):
        print(verdict_line(found[name] <= _MOST_FIRST_S, f"the {name} takes {found[name] * 1e3:.0f} ms"))
    for num in (1, _NUM_PAGES):
        share, size = found[f"{num} open"], found[f"bytes {num}"]
        words = f"with {num} open, the server takes {share:.1%} of a CPU and sends {size / 1e3:.0f} kB/s"
        print(verdict_line(share <= _MOST_UPDATE, words))


if __name__ == "__main__":
    main()
