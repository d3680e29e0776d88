"""``make help`` lists the targets; ``make demo`` tells of its steps, and uses uv; ``make torches`` leaves none out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from phalanx._torch import lookup

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 300  # make asks pip where it was told to install from, which a busy machine takes long to answer
HINT = "This machine shows no GPU."


def commands(*settings, environ=None):
    """Return what ``make demo`` would run for a new environment."""
    done = subprocess.run(
        ["make", "--dry-run", "demo", "VENV=/nowhere/venv", *settings],
        cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_without_a_target_lists_all_that_are_meant_for_people():
    done = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    (targets,) = re.findall(r"^\.PHONY: (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    within = {"help", "torch", "test-integrations"}  # parts of others
    assert {*re.findall(r"^  make ([a-z-]+)  ", done.stdout, re.MULTILINE)} == {*targets.split()} - within


@pytest.mark.parametrize(("uv", "installer"), [("/opt/uv", "/opt/uv pip install"), ("", "python -m pip install")])
def test_uv_installs_what_is_needed_where_it_is_there(uv, installer):
    (line,) = [line for line in commands(f"UV={uv}").splitlines() if "requirements.txt" in line and "install" in line]
    assert installer in line
    assert "quiet" not in line


def test_the_demo_installs_what_building_and_its_example_need_and_the_tests_all_else(tmp_path):
    venv = f"VENV={tmp_path}"
    told = {target: subprocess.run(
        ["make", "--dry-run", target, venv], cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S,
    ).stdout for target in ("demo", "lint")}  # fmt: skip
    assert "requirements-dev.txt" not in told["demo"].replace("' requirements-dev.txt", "")
    assert f"-r {tmp_path}/requirements-dev.txt" in told["lint"]
    (choice,) = [line for line in told["demo"].splitlines() if line.startswith("grep -E")]
    chosen = subprocess.run(
        choice.partition(" > ")[0], shell=True, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    names = {line.partition("==")[0] for line in chosen.stdout.splitlines()}
    build = {"scikit-build-core", "nanobind", "cmake", "ninja"}
    assert names == build | {"numpy", "cloudpickle", "rich", "scikit-learn", "matplotlib", "py-spy"}


@pytest.mark.parametrize(
    ("told", "is_uv"),
    [
        ({}, True),
        ({"PIP_INDEX_URL": "/somewhere"}, False),
        ({"PIP_EXTRA_INDEX_URL": "/somewhere"}, False),
        ({"PIP_FIND_LINKS": "/somewhere"}, False),
        ({"PIP_CONFIG_FILE": "pip.conf"}, False),
    ],
)
def test_an_index_that_pip_was_told_of_is_used_by_pip(tmp_path, told, is_uv):
    (tmp_path / "uv").touch(0o755)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = /somewhere\n")
    named = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    if "PIP_CONFIG_FILE" in told:
        told = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    assert (f"{tmp_path}/uv pip install" in commands(environ={**kept, **named, **told})) == is_uv


@pytest.mark.parametrize(
    ("uv", "hint"), [("/opt/uv", "UV_TORCH_BACKEND=cpu make demo"), ("", "PIP_EXTRA_INDEX_URL=INDEX")]
)
def test_who_has_no_gpu_is_told_of_torch_for_cpus_alone(uv, hint):
    assert HINT not in commands(f"UV={uv}", "GPUS=/dev/nvidiactl")
    without = commands(f"UV={uv}", "GPUS=")
    assert HINT in without
    assert hint in without


def test_each_minor_version_of_torch_that_the_package_allows_is_tested_before_a_release():
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "TORCH", "VENV")}
    told = subprocess.run(
        ["make", "--dry-run", "torches", "UV=", "PYTHON=python3"],
        cwd=REPOSITORY, env=kept, capture_output=True, text=True, check=True, timeout=LIMIT_S,
    ).stdout  # fmt: skip
    runs = re.findall(
        r"^(\.venv\S*)/bin/python -m pytest -n .* (tests/\S+ tests/\S+ tests/\S+) \|\|", told, re.MULTILINE
    )
    *older, newest = torches()
    assert runs == [
        (venv, "tests/integration tests/replace tests/faults") for venv in [*map(".venv-{}".format, older), ".venv"]
    ]
    (floor,) = re.findall(r'"torch>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    minors = [version.rpartition(".")[0] for version in torches()]
    assert minors == [f"2.{i}" for i in range(int(floor.removeprefix("2.")), int(newest.split(".")[1]) + 1)]
    assert f"{minors[0]} to {minors[-1]}" == lookup._TESTED
    assert f"\ntorch=={newest}\n" in (REPOSITORY / "requirements-dev.txt").read_text()


def torches():
    """Return the versions of torch that ``make torches`` tests on, the newest last."""
    (line,) = re.findall(r"^TORCHES := (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    return line.split()
