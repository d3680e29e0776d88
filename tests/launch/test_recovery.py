"""What ``phalanx run`` tells of a loss: how it was noticed, how long each phase took, and where the job went on."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from phalanx.failure.losses import load_losses, words_of
from tests.train.test_report import Page

from .jobs import run_job

pytestmark = pytest.mark.usefixtures("warm_jobs")

TRAINER = """
import torch, phalanx
from torch import nn
class Dies:
    def on_step(self, trainer):
        if trainer.step == 60 and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
model = nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(800, 4), torch.zeros(800, 1))
trainer = phalanx.Trainer(
    model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.mse_loss, max_epochs=1, global_batch_size=8,
    folder="run", log_every=1, callbacks=(Dies(),), snapshot_every=20,
)
trainer.fit(data)
"""
BY_HAND = """
import torch, torch.distributed as dist, phalanx, phalanx.checkpoint
with phalanx.init():
    model = phalanx.DistributedDataParallel(nn.Linear(4, 2)) if {has_model} else None
    state = {{"step": 0, "weight": torch.zeros(8)}}
    phalanx.checkpoint.load("saved", state, missing="ignore")
    while state["step"] < 40:
        if model is not None:
            model(torch.ones(3, 4)).sum().backward()
        dist.all_reduce(state["weight"])
        state["step"] += 1
        if state["step"] % 10 == 0:
            phalanx.checkpoint.snapshot("saved", state, state["step"])
        if state["step"] == 33 and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(9)
"""


def lines_of_recovery(done):
    return re.findall(r"^phalanx run: (resuming .*)$", done.stderr, re.M)


def the_loss(folder):
    """Return the folder of the only run, and the loss that it has kept."""
    [run] = folder.glob("logs/train/*/")
    [loss] = load_losses(run)
    return run, loss


def test_a_killed_rank_is_told_with_its_phases_on_the_screen_in_why_and_in_the_report(tmp_path):
    done = run_job(tmp_path, TRAINER, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    run, loss = the_loss(tmp_path)
    assert (loss.ending.rank, loss.ending.signal, loss.ending.host) == (1, 9, "")
    assert [*loss.phases_s] == ["noticed", "ended", "started", "loaded", "first step"]
    assert all(took_s >= 0 for took_s in loss.phases_s.values())
    assert (loss.step, loss.loaded_step) == (41, 40)
    assert loss.num_repeated in (19, 20)  # rank 0 may not have finished the step in which rank 1 died
    [line] = lines_of_recovery(done)
    assert line == words_of(loss)
    number = r"\d+\.\d\d?"
    phases = rf"\(noticed {number}, ended {number}, started {number}, loaded {number}, first step {number}\)"
    assert re.fullmatch(rf"resuming at step 41 after {number} s {phases}; (19|20) steps repeated", line)
    said = [line for line in done.stderr.splitlines() if line.startswith("phalanx run: ")]
    assert (run / "launch.log").read_text().splitlines() == said
    assert any("restart 1 of 1" in one for one in said)
    why = subprocess.run(
        [sys.executable, "-m", "phalanx", "why", str(run)], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"rank 1, killed by SIGKILL; {line.replace('resuming', 'resumed')}\n" in why.stdout
    text = " ".join(Page((tmp_path / "run" / "report.html").read_text()).text.split())
    assert "Lost ranks From the first sign of a lost rank" in text
    assert re.search(r"rank 1 killed by SIGKILL .* at step 41 (19|20) steps repeated", text)


@pytest.mark.parametrize("has_model", [False, True], ids=["collectives", "DistributedDataParallel"])
def test_of_a_loop_by_hand_the_pieces_that_are_known_are_told(tmp_path, has_model):
    source = "from torch import nn" + BY_HAND.format(has_model=has_model)
    done = run_job(tmp_path, source, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    _, loss = the_loss(tmp_path)
    assert (loss.ending.exitcode, loss.step, loss.loaded_step) == (9, None, 30)
    last = "first step" if has_model else "first collective"
    assert [*loss.phases_s] == ["noticed", "ended", "started", "loaded", last]
    assert loss.num_repeated == (3 if has_model else None)
    [line] = lines_of_recovery(done)
    assert line.startswith("resuming from step 30 after ")
    assert line.endswith("; 3 steps repeated" if has_model else ")")


def test_a_job_that_finds_nothing_to_load_is_said_to_begin_anew(tmp_path):
    source = """
        import torch, torch.distributed as dist, phalanx.checkpoint as ckpt
        dist.init_process_group("phalanx")
        ckpt.load("folder", {"step": 0}, missing="ignore")
        for _ in range(3):
            dist.all_reduce(torch.zeros(1))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK:
            os._exit(9)
        """
    done = run_job(tmp_path, source, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    [line] = lines_of_recovery(done)
    assert line.startswith("resuming from the beginning after ")


def test_a_collective_that_fails_is_no_progress(tmp_path):
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("phalanx")
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "1" and RANK:  # as a script that was changed on one host alone
            dist.all_gather_object([None] * 2, "another call")
        for _ in range(3):
            dist.all_reduce(torch.zeros(1 + (RANK if attempt == "1" else 0)))
        if attempt == "0":
            os._exit(9)
        """
    done = run_job(tmp_path, source, "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    assert "CollectiveMismatch" in done.stderr
    assert len(lines_of_recovery(done)) == 1, done.stderr  # of the third attempt
    [run] = tmp_path.glob("logs/train/*/")
    first, second = load_losses(run)
    assert (first.is_over, second.is_over) == (False, True)


def test_ranks_that_record_nothing_are_started_again_without_a_word_of_it(tmp_path):
    source = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and RANK: os._exit(3)\n"
    done = run_job(tmp_path, source, "--max-restarts", "1")
    assert (done.returncode, lines_of_recovery(done)) == (0, [])
    _, loss = the_loss(tmp_path)
    assert (loss.ending.exitcode, [*loss.phases_s]) == (3, ["noticed", "ended"])
    assert not loss.is_over
