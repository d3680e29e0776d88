"""Where there is no Linux there is no backend: what needs it says what to use instead, and all else runs on Gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PRETENCE = "tests.platforms.other_system"
INSTEAD = 'the phalanx backend needs Linux, and this is darwin: use init_process_group("gloo"), or phalanx.init(), '

EVERY_NAME = """
import phalanx
for name in phalanx.__all__:
    try:
        getattr(phalanx, name)
    except ImportError:
        print(name)
"""
COMMAND = "import sys; from phalanx.cli import main; sys.exit(main(['{}', 'train.py']))"
COMMANDS = ("run", "tune", "doctor", "check")
SPAWN = "import phalanx\nphalanx.spawn(print, (), 2)"
GROUP = "import torch.distributed as dist\ndist.init_process_group('phalanx', {})"
PLACES = ("init_method='file://{}/meet', rank=0, world_size=2", "store=dist.HashStore(), rank=0, world_size=1")
# Each script in a process that is forked before phalanx is imported, so that torch is imported once.
RUNS_SCRIPTS = """
import json, os, sys
for number, code in enumerate(json.loads(open("scripts").read())):
    if (child := os.fork()) == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        status = 0
        try:
            exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code
        except Exception:
            sys.excepthook(*sys.exc_info())
            status = 1
        sys.stdout.flush()
        os._exit(status)  # without torch's end, which takes a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
TRAIN = """
import sys
import phalanx
import torch
from torch import nn
from torch.utils.data import TensorDataset

phalanx.seed_everything(0)
inputs = torch.randn(200, 8)
model = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 1))  # large enough to be saved in parts
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
trainer = phalanx.Trainer(
    model, optimizer, nn.functional.mse_loss, max_epochs=int(sys.argv[1]), global_batch_size=20, folder="run"
)
trainer.fit(TensorDataset(inputs, inputs.sum(1, keepdim=True)))
"""


def run(*command, folder):
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def run_code(tmp_path_factory):
    """``run_code(script)`` returns how one of the scripts has ended."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = [EVERY_NAME, SPAWN, *(GROUP.format(place.format(folder)) for place in PLACES)]
    scripts += [COMMAND.format(command) for command in COMMANDS]
    (folder / "scripts").write_text(json.dumps(scripts))
    (folder / "script.py").write_text(RUNS_SCRIPTS)
    done = run(PRETENCE, "script.py", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    ends = {}
    for number, (script, code) in enumerate(zip(scripts, done.stdout.split(), strict=True)):
        out, err = ((folder / f"{number}.{name}").read_text() for name in ("out", "err"))
        ends[script] = subprocess.CompletedProcess(script, int(code), out, err)
    return lambda script: ends[script.format(folder)]


def test_the_package_imports_with_all_names_but_the_backend_s_own(run_code):
    done = run_code(EVERY_NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Communicator", "communicator"]


@pytest.mark.parametrize("place", PLACES)
def test_a_group_of_the_backend_is_refused_in_a_sentence(run_code, place):
    done = run_code(GROUP.format(place))
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1] == f"phalanx.PhalanxError: {INSTEAD}which chooses it (phalanx explain linux-only)"
    )


def test_ranks_that_phalanx_would_start_are_refused_in_a_sentence(run_code):
    done = run_code(SPAWN)
    assert done.stderr.splitlines()[-1].endswith(
        "starting ranks needs Linux, and this is darwin: start the script with torchrun (phalanx explain linux-only)"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_starts_ranks_is_refused_in_a_sentence(run_code, command):
    done = run_code(COMMAND.format(command))
    assert done.returncode == 2
    assert done.stderr == (
        f"phalanx {command} needs Linux, and this is darwin: start scripts with torchrun, on the backend gloo "
        "(phalanx explain linux-only)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("launch", [(), ("torch.distributed.run", "--nproc-per-node", "2", "-m")])
def test_a_trainer_trains_and_goes_on_from_its_checkpoint_on_gloo(tmp_path, launch):
    (tmp_path / "train.py").write_text(TRAIN)
    first, second = (run(*launch, PRETENCE, "train.py", epochs, folder=tmp_path) for epochs in ("1", "2"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "phalanx.init: backend gloo: the phalanx backend needs Linux" in first.stderr
    assert "epoch 1, step 10:" in first.stdout
    assert "resuming after step 10 from" in second.stdout
    assert "epoch 2, step 20:" in second.stdout
    assert "epoch 1," not in second.stdout
    assert (tmp_path / "run" / "report.html").exists()


def test_the_package_builds_without_a_compiler_and_without_the_core(tmp_path):
    cmake = shutil.which("cmake", path=os.path.dirname(sys.executable)) or shutil.which("cmake")
    configure = [cmake, "-S", REPOSITORY, "-B", tmp_path, "-DCMAKE_SYSTEM_NAME=Darwin", "-DCMAKE_CXX_COMPILER=none"]
    done = subprocess.run(configure, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "No core on Darwin" in done.stdout
