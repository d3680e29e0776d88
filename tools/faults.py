"""Plants small faults in the sources, one at a time, and reports which of them the tests find.

``map`` runs each test file under coverage and saves which lines the file reaches, also in processes that it starts;
this takes two hours of one core. ``plant`` changes one random line of this checkout at a time, and runs the test files
that reach the line until one fails; a fault that no file finds shows where a test is missing. ``plant --likely 6``
needs no map: it runs the six test files whose imports and names fit the changed file best. ``total`` prints the
coverage that ``map`` has measured. ``core`` plants the faults of `core_faults`, and reports which of them the fuzzer
finds or, with ``--verify``, which PHALANX_VERIFY finds.

The results are in ``build/faults``. The package coverage must be installed in the environment of the tests.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT = REPOSITORY / "build" / "faults"
LANE = "not (cluster or slow or integrations or wheels or site)"
_RC = """
[run]
branch = True
parallel = True
source = {source}
patch = _exit, fork, subprocess
disable_warnings = no-data-collected, module-not-imported, couldnt-parse
"""
_FILE_S = 900.0  # time limit of a test file under coverage
_OPERATORS = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "+",
}  # fmt: skip
_OF_CPP = (
    (r" == ", " != "), (r" != ", " == "), (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "),
    (r" && ", " || "), (r" \|\| ", " && "), (r"\breturn true;", "return false;"), (r"\breturn false;", "return true;"),
    (r" \+ 1\b", " + 2"), (r" - 1\b", " - 2"),
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A piece of a source file, and what is put in its place.

    Attributes:
        path: File, relative to the repository.
        line: Number of the line in which the piece begins.
        begin: Offset of the piece in the file's text.
    """

    path: str
    line: int
    begin: int
    before: str
    after: str

    @property
    def is_of_python(self) -> bool:
        return self.path.endswith(".py")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r}"


# ---- where faults can be --------------------------------------------------------------------------------------------


def faults_of(path: Path) -> list[Fault]:
    """Return every fault that can be planted in a file."""
    text = path.read_text()
    pieces = _of_python(text) if path.suffix == ".py" else _of_cpp(text)
    name = str(path.relative_to(REPOSITORY))
    return [Fault(name, text.count("\n", 0, begin) + 1, begin, text[begin:end], after) for begin, end, after in pieces]


def chosen(folder: str, num: int, seed: int) -> list[Fault]:
    """Return `num` random faults in the sources below `folder`, which is relative to the repository."""
    core = [
        path for path in REPOSITORY.glob("csrc/*/*") if path.suffix in (".cpp", ".h") and path.parent.name != "tests"
    ]
    sources = sorted([*REPOSITORY.glob("src/phalanx/**/*.py"), *core])
    within = [path for path in sources if path.is_relative_to(REPOSITORY / folder)]
    return random.Random(seed).sample(list(itertools.chain.from_iterable(map(faults_of, within))), num)


def _of_cpp(text: str) -> Iterator[tuple[int, int, str]]:
    begin = 0
    for line in text.splitlines(keepends=True):
        code = line.partition("//")[0]
        if not code.lstrip().startswith(("#", "*", "static_assert", "template")):
            for pattern, after in _OF_CPP:
                yield from ((begin + found.start(), begin + found.end(), after) for found in re.finditer(pattern, code))
        begin += len(line)


def _of_python(text: str) -> Iterator[tuple[int, int, str]]:
    starts = [0, *itertools.accumulate(len(line.encode()) for line in text.splitlines(keepends=True))]
    data = text.encode()

    def at(line: int, column: int) -> int:
        return len(data[: starts[line - 1] + column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def operator(left: ast.AST, right: ast.AST) -> Iterator[tuple[int, int, str]]:
        begin, end = span(left)[1], span(right)[0]
        for found in re.finditer(r"not in|is not|[a-z]+|[<>=!+*/%-]+", text[begin:end]):
            if found[0] in _OPERATORS:
                yield begin + found.start(), begin + found.end(), _OPERATORS[found[0]]
                return

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(left, _, [right, *_]):
                yield from operator(left, right)
            case ast.BoolOp(_, [left, right, *_]):
                yield from operator(left, right)
            case ast.BinOp(left, _, right) if not any(isinstance(side, ast.JoinedStr) for side in (left, right)):
                yield from operator(left, right)
            case ast.UnaryOp(ast.Not(), operand):
                yield span(node)[0], span(operand)[0], ""
            case ast.Constant(value) if isinstance(value, int):
                yield *span(node), str(not value if isinstance(value, bool) else value + 1)
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                begin, end = span(test)
                yield begin, end, f"not ({text[begin:end]})"
            case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
                yield *span(value), "None"
            case ast.Expr(ast.Call()) | ast.Raise():
                yield *span(node), "pass"


# ---- which tests reach a line ----------------------------------------------------------------------------------------


def all_tests() -> list[str]:
    """Return the paths of all test files, relative to the repository."""
    return sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("tests/**/test_*.py"))


def make_map(tests: Sequence[str], num_at_once: int) -> None:
    """Run test files under coverage, and save which lines of the package each of them reaches."""
    (KEPT / "data").mkdir(parents=True, exist_ok=True)
    (KEPT / "rc").write_text(_RC.format(source=REPOSITORY / "src" / "phalanx"))
    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        for name, code, seconds in pool.map(_cover, tests):
            print(f"{name}: {seconds:.0f} s{'' if code in (0, 5) else f', exit code {code}'}", flush=True)
    from coverage import Coverage

    reached: dict[str, dict[str, list[int]]] = {}
    for name in tests:
        cov = Coverage(data_file=str(_data_of(name)), config_file=str(KEPT / "rc"))
        parts = [str(part) for part in _data_of(name).parent.glob("part*")]
        if parts:
            cov.combine(parts, keep=True)
        data = cov.get_data()
        data.read()
        files = {path: data.lines(path) or [] for path in data.measured_files()}
        reached[name] = {os.path.relpath(path, REPOSITORY): sorted(lines) for path, lines in files.items() if lines}
    (KEPT / "map.json").write_text(json.dumps(reached))


def _data_of(name: str) -> Path:
    return KEPT / "data" / name.replace("/", ".") / "all"


def _cover(name: str) -> tuple[str, int, float]:
    data = _data_of(name)
    data.parent.mkdir(exist_ok=True)
    for part in data.parent.iterdir():
        part.unlink()
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={KEPT / 'rc'}", "-m", "pytest", "-m", LANE, name]
    began_s = time.monotonic()
    code = _run([*command, "-o", f"cache_dir={KEPT / 'cache'}"], _FILE_S, COVERAGE_FILE=str(data.with_name("part")))
    return name, code, time.monotonic() - began_s


def _run(command: Sequence[str], limit_s: float, output: int = subprocess.DEVNULL, **environ: str) -> int:
    """Run a command; return its exit code, or -1 if it passes the time limit. Its processes are ended in any case."""
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, **environ}, stdout=output, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def print_total() -> None:
    """Print how much of the package all test files together reach, by line and by branch."""
    from coverage import Coverage

    cov = Coverage(data_file=str(KEPT / "total"), config_file=str(KEPT / "rc"))
    cov.combine([str(part) for part in (KEPT / "data").glob("*/all")], keep=True)
    cov.report(skip_covered=True, sort="miss")


# ---- planting --------------------------------------------------------------------------------------------------------


def plant(faults: Sequence[Fault], likely: int, fault_s: float) -> None:
    """Plant each fault alone, print which test finds it, and save the results so far after each fault."""
    KEPT.mkdir(parents=True, exist_ok=True)
    results = []
    for fault in faults:
        by = found_by(fault, _likely(fault, likely) if likely else _reaching(fault), fault_s)
        print(f"{fault}: {by}", flush=True)
        results.append({**asdict(fault), "by": by})
        (KEPT / "results.json").write_text(json.dumps(results, indent=1))
    print(f"{sum(one['by'].startswith('tests/') for one in results)} of {len(results)} found")


def _reaching(fault: Fault) -> list[str]:
    """Return the test files that reach a fault by the map, those with the closest names first; for C++, all files."""
    reached = json.loads((KEPT / "map.json").read_text())
    tests = [
        name for name, lines in reached.items() if fault.line in lines.get(fault.path, ()) or not fault.is_of_python
    ]
    return sorted(tests, key=lambda name: (-len(_words(fault.path) & _words(name)), len(reached[name])))


def _likely(fault: Fault, num: int) -> list[str]:
    """Return the `num` test files that fit a fault's file best: they import it, or share words of its name."""
    package, _, module = fault.path.removeprefix("src/").removesuffix(".py").replace("/", ".").rpartition(".")
    imports = re.compile(rf"\b{re.escape(package)}(\.| import .*\b){module}\b")
    near = {
        name: 2 * bool(imports.search((REPOSITORY / name).read_text())) + len(_words(fault.path) & _words(name))
        for name in all_tests()
    }
    return sorted(near, key=lambda name: -near[name])[:num]


def _words(path: str) -> set[str]:
    return set(re.findall(r"[a-z]+", path)) - {"src", "phalanx", "py", "csrc", "cpp", "h", "tests", "test"}


def found_by(fault: Fault, tests: Sequence[str], fault_s: float) -> str:
    """Return the first test that fails with a fault; if there is none, a phrase that says so."""
    if not tests:
        return "no test reaches it"
    path = REPOSITORY / fault.path
    text = path.read_text()
    end = fault.begin + len(fault.before)
    path.write_text(text[: fault.begin] + fault.after + text[end:])
    try:
        if not fault.is_of_python and _build():
            return "it does not compile"
        deadline_s = time.monotonic() + fault_s
        for number, name in enumerate(tests):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return f"not by the nearest {number} of {len(tests)} files, in {fault_s:.0f} s"
            if by := _failing(name, max(left_s, 60.0)):
                return by
        return f"not by any of {len(tests)} files"
    finally:
        path.write_text(text)
        if not fault.is_of_python:
            _build()


def _failing(name: str, limit_s: float) -> str:
    """Return which test of a file fails, empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", LANE, "-o", f"cache_dir={KEPT / 'cache'}", "--tb=no", name]
    with tempfile.TemporaryFile("w+") as output:
        code = _run(command, limit_s, output.fileno())
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    if code in (0, 5):
        return ""
    return failed[1] if failed else f"{name}, {'which took too long' if code == -1 else f'exit code {code}'}"


def _build() -> int:
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    return _run([sys.executable, *pip, "--editable", "."], _FILE_S)


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["map", "total", "plant", "core"])
    parser.add_argument("--tests", nargs="*", help="files of tests (default: all)")
    parser.add_argument("--at-once", type=int, default=2, help="files of tests that map runs at once")
    parser.add_argument("--in", dest="folder", default="", help="src/phalanx/launch, csrc, ...: faults of it alone")
    parser.add_argument("--num", type=int, default=60, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed of their choice")
    parser.add_argument("--likely", type=int, default=0, help="without a map, run so many files of tests for a fault")
    parser.add_argument("--fault-s", type=float, default=600.0, help="seconds for the tests of a fault")
    parser.add_argument("--fuzz-s", type=float, default=60.0, help="seconds for the fuzzer to find a fault of the core")
    parser.add_argument("--verify", action="store_true", help="look for faults of the core by PHALANX_VERIFY in tests")
    parser.add_argument("--only", default="", help="faults of the core whose names have this text")
    given = parser.parse_args()
    if given.command == "core":
        import core_faults  # beside this file

        faults = [fault for fault in core_faults.FAULTS if given.only in fault.name]
        look = core_faults.verify if given.verify else lambda core: core_faults.fuzz(core, given.fuzz_s, given.seed)
        sys.exit(bool(core_faults.find(faults, look)))
    if given.command == "map":
        return make_map(given.tests or all_tests(), given.at_once)
    if given.command == "total":
        return print_total()
    plant(chosen(given.folder, given.num, given.seed), given.likely, given.fault_s)


if __name__ == "__main__":
    main()
