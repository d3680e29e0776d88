"""``python -m bench.calls``: what a call of 4 bytes costs from Python, and how much of that is torch's own front end.

The front end is ``torch.distributed`` on a group that returns at once. A world of one waits for nobody, so there ours
minus the front end's is what this library adds; with two ranks it includes their meeting.
"""

from __future__ import annotations

import argparse
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
_ENGINES = ("phalanx", "front_end")
_TURN_S = 0.01


def measure_world(world_size: int, ops: tuple[str, ...], size_bytes: int, rounds: int, *, has_mpi: bool) -> None:
    """Print the medians of one world size, in us."""
    engines = (*_ENGINES, "mpi") if has_mpi else _ENGINES
    names = [LABELS[engine] for engine in engines]
    print(f"\n{world_size} rank{'s' * (world_size > 1)}, {size_bytes} B, us")
    print("".join(f"{name:>18}" for name in ("", *names, "ours - front end")))
    with ExitStack() as stack:
        sets = dict.fromkeys(_ENGINES, stack.enter_context(RankSet("calls", world_size)))
        if has_mpi:
            sets["mpi"] = stack.enter_context(RankSet("mpi", world_size))
        for op in ops:
            if op == "send_recv" and world_size == 1:
                continue
            point = Point(op, size_bytes, world_size, engines, rounds, _TURN_S)
            result = measure(point, sets, point_s=3.0)
            medians = [result.median(engine) * 1e6 for engine in engines]
            print("".join([f"{op:>18}", *(f"{us:18.2f}" for us in (*medians, medians[0] - medians[1]))]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--only", default=",".join(OPS), help="operations, default all")
    parser.add_argument("--world-sizes", default="1,2", help="numbers of ranks, default 1,2")
    parser.add_argument("--size", type=int, default=4, help="bytes, default 4")
    parser.add_argument("--rounds", type=int, default=41, help="turns of each engine, default 41")
    parser.add_argument("--no-mpi", action="store_true", help="leave out Open MPI")
    given = parser.parse_args()
    has_mpi = not given.no_mpi and not find_mpi()[1]
    for world_size in map(int, given.world_sizes.split(",")):
        measure_world(world_size, tuple(given.only.split(",")), given.size, given.rounds, has_mpi=has_mpi)


if __name__ == "__main__":
    main()
