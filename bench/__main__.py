"""``python -m bench``: measure all engines in one interleaved run, and write a table, JSON and a plot."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench import plan, record, report
from bench.plan import Point, Settings
from bench.ranks import RankSet, find_mpi, mpirun_command

_BUSY_LOAD = 0.5
_MAX_ITERATIONS = 20_000


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_arguments(args: list[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about a minute")
    parser.add_argument("--only", type=_list, metavar="OP,OP", help=f"of {', '.join(plan.OPS)}")
    parser.add_argument("--world-sizes", type=_list, metavar="N,N", help="numbers of ranks, default 2,4,8")
    parser.add_argument("--sizes", type=_list, metavar="SIZE,SIZE", help="as in 4,64K,1M")
    parser.add_argument("--rounds", type=int, help="turns of each engine")
    parser.add_argument("--turn-ms", type=float, help="length of a turn, where operations are faster")
    parser.add_argument("--no-mpi", action="store_true", help="leave out Open MPI")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for bench.json and bench.png")
    record.add_arguments(parser, "bench.json")
    given = parser.parse_args(args)
    changes = dict(plan.QUICK) if given.quick else {}
    if given.only:
        unknown = set(given.only).difference(plan.OPS)
        if unknown:
            parser.error(f"--only takes {', '.join(plan.OPS)}; got {', '.join(sorted(unknown))}")
        changes["ops"] = given.only
    try:
        if given.world_sizes:
            changes["world_sizes"] = tuple(int(size) for size in given.world_sizes)
        if given.sizes:
            changes["sizes"] = changes["all_reduce_sizes"] = tuple(plan.parse_size(size) for size in given.sizes)
    except ValueError as error:
        parser.error(str(error))
    if given.rounds:
        changes["rounds"] = max(given.rounds, 2)
    if given.turn_ms:
        changes["turn_s"] = given.turn_ms / 1e3
    return replace(Settings(), **changes, mpi=not given.no_mpi), given


def measure(point: Point, sets: dict[str, RankSet], point_s: float) -> report.Result:
    """Measure the engines of a point in turns; every second round is in reverse order, which cancels a steady drift."""
    for ranks in {id(ranks): ranks for ranks in map(sets.get, point.engines)}.values():
        ranks.prepare(point.op, point.size_bytes)
    iterations, samples = {}, {engine: [] for engine in point.engines}
    round_s = 0.0
    for engine in point.engines:
        num = 1
        while True:  # increase the number of iterations until the time of one operation is known
            seconds = max(sets[engine].measure(engine, num), 1e-9)
            if num * seconds >= point.turn_s / 8 or num == _MAX_ITERATIONS:
                break
            num = min(max(int(point.turn_s / 4 / seconds), 4 * num), _MAX_ITERATIONS)
        iterations[engine] = max(min(int(point.turn_s / seconds), _MAX_ITERATIONS), 1)
        round_s += iterations[engine] * seconds
    for turn in range(max(min(point.rounds, int(point_s / round_s)), 3)):
        for engine in point.engines[:: -1 if turn % 2 else 1]:
            samples[engine].append(sets[engine].measure(engine, iterations[engine]))
    return report.Result(point, samples, iterations)


def measure_world(settings: Settings, world_size: int) -> list[report.Result]:
    """Start all sets of `world_size` ranks, and measure all points that are planned for this world size."""
    points = list(plan.plan(settings, world_size))
    used = {engine for point in points for engine in point.engines}
    results = []
    with ExitStack() as stack:
        sets = dict.fromkeys(used, stack.enter_context(RankSet("torch", world_size)))
        if "phalanx_no_recorder" in used:
            sets["phalanx_no_recorder"] = stack.enter_context(RankSet("torch", world_size, TORCH_FR_BUFFER_SIZE="0"))
        if "mpi" in used:
            sets["mpi"] = stack.enter_context(RankSet("mpi", world_size))
        for i, point in enumerate(points):
            result = measure(point, sets, settings.point_s)
            results.append(result)
            times = ", ".join(f"{plan.LABELS[e]} {report.time_text(result.median(e))}" for e in point.engines)
            where = f"{world_size} ranks {i + 1}/{len(points)}"
            print(f"{where}: {point.op} {plan.size_text(point.size_bytes)}: {times}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    settings, given = parse_arguments()
    out, json = given.out, given.json or given.out / "bench.json"
    start = time.monotonic()
    mpi_version = ""
    if settings.mpi:
        mpi_version, why_not = find_mpi()
        if why_not:
            print(f"Without Open MPI: {why_not}", file=sys.stderr)
            settings = replace(settings, mpi=False)
    facts = report.machine_facts(mpi_version)
    if settings.mpi:
        facts["mpirun"] = {size: " ".join(mpirun_command(size)) for size in settings.world_sizes}
    if facts["load_before"] > _BUSY_LOAD:
        print(f"This machine is busy (load {facts['load_before']:.1f}): the numbers will be noisy", file=sys.stderr)
    results = [result for size in settings.world_sizes for result in measure_world(settings, size)]
    verdicts = report.judge(results)
    facts["load_after"] = os.getloadavg()[0]
    report.print_results(results)
    report.print_verdicts(verdicts)
    out.mkdir(parents=True, exist_ok=True)
    record.write(json, given.note, facts, [report.table(results)], report.raw(results, verdicts))
    written = [json]
    try:
        report.write_plot(out / "bench.png", results)
        written.append(out / "bench.png")
    except ImportError as error:
        print(f"No plot: {error}", file=sys.stderr)
    print(f"\n{' and '.join(map(str, written))} written, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
