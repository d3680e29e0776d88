"""The benchmark of recovery takes a host away, and finds the job going on."""

from __future__ import annotations

import json

import pytest

from tests.bench._run import run_bench
from tests.namespaces import why_no_hosts


def test_a_short_run_sees_the_job_go_on_each_time(tmp_path):
    if why_not := why_no_hosts():
        pytest.skip(f"no hosts here: {why_not}")
    done = run_bench("bench.recovery", "--rounds", 1, "--hosts", 3, "--no-torchrun", "--json", tmp_path / "record.json")
    assert "Traceback" not in done.stderr, done.stderr
    [table] = json.loads((tmp_path / "record.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == [
        "phalanx: the first host is killed",
        "phalanx: another host is killed",
        "phalanx: another host is killed, start of 3 s",
        "phalanx --no-keep: another host is killed, start of 3 s",
        "phalanx: another host is cut off",
        "phalanx: the first host is cut off",
    ]
    for what, median_s, _, _ in table["rows"]:
        assert (1.0 if "cut" in what else 0.0) < median_s < 60, what
