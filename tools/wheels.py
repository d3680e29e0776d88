"""Build the wheels and the sdist of a release, and check what they require of the system that they are installed on.

``make wheels`` runs this program with the tools of ``requirements-wheels.txt``.

**One wheel for many torches.** The core is plain C++ and is not linked with torch. It learns about a tensor by calling
a function that torch offers at run time (``csrc/python/tensors.h``), so a wheel works with many versions of torch. The
bindings are nanobind's: one wheel each for Python 3.10 and 3.11, and one for the stable ABI of all later versions.

**An old glibc without an old machine.** zig compiles the core for each processor. zig is installed by pip, and contains
clang, libc++ and the symbols of every glibc: ``-target x86_64-linux-gnu.2.28`` links against the glibc that torch's own
wheels require. The C++ runtime is linked in, because the system's may be older than the code, so a wheel needs only
Python and torch. Any Python of the right version can build a wheel, because Python's headers do not depend on the
processor. TLS descriptors, which nanobind would turn on, are off: calls through them clobber vector registers before
glibc 2.40. ``auditwheel`` and ``abi3audit`` check the wheels.

**Kernels are chosen where they run** (``csrc/collectives/reduce_kernels.cpp``). A test runs the wheel's core on an
emulated processor without AVX.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WORK = REPOSITORY / "build" / "wheels"
GLIBC = "2.28"
PROCESSORS = ("x86_64", "aarch64")
PYTHONS = ("3.10", "3.11", "3.12")  # the wheel for the last one uses the stable ABI and serves all later versions
MAX_WHEEL_BYTES = 3_000_000
SYSTEM_LIBRARIES = ("libc.so.", "libm.so.", "libpthread.so.", "libdl.so.", "librt.so.", "ld-linux")
BACKEND = """
import json, sys
from scikit_build_core.build import build_{0} as build
print(build(sys.argv[1], json.loads(sys.argv[2])))
"""

# zig has names of its own for processors.
COMMAND = """#!/bin/sh
for flag; do
  shift
  case $flag in -march=x86-64-v*) flag=-march=x86_64_v${{flag##*v}} ;; esac
  set -- "$@" "$flag"
done
exec "{zig}" {call} "$@"
"""


@dataclass(frozen=True)
class Target:
    """One wheel: the Python whose headers it is compiled with, and the processor that it runs on."""

    python: str
    processor: str

    @property
    def interpreter(self) -> str:
        return f"cp{self.python.replace('.', '')}"

    @property
    def name(self) -> str:
        return f"{self.interpreter}-{self.processor}"

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.processor}"

    @property
    def tag(self) -> str:
        """Tag in the name of the wheel: interpreter, ABI and platform."""
        return f"{self.interpreter}-{'abi3' if self.python == PYTHONS[-1] else self.interpreter}-{self.platform}"


TARGETS = {target.name: target for target in (Target(p, c) for c in PROCESSORS for p in PYTHONS)}


def main() -> None:
    """Build what the command line asks for; the exit code is 1 if a wheel does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the wheels and the sdist")
    parser.add_argument("--only", nargs="*", choices=[*TARGETS, "sdist"], help="what to build (default: everything)")
    options = parser.parse_args()
    names = options.only or [*TARGETS, "sdist"]
    for name in names:
        print(f"{name}: building", flush=True)
        made = build_wheel(TARGETS[name], options.out) if name in TARGETS else build_sdist(options.out)
        faults = check_wheel(made, TARGETS[name]) if name in TARGETS else []
        print(f"{name}: {made.name}, {made.stat().st_size / 1e6:.2f} MB: {'; '.join(faults) or 'ok'}", flush=True)
        if faults:
            raise SystemExit(1)


def build_wheel(target: Target, out: Path) -> Path:
    """Cross-compile the wheel of `target` into the folder `out`, and return it."""
    python = build_environment(target.python)
    compiler = zig_commands(target.processor)
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.processor,
        "CMAKE_CXX_COMPILER": compiler / "c++",
        "CMAKE_AR": compiler / "ar",
        "CMAKE_RANLIB": compiler / "ranlib",
        "CMAKE_CXX_FLAGS": "-include stdio.h",  # nanobind expects other headers to include it; libc++'s do not
        "NB_HAS_MTLS_GNU2": "OFF",  # TLS descriptors clobber vector registers before glibc 2.40
    }
    names = json.dumps({"env._PYTHON_HOST_PLATFORM": target.platform})  # tells the build backend the wheel's platform
    done = run(
        [python, "-c", BACKEND.format("wheel"), out.resolve(), names],
        SETUPTOOLS_EXT_SUFFIX=f".cpython-{target.interpreter[2:]}-{target.processor}-linux-gnu.so",
        SKBUILD_BUILD_DIR=str(WORK / target.name),
        ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig" / "cache"),
        CMAKE_ARGS=shlex.join(f"-D{name}={value}" for name, value in settings.items()),
        PATH=f"{python.parent}:{os.environ['PATH']}",
    )
    return out / done.splitlines()[-1]


def build_sdist(out: Path) -> Path:
    """Build the sdist into the folder `out`, and return it."""
    python = build_environment(PYTHONS[-1])
    done = run([python, "-c", BACKEND.format("sdist"), out.resolve(), "{}"])
    return out / done.splitlines()[-1]


def build_environment(version: str) -> Path:
    """Return the interpreter of a virtual environment that has what the build needs, made once for each version."""
    folder = WORK / f"python{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        run([tool("uv"), "venv", "--quiet", "--python", find_python(version), folder])
    pins = (REPOSITORY / "requirements-dev.txt").read_text().split()
    needs = [pin for pin in pins if pin.startswith(("scikit-build-core", "nanobind", "cmake", "ninja"))]
    run([tool("uv"), "pip", "install", "--quiet", "--python", python, *needs])
    return python


def find_python(version: str) -> Path | str:
    """Return an interpreter of that version: pyenv's, else what uv finds or is allowed to download."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next(root.glob(f"versions/{version}.*/bin/python{version}"), version)


def zig_commands(processor: str) -> Path:
    """Return a folder of commands that call zig for `processor`; build tools expect one executable for each."""
    folder = WORK / "zig" / processor
    folder.mkdir(parents=True, exist_ok=True)
    zig = run([sys.executable, "-c", "import ziglang; print(ziglang.__path__[0])"]).strip() + "/zig"
    for name, call in {"c++": f"c++ -target {processor}-linux-gnu.{GLIBC}", "ar": "ar", "ranlib": "ranlib"}.items():
        (folder / name).write_text(COMMAND.format(zig=zig, call=call))
        (folder / name).chmod(0o755)
    return folder


def check_wheel(wheel: Path, target: Target) -> list[str]:
    """Return the faults of a wheel: in its requirements on the system and on Python, its name and its size."""
    faults = []
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        faults.append(f"it is larger than {MAX_WHEEL_BYTES / 1e6:g} MB")
    if not wheel.stem.endswith(f"-{target.tag}"):
        faults.append(f"its name does not end in {target.tag}")
    shown = json.loads(run([tool("auditwheel"), "show", "--json", wheel]))
    for library, versions in shown["versioned_symbols"].items():
        if not library.startswith(SYSTEM_LIBRARIES):
            faults.append(f"it needs {library}")
        newest = max(versions, key=_numbers)
        if library.startswith("libc.so.") and _numbers(newest) > _numbers(GLIBC):
            faults.append(f"it needs {newest}")
    if shown["external_libs"] or shown["unsupported_isa"]:
        faults.append(f"auditwheel found {shown}")
    if "abi3" in wheel.name:
        audit = subprocess.run([tool("abi3audit"), "--strict", "--report", wheel], text=True, capture_output=True)
        if audit.returncode != 0:
            faults.append(f"it is not of the stable ABI: {audit.stdout or audit.stderr}")
    return faults


def _numbers(version: str) -> list[int]:
    """Return ``[2, 28]`` for ``GLIBC_2.28``."""
    return [int(number) for number in re.findall(r"\d+", version)]


def tool(name: str) -> Path:
    """Return a command of the environment that this script runs in."""
    return Path(sys.executable).parent / name


def run(command: list[Path | str], **environ: str) -> str:
    """Run a command and return what it printed to stdout; if it fails, show its output and exit."""
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environ}, text=True, capture_output=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"{shlex.join(map(str, command))} failed with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
