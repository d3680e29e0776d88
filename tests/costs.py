"""What each test costs, told at the end of a run and kept in ``build/test_costs.tsv``, the costliest first.

It is the CPU time of the tree below the process that runs the test. What is forked elsewhere, by a warm process or by
that of the fixture ``forked``, and what others have adopted, is not all in it: a test that is moved there seems cheaper
than it is.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / "build" / "test_costs.tsv"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_SHOWN = 10  # files


def children(pid: int) -> set[int]:
    """Return the children of all threads of a process; none if it has ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except OSError:
        return set()


def _cpu_s() -> float:
    """Return the CPU time of this process, of those below it and of those that they have waited for."""
    ticks, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
        todo += children(pid)
    return ticks / _TICKS_PER_S


class Costs:
    """Measures in each process that runs tests; adds up where the reports come together."""

    def __init__(self) -> None:
        self._began_s = _cpu_s()
        self._seconds: dict[str, float] = defaultdict(float)
        self._cpu_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        try:
            return (yield)
        finally:
            now_s = _cpu_s()
            item.user_properties.append(("cpu_s", round(max(0.0, now_s - self._began_s), 2)))
            self._began_s = now_s

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            self._cpu_s[report.nodeid] = dict(report.user_properties).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        if len(self._cpu_s) < _NUM_SHOWN:
            return
        rows = sorted(((cpu_s, self._seconds[name], name) for name, cpu_s in self._cpu_s.items()), reverse=True)
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text("".join(f"{cpu_s:.2f}\t{seconds:.2f}\t{name}\n" for cpu_s, seconds, name in rows))
        files: dict[str, float] = defaultdict(float)
        for cpu_s, _, name in rows:
            files[name.partition("::")[0]] += cpu_s
        costliest = sorted(files.items(), key=lambda it: -it[1])[:_NUM_SHOWN]
        terminalreporter.section(f"CPU seconds: {sum(files.values()):.0f}, of each test in {KEPT}")
        for name, cpu_s in costliest:
            terminalreporter.write_line(f"{cpu_s:8.1f}  {name}")
