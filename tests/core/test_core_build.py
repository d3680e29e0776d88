"""The core's own tests (`csrc/tests`): ranks as threads over one mapping, under the sanitizers.

The builds stay in `build/test_core`, so only the first run compiles everything.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import nanobind
import pytest

REPO = Path(__file__).resolve().parents[2]
BUILDS = REPO / "build" / "test_core"
BUILD_LIMIT_S = 600
RUN_LIMIT_S = 300  # a hang; sanitized, a run takes some ten seconds
SANITIZED = [
    str(REPO / "tests" / name)
    for name in (
        "backend/test_messages.py",
        "backend/test_shapes.py",
        "backend/test_works.py",
        "backend/test_overlaps.py",
        "faults/test_handlers.py",
    )
]  # none that forks beside threads: before GCC 14 the sanitizer's allocator is locked for ever in such a child

pytestmark = pytest.mark.skipif(not (REPO / "csrc" / "tests").is_dir(), reason="needs the source tree")


def tool(name: str) -> str:
    """A build tool of this virtual environment, else of the system."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert path is not None, f"{name} is missing; pip install -r requirements-dev.txt"
    return path


def run(command: list[str], limit_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        env={**os.environ, **env},
        check=False,
    )


@contextmanager
def locked(folder: Path):
    """Two test runs may share the checkout; they take turns in a build folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(variant: str, target: str, *settings: str, tests: str = "ON") -> Path:
    """Bring `target` of the core up to date in a folder of the variant's own; return the folder."""
    folder = BUILDS / variant
    with locked(folder):
        configure = [tool("cmake"), "-S", str(REPO), "-B", str(folder), "-G", "Ninja", f"-DPHALANX_TESTS={tests}"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=None", *settings]
        for command in (configure, [tool("cmake"), "--build", str(folder), "--target", target]):
            done = run(command, BUILD_LIMIT_S)
            assert done.returncode == 0, done.stdout[-6000:]
    return folder


def require_sanitizer(name: str, folder: Path) -> None:
    """Skip where the compiler comes without the sanitizer's runtime library."""
    folder.mkdir(exist_ok=True)
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None, "a C++ compiler is missing"
    probe = run([compiler, f"-fsanitize={name}", "-o", str(folder / "probe"), str(folder / "probe.cpp")], 60)
    if probe.returncode != 0:
        pytest.skip(f"{compiler} cannot link with -fsanitize={name}: {probe.stdout[-200:]}")


@functools.cache
def without_randomization() -> list[str]:
    """Prefix that runs a program at fixed addresses: GCC's thread sanitizer fails on kernels that randomize more bits
    than it knows. Empty where that is not permitted, as in some containers."""
    setarch = shutil.which("setarch")
    if setarch is None or run([setarch, "-R", "true"], 10).returncode != 0:
        return []
    return [setarch, "-R"]


@pytest.mark.parametrize("variant", ["thread", "address"])
def test_the_core_passes_its_own_tests(variant, tmp_path):
    require_sanitizer(variant, tmp_path)
    binary = build(variant, "test_core", f"-DPHALANX_SANITIZE={variant}") / "test_core"
    done = run([*without_randomization(), str(binary)], RUN_LIMIT_S, UBSAN_OPTIONS="print_stacktrace=1")
    report = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("ok "))[-10_000:]
    assert done.returncode == 0, report
    assert report.endswith(" cases, 0 failed"), report


@pytest.mark.slow
def test_the_python_tests_pass_on_the_sanitized_core(tmp_path):
    """Real processes, with signals and threads of Python: what ranks as threads cannot show."""
    require_sanitizer("address,undefined", tmp_path)
    settings = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    folder = build("extension", "_core", "-DPHALANX_SANITIZE=address", *settings, tests="OFF")
    (core,) = folder.glob("_core*.so")
    compiler = os.environ.get("CXX", "c++")
    libraries = [
        run([compiler, f"-print-file-name={name}"], 10).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")  # the last: or exceptions are not intercepted
    ]
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SANITIZED],
        RUN_LIMIT_S * 2,
        LD_PRELOAD=":".join(libraries),
        PYTHONPATH=str(REPO / "tests" / "core" / "sanitized"),
        SANITIZED_CORE=str(core),
        ASAN_OPTIONS="detect_leaks=0",  # of Python's own, by the hundred
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    assert done.returncode == 0, done.stdout[-10_000:]


@pytest.fixture
def for_aarch64():
    """Settings of a build for aarch64, whose programs need nothing of the system that emulates them."""
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("needs the cross compiler aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    names = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": "aarch64-linux-gnu-g++"}
    names["EXE_LINKER_FLAGS"] = "-static"
    return [f"-DCMAKE_{name}={value}" for name, value in names.items()]


def test_the_core_compiles_for_aarch64(for_aarch64):
    assert (build("aarch64", "core", *for_aarch64) / "libcore.a").exists()


@pytest.mark.slow
def test_the_core_passes_its_own_tests_on_an_emulated_aarch64(for_aarch64):
    """Its instructions, sizes and system calls. An x86 underneath keeps stores in order: of that, see `model`."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("needs the emulator qemu-aarch64 (Debian: qemu-user)")
    done = run([emulator, str(build("aarch64", "test_core", *for_aarch64) / "test_core")], RUN_LIMIT_S)
    assert done.returncode == 0, done.stdout[-10_000:]
    assert done.stdout.rstrip().endswith(" cases, 0 failed"), done.stdout[-10_000:]
