"""The command line: what it accepts, and the one line with which it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import phalanx.checkpoint
from tests.train.runs import FakeRun

PHALANX = [sys.executable, "-m", "phalanx"]


def run_phalanx(*args, **options):
    return subprocess.run([*PHALANX, *args], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no command given"),
        (["fly"], "unknown command 'fly'"),
        (["run"], "no script given"),
        (["run", "missing.py"], "no script 'missing.py'"),
        (["run", "--nproc", "2", "x.py"], "did you mean --nproc-per-node?"),
        (["run", "--nproc-per-node", "two", "x.py"], "got 'two'"),
        (["run", "--nproc-per-node"], "--nproc-per-node needs a value"),
    ],
)
def test_a_mistake_is_one_line_that_shows_the_right_call(args, said):
    done = run_phalanx(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "phalanx run --nproc-per-node 2 train.py" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_script_that_cannot_run_is_refused_once_with_the_call_that_would_do(tmp_path):
    for name in ("train.py", "tool.sh"):
        (tmp_path / name).touch(mode=0o644)
    for args, said in (
        (["run", "trian.py"], f"no script 'trian.py' in {tmp_path}, did you mean train.py?"),
        (["run", "."], "the folder '.' has no __main__.py"),
        (["run", "--no-python", "./tool.sh"], "'./tool.sh' may not be executed; right: chmod +x ./tool.sh"),
        (["run", "python", "train.py", "--lr", "1"], "without python; right: phalanx run train.py --lr 1"),
        (["train.py"], "train.py is a script, not a command; right: phalanx run train.py"),
        (["rn", "train.py"], "unknown command 'rn', did you mean run?"),
        (["run", "--run-path", "train.py"], "leave it out; right: phalanx run train.py"),
    ):
        done = run_phalanx(*args, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
def test_flags_take_dashes_and_underscores_and_the_rest_is_the_scripts(tmp_path, flag):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.argv[1:])\n")
    done = run_phalanx("run", flag, "2", str(script), "--nproc-per-node", "9", "--", "-x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] --nproc-per-node 9 -- -x",
        "[rank 1] --nproc-per-node 9 -- -x",
    ]


def test_a_module_and_a_program_can_be_run(tmp_path):
    (tmp_path / "job.py").write_text("import os; print(__name__, os.environ['RANK'])\n")
    assert run_phalanx("run", "--nproc-per-node=1", "-m", "job", cwd=tmp_path).stdout == "[rank 0] __main__ 0\n"
    assert run_phalanx("run", "--nproc-per-node=1", "--no-python", "echo", "hello").stdout == "[rank 0] hello\n"


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["run", "--nproc-per-node", "2", "-h"]])
def test_help_is_no_mistake(args):
    done = run_phalanx(*args)
    assert done.returncode == 0
    assert "phalanx run" in done.stdout


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("open('started', 'w')\n")
    done = run_phalanx("run", "--dry-run", "--nproc-per-node", "3", "script.py", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node" in done.stdout
    assert "3 ranks, 1 thread each" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_supervisor_imports_neither_torch_nor_anything_heavy():
    code = "import sys, phalanx.cli; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_every_command_prints_names_that_the_output_cannot_encode(tmp_path):
    folder = tmp_path / os.fsdecode("größe-".encode() + b"\xff")
    run = FakeRun(folder)
    run.start()
    run.steps(1, 3)
    (folder / "train.py").write_text("print('trained')\n")
    phalanx.checkpoint.save(folder / "ckpt", {"größe": torch.ones(3)}, step=1)

    printing = [
        ["report", folder],
        ["ckpt", "show", folder / "ckpt"],
        ["ckpt", "export", folder / "ckpt", folder / "out.safetensors"],
        ["run", "--dry-run", "--nproc-per-node", "1", folder / "train.py"],
    ]
    running = ["run", "--nproc-per-node", "1", "--log-dir", folder / "logs", folder / "train.py"]
    calls = [(encoding, args) for encoding in ("utf-8", "ascii") for args in printing] + [("ascii", running)]
    # One interpreter for all, so that torch is imported once.
    code = (
        "import sys, phalanx.cli\n"
        f"for encoding, args in {[(encoding, [os.fspath(arg) for arg in args]) for encoding, args in calls]!a}:\n"
        "    sys.stdout.reconfigure(encoding=encoding, errors='strict')\n"
        "    code = phalanx.cli.main(args)\n"
        "    print('exit code', code, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.stdout.count(b"exit code 0\n") == len(calls), done
    assert Path(os.fsdecode(done.stdout.splitlines()[0])) == folder / "report.html"
    assert "größe-\\udcff/logs".encode() in done.stderr
