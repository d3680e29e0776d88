"""all_reduce by hand, as a ring of isend and irecv, against the built-in one: the same sums, and how long each takes.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/ring_all_reduce.py
    torchrun --nproc-per-node 2 examples/ring_all_reduce.py

`phalanx.ring_all_reduce` is 20 lines to read: `phalanx/parallel/exercises.py`.
"""

import argparse
import time

import torch
import torch.distributed as dist

import phalanx


def show_small(rank, world_size):
    """Print a tensor of one number per chunk, before and after."""
    tensor = torch.full((world_size,), rank + 1)
    before = tensor.tolist()
    phalanx.ring_all_reduce(tensor)
    print(f"rank {rank}: {before} -> {tensor.tolist()}")


def seconds_of(all_reduce, num_elems, repeats):
    """Return the median of how long a call takes, on this rank."""
    times = []
    for _ in range(repeats):
        tensor = torch.randn(num_elems)
        dist.barrier()
        begin = time.perf_counter()
        all_reduce(tensor)
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def difference_of(num_elems):
    """Return how far the two sums are apart at most, relative to the largest: they add in different orders."""
    ours = torch.randn(num_elems)
    theirs = ours.clone()
    phalanx.ring_all_reduce(ours)
    dist.all_reduce(theirs)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 1_000, 100_000, 1_000_000], help="in elements")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--backend", default="phalanx", help="the built-in one, such as gloo")
    args = parser.parse_args()

    with phalanx.init(args.backend) as session:
        torch.manual_seed(session.rank)
        show_small(session.rank, session.world_size)
        dist.barrier()
        if session.rank == 0:
            print(f"{'elements':>12} {'difference':>12} {'ring':>12} {session.backend:>12}")
        for num_elems in args.sizes:
            difference = difference_of(num_elems)
            ring, built_in = (
                seconds_of(f, num_elems, args.repeats) for f in (phalanx.ring_all_reduce, dist.all_reduce)
            )
            if session.rank == 0:
                print(f"{num_elems:12,} {difference:12.0e} {ring * 1e6:9,.0f} µs {built_in * 1e6:9,.0f} µs")


if __name__ == "__main__":
    main()
