"""Phalanx in the place of Gloo where something is wrong: it is named at once, and torch goes on or ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

import phalanx
from tests.ports import free_port
from tests.replace._running import BY_VARIABLE

ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(type(dist.group.WORLD).__name__, tensor.tolist())
dist.destroy_process_group()
"""


def run_cold(*args, env):
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=60)


def run_alone(run, program, **environ):
    """Return what a process printed on stdout, and its lines on stderr."""
    done = run("-c", program, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def sabotaged(module):
    """Return a program that can't import a module of ours."""
    return f"import sys\nsys.modules[{module!r}] = None\n" + ALONE


@pytest.mark.parametrize(
    ("program", "environ", "said"),
    [
        (ALONE, {"PHALANX_REPLACE": "glo"}, "PHALANX_REPLACE must be gloo, or empty, did you mean gloo?, got 'glo'"),
        (sabotaged("phalanx._torch.replace"), BY_VARIABLE, "can't be set up at import torch; torch continues without"),
        (sabotaged("phalanx.backend.groups"), BY_VARIABLE, "can't be loaded, so Gloo is used"),
    ],
    ids=["unknown word", "broken at import", "broken backend"],
)
def test_gloo_goes_on_and_a_line_says_why(forked, program, environ, said):
    out, lines = run_alone(run_cold if "at import" in said else forked.run, program, **environ)
    assert out == "ProcessGroup [1.0, 1.0]"
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"phalanx: {said}")


def test_an_empty_variable_is_none(forked):
    done = forked.run("-c", ALONE, env={**os.environ, "PHALANX_REPLACE": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "ProcessGroup [1.0, 1.0]\n", "")


def test_a_group_that_exists_stays_on_gloo_and_a_line_says_so(forked):
    late = ALONE.replace("tensor = torch.ones(2)", "import phalanx; phalanx.replace_gloo(); tensor = torch.ones(2)")
    done = forked.run("-c", late)
    assert (done.returncode, done.stdout) == (0, "ProcessGroup [1.0, 1.0]\n")
    assert done.stderr.splitlines() == [
        "phalanx: phalanx.replace_gloo(): the groups that exist already stay on Gloo; call it before init_process_group"
    ]


def join_with_or_without(rank, world_size, who, port, launched):
    """One rank alone is on phalanx."""
    if not launched:
        os.environ.pop("PHALANX_LAUNCH", None)
    os.environ["MASTER_PORT"] = port
    if rank == who:
        phalanx.replace_gloo()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))


@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False], ids=["phalanx run", "torchrun"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_without_the_variable_is_named(spawn_ranks, who, launched):
    with spawn_ranks(join_with_or_without, 2, who, free_port(), launched, init=False, init_method="env") as ranks:
        outcomes = ranks.join(12)
    text = str(outcomes[who].error)
    assert isinstance(outcomes[who].error, phalanx.PhalanxError)
    assert f"rank {1 - who}" in text
    assert "PHALANX_REPLACE" in text


def join_as_version(rank, world_size, calls_roll):
    phalanx.__version__ = f"0.{rank}.0"
    if not calls_roll:
        os.environ.pop("PHALANX_LAUNCH", None)
    phalanx.replace_gloo()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))


@pytest.mark.parametrize("calls_roll", [True, False])
def test_two_versions_in_one_job_are_named(spawn_ranks, calls_roll):
    with spawn_ranks(join_as_version, 2, calls_roll, init=False, init_method="env") as ranks:
        for outcome in ranks.join(20):
            assert isinstance(outcome.error, phalanx.PhalanxError)
            assert "the ranks run different versions of phalanx: 0.0.0 on rank 0" in str(outcome.error)
            assert ", 0.1.0 on rank 1" in str(outcome.error)


def test_nothing_is_different_where_nobody_asks():
    program = """
import json, sys, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
print(json.dumps({
    "modules": [name for name in sys.modules if name == "phalanx._torch.replace"],
    "plugin": "GLOO" in dist.Backend._plugins,
    "maker": c10d._new_process_group_helper.__module__,
    "class": type(vars(dist.ProcessGroupGloo)["__init__"]).__name__,
}))
"""
    torchs = {"maker": "torch.distributed.distributed_c10d", "class": "instancemethod"}
    assert json.loads(run_alone(run_cold, program)[0]) == {"modules": [], "plugin": False, **torchs}
