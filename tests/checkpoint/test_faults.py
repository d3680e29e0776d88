"""Full disks, folders that can't be written, ranks that do not make the call, processes that end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.checkpoint as ckpt
from phalanx import CheckpointError, CollectiveMismatch
from phalanx.checkpoint import agreement
from phalanx.checkpoint.disk import folder as folders
from phalanx.testing import reached
from tests.checkpoint._kills import kill_savers
from tests.checkpoint._tools import save

pytestmark = pytest.mark.usefixtures("warm_jobs")

NUM_KILLS = 6
LIMIT_S = 60


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def fill_disk(rank, world_size, folder, make_full, log):
    """Save, and save again when the disk can't take it; return what this rank has heard and said."""
    sys.stderr = open(f"{log}-{rank}.err", "w+")  # noqa: SIM115 closed with the process
    save(folder, {"x": torch.ones(100_000)}, 1)
    make_full()
    heard = []
    for call in (ckpt.wait, lambda: ckpt.save(folder, {"x": 0}, 3)):
        ckpt.save(folder, {"x": torch.ones(3_000_000)}, 2)
        with pytest.raises(CheckpointError) as caught:
            call()
        heard.append(str(caught.value))
    sys.stderr.seek(0)
    state = {"x": None}
    assert ckpt.load(folder, state) == ckpt.Loaded(1, "disk")
    return heard, sys.stderr.read(), names_in(folder), state["x"].sum().item()


def limit_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() then fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))


def hide_shortage():
    real = os.statvfs("/tmp")  # whoever fills the disk comes after we have looked
    os.statvfs = lambda path: os.statvfs_result([*real[:4], 1 << 40, *real[5:]])


@contextlib.contextmanager
def small_disk(folder):
    """Mount a file system of 6 MB."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=6m") != 0:
        pytest.skip(f"this root may not mount: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        assert libc.umount2(os.fsencode(folder), 2) == 0


@pytest.mark.parametrize("how", ["a limit of this process", "a small disk"])
def test_a_disk_that_is_full_leaves_the_checkpoint_before_as_it_was(run_ranks, tmp_path, how):
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(small_disk(tmp_path / "disk")) / "c" if how == "a small disk" else tmp_path / "c"
        make_full = hide_shortage if how == "a small disk" else limit_files
        results = run_ranks(fill_disk, 2, str(folder), make_full, str(tmp_path / "log"))
    why = "No space left on device" if how == "a small disk" else "File too large"
    said = [err for _, err, _, _ in results]
    assert any(why in err for err in said)
    for heard, err, names, total in results:
        for message in heard:
            assert "the checkpoint of step 2 was not saved" in message
            assert "Earlier checkpoints are unchanged; make room or choose another folder" in message
        assert err.count("\n") == err.count("phalanx: rank ") <= 2  # a line for each failure
        assert names == ["latest", "step-00000001"]
        assert total == 100_000
    assert sum(err.count("\n") for err in said) >= 2


def test_a_disk_that_must_be_written_through_the_cache_is(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    save(tmp_path, {"x": torch.arange(3_000_000)})
    state = {"x": None}
    assert ckpt.load(tmp_path, state).step == 1
    assert torch.equal(state["x"], torch.arange(3_000_000))


def save_as_nobody(rank, world_size, folder):
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    with pytest.raises(CheckpointError, match=r"rank 0: can't save to .*: Permission denied"):
        ckpt.save(folder, {"x": 1}, 2)
    assert ckpt.load(folder, {"x": 0}).step == 1
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(folder)] == [1]
    if is_root:
        os.seteuid(0)


def test_a_folder_that_may_only_be_read_is_named_and_can_be_loaded(run_ranks):
    with tempfile.TemporaryDirectory() as parent:  # pytest's own can't be entered by others
        os.chmod(parent, 0o755)
        folder = f"{parent}/c"
        save(folder, {"x": 1})
        os.chmod(folder, 0o555)
        run_ranks(save_as_nobody, 2, folder)
        os.chmod(folder, 0o755)


def call_on_rank_0_alone(rank, world_size, folder, name):
    dist.barrier()
    if rank:
        dist.all_reduce(torch.ones(10))
        return 0.0
    begin = time.monotonic()
    try:
        calls = {
            "save": lambda: ckpt.save(folder, {"x": 1}, 1),
            "load": lambda: ckpt.load(folder, {}),
            "wait": ckpt.wait,
        }
        calls[name]()
    finally:
        reached("told", time.monotonic() - begin)


@pytest.mark.parametrize("name", ["save", "load", "wait"])
def test_a_call_that_another_rank_does_not_make_fails_within_a_second(spawn_ranks, tmp_path, name):
    with spawn_ranks(call_on_rank_0_alone, 2, str(tmp_path / "c"), name) as ranks:
        [took_s] = ranks.wait_until_reached("told", [0])
        first, second = ranks.join(LIMIT_S)
    assert took_s < 1
    assert isinstance(first.error, CheckpointError)
    assert "not every rank has called it. All must, not only rank 0" in str(first.error)
    assert isinstance(second.error, CollectiveMismatch)
    assert not (tmp_path / "c").exists()


def save_on_rank_0_of_gloo(rank, world_size, folder):
    agreement._MISSING_S = 0.5
    told = dist.FileStore(f"{folder}-told", 2)
    if rank == 0:
        with pytest.raises(CheckpointError, match="not every rank has called it") as caught:
            ckpt.save(folder, {"x": 1}, 1)
        assert "anks 1 failed to pass" in str(caught.value)
        told.set("told", "")
    told.wait(["told"])  # so that it is missing, and not gone


def test_a_call_that_another_rank_does_not_make_fails_on_gloo(run_ranks, tmp_path):
    run_ranks(save_on_rank_0_of_gloo, 2, str(tmp_path / "c"), backend="gloo")


def signed(data):
    sha256 = Future()
    sha256.set_result("0" * 64)
    return memoryview(data), sha256


def test_a_rank_whose_signature_another_has_published_at_once_has_written(tmp_path, monkeypatch):
    """The folder has moved before the rank goes on."""
    draft = folders.begin(str(tmp_path), 1, 2, None)
    draft.write(0, *signed(b"x"))
    rename = os.rename

    def rename_and_publish(path, to):
        rename(path, to)
        if to.endswith(f"{folders.file_of(1)}.json"):
            assert draft.publish()

    monkeypatch.setattr(os, "rename", rename_and_publish)
    draft.write(1, *signed(b"y"))
    assert not draft.publish()
    assert [c.step for c in ckpt.list_checkpoints(tmp_path)] == [1]


def test_a_rank_that_publishes_too_late_does_no_harm(tmp_path, monkeypatch):
    """It has seen all signatures, and another has published and taken them away before it goes on."""
    draft = folders.begin(str(tmp_path), 1, 2, None)
    for rank in range(2):
        draft.write(rank, *signed(b"x"))
    late, published = [], ["manifest.json", *map(folders.file_of, range(2))]

    def sync(path):
        if not late and path == draft.path and names_in(path) == [*published, "writing"]:
            with monkeypatch.context() as patch:
                patch.setattr(os.path, "exists", lambda path: True)  # as it was when it looked
                late.append(None)
                late[0] = draft.publish()

    monkeypatch.setattr(folders, "_sync", sync)
    assert draft.publish()
    assert late == [False]
    assert names_in(tmp_path) == ["latest", "step-00000001"]
    assert names_in(tmp_path / "step-00000001") == published


# ---------------------------------------------------------------- the end of a process

ENDING = """
import sys, torch, torch.distributed as dist
import phalanx, phalanx.checkpoint as ckpt
phalanx.init()
ckpt.save("c", {"x": torch.full((3_000_000,), 7.0)}, 1)
if "destroy" in sys.argv:
    dist.destroy_process_group()
if "raise" in sys.argv:
    raise ValueError("bad batch")
if "exit" in sys.argv:
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how"),
    [("python", "exit"), ("phalanx run", "destroy"), ("phalanx run", "raise")],
)
def test_the_last_save_is_completed_before_the_interpreter_ends(tmp_path, launcher, how):
    (tmp_path / "end.py").write_text(textwrap.dedent(ENDING))
    run = ["-m", "phalanx", "run", "--nproc-per-node", "2"] if launcher == "phalanx run" else []
    command = [sys.executable, *run, "end.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == {"raise": 1, "exit": 3}.get(how, 0), done.stderr
    state = {"x": None}
    assert ckpt.load(tmp_path / "c", state) == ckpt.Loaded(1, "disk")
    assert state["x"].eq(7).all()
    assert names_in(tmp_path / "c") == ["latest", "step-00000001"]


def test_killed_ranks_lose_at_most_one_step(tmp_path):
    assert len(kill_savers(tmp_path, NUM_KILLS, seed=1)) == NUM_KILLS
