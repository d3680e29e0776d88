"""What is written about a training does not change it: not its steps, not its exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal

import torch

import phalanx
from phalanx.train.report.metrics import MetricsLog, read_metrics
from tests.train._programs import Numbered, make_model


def disk_is_full(folder):
    def write(self, kind, **values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    MetricsLog.write, whole = write, MetricsLog.write
    return lambda: setattr(MetricsLog, "write", whole)


def log_is_a_folder(folder):
    os.makedirs(f"{folder}/metrics.jsonl")


def report_is_a_folder(folder):
    os.makedirs(f"{folder}/report.html/in the way")
    os.makedirs(f"{folder}/metrics.csv/in the way")


def nothing(folder):
    pass


SAID = {
    nothing: [],
    disk_is_full: ["metrics.jsonl (OSError: [Errno 28] No space left", "report.html (ValueError: nothing recorded yet"],
    log_is_a_folder: [
        "metrics.jsonl (IsADirectoryError",
        "metrics.csv (IsADirectoryError",
        "report.html (IsADirectory",
    ],
    report_is_a_folder: ["metrics.csv (IsADirectoryError", "report.html (IsADirectoryError"],
}


def train_to_signals(rank, world_size, folder, runs):
    """Train until SIGUSR1 comes, each time in another folder; return code, steps and what was said."""
    return [train_to_a_signal(rank, f"{folder}/{number}", *run) for number, run in enumerate(runs)]


def train_to_a_signal(rank, folder, spoil, loss):

    class Signal:
        def on_step(self, trainer):
            if trainer.step == 3 and rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    def step(model, batch):
        outputs = model(batch[0]).double().mean()
        return outputs - outputs.detach() + loss

    mend = spoil(folder) if rank == 0 else None
    model = make_model()
    options = {"global_batch_size": 2, "max_epochs": 3, "log_every": 1, "folder": folder, "on_nan": "ignore"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(model, optimizer, training_step=step, callbacks=[Signal()], **options)
    said, code = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        try:
            trainer.fit(Numbered(20), Numbered(4))
        except SystemExit as end:
            code = end.code
    if mend is not None:
        mend()
    return code, trainer.step, said.getvalue()


def test_no_loss_fails_the_report_or_the_code_of_a_run_that_makes_room(run_ranks, tmp_path):
    losses = [1e308, -1e308, float("inf"), float("nan"), 5e-324]
    [results] = run_ranks(train_to_signals, 1, str(tmp_path), [(nothing, loss) for loss in losses])
    for number, (code, step, said) in enumerate(results):
        assert code == 75
        assert 4 <= step < 30
        assert "can't write" not in said
        assert f"report: {tmp_path}/{number}/report.html" in said


def test_what_cannot_be_written_is_said_once_and_changes_nothing(run_ranks, tmp_path):
    results = run_ranks(train_to_signals, 2, str(tmp_path), [(spoil, 1.0) for spoil in SAID])
    for (code, step, said), expected in zip(results[0], SAID.values(), strict=True):
        assert code == 75
        assert 4 <= step < 30
        for start in expected:
            assert said.count(f"can't write {start}") == 1, said
        assert said.count("can't write") == said.count("training continues\n") == len(expected), said
    assert [(code, said) for code, _, said in results[1]] == [(75, "")] * len(SAID)


def test_a_record_that_came_half_onto_a_full_disk_spoils_no_other(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("start", resumed_from=None)

    class HalfWritten:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            return self._file.write(data[:30])

    whole, log._file = log._file, HalfWritten(log._file)
    log.write("step", step=1)
    log._file = whole
    log.write("step", step=2)
    log.close()
    assert [record.get("step") for record in read_metrics(tmp_path)] == [None, 2]
