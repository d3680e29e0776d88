"""A program that says gloo runs on phalanx: by variable, by flag, by function, under every launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import _torch
from tests.ports import free_port
from tests.replace._running import BY_VARIABLE, PHALANX_RUN, PROGRAM, got, run

EXPECTED = {
    "backend": "gloo",
    "name": "gloo",
    "is_gloo": True,
    "total": [1.0, 3.0, 5.0, 7.0],
    "inside": 2.0,
    "gradient": None,
    "ranks": [0, 1],
}
WITH_DDP = EXPECTED | {"gradient": [[0.5, 0.5]]}


@pytest.fixture
def run_forked(forked):
    """Run a script like `run`, but with torch imported."""

    def run_it(*command, folder, **environ):
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": free_port(), **environ}
        return forked.run(*command, cwd=folder, env=environ)

    return run_it


@pytest.mark.parametrize("launcher", ["phalanx run", "spawn"])  # torchrun: see backend/test_lives.py
def test_the_variable_replaces_gloo_under(launcher, run_forked, tmp_path):
    trains = launcher == "phalanx run"  # where the group comes from makes no difference to DDP
    if trains:
        done = run([*PHALANX_RUN, "ddp"], tmp_path, **BY_VARIABLE)
    else:  # its ranks are started anew
        done = run_forked(PROGRAM, launcher, folder=tmp_path, **BY_VARIABLE)
    assert got(done) == (WITH_DDP if trains else EXPECTED) | {"group": "PhalanxGroup"}
    assert "phalanx: " not in done.stderr


def test_the_flag_replaces_gloo(tmp_path, warm_jobs):
    command = [*PHALANX_RUN[:4], "--replace-gloo", *PHALANX_RUN[4:]]
    assert got(run(command, tmp_path))["group"] == "PhalanxGroup"


def test_the_function_replaces_gloo_in_the_processes_that_follow(run_forked, tmp_path):
    done = run_forked(PROGRAM, "spawn", "function", folder=tmp_path, WORLD_SIZE="1")
    assert got(done)["group"] == "PhalanxGroup"


def test_without_the_variable_gloo_is_gloo(forked, tmp_path):
    environ = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with (
        forked.start(PROGRAM, "ddp", cwd=tmp_path, env=environ | {"RANK": "1"}),
        forked.start(PROGRAM, "ddp", cwd=tmp_path, env=environ | {"RANK": "0"}) as first,
    ):
        out, err = first.communicate()
    assert got(subprocess.CompletedProcess([], first.returncode, out, err)) == WITH_DDP | {"group": "ProcessGroup"}


SPAWNS_TWICE = """
import os, phalanx, torch.distributed as dist

def say(rank):
    dist.init_process_group("gloo")
    print(type(dist.group.WORLD).__name__, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    phalanx.spawn(say, nprocs=1)
    del os.environ["PHALANX_REPLACE"]
    phalanx.spawn(say, nprocs=1)
"""


def test_spawn_obeys_the_variable_as_it_is_at_each_call(run_forked, tmp_path):
    (tmp_path / "train.py").write_text(SPAWNS_TWICE)
    done = run_forked(tmp_path / "train.py", folder=tmp_path, **BY_VARIABLE)
    assert done.stdout.split() == ["PhalanxGroup", "ProcessGroup"], done.stderr


def test_a_dry_run_says_whether_and_who_asked(tmp_path):
    command = [*PHALANX_RUN[:4], "--dry-run", *PHALANX_RUN[4:]]
    flagged = [*command[:5], "--replace-gloo", *command[5:]]
    for line, environ, said in (
        (command, {}, ["no", "default"]),
        (command, BY_VARIABLE, ["yes", "PHALANX_REPLACE"]),
        (flagged, {}, ["yes", "--replace-gloo"]),
    ):
        (row,) = (row for row in run(line, tmp_path, **environ).stdout.splitlines() if row.startswith("replace-gloo"))
        assert row.split()[1:] == said
    refused = run(command, tmp_path, PHALANX_REPLACE="glo")
    assert refused.returncode == 2
    assert "PHALANX_REPLACE must be gloo, or empty, did you mean gloo?, got 'glo'" in refused.stderr


def test_import_torch_loads_little_of_phalanx():
    program = "import sys, torch; print(*sorted(name for name in sys.modules if name.startswith('phalanx')))"
    done = run([sys.executable, "-c", program], None, **BY_VARIABLE)
    lean = ["", "._env", "._plugin", "._torch", "._torch.replace"]
    if _torch.version() < (2, 14):  # Gloo is no plugin there: more is needed to stand in its place
        lean += ["._torch.lookup", "._torch.names", "._torch.stand_in"]
    assert done.stdout.split() == [f"phalanx{name}" for name in sorted(lean)]
    files = {path.stem for path in Path(_torch.__file__).parent.glob("*.py")}
    assert files - {"__init__"} == _torch._MODULES
