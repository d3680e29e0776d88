"""``python -m bench.testing`` measures each way to start a test's ranks; what it measures is not judged here."""

from __future__ import annotations

import json
import re

from tests.bench._run import run_bench


def test_ways_are_measured_in_turns_and_tests_in_a_row_leave_nothing(tmp_path):
    flags = ("--rounds", "1", "--only", "mark, phalanx", "--in-a-row", "4", "--json", tmp_path / "testing.json")
    done = run_bench("bench.testing", *flags)
    assert done.returncode == 0, done.stderr
    [seconds] = re.findall(r"^mark, phalanx +median +(\d+\.\d+) s", done.stdout, re.MULTILINE)
    assert float(seconds) > 0
    states = [json.loads(state) for state in re.findall(r"^after \d+ +(\{.*\})$", done.stdout, re.MULTILINE)]
    assert [state["processes"] for state in states] == [states[0]["processes"]] * 2
    assert (tmp_path / "testing.json").exists()
