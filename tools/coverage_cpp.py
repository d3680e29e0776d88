"""Runs tests on an instrumented core, and prints which lines and branches of ``csrc`` they have executed.

The core is built with clang's source coverage in a virtual environment of its own, ``build/coverage/venv``, which finds
every other package in the present environment. So every process that a test starts by ``sys.executable``, or by a
command beside it, loads the instrumented core, whatever environment variables the process is given.

The counters are a file that each process maps as shared memory ("continuous mode"), so each count is in the file at
once. Counts of ranks that are forked, end by ``os._exit`` or are killed by SIGKILL are not lost. gcc, by contrast,
counts in private memory, which ``exit`` writes to a file. So the core would need a hook for every other way in which a
process ends, and there is no hook for SIGKILL.

Lines of templates and of the kernels, which are compiled once per type or instruction set, count as executed if one of
the compiled copies was executed. A branch is one outcome, true or false, of a condition. clang counts blocks: if a call
throws, or the process dies in the call, the lines after the call in the same block count as executed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT = REPOSITORY / "build" / "coverage"
_PYTHON = KEPT / "venv" / "bin" / "python"
_COUNTERS = KEPT / "counters"
_LANE = "not (cluster or slow or integrations or wheels or site)"
_CLANGS = ("clang++", *(f"clang++-{version}" for version in range(24, 17, -1)))
# No promotion of counters: it would keep the counts of a loop in registers until the loop ends. Atomic updates, because
# clang derives the count of one outcome from others: a lost count would invent or hide an outcome.
_FLAGS = (
    "-fcoverage-mapping -fprofile-update=atomic -mllvm -runtime-counter-relocation -mllvm -do-counter-promotion=false"
)


@dataclass
class Covered:
    """What tests have executed of one source file.

    Attributes:
        lines: How often each line with code was executed.
        branches: How often each outcome of a condition was taken, as (line, column, outcome).
    """

    lines: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    branches: dict[tuple[int, int, str], int] = field(default_factory=lambda: defaultdict(int))

    def missed(self) -> list[int]:
        """Return the lines that were never executed, in order."""
        return sorted(line for line, times in self.lines.items() if not times)

    def numbers(self) -> tuple[int, int, int, int]:
        """Return the numbers of lines, executed lines, branches and taken branches."""
        lines, branches = self.lines.values(), self.branches.values()
        return len(lines), sum(map(bool, lines)), len(branches), sum(map(bool, branches))


def flags(counters: Path) -> str:
    """Return the compiler's options for code that counts in files in `counters`, even if its process is killed."""
    return f"-fprofile-instr-generate={counters}/%c%m {_FLAGS}"  # without %m, each process sets all counts to 0


def find_clang() -> Path | None:
    """Return a clang that counts in mapped files on Linux, None if there is none."""
    names = [os.environ["CLANG"]] if os.environ.get("CLANG") else _CLANGS
    found = next(filter(None, map(shutil.which, names)), None)
    return Path(found) if found else None


def build() -> Path:
    """Bring the environment and its core up to date; return the clang that has built the core.

    Raises:
        SystemExit: There is no clang of version 18 or later, or the build fails.
    """
    clang = find_clang()
    if clang is None:
        sys.exit(
            "clang++ is missing: apt-get install clang-19 llvm-19 libclang-rt-19-dev, or set CLANG to one from 18 on"
        )
    if re.search(r"\s", str(KEPT)):
        sys.exit(
            f"the compiler's options can't name a folder with spaces: {str(KEPT)!r}; clone the repository elsewhere"
        )
    if not list(KEPT.glob("venv/lib/python*/site-packages/beside.pth")):  # written last
        shutil.rmtree(KEPT / "venv", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", KEPT / "venv"], check=True)
        (library,) = (KEPT / "venv" / "lib").glob("python*/site-packages")
        (library / "beside.pth").write_text(sysconfig.get_path("purelib"))
    _adopt_commands(Path(sys.executable).parent)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    settings = [f"build-dir={KEPT}/core", "install.strip=false", f"cmake.define.CMAKE_CXX_FLAGS={flags(_COUNTERS)}"]
    options = [part for setting in settings for part in ("-C", setting)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    before = [core.read_bytes() for core in _cores()]
    command = [_PYTHON, *pip, *options, "--editable", REPOSITORY]
    if code := subprocess.run(command, env={**os.environ, "CXX": str(clang), "PATH": path}, check=False).returncode:
        sys.exit(f"the instrumented core was not built: pip ended with {code}")
    if before != [core.read_bytes() for core in _cores()]:
        shutil.rmtree(_COUNTERS, ignore_errors=True)  # the counts are those of another core
    return clang


def _cores() -> list[Path]:
    """Return a list with the file of the instrumented core; an empty list before the core is built."""
    return list(KEPT.glob("venv/lib/python*/site-packages/phalanx/_core*.so"))


def _adopt_commands(folder: Path) -> None:
    """Copy commands such as torchrun from the present environment to the instrumented one, to run with its Python."""
    for path in folder.iterdir():
        to = _PYTHON.with_name(path.name)
        if to.exists() or not path.is_file():
            continue
        content = path.read_bytes()
        if re.match(rb"#!\S*/bin/python[\d.]*\n", content):
            to.write_bytes(b"#!%s\n" % bytes(_PYTHON) + content.partition(b"\n")[2])
            to.chmod(0o755)
        else:
            to.symlink_to(path)


def run(tests: Sequence[str]) -> int:
    """Run tests on the instrumented core, which adds to the counters; return the exit code of pytest."""
    return subprocess.run(
        [_PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *tests], cwd=REPOSITORY, check=False
    ).returncode


def covered(clang: Path) -> dict[str, Covered]:
    """Return what the tests since the last build or ``--fresh`` have executed, by path below the repository."""
    (core,) = _cores()
    return read(clang, core, _COUNTERS, REPOSITORY / "csrc")


def read(clang: Path, binary: Path, counters: Path, folder: Path) -> dict[str, Covered]:
    """Return what was executed of the sources in `folder`, by path relative to the folder's parent.

    Args:
        clang: Compiler that built `binary`.
        binary: Instrumented library or program.
        counters: Folder of the files in which `binary` counts.
        folder: Folder of sources.
    """
    profdata, cov = (
        subprocess.run([clang, f"--print-prog-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("llvm-profdata", "llvm-cov")
    )
    profile = counters.with_suffix(".profdata")
    subprocess.run([profdata, "merge", "-sparse", *counters.iterdir(), "-o", profile], check=True)
    files: dict[str, Covered] = defaultdict(Covered)

    def export(form: str) -> str:
        command = [cov, "export", f"-format={form}", f"-instr-profile={profile}", binary, folder]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    # Each form lacks something: "lcov" does not tell copies of a branch apart, "text" has no lines.
    for record in export("lcov").splitlines():
        kind, _, facts = record.partition(":")
        if kind == "SF":
            file = files[facts]
        elif kind == "DA":
            line, times = facts.split(",")[:2]
            file.lines[int(line)] += int(times)
    for one in json.loads(export("text"))["data"][0]["files"]:
        for line, column, _, _, true, false, *_ in one["branches"]:
            files[one["filename"]].branches[line, column, "true"] += true
            files[one["filename"]].branches[line, column, "false"] += false
    return {os.path.relpath(path, folder.parent): file for path, file in files.items()}


def ranges(lines: Sequence[int]) -> Iterator[str]:
    """Yield the numbers of lines as text; adjacent lines become a range: ``3``, then ``7-9``."""
    begin = None
    for line, then in zip(lines, [*lines[1:], None], strict=True):
        begin = begin or line
        if then != line + 1:
            yield f"{begin}-{line}" if begin < line else f"{line}"
            begin = None


def show(files: dict[str, Covered], missed: bool) -> None:
    """Print the table and, if `missed`, the lines that were never executed."""
    print(f"{'file':40}{'lines':>8}{'executed':>10}{'':7}{'branches':>10}{'taken':>8}")
    rows = {path: file.numbers() for path, file in sorted(files.items())}
    for path, row in [*rows.items(), ("all", tuple(map(sum, zip(*rows.values(), strict=True))))]:
        lines, executed, branches, taken = row
        print(f"{path:40}{lines:8}{executed:10}{executed / lines:7.1%}{branches:10}{taken:8}")
    for path, file in sorted(files.items()):
        if missed and file.missed():
            print(f"\n{path}: {', '.join(ranges(file.missed()))}")
            text = (REPOSITORY / path).read_text().splitlines()
            for line in file.missed():
                print(f"{line:6} {text[line - 1]}")


def main() -> None:
    """Build, run the tests if any are named, and print the table; exit as pytest does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or folders of tests (default: show what has been executed)")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="forget what has been executed; otherwise the runs since the last change of csrc add up",
    )
    parser.add_argument("--missed", action="store_true", help="list the lines that were never executed")
    parser.add_argument("-n", default="0", help="number of processes that run tests")
    given = parser.parse_args()
    clang = build()
    if given.fresh:
        shutil.rmtree(_COUNTERS, ignore_errors=True)
    _COUNTERS.mkdir(exist_ok=True)
    subprocess.run([_PYTHON, "-c", "import phalanx._core"], check=True)  # makes the counters' file
    for path in _COUNTERS.iterdir():
        path.chmod(0o666)  # tests run ranks as other users, too
    code = run(["-n", given.n, "--dist", "loadfile", "-m", _LANE, *given.tests]) if given.tests else 0
    show(covered(clang), given.missed)
    sys.exit(code)


if __name__ == "__main__":
    main()
