"""Whatever happens to a file of a checkpoint, it is noticed, and the one before is loaded."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from tests.checkpoint._tools import flip_bit, save

FILES = ("rank_00000.safetensors", "manifest.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("whole")
    for number in (1, 2):
        save(folder, {"x": torch.full((2000,), float(number)), "epoch": number}, number, metric=1e-7)
    return folder


@pytest.fixture(scope="module")
def damaged(whole, tmp_path_factory):
    """``damaged(damage, name)``: the same, with `damage` done to a file of step 2."""
    folder = tmp_path_factory.mktemp("damaged")

    def make(damage, name):
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        damage(folder / "step-00000002" / name)
        return folder

    return make


def assert_gives_way(folder):
    state = {"x": torch.zeros(2000), "epoch": 0}
    with pytest.warns(UserWarning, match=r"step-00000002.*The checkpoint of step 1 is loaded instead"):
        assert ckpt.load(folder, state) == ckpt.Loaded(1, "disk")
    assert state["epoch"] == 1
    assert state["x"].eq(1).all()
    [problem] = ckpt.verify(folder)
    assert "step-00000002" in problem
    with pytest.raises(CheckpointError, match="step-00000002"):
        ckpt.load(folder, state, 2)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=50)
@given(where=st.floats(0, 1, exclude_max=True))
def test_one_flipped_bit_anywhere_is_noticed(damaged, name, where):
    assert_gives_way(damaged(lambda path: flip_bit(path, int(where * 8 * path.stat().st_size)), name))


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=50)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_too_early_is_noticed(damaged, name, where):
    assert_gives_way(
        damaged(lambda path: path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)]), name)
    )


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_noticed(damaged, name):
    """Its end was never written: it has the length, and zeros."""

    def tear(path):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))

    assert_gives_way(damaged(tear, name))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(damaged, name):
    assert_gives_way(damaged(lambda path: path.unlink(), name))


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_something_behind_it_is_noticed(damaged, name):
    assert_gives_way(damaged(lambda path: path.write_bytes(path.read_bytes() + b" "), name))


def test_every_single_bit_of_the_manifest_counts(damaged):
    folder = damaged(lambda path: None, "manifest.json")
    text = (folder / "step-00000002" / "manifest.json").read_bytes()
    with open(folder / "step-00000002" / "manifest.json", "r+b", buffering=0) as file:
        for position in range(8 * len(text)):
            place, byte = position // 8, text[position // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << position % 8]), place)
            assert [checkpoint.step for checkpoint in ckpt.list(folder)] == [1], position
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert not ckpt.verify(folder)


def test_a_manifest_of_another_step_is_noticed(damaged):
    assert_gives_way(damaged(lambda path: shutil.copy(path.parents[1] / "step-00000001" / path.name, path), FILES[1]))


def test_a_format_of_the_future_is_said_to_be_one(damaged):
    from phalanx.checkpoint.folder import _sign

    def date_forward(path):
        manifest = json.loads(path.read_text())
        del manifest["checksum"]
        path.write_text(_sign({**manifest, "format": 2}))

    with pytest.warns(UserWarning, match=r"is of a newer phalanx \(format 2\)"):
        ckpt.load(damaged(date_forward, "manifest.json"), {"epoch": 0})


def test_what_is_no_checkpoint_is_left_alone(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    for name in ("step-9", "step-00000003.bak", "notes"):
        (folder / name).mkdir()
    assert [checkpoint.step for checkpoint in ckpt.list(folder)] == [1, 2]
    save(folder, {"epoch": 4}, 4)
    assert {"step-9", "step-00000003.bak", "notes"} <= {path.name for path in folder.iterdir()}
