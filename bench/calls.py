"""``python -m bench.calls``: what a small call costs from Python, and how much of that is torch's own front end.

The front end is ``torch.distributed`` on a group whose operations return at once. In a world of one rank, no rank waits
for another, so the difference between phalanx and the front end is the time that this library adds. With two ranks, the
difference also includes the time for which the ranks wait for each other. The direct way is ``phalanx.communicator()``.
For Open MPI, mpi4py's descriptions of the buffers are made once, before the calls.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench import record
from bench.__main__ import measure
from bench.plan import LABELS, Point, parse_size, size_text
from bench.ranks import RankSet, find_mpi
from bench.report import machine_facts

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)
Summary = Callable[[Sequence[float]], float]
ENGINES = ("phalanx", "front_end", "direct", "mpi")
_DIRECT = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv", "barrier")
_TURN_S = 0.003


def measure_world(
    world_size: int, ops: Sequence[str], sizes: Sequence[int], engines: Sequence[str], rounds: int, summary: Summary
) -> list[list[record.Value]]:
    """Print each engine's time in a world of this size, in us; return the rows of a record, with times in seconds."""
    rows: list[list[record.Value]] = []
    with ExitStack() as stack:
        own = stack.enter_context(RankSet("calls", world_size))
        sets = {engine: own for engine in engines if engine != "mpi"}
        if "mpi" in engines and not find_mpi()[1]:
            sets["mpi"] = stack.enter_context(RankSet("mpi", world_size))
        for size_bytes in sizes:
            print(f"\n{world_size} rank{'s' * (world_size > 1)}, {size_text(size_bytes)}, us")
            names = ["", *(LABELS[engine] for engine in engines), "ours - front end", "direct / MPI"]
            print("".join(f"{name:>18}" for name in names))
            for op in ops:
                if op == "send_recv" and world_size == 1:
                    continue
                able = tuple(e for e in engines if e in sets and (e != "direct" or op in _DIRECT))
                result = measure(Point(op, size_bytes, world_size, able, rounds, _TURN_S), sets, point_s=10.0)
                us = {engine: summary(result.samples[engine]) * 1e6 for engine in able}
                seconds = (us[engine] / 1e6 if engine in us else None for engine in engines)
                rows.append([op, world_size, size_bytes, *seconds])
                cells = [f"{us[engine]:.2f}" if engine in us else "" for engine in engines]
                cells.append(f"{us['phalanx'] - us['front_end']:.2f}" if {"phalanx", "front_end"} <= us.keys() else "")
                cells.append(f"{us['direct'] / us['mpi']:.2f}" if {"direct", "mpi"} <= us.keys() else "")
                print("".join(f"{cell:>18}" for cell in (op, *cells)), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--only", default=",".join(OPS), help="operations, default all")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"engines, default {','.join(ENGINES)}")
    parser.add_argument("--world-sizes", default="1,2", help="numbers of ranks, default 1,2")
    parser.add_argument("--sizes", default="4", help="sizes of a message, such as 4,64K,1M; default 4")
    parser.add_argument("--rounds", type=int, default=41, help="turns of each engine, default 41")
    parser.add_argument(
        "--least", action="store_true", help="report each engine's best turn, not the median: for a busy machine"
    )
    record.add_arguments(parser)
    given = parser.parse_args()
    summary = min if given.least else statistics.median
    sizes = [parse_size(size) for size in given.sizes.split(",")]
    engines, rows = given.engines.split(","), []
    for world_size in map(int, given.world_sizes.split(",")):
        rows += measure_world(world_size, given.only.split(","), sizes, engines, given.rounds, summary)
    columns = [("operation", "text"), ("ranks", "count"), ("size", "bytes")]
    table = record.Table("calls", [*columns, *((LABELS[engine], "seconds") for engine in engines)], rows)
    record.write(given.json, given.note, machine_facts(find_mpi()[0]), [table], {})


if __name__ == "__main__":
    main()
