"""Plants small faults in the sources, one at a time, and tells which of them the tests find.

``map`` runs each file of tests under coverage and keeps which lines it reaches, also in the processes that it starts:
two hours of a core. ``plant`` changes a random line, in this checkout, and runs the files that reach it until one
fails; a fault that none finds shows where a test is missing. ``total`` prints the coverage that ``map`` has found. What
they keep is in ``build/faults``. coverage must be installed beside the packages of the tests.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT = REPOSITORY / "build" / "faults"
LANE = "not (cluster or slow or integrations or wheels)"
_RC = """
[run]
branch = True
parallel = True
source = {source}
patch = _exit, fork, subprocess
disable_warnings = no-data-collected, module-not-imported, couldnt-parse
"""
_FILE_S = 900.0  # for a file of tests under coverage
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
        line: Number of the line in which it begins.
        begin: Offset of the piece in the file's text.
    """

    path: str
    line: int
    begin: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r}"


# ---- where faults can be --------------------------------------------------------------------------------------------


def faults_of(path: Path) -> list[Fault]:
    """Return every fault that can be planted in a file."""
    text = path.read_text()
    pieces = _of_python(text) if path.suffix == ".py" else _of_cpp(text)
    name = str(path.relative_to(REPOSITORY))
    return [Fault(name, text.count("\n", 0, begin) + 1, begin, text[begin:end], after) for begin, end, after in pieces]


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


def make_map(tests: Sequence[str], num_at_once: int) -> None:
    """Run files of tests under coverage, and keep the lines of the package that each reaches."""
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
    code = _run([*command, "-p", "no:cacheprovider"], _FILE_S, COVERAGE_FILE=str(data.with_name("part")))
    return name, code, time.monotonic() - began_s


def _run(command: Sequence[str], limit_s: float, **environ: str) -> int:
    """Return the exit code of a command, -1 if it ran out of time; nothing of it outlives this."""
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
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
    """Print how much of the package all files of tests together reach, by line and by branch."""
    from coverage import Coverage

    cov = Coverage(data_file=str(KEPT / "total"), config_file=str(KEPT / "rc"))
    cov.combine([str(part) for part in (KEPT / "data").glob("*/all")], keep=True)
    cov.report(skip_covered=True, sort="miss")


# ---- planting --------------------------------------------------------------------------------------------------------


def plant(faults: Sequence[Fault], fault_s: float) -> None:
    """Plant each fault alone, and tell who finds it; what was found is kept as it comes."""
    reached = json.loads((KEPT / "map.json").read_text())
    results = []
    for fault in faults:
        by = _found_by(fault, reached, fault_s)
        print(f"{fault}: {by}", flush=True)
        results.append({**asdict(fault), "by": by})
        (KEPT / "results.json").write_text(json.dumps(results, indent=1))
    print(f"{sum(one['by'].startswith('tests/') for one in results)} of {len(results)} found")


def _found_by(fault: Fault, reached: dict[str, dict[str, list[int]]], fault_s: float) -> str:
    path = REPOSITORY / fault.path
    is_python = path.suffix == ".py"
    tests = [name for name, lines in reached.items() if fault.line in lines.get(fault.path, ()) or not is_python]
    if not tests:
        return "no test reaches it"
    theme = set(re.findall(r"[a-z]+", fault.path)) - {"src", "phalanx", "py", "csrc", "cpp", "h"}
    nearest = sorted(tests, key=lambda name: (-len(theme & set(re.findall(r"[a-z]+", name))), len(reached[name])))
    text = path.read_text()
    end = fault.begin + len(fault.before)
    path.write_text(text[: fault.begin] + fault.after + text[end:])
    try:
        if not is_python and _build():
            return "it does not compile"
        deadline_s = time.monotonic() + fault_s
        for number, name in enumerate(nearest):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return f"not by the nearest {number} of {len(nearest)} files, in {fault_s:.0f} s"
            command = [sys.executable, "-m", "pytest", "-x", "-m", LANE, "-p", "no:cacheprovider", name]
            if _run(command, max(left_s, 60.0)) not in (0, 5):
                return name
        return f"not by any of {len(nearest)} files"
    finally:
        path.write_text(text)
        if not is_python:
            _build()


def _build() -> int:
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    return _run([sys.executable, *pip, "--editable", "."], _FILE_S)


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["map", "total", "plant"])
    parser.add_argument("--tests", nargs="*", help="files of tests (default: all)")
    parser.add_argument("--at-once", type=int, default=2, help="files of tests that map runs at once")
    parser.add_argument("--num", type=int, default=60, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed of their choice")
    parser.add_argument("--fault-s", type=float, default=600.0, help="seconds for the tests of a fault")
    given = parser.parse_args()
    tests = given.tests or sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("tests/**/test_*.py"))
    if given.command == "map":
        return make_map(tests, given.at_once)
    if given.command == "total":
        return print_total()
    sources = sorted(
        [*REPOSITORY.glob("src/phalanx/**/*.py"), *REPOSITORY.glob("csrc/*.cpp"), *REPOSITORY.glob("csrc/*.h")]
    )
    everything = list(itertools.chain.from_iterable(map(faults_of, sources)))
    plant(random.Random(given.seed).sample(everything, given.num), given.fault_s)


if __name__ == "__main__":
    main()
