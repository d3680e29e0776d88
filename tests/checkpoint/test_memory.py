"""Snapshots in memory: what outlives killed ranks, and what is loaded from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from phalanx.checkpoint.memory import layout, snapshots
from phalanx.host import spare_memory
from phalanx.host.cgroups import Memory
from phalanx.testing import run_ranks
from tests.checkpoint import _own
from tests.checkpoint._tools import assert_same, save

pytestmark = pytest.mark.usefixtures("warm_jobs")
LIMIT_S = 100

TRAIN = """
import hashlib, json, os, signal, sys
import torch
from torch import nn
import phalanx, phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from phalanx.checkpoint.memory import snapshots as memory

kills = [tuple(kill) for kill in json.loads(sys.argv[1])]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
phalanx.init()
rank = int(os.environ["RANK"])
phalanx.seed_everything(3, per_rank=True)
layers = [nn.Linear(20, 200), nn.ReLU(), nn.Dropout(0.3), nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 3)]
model = phalanx.DistributedDataParallel(nn.Sequential(*layers))
momentum = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
state = {"model": model, "momentum": momentum, "random": phalanx.RandomState(), "step": 0}
found = ckpt.load("c", state)
assert state["step"] == (found.step if found else 0)
print("loaded", attempt, rank, *((found.step, found.source) if found else (0, "none")), flush=True)
torch.distributed.barrier()  # all have said it before one dies

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def fill_half(target, layout, parts):
    target[: layout.size_bytes // 2] = bytes(layout.size_bytes // 2)
    die()

for step in range(state["step"] + 1, 9):
    if (attempt, rank, step, "before") in kills:
        die()
    model.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    with torch.no_grad():  # by hand: torch's optimizers import for seconds what this test does not need
        for name, parameter in model.named_parameters():
            momentum[name].mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum[name], alpha=0.01)
    state["step"] = step
    if (attempt, rank, step, "in snapshot") in kills:
        memory.fill = fill_half
    problem = ckpt.snapshot("c", state, step)
    assert not problem, problem
digest = hashlib.sha256()
for values in (model.module.state_dict(), momentum):
    for tensor in values.values():
        digest.update(tensor.numpy().tobytes())
print("digest", rank, digest.hexdigest(), torch.rand(()).item(), flush=True)
phalanx.shutdown()
"""


def train(folder, kills):
    """Run a job whose ranks are killed as told; return what was loaded by attempt and rank, and how each rank ended."""
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    flags = ["--nproc-per-node", "2", "--max-restarts", str(len(kills) + 1)]
    command = [sys.executable, "-m", "phalanx", "run", *flags, "train.py", json.dumps(kills)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    lines = [line.split("] ")[1].split() for line in done.stdout.splitlines()]
    loaded = {
        (int(a), int(r)): (int(step), source) for what, a, r, step, source in (x for x in lines if x[0] == "loaded")
    }
    return loaded, sorted(line for line in lines if line[0] == "digest")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed") / "run", [])[1]


def test_a_killed_rank_costs_one_step_and_changes_no_bit_twice_in_a_row(tmp_path, undisturbed):
    kills = [(0, 1, 5, "before"), (1, 0, 5, "before")]  # the second before there is any new snapshot
    loaded, ends = train(tmp_path / "run", kills)
    assert loaded[0, 0] == loaded[0, 1] == (0, "none")
    for attempt in (1, 2):
        assert loaded[attempt, 0] == loaded[attempt, 1] == (4, "memory")
    assert ends == undisturbed


@pytest.mark.slow
def test_a_rank_killed_inside_a_snapshot_leaves_the_one_before(tmp_path, undisturbed):
    kills = [(0, 1, 5, "in snapshot"), (1, 0, 6, "in snapshot")]
    loaded, ends = train(tmp_path / "run", kills)
    assert loaded[1, 0] == loaded[1, 1] == (4, "memory")
    assert loaded[2, 0] == loaded[2, 1] == (5, "memory")
    assert ends == undisturbed


# ---------------------------------------------------------------- without a supervisor: the memory alone


@pytest.fixture
def held():
    """The environment of ranks whose snapshots this process holds."""
    fd = os.memfd_create("snapshots-of-a-test")
    yield {"PHALANX_SNAPSHOTS": f"/proc/{os.getpid()}/fd/{fd}"}
    os.close(fd)


def state_of(rank, step):
    """Some of it all ranks have alike, some is large and theirs."""
    return {"all": torch.full((50_000,), float(step)), "mine": torch.full((3,), step + rank / 4), "step": step}


def take(rank, world_size, folder, steps, saved=()):
    """Take snapshots; return why there was none of each."""
    problems = []
    for step in steps:
        problems.append(ckpt.snapshot(folder, state_of(rank, step), step))
        if step in saved:
            save(folder, state_of(rank, step), step)
    return problems


def find(rank, world_size, folder, number_of_owner=None):
    """Load; return step and source, having looked at every value."""
    state = {"all": torch.zeros(50_000), "mine": torch.zeros(3), "step": 0}
    found = ckpt.load(folder, state)
    if found is None:
        return None
    assert state["step"] == found.step
    assert state["all"].eq(found.step).all()
    assert state["mine"].eq(found.step + (rank if number_of_owner is None else number_of_owner) / 4).all()
    return found.step, found.source


def take_own(rank, world_size, folder):
    for number, state in enumerate(_own.states(rank)):
        assert ckpt.snapshot(folder, state, number) == ""
        loaded = dict.fromkeys(state)
        assert ckpt.load(folder, loaded) == ckpt.Loaded(number, "memory")
        assert_same(loaded, state, f"state {number}")


def test_what_differs_in_one_bit_is_each_ranks_own(tmp_path, held):
    run_ranks(take_own, 2, str(tmp_path), env=held)


def test_the_newest_in_memory_or_on_disk_is_loaded(tmp_path, held):
    folder = str(tmp_path)
    run_ranks(take, 2, folder, [1, 2, 3], [2], env=held)
    assert run_ranks(find, 2, folder, env=held) == [(3, "memory")] * 2
    run_ranks(take, 2, folder, [4, 5], [5], env=held)
    assert run_ranks(find, 2, folder, env=held) == [(5, "memory")] * 2, "the nearer of two alike"
    run_ranks(save_only, 2, folder, 7, env=held)
    assert run_ranks(find, 2, folder, env=held) == [(7, "disk")] * 2


def save_only(rank, world_size, folder, step):
    save(folder, state_of(rank, step), step)


def test_a_snapshot_of_another_folder_is_not_loaded(tmp_path, held):
    run_ranks(take, 2, str(tmp_path / "a"), [1, 2], env=held)
    assert run_ranks(find, 2, str(tmp_path / "b"), env=held) == [None] * 2
    run_ranks(take, 2, str(tmp_path / "b"), [1], env=held)
    assert run_ranks(find, 2, str(tmp_path / "b"), env=held) == [(1, "memory")] * 2
    assert run_ranks(find, 2, str(tmp_path / "a"), env=held) == [(2, "memory")] * 2


@pytest.mark.parametrize("num_left", [1, 2, 4])
def test_another_number_of_ranks_loads_it_too(tmp_path, held, num_left):
    folder = str(tmp_path)
    run_ranks(take, 3, folder, [1, 2], env=held)
    assert run_ranks(find, num_left, folder, 0, env=held) == [(2, "memory")] * num_left
    run_ranks(take, num_left, folder, [3], env=held)
    assert run_ranks(find, num_left, folder, env=held) == [(3, "memory")] * num_left


def die_between(rank, world_size, folder):
    """Rank 1 has taken one snapshot less than rank 0, and half of the next."""
    for step in (1, 2):
        assert ckpt.snapshot(folder, state_of(rank, step), step) == ""
    if rank == 1:
        snapshots.fill = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    ckpt.snapshot(folder, state_of(rank, 3), 3)


def test_the_last_step_that_every_rank_has_is_loaded(tmp_path, held):
    outcomes = run_ranks(die_between, 2, str(tmp_path), env=held, expect_failures=True)
    assert outcomes[0].ok
    assert outcomes[1].signal == signal.SIGKILL
    assert run_ranks(find, 2, str(tmp_path), env=held) == [(2, "memory")] * 2


def grow(rank, world_size, folder):
    """The state has more in it from step to step, as one of an optimizer has, and keys that grow longer."""
    for step in range(1, 6):
        state = {"big": [torch.full((30_000,), float(step))] * step, "note": "x" * 3000 * step, "rank": rank}
        assert ckpt.snapshot(folder, state, step) == ""
    return snapshots.memory().size_bytes


def read_grown(rank, world_size, folder):
    state = {"big": None, "note": "", "rank": None}
    assert ckpt.load(folder, state) == ckpt.Loaded(5, "memory")
    assert (len(state["big"]), len(state["note"]), state["rank"]) == (5, 15_000, rank)
    assert all(tensor.eq(5).all() for tensor in state["big"])


def test_a_state_may_grow(tmp_path, held):
    sizes = run_ranks(grow, 2, str(tmp_path), env=held)
    assert all(2 * 5 * 30_000 * 4 / 2 < size < 1.5e6 for size in sizes), sizes
    run_ranks(read_grown, 2, str(tmp_path), env=held)


def take_too_much(rank, world_size, folder):
    spare_memory._MAX_SHARE = 1e-6
    return take(rank, world_size, folder, [1, 2])


def take_what_is_needed(rank, world_size, folder):
    spare_memory.cgroup_memory = lambda: [Memory(64 << 20, 63 << 20)]
    return take(rank, world_size, folder, [1, 2])


def take_beyond_the_region(rank, world_size, folder):
    layout.REGION_BYTES = 1 << 16
    return take(rank, world_size, folder, [1, 2])


def lack_memory(rank, world_size, folder):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    if rank == 1:
        snapshots.os.posix_fallocate = refuse
    return take(rank, world_size, folder, [1, 2])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (take_too_much, "two of all ranks would take 0 MiB, more than 0% of this host's"),
        (
            take_what_is_needed,
            "two of all ranks would take 0 MiB, more than 50% of the 1 MiB that are left of the cgro",
        ),
        (take_beyond_the_region, "one of a rank would take 0 MiB, more than 0 MiB"),
        (lack_memory, "0 MiB can't be had on rank 1: No space left on device"),
    ],
)
def test_every_rank_is_told_that_memory_is_short(tmp_path, held, function, said):
    for answers in run_ranks(function, 2, str(tmp_path), env=held):
        assert all(answer.startswith(said) for answer in answers), answers
    assert run_ranks(find, 2, str(tmp_path), env=held) == [None] * 2


def take_what_cannot_be_saved(rank, world_size, folder):
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.snapshot of step 1 of /\S+: rank 1: TypeError: x is a object"
    ):
        ckpt.snapshot(folder, {"x": object() if rank == 1 else 0}, 1)
    return take(rank, world_size, folder, [2])


def test_a_value_that_one_rank_cannot_save_raises_on_all(tmp_path, held):
    assert run_ranks(take_what_cannot_be_saved, 2, str(tmp_path), env=held) == [[""]] * 2


def go_on_without(rank, world_size, folder, path):
    """Load, in two calls, and try to take snapshots; return the pages that are held before and after."""
    before = os.stat(path).st_blocks
    assert find(rank, world_size, folder) == find(rank, world_size, folder) == (3, "memory")
    assert take(rank, world_size, folder, [4]) == ["the kernel has killed an earlier attempt because memory ran out"]
    torch.distributed.barrier()
    return before, os.stat(path).st_blocks


def test_after_a_kill_for_want_of_memory_snapshots_are_loaded_once_more_and_freed(tmp_path, held):
    folder, path = str(tmp_path), held["PHALANX_SNAPSHOTS"]
    run_ranks(take, 2, folder, [1, 2, 3], env=held)
    fd = os.open(path, os.O_RDWR)
    layout.forbid(fd)
    os.close(fd)
    for before, after in run_ranks(go_on_without, 2, folder, path, env=held):
        assert before > 1000
        assert after <= 16, "the word that forbids them"


def test_without_a_supervisor_snapshot_says_so(tmp_path):
    for answers in run_ranks(take, 2, str(tmp_path), [1]):
        assert answers == ["no supervisor holds memory for them: start with phalanx run --max-restarts"]
