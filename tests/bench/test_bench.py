"""The benchmark runs and writes what it promises; what it measures is not judged here."""

from __future__ import annotations

import json

import pytest

from bench import plan, report
from tests.bench._run import PNG, run_bench


def test_a_quick_run_writes_json_and_a_plot_with_every_engine(tmp_path):
    small = ("--sizes", "4,4K", "--rounds", "2", "--turn-ms", "1")
    done = run_bench(
        "bench", "--quick", "--only", "all_reduce", "--no-mpi", "--world-sizes", "2", *small, "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    measured = {(r["op"], r["size_bytes"]): r["engines"] for r in record["results"]}
    assert set(measured[("all_reduce", 4)]) == {"phalanx", "phalanx_no_recorder", "core", "gloo", "memcpy"}
    assert set(measured[("all_reduce", 4096)]) == {"phalanx", "core", "gloo", "memcpy"}
    assert set(measured[("call_check", 4)]) == {"core", "core_unchecked"}
    for engines in measured.values():
        for facts in engines.values():
            low, high = facts["quartiles_s"]
            assert 0 < low <= facts["median_s"] <= high
            assert min(facts["samples_s"]) > 0
    assert record["machine"]["torch"]
    (table,) = record["tables"]
    assert [row[:3] for row in table["rows"]] == [["all_reduce", 2, 4], ["all_reduce", 2, 4096]]
    assert len(record["targets"]) >= 4
    assert all(isinstance(target["reached"], bool) and target["value"] > 0 for target in record["targets"])
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)
    assert "2 ranks" in done.stdout
    assert "all_reduce" in done.stdout


def test_an_unknown_operation_is_refused_by_name():
    done = run_bench("bench", "--only", "all_reduce,al_gather")
    assert done.returncode == 2
    assert "got al_gather" in done.stderr


def _result(op, size_bytes, **seconds):
    point = plan.Point(op, size_bytes, 2, tuple(seconds), 1, 0.01)
    return report.Result(point, {engine: [time] * 3 for engine, time in seconds.items()}, dict.fromkeys(seconds, 1))


def test_a_target_is_judged_by_its_worst_size():
    results = [_result("broadcast", 4, phalanx=1e-6, gloo=9e-6), _result("broadcast", 1024, phalanx=1e-6, gloo=4e-6)]
    (verdict,) = report.judge(results)
    assert verdict.value == pytest.approx(4)
    assert verdict.size_bytes == 1024
    assert not verdict.reached


@pytest.mark.parametrize(("unchecked_us", "reached"), [(0.99, True), (0.97, False)])
def test_the_cost_of_the_call_check_may_be_two_percent(unchecked_us, reached):
    (verdict,) = report.judge([_result(plan.CALL_CHECK, 4, core=1e-6, core_unchecked=unchecked_us * 1e-6)])
    assert verdict.reached is reached


@pytest.mark.parametrize(("text", "size_bytes"), [("4", 4), ("4B", 4), ("16K", 16384), ("16KiB", 16384), ("1M", 2**20)])
def test_sizes_are_read_as_people_write_them(text, size_bytes):
    assert plan.parse_size(text) == size_bytes


def test_the_launchers_benchmark_measures_every_command_in_turns(tmp_path):
    done = run_bench("bench.launch", "--rounds", "1", "--restarts", "1", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "launch.json").read_text())
    samples = record["samples"]
    commands = ("phalanx run", "phalanx run --warm", "phalanx run --no-preload", "torchrun", "python, one rank")
    for name in (*commands, "death to end of command"):
        assert len(samples[name]) == 1
        assert name in done.stdout
    judged = [line for line in done.stdout.splitlines() if line.startswith(("reached ", "missed "))]
    assert len(judged) == 7
    (table,) = record["tables"]
    assert dict(table["rows"])["torchrun"] == samples["torchrun"][0]
    assert record["command"] == "python -m bench.launch --rounds 1 --restarts 1"
    assert record["machine"]["torch"]
