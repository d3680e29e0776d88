"""Behaviours: how the calls fail, and what a failure leaves behind."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
import sys
import threading
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from tests.checkpoint._tools import behaviour, flip_bit, model, save


def names_in(folder):
    return sorted(path.name for path in pathlib.Path(folder).iterdir()) if os.path.exists(folder) else []


@behaviour
def nothing_is_unpickled(rank, world_size, folder):
    module = model()
    save(folder, {"model": module, "plain": {"a": (1, b"x" * 5000)}})

    def refuse(*args, **kwargs):
        raise AssertionError("something is unpickled")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((pickle, "Unpickler"), (pickle, "load"), (pickle, "loads"), (torch, "load")):
            patch.setattr(owner, name, refuse)
        ckpt.load(folder, {"model": model(), "plain": None})


@behaviour
def files_are_ones_of_safetensors(rank, world_size, folder):
    from safetensors import safe_open

    module = model()
    state = {"model": module, "half": torch.ones(3, dtype=torch.bfloat16), "z": torch.ones(2, dtype=torch.complex64)}
    save(folder, state)
    checkpoint = ckpt.list_checkpoints(folder)[0]
    found = {}
    for name in checkpoint.files:
        with safe_open(os.path.join(checkpoint.path, name), "pt") as file:
            found[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 it is no dict
    assert len(found) == world_size
    own = found[f"rank_{rank:05}.safetensors"]
    assert torch.equal(own["half"], state["half"])
    assert torch.equal(own["z"], torch.view_as_real(state["z"]))
    rows = [t for tensors in found.values() for key, t in tensors.items() if key.split("@")[0] == "model.3.weight"]
    assert len(rows) == world_size, "a large tensor is divided among the ranks"
    assert torch.equal(torch.cat(rows), module[3].weight)


@behaviour
def a_wrong_argument_is_refused_on_every_rank(rank, world_size, folder):
    for options, said in (
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"step": 1.5}, "'float' object cannot be interpreted as an integer"),
        ({"step": 1, "keep": {"keep_last": 0}}, "keep_last must be at least 1, got 0"),
        ({"step": 1, "keep": {"last": 2}}, "unexpected keyword argument 'last'"),
        ({"step": 1, "metric": "good"}, "could not convert string to float"),
    ):
        with pytest.raises(CheckpointError, match=said):
            ckpt.save(folder, {"x": 1}, **options)
    assert not any(".part" in name for name in names_in(folder))


@behaviour
def a_state_dict_that_raises_on_one_rank_is_told_on_all(rank, world_size, folder):
    class Broken:
        def state_dict(self):
            raise AttributeError("no such field")

        def load_state_dict(self, state):
            raise AttributeError("no such field either")

    save(folder, {"thing": {"a": 1}})
    mine = Broken() if rank == world_size - 1 else torch.nn.Identity()
    with pytest.raises(
        CheckpointError, match=rf"rank {world_size - 1}: AttributeError: no such field \(phalanx explain [\w-]+\)$"
    ):
        ckpt.save(folder, {"thing": mine}, 2)
    with pytest.raises(CheckpointError, match=f"rank {world_size - 1}: thing: AttributeError: no such field either"):
        ckpt.load(folder, {"thing": mine}, strict=False)
    assert names_in(folder) == ["latest", "step-00000001"]


@behaviour
def a_tree_that_is_no_json_on_one_rank_is_told_on_all(rank, world_size, folder):
    deep: list[object] = []
    for _ in range(492):
        deep = [deep]
    save(folder, {"x": 1})
    for value, said in ((10**5000, "x is an integer of 16610 bits"), (deep, "the state is nested too deeply")):
        with pytest.raises(CheckpointError, match=f"rank {world_size - 1}: {said}"):
            ckpt.save(folder, {"x": value if rank == world_size - 1 else 1}, 2)
    dist.barrier()  # rank 0 removes what it has begun
    assert names_in(folder) == ["latest", "step-00000001"]


@behaviour
def a_copy_that_fails_on_one_rank_is_told_on_all(rank, world_size, folder):
    def refuse(*args):
        raise MemoryError("no memory for the copy")

    save(folder, {"x": 1})
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr("phalanx.checkpoint.saving.fill", refuse)
        with pytest.raises(CheckpointError, match=f"rank {world_size - 1}: .*MemoryError: no memory for the copy"):
            save(folder, {"x": 2}, 2)
    dist.barrier()  # rank 0 removes what it has begun
    assert names_in(folder) == ["latest", "step-00000001"]
    save(folder, {"x": 3}, 3)


@behaviour
def ranks_that_save_different_steps_or_folders_are_told(rank, world_size, folder):
    if world_size == 1:
        return
    with pytest.raises(CheckpointError, match=r"rank 0: saves step 0 to .*\n?.*rank 1: saves step 1 to "):
        ckpt.save(folder, {"x": 1}, rank)
    with pytest.raises(CheckpointError, match=r"saves step 1 to .*0\nrank 1: saves step 1 to .*1"):
        ckpt.save(f"{folder}-{rank}", {"x": 1}, 1)
    assert names_in(folder) == names_in(f"{folder}-{rank}") == []
    save(folder, {"x": 1})
    with pytest.raises(CheckpointError, match=r"rank 0: loads step 1 from .*\nrank 1: loads step latest from "):
        ckpt.load(folder, {"x": 1}, "latest" if rank else 1)


@behaviour
def a_folder_that_is_a_file_is_named_on_every_rank(rank, world_size, folder):
    if rank == 0:
        pathlib.Path(folder).write_text("mine")
    with pytest.raises(CheckpointError, match=r"rank 0: can't save to .*: Not a directory"):
        ckpt.save(folder, {"x": 1}, 1)
    with pytest.raises(CheckpointError, match=r"rank 0: .* is a file, and load takes a folder .* has written \("):
        ckpt.load(folder, {"x": 1})
    assert pathlib.Path(folder).read_text() == "mine"


@behaviour
def a_file_of_weights_is_told_the_call_that_reads_it(rank, world_size, folder):
    for name, call in {
        "model.pt": "torch.load('{}', map_location='cpu')",
        "model.pth": "torch.load('{}', map_location='cpu')",
        "model.safetensors": "safetensors.torch.load_file('{}')",
    }.items():
        file = f"{folder}-{name}"
        pathlib.Path(file).touch()
        with pytest.raises(CheckpointError) as caught:
            ckpt.load(file, {"x": 1})
        assert f"model.load_state_dict({call.format(file)})" in str(caught.value)


@behaviour
def too_little_room_is_told_before_anything_is_copied(rank, world_size, folder):
    save(folder, {"x": 1})
    real = os.statvfs(folder)
    with pytest.MonkeyPatch.context() as patch:
        full = os.statvfs_result([*real[:4], 3 * 2**20 // real.f_frsize, *real[5:]])
        patch.setattr(os, "statvfs", lambda path: full)
        patch.setattr("phalanx.checkpoint.saving.fill", None)  # a copy would raise a TypeError
        with pytest.raises(CheckpointError, match=r"has 3\.0 MiB left and the checkpoint needs 4\.0"):
            ckpt.save(folder, {"x": torch.ones(2**20)}, 2)
    assert names_in(folder) == ["latest", "step-00000001"]


@behaviour
def a_write_that_fails_is_told_at_the_next_call_on_every_rank(rank, world_size, folder):
    class Full:
        def fsync(self, fd):
            raise OSError(28, "No space left on device")

    save(folder, {"x": torch.ones(100_000)})
    said = "the checkpoint of step 2 was not saved to .*(No space left on device|another rank could not write)"
    for how in (ckpt.wait, lambda: ckpt.save(folder, {"x": 1}, 3), lambda: save(folder, {"x": 1}, 3)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == world_size - 1:
                patch.setattr(os, "fsync", Full().fsync)
            ckpt.save(folder, {"x": torch.ones(100_000)}, 2)
            _settle()
        with pytest.raises(CheckpointError, match=said):
            how()
        dist.barrier()  # rank 0 removes what it has begun for the save after
        assert names_in(folder) == ["latest", "step-00000001"], "nothing half written stays"
    assert ckpt.load(folder, {"x": None}).step == 1
    save(folder, {"x": torch.ones(100_000)}, 2)


def _settle():
    from phalanx.checkpoint.saving import _saver

    _saver._pending.exception()  # waits, and leaves the outcome to the next call


@contextlib.contextmanager
def slow_save(folder, number, is_slow):
    """Begin a save that this rank goes on with only a while after whoever reads the folder has begun to wait."""
    from phalanx.checkpoint import saving

    go_on, sha256 = threading.Event(), saving._sha256
    timer = threading.Timer(0.2 if is_slow else 0, go_on.set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_sha256", lambda image: (go_on.wait(60), sha256(image))[1])
        ckpt.save(folder, {"x": number}, number)
        timer.start()
        try:
            yield
        finally:
            go_on.set()
            timer.join()
            ckpt.wait()


@behaviour
def a_save_that_is_being_written_is_what_a_load_takes(rank, world_size, folder):
    for number in (1, 2):
        state = {"x": None}
        with slow_save(folder, number, rank == world_size - 1):
            assert ckpt.load(folder, state, missing="error") == ckpt.Loaded(number, "disk")
        assert state["x"] == number


@behaviour
def a_first_save_that_is_being_written_lets_a_process_be_kept(rank, world_size, folder):
    from phalanx.checkpoint import loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading.memory(), "asked", {folder})
        assert "no snapshot or checkpoint yet" in loading.why_not_loadable()
        with slow_save(folder, 1, rank == world_size - 1):
            assert loading.why_not_loadable() == ""


@behaviour
def a_save_that_is_being_written_is_in_the_list(rank, world_size, folder):
    """Also where another rank is the one that still writes."""
    for number in (1, 2):
        with slow_save(folder, number, rank == world_size - 1):
            if rank == 0:
                assert [found.step for found in ckpt.list_checkpoints(folder)] == [*range(1, number + 1)]
                assert ckpt.verify(folder, number) == []
    with slow_save(folder, 3, rank == world_size - 1):
        if rank == 0:
            assert ckpt.prune(folder, keep_last=1) == [1, 2]
    assert [found.step for found in ckpt.list_checkpoints(folder)] == [3]


@behaviour
def a_save_of_another_job_that_is_under_way_is_said(rank, world_size, folder):
    from phalanx.checkpoint.disk import folder as folders

    def load(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", io.StringIO())
            loaded = ckpt.load(folder, {"x": None}, **options)
            return loaded and loaded.step, sys.stderr.getvalue()

    def meet():
        if world_size > 1:
            dist.barrier()

    said = "another process is saving step 7 there"
    if rank == 0:
        os.makedirs(folder)
        draft = folders.begin(folder, 7, 1, None)
        mark = folders.Writing(draft.path)
    meet()
    for missing in ("note", "ignore"):
        found, heard = load(missing=missing)
        assert (found, f"holds no checkpoint yet: {said}" in heard) == (None, rank == 0)
    with pytest.raises(CheckpointError, match=f"holds no checkpoint yet: {said}"):
        load(missing="error")
    with pytest.raises(CheckpointError, match=f"it has steps none. {said.capitalize()}"):
        load(step=7)
    meet()
    if rank == 0:
        os.rename(draft.path, folder + ".kept")  # the next save sweeps what it finds
    save(folder, {"x": 1})
    if rank == 0:
        os.rename(folder + ".kept", draft.path)
    meet()
    found, heard = load()
    assert (found, heard.count(f"{said}, which can be read when the save is complete: resuming from step 1")) == (
        1,
        rank == 0,
    )
    meet()
    if rank == 0:
        mark.end()
    meet()
    assert load() == (1, ""), "what a killed job has left is not under way"


@behaviour
def a_log_that_cannot_be_written_keeps_no_error_back(rank, world_size, folder):
    class FullLog:
        def write(self, text):
            raise OSError(28, "No space left on device")

        flush = write

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", FullLog().write)
        patch.setattr("sys.stderr", FullLog())
        ckpt.save(folder, {"x": 1}, 1)
        _settle()
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 1 was not saved"):
        ckpt.wait()


@behaviour
def leftovers_of_killed_saves_are_swept(rank, world_size, folder):
    other = pathlib.Path(folder) / ".step-00000009-0123abcd.part"
    if rank == 0:
        other.mkdir(parents=True)
        (other / "rank_00000.safetensors").write_bytes(b"half")
        (pathlib.Path(folder) / ".mine.part").mkdir()
        (pathlib.Path(folder) / "latest.4711.part").write_text("step-0000")
        (pathlib.Path(folder) / "latest.mine.part").write_text("")
    save(folder, {"x": 1})
    assert names_in(folder) == [".mine.part", "latest", "latest.mine.part", "step-00000001"]


@behaviour
def a_damaged_checkpoint_gives_way_to_the_one_before(rank, world_size, folder):
    for number in (1, 2, 3):
        save(folder, {"x": torch.full((50_000,), float(number))}, number)
    if rank == 0:
        flip_bit(pathlib.Path(folder) / "step-00000003" / f"rank_{world_size - 1:05}.safetensors", 80_001)
        (pathlib.Path(folder) / "step-00000002" / "manifest.json").unlink()
    if world_size > 1:
        dist.barrier()
    state = {"x": None}
    if rank == 0:
        with pytest.warns(
            UserWarning, match=r"(?s)step-00000003/rank_.* was altered.*manifest\.json is missing"
        ) as seen:
            found = ckpt.load(folder, state)
        assert str(seen[0].message).endswith("The checkpoint of step 1 is loaded instead")
        assert seen[0].filename == __file__, "the line that loads"
    else:
        found = ckpt.load(folder, state)  # a warning would be an error here
    assert found == ckpt.Loaded(1, "disk")
    assert state["x"].eq(1).all()
    for number, said in ((3, "was altered"), (2, "is missing")):
        with pytest.raises(CheckpointError, match=said):
            ckpt.load(folder, {"x": None}, number)


@behaviour
def nothing_whole_is_an_error_and_changes_nothing(rank, world_size, folder):
    save(folder, {"x": torch.ones(5)})
    if rank == 0:
        flip_bit(pathlib.Path(folder) / "step-00000001" / "rank_00000.safetensors", 7)
    if world_size > 1:
        dist.barrier()
    state = {"x": torch.zeros(5)}
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*was altered"):
        ckpt.load(folder, state)
    assert state["x"].eq(0).all()


@behaviour
def a_file_that_several_ranks_fail_to_read_has_one_reason(rank, world_size, folder):
    for number in (1, 2):
        save(folder, {"x": torch.full((50_000,), float(number))}, number)
    torn = pathlib.Path(folder) / "step-00000002" / f"rank_{world_size - 1:05}.safetensors"
    if rank == 0:
        torn.write_bytes(torn.read_bytes()[:1000])
    if world_size > 1:
        dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert ckpt.load(folder, {"x": None}) == ckpt.Loaded(1, "disk")
    assert len(seen) == (rank == 0)
    for one in seen:
        assert str(one.message).startswith(f"{torn} has 1000 bytes instead of ")
        assert str(one.message).count("step-00000002") == 1


def screen_of(error):
    """Return what Python prints of an error that nobody catches."""
    return "".join(traceback.format_exception(error))


@behaviour
def an_error_says_its_reason_once(rank, world_size, folder):
    save(folder, {"model": nn.Linear(3, 3), "optimizer": optim.SGD(nn.Linear(3, 3).parameters()), "epoch": 3})
    others = nn.Linear(3, 4), optim.SGD([nn.Parameter(torch.ones(1))])
    for wrong, words in (
        ({"schedule": 1}, "the checkpoint has no 'schedule'"),
        ({"model": others[0]}, "of another shape"),
        ({"optimizer": others[1]}, "make the same groups again"),
    ):
        with pytest.raises(CheckpointError) as caught:
            ckpt.load(folder, wrong)
        shown = screen_of(caught.value)
        assert shown.count(words) == 1, shown
        assert "direct cause" not in shown
    with pytest.raises(CheckpointError) as caught:
        save(folder, {"loss": lambda: 0}, 4)
    assert "direct cause" not in screen_of(caught.value)


class Fails:
    """An object of the user's that can't take its state back."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        return state["b"]


@behaviour
def an_error_of_the_users_own_code_comes_with_its_line(rank, world_size, folder):
    save(folder, {"own": Fails()})
    with pytest.raises(CheckpointError) as caught:
        ckpt.load(folder, {"own": Fails()})
    assert 'return state["b"]' in screen_of(caught.value)
