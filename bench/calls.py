"""``python -m bench.calls``: what a call of 4 bytes costs from Python, and how much of that is torch's own front end.

The front end is ``torch.distributed`` on a group that returns at once. A world of one waits for nobody, so there ours
minus the front end's is what this library adds; with two ranks it includes their meeting. The direct way is
``phalanx.communicator()``; Open MPI is called with buffers that are described once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench.__main__ import measure
from bench.plan import LABELS, Point
from bench.ranks import RankSet, find_mpi

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
_ENGINES = ("phalanx", "front_end", "direct")
_DIRECT = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv", "barrier")
_TURN_S = 0.003


def measure_world(world_size: int, ops: tuple[str, ...], size_bytes: int, rounds: int, summary: Summary) -> None:
    """Print what each engine takes in a world of this size, in us."""
    has_mpi = not find_mpi()[1]
    names = [LABELS[engine] for engine in (*_ENGINES, "mpi")]
    print(f"\n{world_size} rank{'s' * (world_size > 1)}, {size_bytes} B, us")
    print("".join(f"{name:>18}" for name in ("", *names, "ours - front end", "direct / MPI")))
    with ExitStack() as stack:
        sets = dict.fromkeys(_ENGINES, stack.enter_context(RankSet("calls", world_size)))
        if has_mpi:
            sets["mpi"] = stack.enter_context(RankSet("mpi", world_size))
        for op in ops:
            if op == "send_recv" and world_size == 1:
                continue
            engines = tuple(e for e in (*_ENGINES, "mpi") if e in sets and (e != "direct" or op in _DIRECT))
            result = measure(Point(op, size_bytes, world_size, engines, rounds, _TURN_S), sets, point_s=10.0)
            us = {engine: summary(result.samples[engine]) * 1e6 for engine in engines}
            cells = [f"{us[e]:.2f}" if e in us else "" for e in (*_ENGINES, "mpi")]
            cells.append(f"{us['phalanx'] - us['front_end']:.2f}")
            cells.append(f"{us['direct'] / us['mpi']:.2f}" if {"direct", "mpi"} <= us.keys() else "")
            print("".join(f"{cell:>18}" for cell in (op, *cells)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--only", default=",".join(OPS), help="operations, default all")
    parser.add_argument("--world-sizes", default="1,2", help="numbers of ranks, default 1,2")
    parser.add_argument("--size", type=int, default=4, help="bytes, default 4")
    parser.add_argument("--rounds", type=int, default=41, help="turns of each engine, default 41")
    parser.add_argument(
        "--least", action="store_true", help="each engine's best turn, not the median: on a busy machine"
    )
    given = parser.parse_args()
    summary = min if given.least else statistics.median
    for world_size in map(int, given.world_sizes.split(",")):
        measure_world(world_size, tuple(given.only.split(",")), given.size, given.rounds, summary)


if __name__ == "__main__":
    main()
