"""The wheels and the sdist of a release, built as ``make wheels`` does, installed where nothing can be compiled."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tools import wheels

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
INSTALL_LIMIT_S = 10
# The newest that there is for each Python, as its users get it; the last five are of the tests.
NEEDS = (
    "torch>=2.11", "cloudpickle>=3.0", "rich>=13", "numpy", "pytest", "pytest-timeout", "hypothesis", "expecttest"
)  # fmt: skip
SHORT_TESTS = ("tests/core/test_simd.py", "tests/backend/test_dtypes.py", "tests/backend/test_shapes.py")
HELLO = """
import torch
import torch.distributed as dist

dist.init_process_group("phalanx")
tensor = torch.arange(1000.0) + dist.get_rank()
dist.all_reduce(tensor)
assert torch.equal(tensor, 2 * torch.arange(1000.0) + 1)
print("summed")
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="installs the wheels for x86-64")


def run(*command, path="", **options):
    environ = {**os.environ, "PATH": path} if path else None
    return subprocess.run(
        list(map(str, command)), cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=600, **options
    )


def checked(*command, **options):
    done = run(*command, **options)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def made(name):
    """Bring one wheel, or the sdist, up to date as ``make wheels`` does, and return it."""
    checked("make", "wheels", f"ONLY={name}")
    pattern = "*.tar.gz" if name == "sdist" else f"*-{wheels.TARGETS[name].tag}.whl"
    found = sorted((REPOSITORY / "dist").glob(pattern), key=os.path.getmtime)
    assert found, f"no {pattern} in dist"
    return found[-1]


def python_of(version):
    found = wheels.find_python(version)
    path = str(found) if isinstance(found, Path) else shutil.which(f"python{version}")
    if path is None or run(path, "-c", "").returncode != 0:
        pytest.skip(f"needs Python {version}")
    return path


@pytest.mark.parametrize("version", PYTHONS)
def test_a_wheel_installs_and_runs_where_there_is_no_compiler(version, tmp_path):
    python, wheel = python_of(version), made(f"cp{min(version, '3.12').replace('.', '')}-x86_64")
    venv = tmp_path / "venv"
    binaries = venv / "bin"
    uv = wheels.WORK / "tools" / "bin" / "uv"
    checked(uv, "venv", "--quiet", "--seed", "--python", python, venv)
    checked(uv, "pip", "install", "--quiet", "--python", binaries / "python", *NEEDS)
    begin = time.monotonic()
    checked(binaries / "python", "-m", "pip", "install", "--no-index", wheel, path=str(binaries))
    assert time.monotonic() - begin < INSTALL_LIMIT_S
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    said = checked(binaries / "phalanx", "run", "--nproc-per-node", "2", script, path=str(binaries))
    assert said.count("summed") == 2
    checked(binaries / "python", "-m", "pytest", "-p", "no:cacheprovider", *SHORT_TESTS, path=str(binaries))


def test_the_core_of_a_wheel_chooses_its_kernels_on_the_machine_that_it_runs_on(tmp_path):
    """By an emulated processor without AVX, where the machine's own would be chosen at build time."""
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("needs qemu-x86_64 (Debian: qemu-user)")
    python = python_of("3.12")
    with zipfile.ZipFile(made("cp312-x86_64")) as archive:
        archive.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from phalanx import _core; print(_core.simd_level())"
    levels = [checked(emulator, "-cpu", cpu, python, "-c", code).strip() for cpu in ("qemu64", "max")]
    assert levels == ["baseline", "x86-64-v3"]


def test_a_wheel_of_another_processor_is_refused_by_pip():
    done = run(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", made("cp312-aarch64"))
    assert done.returncode == 1
    assert "is not a supported wheel on this platform" in done.stderr


def test_pip_finds_no_wheel_for_an_older_glibc(tmp_path):
    wheel = made("cp312-x86_64")
    command = [sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "--only-binary=:all:"]
    command += ["--find-links", wheel.parent, "--dest", tmp_path, "--python-version", "3.12", "phalanx-torch"]
    checked(*command, "--platform", "manylinux_2_28_x86_64")
    done = run(*command, "--platform", "manylinux_2_27_x86_64")
    assert done.returncode == 1
    assert "No matching distribution found for phalanx-torch" in done.stderr


def test_the_sdist_builds_where_there_is_a_compiler(tmp_path):
    checked(sys.executable, "-m", "venv", tmp_path)
    checked(tmp_path / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", made("sdist"))
    checked(tmp_path / "bin" / "python", "-c", "from phalanx import _core; _core.simd_level()")


def test_a_wheel_that_asks_too_much_of_the_system_or_of_python_is_found_out(tmp_path, monkeypatch):
    """As one does that this machine's own compiler has built for this Python alone."""
    import phalanx._core

    wheel = made("cp312-x86_64")
    spoilt = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(spoilt, "w") as copy:
        for name in archive.namelist():
            is_core = name.startswith("phalanx/_core.")
            copy.writestr(name, Path(phalanx._core.__file__).read_bytes() if is_core else archive.read(name))
    monkeypatch.setattr(sys, "executable", str(wheels.WORK / "tools" / "bin" / "python"))
    faults = wheels.check_wheel(spoilt, wheels.TARGETS["cp312-x86_64"])
    assert "it needs libstdc++.so.6" in faults
    assert any(fault.startswith("it needs GLIBC_2.3") for fault in faults)
    assert any("stable ABI" in fault and "_PyType_Lookup" in fault for fault in faults)
