"""Sit torch's exam from a shell: what passes, fails and skips on a backend.

    python -m tests.conformance.exam --backend phalanx --world-size 2
    python -m tests.conformance.exam --backend gloo --world-size 3 -k all_reduce --json out.json
    python -m tests.conformance.exam --backend phalanx --world-size 2 --check
    python -m tests.conformance.exam --backend phalanx --world-size 2 --ddp phalanx --check

With ``--ddp``, the tests of DistributedDataParallel alone, all of them on a CPU, for
phalanx's class or torch's own; see `_ddp`.

With PHALANX_REPLACE=gloo in the environment, ``--backend gloo`` is phalanx in the place of Gloo.

Exit code 1 if a test failed; with ``--check``, if a test came out otherwise than
`expectations`, or `ddp_expectations`, has it. `Exam` is the same for a program: it keeps one such process and
asks it for one test at a time.
"""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from phalanx.launch.processes.forker import RANK_MODULES
from phalanx.launch.processes.pages import share_pages

from . import _ddp, ddp_expectations, expectations
from ._runner import DEFAULT_LIMIT_S, Result, Runner, die_with_parent

# Past a test's own limit: to kill its ranks and to report.
_MARGIN_S = 30.0


class Exam:
    """A process that has loaded the exam and runs tests by name; a context manager.

    Args:
        backend: Name under which torch knows the backend.
        world_size: Ranks that sit each test.
        limit_s: Seconds that one test may take.
        ddp: Whose DistributedDataParallel sits the tests of it, see `_ddp`; then there are no others.

    Raises:
        RuntimeError: The process could not load the exam; its output says why.
    """

    def __init__(self, backend: str, world_size: int, *, limit_s: float = DEFAULT_LIMIT_S, ddp: str = "") -> None:
        package = __spec__.name.rpartition(".")[0]
        root = Path(__file__).resolve().parents[package.count(".") + 1]
        command = [sys.executable, "-m", f"{package}.exam", "--serve", "--backend", backend]
        command += ["--world-size", str(world_size), "--limit-s", str(limit_s)]
        command += ["--ddp", ddp] if ddp else []
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.names: list[str] = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Exam":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, name: str) -> Result:
        """Run one test and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return Result(**self._answer())

    def close(self) -> None:
        """End the process and its ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the exam's process ended with code {self._process.wait()}")
        return json.loads(line)


def _serve(runner: Runner) -> None:
    """Answer each name on standard input by one line of JSON."""
    share_pages()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the exam prints must not mix with answers
    print(json.dumps(runner.test_names()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(runner.run(line.strip()))), file=answers, flush=True)


def _report(runner: Runner, names: list[str], *, verbose: bool) -> list[Result]:
    """Run `names`, printing a line for each, and return the results."""
    results = []
    for position, name in enumerate(names, 1):
        result = runner.run(name)
        results.append(result)
        line = f"[{position:3}/{len(names)}] {result.outcome:7} {result.duration_s:6.2f} s  {name}"
        if result.outcome == "skipped":
            line += f"  ({result.detail})"
        print(line, flush=True)
        if result.outcome == "failed" and verbose:
            print(result.detail, flush=True)
    return results


def _complaints(results: list[Result], world_size: int) -> list[str]:
    """Return what is otherwise than `expectations` has it."""
    by_name = {result.name: result for result in results}
    complaints = []
    in_place = os.environ.get("PHALANX_REPLACE") == "gloo"
    for name, expected in expectations.expected_outcomes(world_size, in_place=in_place).items():
        if name not in by_name:
            complaints.append(f"{name}: this torch's exam has no such test")
        elif problem := expectations.complaint(by_name[name], expected):
            complaints.append(problem)
    return complaints


def _ddp_complaints(results: list[Result], names: list[str], ddp: str) -> list[str]:
    """Return what is otherwise than `ddp_expectations` has it; `names` are all tests of the exam."""
    problems = [ddp_expectations.complaint(ddp, result) for result in results]
    return [*ddp_expectations.unknown_names(names), *filter(None, problems)]


def _write_baseline(runner: Runner, results: list[Result], world_size: int) -> None:
    """Write the list of passes; a test that failed gets one more chance."""
    failed = [result.name for result in results if result.outcome == "failed"]
    again = [runner.run(name) for name in failed]
    passed = [result.name for result in [*results, *again] if result.outcome == "passed"]
    print(f"wrote {len(passed)} names to {expectations.write_gloo_passes(world_size, passed)}")


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="phalanx", help="name that torch knows")
    parser.add_argument("--world-size", type=int, default=2, help="ranks in each test")
    parser.add_argument("--ddp", choices=(_ddp.PHALANX, _ddp.TORCH), default="", help="only this package's DDP")
    parser.add_argument("-k", dest="pattern", default="", help="only names that contain this")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--limit-s", type=float, default=DEFAULT_LIMIT_S, help="seconds per test")
    parser.add_argument("--quiet", action="store_true", help="do not print why a test failed")
    parser.add_argument("--check", action="store_true", help="compare with what is expected")
    parser.add_argument("--write-baseline", action="store_true", help="keep the list of passes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write_baseline and (args.backend != "gloo" or args.pattern or args.ddp):
        parser.error("--write-baseline takes the whole exam on Gloo: --backend gloo without -k and --ddp")
    if args.check and args.pattern:
        parser.error("--check takes the whole exam: leave out -k")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the process's exit code."""
    args = _parse_args(argv)
    if args.serve:
        die_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

    from ._load import load_exam

    exam = load_exam(args.backend, args.world_size, args.ddp)
    for module in RANK_MODULES:
        importlib.import_module(module)  # once here, not in every rank

    with Runner(exam, args.limit_s) as runner:
        if args.serve:
            _serve(runner)
            runner.close()
            os._exit(0)  # taking the interpreter down with torch in it takes seconds
        start = time.perf_counter()
        names = [name for name in runner.test_names() if args.pattern in name]
        if args.ddp and args.check:
            names = sorted(set(names) & set(ddp_expectations.expected_names(args.world_size)))
        results = _report(runner, names, verbose=not (args.quiet or args.check))
        counts = Counter(result.outcome for result in results)
        print(
            f"{args.backend}, world size {args.world_size}: {counts['passed']} passed, "
            f"{counts['failed']} failed, {counts['skipped']} skipped "
            f"in {time.perf_counter() - start:.0f} s"
        )
        if args.json:
            args.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
        if args.write_baseline:
            _write_baseline(runner, results, args.world_size)
        if args.check:
            complaints = (
                _ddp_complaints(results, runner.test_names(), args.ddp)
                if args.ddp
                else _complaints(results, args.world_size)
            )
            print(*complaints, sep="\n")
            print(f"{len(complaints)} tests came out otherwise than expected")
            return 1 if complaints else 0
        return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
