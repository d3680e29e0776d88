"""Programs of other libraries, unchanged, train the same on Gloo and with phalanx in its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAMS = Path(__file__).parent / "programs"
_PHALANX = (sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_LIMIT_S = 240  # DeepSpeed compiles an operation of its own, once

_CASES = {
    "accelerate": (*_PHALANX, "with_accelerate.py"),
    "accelerate, torchrun": (*_TORCHRUN, "with_accelerate.py"),
    "accelerate, debug_launcher": (sys.executable, "with_debug_launcher.py"),
    "transformers": (*_PHALANX, "with_transformers.py"),
    "lightning": (*_PHALANX, "with_lightning.py"),
    "lightning, its own launcher": (sys.executable, "with_lightning.py"),
    "fabric": (*_PHALANX, "with_fabric.py"),
    "ignite": (*_PHALANX, "with_ignite.py"),
    "datasets": (*_PHALANX, "with_datasets.py"),
    "pandas and pyarrow": (*_PHALANX, "with_tables.py"),
    "torchdata": (*_PHALANX, "with_torchdata.py"),
    "torchmetrics": (*_PHALANX, "with_torchmetrics.py"),
    "ray": (sys.executable, "with_ray.py"),
    "deepspeed ZeRO-1": (*_PHALANX, "with_deepspeed.py", "1"),
    "deepspeed ZeRO-2": (*_PHALANX, "with_deepspeed.py", "2"),
}

# What these libraries return, case by case, with the number of cases.
_NUM_CASES = {
    "fairscale": 25,
    "mmengine": 76,
    "monai": 70,
    "ring_attention": 18,
    "tensor_parallel": 8,
    "torchmetrics": 177,
}


def told(command, folder, **environ):
    """Run a program and return what its rank 0 has told."""
    out = folder / "told.json"
    of_deepspeed = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder.parent / "extensions")}
    environ = {**os.environ, **of_deepspeed, "OMP_NUM_THREADS": "1", "OUT": str(out), **environ}
    argv = [str(_PROGRAMS / word) if word.startswith(("with_", "cases_of_")) else word for word in command]
    done = subprocess.run(
        argv, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, done.stdout
    words = json.loads(out.read_text())
    out.unlink()
    return words


@pytest.mark.parametrize("name", _CASES)
def test_it_trains_the_same_as_on_gloo(tmp_path, name):
    on_gloo = told(_CASES[name], tmp_path)
    replaced = told(_CASES[name], tmp_path, PHALANX_REPLACE="gloo")
    assert (on_gloo.pop("replaced_by"), replaced.pop("replaced_by")) == ("", "PHALANX_REPLACE")
    assert on_gloo["backend"] == replaced["backend"] == "gloo"
    assert replaced == on_gloo  # of two addends the sum is the same in either order


@pytest.mark.parametrize("name", _NUM_CASES)
def test_each_case_returns_the_same_bits_as_on_gloo(tmp_path, name):
    on_gloo, replaced = (
        told((*_PHALANX, f"cases_of_{name}.py"), tmp_path, PHALANX_REPLACE=word) for word in ("", "gloo")
    )
    assert (on_gloo["replaced_by"], replaced["replaced_by"]) == ("", "PHALANX_REPLACE")
    wanted, found = on_gloo["cases"], replaced["cases"]
    assert {case: results for case, results in wanted.items() if "raised " in str(results)} == {}
    assert {case: (wanted[case], found[case]) for case in wanted if found[case] != wanted[case]} == {}
    assert (len(wanted), len(found)) == (_NUM_CASES[name],) * 2


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun here")
def test_accelerate_launch_starts_its_ranks_by_mpirun(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    command = (
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--num_processes", "2",
        "--mpirun_hostfile", "hosts", "with_accelerate.py",
    )  # fmt: skip
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [told(command, tmp_path, **as_root, PHALANX_REPLACE=word) for word in ("", "gloo")]
    assert [one.pop("replaced_by") for one in words] == ["", "PHALANX_REPLACE"]
    assert words[0] == words[1]
