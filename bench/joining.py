"""``python -m bench.joining``: how long ranks take to join a world, and then further groups of all ranks.

In each round, phalanx and Gloo in turns run on new ranks on this host, in which torch is already imported. The
benchmark reports the slowest rank's time for ``init_process_group``, and for ``--groups`` calls of ``new_group``, one
after the other. Both engines meet through torch's TCPStore. With more ranks than cores, the time is mostly the work of
all ranks rather than waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch.distributed as dist

from phalanx.testing import run_ranks

ENGINES = ("phalanx", "gloo")
_LIMIT_S = 300.0


def join(_rank: int, _world_size: int, engine: str, num_groups: int) -> tuple[float, float]:
    """Return the seconds for joining a world, and for joining `num_groups` further groups."""
    began_s = time.perf_counter()
    dist.init_process_group(engine)
    world_s = time.perf_counter() - began_s
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(num_groups):
        dist.new_group(backend=engine)
    groups_s = time.perf_counter() - began_s
    dist.barrier()
    dist.destroy_process_group()
    return world_s, groups_s


def measure(engine: str, num_ranks: int, num_groups: int) -> tuple[float, float]:
    """Return both times of the slowest rank, in seconds."""
    worlds, groups = zip(*run_ranks(join, num_ranks, engine, num_groups, init=False, timeout_s=_LIMIT_S), strict=True)
    return max(worlds), max(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,8,32", help="numbers of ranks, separated by commas (default %(default)s)")
    parser.add_argument("--groups", type=int, default=50, help="number of further groups (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default %(default)s)")
    args = parser.parse_args()
    for num_ranks in map(int, args.ranks.split(",")):
        taken: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
        for _ in range(args.rounds):
            for engine in ENGINES:
                taken[engine].append(measure(engine, num_ranks, args.groups))
        for what, number in (("the world", 0), (f"{args.groups} groups", 1)):
            ours, gloos = (statistics.median(times[number] for times in taken[engine]) for engine in ENGINES)
            print(
                f"{num_ranks} ranks join {what}: phalanx {ours:.3f} s, Gloo {gloos:.3f} s, ratio {ours / gloos:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
