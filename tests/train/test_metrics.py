"""metrics.jsonl: what is in it after kills and restarts, and what is made of it."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.train.report import metrics
from phalanx.train.report.metrics import MetricsLog, is_being_written, read_metrics, without_undone, write_csv
from tests.train import hostile
from tests.train.runs import FakeRun


def step_numbers(records):
    return [record["step"] for record in records if record["kind"] == "step"]


def test_records_come_back_with_time_kind_and_attempt(tmp_path):
    log = MetricsLog(tmp_path / "new" / "folder")
    log.write("step", step=1, loss=0.5, phases_s={"data": 0.1})
    log.write("evaluation", step=1, accuracy=math.nan)
    log.close()
    log.close()
    first, second = read_metrics(tmp_path / "new" / "folder")
    assert first["time"] > 1.7e9
    assert {**first, "time": 0} == {
        "time": 0, "kind": "step", "attempt": 0, "step": 1, "loss": 0.5, "phases_s": {"data": 0.1},
    }  # fmt: skip
    assert math.isnan(second["accuracy"])


def test_tensors_are_numbers_and_what_is_no_json_is_text(tmp_path):
    import torch

    log = MetricsLog(tmp_path)
    log.write("evaluation", step=1, one=torch.tensor(0.5), many=torch.ones(2), folder=tmp_path)
    log.close()
    [record] = read_metrics(tmp_path)
    assert (record["one"], record["many"], record["folder"]) == (0.5, "tensor([1., 1.])", str(tmp_path))


def test_a_metric_that_is_called_time_does_not_hide_the_time(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("evaluation", step=1, time="never", attempt="x")
    log.close()
    [record] = read_metrics(tmp_path)
    assert record["time"] > 1.7e9
    assert record["attempt"] == 0


@pytest.mark.parametrize("device", [None, "/dev/zero"])
def test_what_is_no_regular_file_is_refused(tmp_path, device):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path) if device is None else path.symlink_to(device)
    for use in (read_metrics, MetricsLog):
        with pytest.raises(OSError, match="Not a regular file"):
            use(tmp_path)
    assert not is_being_written(tmp_path)


@pytest.mark.parametrize("torn", [b'{"time": 1.0, "ki', b"{", b"\xff\xfe", b"\0\0\0", b"17", b'{"kind": "step"}'])
def test_a_torn_line_is_skipped_and_a_restart_goes_on_after_it(tmp_path, torn):
    log = MetricsLog(tmp_path)
    log.write("start", resumed_from=None)
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    assert [record["kind"] for record in read_metrics(tmp_path)] == ["start"]
    log = MetricsLog(tmp_path)
    log.write("start", resumed_from={"step": 3, "source": "disk"})
    log.close()
    assert [record["attempt"] for record in read_metrics(tmp_path)] == [0, 1]
    assert torn in path.read_bytes().split(b"\n")


def test_a_killed_process_leaves_every_record_that_it_has_written(tmp_path):
    code = (
        "import sys, time; from phalanx.train.report.metrics import MetricsLog\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for step in range(5000):\n"  # 25 MB at most, should nobody kill it
        "    log.write('step', step=step, filling='x' * 5000)\n"
        "    if step == 200: print(flush=True)\n"
        "time.sleep(30)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert is_being_written(tmp_path)
        finally:
            process.kill()
    assert not is_being_written(tmp_path)
    steps = step_numbers(read_metrics(tmp_path))
    assert steps == list(range(len(steps)))
    assert len(steps) > 200
    assert len(steps) >= (tmp_path / "metrics.jsonl").read_bytes().count(b"\n")


def test_the_log_is_being_written_until_it_is_closed_although_a_worker_holds_the_file(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("start")
    assert is_being_written(tmp_path)
    inherited = os.dup(log._file.fileno())
    log.close()
    assert not is_being_written(tmp_path)
    os.close(inherited)


def test_of_steps_that_were_done_twice_the_later_counts(tmp_path):
    run = FakeRun(tmp_path)
    run.start()
    run.steps(50, 57, loss=1.0)
    run.start({"step": 55, "source": "memory"})
    run.steps(56, 60, loss=2.0)
    records = without_undone(read_metrics(tmp_path))
    assert step_numbers(records) == list(range(50, 61))
    assert [r["loss"] for r in records if r["kind"] == "step"] == [1.0] * 6 + [2.0] * 5


def test_steps_that_a_restart_took_back_are_gone_also_where_none_stands_in_their_place(tmp_path):
    run = FakeRun(tmp_path)
    run.start()
    run.steps(10, 50, every=10)
    run.evaluate(50, loss=1.0)
    run.start({"step": 25, "source": "disk"})
    run.steps(35, 45, every=10)
    assert step_numbers(without_undone(read_metrics(tmp_path))) == [10, 20, 35, 45]
    run.start(None)
    run.steps(7, 7)
    kept = without_undone(read_metrics(tmp_path))
    assert step_numbers(kept) == [7]
    assert not [record for record in kept if record["kind"] == "evaluation"]


def test_csv_has_a_row_for_each_step_and_the_union_of_columns(tmp_path):
    run = FakeRun(tmp_path)
    run.start()
    run.steps(1, 2)
    run.write("step", step=3, epoch=0, loss=0.25, extra="a,b")
    with write_csv(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert {row["epoch"] for row in rows} == {"0"}, "as in metrics.jsonl and in Trainer.epoch"
    assert rows[0]["backward_s"] == "0.04"
    assert float(rows[0]["slowest_s"]) > float(rows[0]["fastest_s"])
    assert (rows[2]["loss"], rows[2]["extra"], rows[2]["lr"], rows[0]["extra"]) == ("0.25", "a,b", "", "")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["metrics.csv", "metrics.jsonl"]


def test_it_is_documented_where_epochs_count_from_0_and_where_from_1():
    page = (Path(__file__).parents[2] / "docs" / "en" / "reference" / "files.md").read_text()
    assert "`epoch` counts from 0 here; the screen and the report count from 1" in page
    assert "``epoch`` counts from 0 here, in the CSV and for loggers" in (metrics.__doc__ or "")


def test_csv_has_an_evaluation_in_the_row_of_its_step(tmp_path):
    run = FakeRun(tmp_path)
    run.start()
    run.steps(1, 2)
    run.evaluate(2, loss=0.5)
    with write_csv(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["validation/loss"]) for row in rows] == [("1", ""), ("2", "0.5")]


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_folder_without_metrics_is_named(tmp_path, kind):
    folder = tmp_path / "nothing"
    if kind == "a file":
        folder.write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match=r"no metrics.jsonl in .*nothing': name the folder of a run"):
        read_metrics(folder)


def test_any_bytes_can_be_read_and_made_a_report_of():
    hostile.fuzz(num_runs=50)


def test_a_log_of_many_starts_is_read_in_no_time():
    records = []
    for number in range(20_000):
        head = {"time": 1.0, "attempt": number}
        records.append({**head, "kind": "start", "resumed_from": {"step": number, "source": "disk"}})
        records.append({**head, "kind": "step", "step": number + 1})
    begin = time.monotonic()
    assert step_numbers(without_undone(records)) == list(range(1, 20_001))
    assert time.monotonic() - begin < 5  # each start against each record takes minutes
