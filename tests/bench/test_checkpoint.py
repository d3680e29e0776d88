"""The benchmark of checkpoints runs and writes what it promises; what it measures is not judged here."""

from __future__ import annotations

import json

from tests.bench._run import run_bench


def test_a_short_run_writes_json_and_a_verdict_on_every_target(tmp_path):
    done = run_bench(
        "bench.checkpoint", "--rounds", 1, "--size-mib", 4, "--ranks", 2, "--optimizers", "SGD", "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    samples = record["saves"]["2 ranks"]
    assert {"memcpy", "save", "first save", "in the background", "torch.save + fsync"} <= samples.keys()
    assert all(len(times) == 1 and times[0] > 0 for times in samples.values())
    assert record["snapshots"].keys() == {"2 ranks, SGD"}
    assert len(record["verdicts"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"], "no checkpoint stays"
    assert "save blocks" in done.stdout
