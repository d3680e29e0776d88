"""``make demo`` says how long its steps take, uses uv where it is, and tells of torch for CPUs alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
HINT = "This machine shows no GPU."


def commands(*settings):
    """Return what ``make demo`` would run for a new environment."""
    done = subprocess.run(
        ["make", "--dry-run", "demo", "VENV=/nowhere/venv", *settings],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("uv", "installer"), [("/opt/uv", "/opt/uv pip install"), ("", "python -m pip install")])
def test_uv_installs_what_is_needed_where_it_is_there(uv, installer):
    (line,) = [line for line in commands(f"UV={uv}").splitlines() if "requirements.txt" in line and "install" in line]
    assert installer in line
    assert "quiet" not in line


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_an_index_given_to_pip_is_used_by_pip(variable):
    assert "uv pip" not in commands(f"{variable}=/somewhere")


@pytest.mark.parametrize(
    ("uv", "hint"), [("/opt/uv", "UV_TORCH_BACKEND=cpu make demo"), ("", "PIP_EXTRA_INDEX_URL=INDEX")]
)
def test_who_has_no_gpu_is_told_of_torch_for_cpus_alone(uv, hint):
    assert HINT not in commands(f"UV={uv}", "GPUS=/dev/nvidiactl")
    without = commands(f"UV={uv}", "GPUS=")
    assert HINT in without
    assert hint in without
