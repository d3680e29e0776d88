"""Which checkpoints stay, and how they are listed."""

from __future__ import annotations

import time

import pytest

import phalanx
import phalanx.checkpoint as ckpt
from phalanx.train.evaluate.best_metric import BestMetric
from tests.checkpoint._tools import flip_bit, save

METRICS = {1: 0.3, 2: 0.9, 3: float("nan"), 4: 0.5, 5: None, 6: 0.8, 7: 0.1}


@pytest.fixture
def folder(tmp_path):
    for number, metric in METRICS.items():
        save(tmp_path, {"x": number}, number, metric=metric)
    return tmp_path


def steps(folder):
    return [checkpoint.step for checkpoint in ckpt.list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [5, 6, 7]),
        ({"keep_last": 1}, [7]),
        ({"keep_last": 100}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 7]),
        ({"keep_last": 1, "keep_best": 2}, [2, 6, 7]),
        ({"keep_last": 1, "keep_best": 2, "best_is_least": True}, [1, 7]),
        ({"keep_last": 1, "keep_every": 4, "keep_best": 1}, [2, 4, 7]),
        ({"keep_last": 1, "keep_best": 100}, [1, 2, 4, 6, 7]),
    ],
)
def test_what_is_to_be_kept_is_kept(folder, options, kept):
    assert ckpt.prune(folder, **options) == [step for step in METRICS if step not in kept]
    assert steps(folder) == kept
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert ckpt.prune(folder, **options) == []


@pytest.mark.parametrize("best_is_least", [True, False])
def test_of_equal_scores_the_earliest_is_the_best_as_in_the_trainer(tmp_path, best_is_least):
    metric_so_far = BestMetric("loss", "min") if best_is_least else BestMetric("accuracy", "max")
    best = []
    for step, metric in enumerate((0.5, 0.5, 0.5, 0.5), start=1):
        save(tmp_path, {"x": step}, step, metric=metric)
        best += [step] if metric_so_far.update({"loss": metric, "accuracy": metric}, step) else []
    ckpt.prune(tmp_path, keep_last=1, keep_best=1, best_is_least=best_is_least)
    assert steps(tmp_path) == [*best, 4] == [1, 4]


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_best"])
def test_less_than_one_is_refused(folder, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ckpt.prune(folder, **{name: 0})
    assert len(steps(folder)) == len(METRICS)


def test_save_prunes_when_it_has_published(tmp_path):
    for number in range(6):
        ckpt.save(tmp_path, {"x": number}, number, keep={"keep_last": 2, "keep_every": 3})
    ckpt.wait()
    assert steps(tmp_path) == [0, 3, 4, 5]


def test_a_list_describes_each_checkpoint(tmp_path):
    before = time.time()
    save(tmp_path, {"x": bytes(10_000)}, 12, metric=0.5)
    [checkpoint] = ckpt.list_checkpoints(tmp_path)
    assert (checkpoint.step, checkpoint.world_size, checkpoint.metric) == (12, 1, 0.5)
    assert checkpoint.path == str(tmp_path / "step-00000012")
    assert before - 1 <= checkpoint.saved_at <= time.time() + 1
    on_disk = (tmp_path / "step-00000012" / "rank_00000.safetensors").stat().st_size
    assert checkpoint.size_bytes == on_disk > 10_000
    assert (tmp_path / "latest").read_text() == "step-00000012\n"


def test_the_folder_of_a_run_stands_for_its_checkpoints(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "checkpoints").symlink_to(folder)
    assert steps(run) == steps(folder)
    assert ckpt.verify(run) == []
    flip_bit(folder / "step-00000007" / "rank_00000.safetensors", 100)
    assert ckpt.verify(run, 6) == []
    assert "step-00000007/rank_00000.safetensors was altered" in ckpt.verify(run)[0]
    with pytest.raises(FileNotFoundError, match="checkpoints' has no checkpoint of step 9"):
        ckpt.verify(run, 9)
    assert ckpt.prune(run, keep_last=2) == [1, 2, 3, 4, 5]
    assert steps(run) == steps(folder) == [6, 7]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert ckpt.list_checkpoints(tmp_path / "none") == []
    assert ckpt.prune(tmp_path / "none") == []
    with pytest.raises(FileNotFoundError, match="has no checkpoint of step latest"):
        ckpt.verify(tmp_path / "none")


def test_verify_names_the_damaged_file_of_any_step(folder):
    flip_bit(folder / "step-00000002" / "rank_00000.safetensors", 100)
    assert ckpt.verify(folder) == ckpt.verify(folder, 7) == []
    [problem] = ckpt.verify(folder, 2)
    assert problem.startswith(str(folder / "step-00000002" / "rank_00000.safetensors"))
    assert "was altered" in problem


@pytest.mark.parametrize(("is_least", "best"), [(True, 2), (False, 3)])
def test_the_best_is_loaded_in_the_direction_in_which_it_was_kept(tmp_path, is_least, best):
    for step, metric in ((1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan")), (5, None)):
        save(tmp_path, {"x": step}, step, metric=metric, keep={"keep_last": 9, "best_is_least": is_least})
    state = {"x": 0}
    assert ckpt.load(tmp_path, state, step="best") == ckpt.Loaded(best, "disk")
    assert state == {"x": best}


def test_an_unknown_best_is_refused(tmp_path):
    assert ckpt.load(tmp_path, {"x": 0}, step="best", missing="ignore") is None
    save(tmp_path, {"x": 1}, 1, keep={"keep_best": 1})
    save(tmp_path, {"x": 2}, 2, metric=0.5)
    with pytest.raises(phalanx.CheckpointError, match="does not tell which checkpoint is the best"):
        ckpt.load(tmp_path, {"x": 0}, step="best")
