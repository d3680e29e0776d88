"""``python -m bench.testing``: what a test of two ranks with one all_reduce costs, for each way to start its processes.

The ways are: `phalanx.testing.run_ranks` and the mark ``ranks(2)``, on phalanx and on Gloo;
``torch.multiprocessing.spawn`` and torch's ``MultiProcessTestCase``, without and with ``--fast-ranks``; and a pool of
two kept processes. They take turns. Each turn is a run of pytest with tests of one kind. The first test of a turn does
not count, because it starts the processes that all tests of the turn need.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench import record
from bench.report import machine_facts, verdict_line

_HEAD = """
import json, os, time
import pytest, torch, torch.distributed as dist, torch.multiprocessing as mp

@pytest.fixture(autouse=True)
def timed():
    begin = time.perf_counter()
    yield
    with open(os.environ["BENCH_TIMES"], "a") as file:
        print(time.perf_counter() - begin, file=file)

def all_reduce():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
"""

_RUN_RANKS = """
from phalanx.testing import run_ranks

def job(rank, world_size):
    all_reduce()

@pytest.mark.parametrize("number", range({count}))
def test(number):
    run_ranks(job, 2, backend="{backend}")
"""

_MARK = """
@pytest.mark.parametrize("number", range({count}))
@pytest.mark.ranks(2, backend="{backend}")
def test(number):
    all_reduce()
"""

_JOB_BY_FILE = """
def job(rank, path):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    all_reduce()
    dist.destroy_process_group()
"""

_SPAWN = """
@pytest.mark.parametrize("number", range({count}))
def test(number, tmp_path):
    mp.spawn(job, (str(tmp_path / "store"),), nprocs=2)
"""

_POOL = """
@pytest.fixture(scope="module")
def pool():
    with mp.get_context("spawn").Pool(2) as pool:
        pool.starmap(abs, [(1,)] * 2)
        yield pool

@pytest.mark.parametrize("number", range({count}))
def test(number, tmp_path, pool):
    path = str(tmp_path / "store")
    pool.starmap(job, [(0, path), (1, path)], chunksize=1)
"""

_TEST_CASE = """
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Test(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _run_one(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        all_reduce()

for number in range({count}):
    setattr(Test, f"test_{{number}}", lambda self: self._run_one())
"""


class Kind(NamedTuple):
    """One way to write the test.

    Attributes:
        code: Source of the tests, with a placeholder for their number.
        count: Number of tests in a turn, without the first one, which does not count.
        flags: Flags of pytest.
    """

    code: str
    count: int
    flags: tuple[str, ...] = ()


_FAST = ("--fast-ranks",)
KINDS = {
    "run_ranks, phalanx": Kind(_RUN_RANKS.replace("{backend}", "phalanx"), 20),
    "run_ranks, Gloo": Kind(_RUN_RANKS.replace("{backend}", "gloo"), 20),
    "mark, phalanx": Kind(_MARK.replace("{backend}", "phalanx"), 20),
    "mark, Gloo": Kind(_MARK.replace("{backend}", "gloo"), 20),
    "mp.spawn": Kind(_JOB_BY_FILE + _SPAWN, 2),
    "mp.spawn --fast-ranks": Kind(_JOB_BY_FILE + _SPAWN, 20, _FAST),
    "MultiProcessTestCase": Kind(_TEST_CASE, 2),
    "MultiProcessTestCase --fast-ranks": Kind(_TEST_CASE, 20, _FAST),
    "kept pool, Gloo": Kind(_JOB_BY_FILE + _POOL, 20),
}
"""The ways to write the test, by name."""

_MOST_ON_PHALANX_S = 0.035
_MOST_ON_GLOO_S = 0.07
_MOST_ABOVE_POOL_S = 0.03
_LEAST_TIMES = 50
_LIMIT_S = 3600


def _has_mark() -> bool:
    """Return whether pytest knows the mark in this environment."""
    command = [sys.executable, "-m", "pytest", "--markers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir())
    return "@pytest.mark.ranks" in done.stdout


def _run(kind: Kind, count: int, folder: Path) -> list[float]:
    """Return the seconds of each test of one turn, except the first test, which starts what all tests need."""
    times = folder / "times"
    times.unlink(missing_ok=True)
    folder.joinpath("test_kind.py").write_text(_HEAD + kind.code.format(count=count + 1))
    folder.joinpath("pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *kind.flags]
    environ = {**os.environ, "BENCH_TIMES": str(times), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(line) for line in times.read_text().split()][1:]


def measure(rounds: int, names: list[str]) -> dict[str, list[float]]:
    """Return the seconds of every test, by kind."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        for number in range(rounds):
            for name in names[:: 1 if number % 2 else -1]:
                samples[name] += _run(KINDS[name], KINDS[name].count, Path(folder))
    return samples


def _state_of(pid: int) -> dict[str, int]:
    """Return the resources in use by a process and its descendants."""
    below, todo, memory_kb = set(), [pid], 0
    while todo:
        one = todo.pop()
        try:
            tasks = Path(f"/proc/{one}/task").iterdir()
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
            memory_kb += int(Path(f"/proc/{one}/smaps_rollup").read_text().partition("Pss:")[2].split()[0])
        except (OSError, IndexError):
            continue
        below.update(children)
        todo += children
    return {
        "processes": len(below),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "files": len(os.listdir(tempfile.gettempdir())) + len(os.listdir("/dev/shm")),
        "memory_bytes": memory_kb * 1024,
    }


def _job(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def endure(count: int) -> dict[str, dict[str, int]]:
    """Run `count` tests in a row; return the resources in use after a hundredth of the tests, and after all tests."""
    from phalanx.testing import run_ranks

    states = {}
    for number in range(1, count + 1):
        run_ranks(_job, 2)
        if number in (max(count // 100, 1), count):
            states[f"after {number}"] = _state_of(os.getpid())
    return states


def verdicts(samples: dict[str, list[float]], states: dict[str, dict[str, int]]) -> dict[str, bool]:
    """Return a text for each target, with the measured value, and whether the target was reached."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    found = {}
    for name, most_s in {"phalanx": _MOST_ON_PHALANX_S, "Gloo": _MOST_ON_GLOO_S}.items():
        for form in (f"run_ranks, {name}", f"mark, {name}"):
            if form in median:
                found[f"{form}: {median[form]:.3f} s (at most {most_s})"] = median[form] <= most_s
    for slow in ("mp.spawn", "MultiProcessTestCase"):
        for fast in ("run_ranks, phalanx", "mark, phalanx"):
            if {slow, fast} <= median.keys():
                times = median[slow] / median[fast]
                found[f"{fast}: {times:.0f}x faster than {slow} (at least {_LEAST_TIMES})"] = times >= _LEAST_TIMES
    for form in ("run_ranks, Gloo", "mark, Gloo"):
        if {form, "kept pool, Gloo"} <= median.keys():
            above = median[form] - median["kept pool, Gloo"]
            found[f"{form}: {above:+.3f} s against a kept pool (at most +{_MOST_ABOVE_POOL_S})"] = (
                above <= _MOST_ABOVE_POOL_S
            )
    if len(states) == 2:
        first, last = states.values()
        for what in ("processes", "descriptors", "files"):
            found[f"{what}: {first[what]}, then {last[what]} (no more)"] = last[what] <= first[what]
        more = last["memory_bytes"] / first["memory_bytes"]
        found[f"memory: {more:.2f} of what it was after the first (at most 1.1)"] = more <= 1.1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.testing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind (default 3)")
    parser.add_argument("--only", metavar="WORD", default="", help="measure the kinds whose name has it alone")
    parser.add_argument("--in-a-row", type=int, default=1000, help="tests in a row, for leaks (default 1000; 0: none)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for testing.json")
    record.add_arguments(parser, "testing.json")
    given = parser.parse_args()
    has_mark = _has_mark()
    names = [name for name in KINDS if given.only in name and (has_mark or not name.startswith("mark"))]
    samples = measure(given.rounds, names)
    states = endure(given.in_a_row) if given.in_a_row else {}
    for name, values in samples.items():
        print(f"{name:34} median {statistics.median(values):6.3f} s   {min(values):6.3f} to {max(values):6.3f}")
    for when, state in states.items():
        print(f"{when:34} {json.dumps(state)}")
    reached = verdicts(samples, states)
    for target, is_reached in reached.items():
        print(verdict_line(is_reached, target))
    rows = [[name, statistics.median(values), min(values), max(values)] for name, values in samples.items()]
    columns = [("test", "text"), ("median", "seconds"), ("fastest", "seconds"), ("slowest", "seconds")]
    tables = [record.Table("testing", columns, rows)]
    raw = {"samples": samples, "states": states, "verdicts": reached}
    record.write(given.json or given.out / "testing.json", given.note, machine_facts(""), tables, raw)


if __name__ == "__main__":
    main()
