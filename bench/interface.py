"""``python -m bench.interface``: what the less usual methods of torch's groups cost, compared with the usual ones.

Two ranks on one host, with one thread each, run both ways in turns within the same processes, so that other load on the
machine affects both equally. Each row of the result has a function in `ROWS`, which prepares tensors and groups, in the
same way on all ranks, and returns the two ways with their names. A reported time is the time of one call on rank 0, the
median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench import record
from bench.report import machine_facts
from phalanx.testing import run_ranks

_TURN_S = 0.02  # longer than a time slice of the scheduler
_MOST_CALLS = 2000


class Ways(NamedTuple):
    """Two ways to the same result, each with its name and a function without arguments that every rank calls."""

    name: str
    call: Callable[[], object]
    plain_name: str
    plain: Callable[[], object]


def all_reduce_with_more_time(rank: int) -> Ways:
    """An all_reduce of 4 bytes with a longer timeout for only this call, and one with the group's timeout."""
    world, tensor = dist.group.WORLD, torch.zeros(1)
    more = timedelta(seconds=1)

    def extended() -> None:
        world._add_ephemeral_timeout(more)
        dist.all_reduce(tensor)

    return Ways("extended timeout", extended, "all_reduce of 4 B", lambda: dist.all_reduce(tensor))


def group_by_split(rank: int) -> Ways:
    """Splitting a group off and leaving it, and making a group with ``new_group`` and leaving it."""
    world = dist.group.WORLD

    def split() -> None:
        world.split_group([0, 1]).shutdown()

    return Ways("split_group", split, "new_group", lambda: dist.destroy_process_group(dist.new_group()))


def put(rank: int) -> Ways:
    """A put of 64 MiB into the other rank's window, and a copy of 64 MiB within the rank."""
    mine = dist.group.WORLD.allocate_tensor(16 << 20).zero_()
    window, source, plain = dist.group.WORLD.new_window(mine), torch.ones(16 << 20), torch.zeros(16 << 20)
    return Ways(
        "put of 64 MiB", lambda: window.put(source, 1 - rank, 0), "copy_ of 64 MiB", lambda: plain.copy_(source)
    )


def signal(rank: int) -> Ways:
    """A signal to the other rank and its answer, and a barrier of the same two ranks."""
    window = dist.group.WORLD.new_window()

    def there_and_back() -> None:
        if rank == 0:
            window.signal(1)
            window.wait_signal(1)
        else:
            window.wait_signal(0)
            window.signal(0)

    return Ways("signal and answer", there_and_back, "barrier", dist.barrier)


def remote_view(rank: int) -> Ways:
    """A view of 64 MiB of the other rank's memory, and a view of 4 bytes."""
    views = [dist.group.WORLD.new_window(dist.group.WORLD.allocate_tensor(size)) for size in (16 << 20, 1)]
    large, small = (lambda window=window: window.map_remote_tensor(1 - rank) for window in views)
    return Ways("view of 64 MiB", large, "view of 4 B", small)


ROWS: dict[str, Callable[[int], Ways]] = {
    "extend": all_reduce_with_more_time,
    "split": group_by_split,
    "put": put,
    "signal": signal,
    "view": remote_view,
}


def _measure(rank: int, world_size: int, names: Sequence[str], num_turns: int) -> dict[str, tuple[str, str, list]]:
    """Return, for each row, the names of the two ways, and for every turn the seconds of one call of each way."""
    found = {}
    for name in names:
        ways = ROWS[name](rank)
        calls = (ways.call, ways.plain)
        counts = [_calls_of_a_turn(call) for call in calls]
        turns = []
        for number in range(num_turns):
            turn = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                turn[which] = _seconds_of(calls[which], counts[which])
            turns.append(turn)
        found[name] = (ways.name, ways.plain_name, turns)
    return found


def _seconds_of(call: Callable[[], object], num_calls: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - began) / num_calls


def _calls_of_a_turn(call: Callable[[], object]) -> int:
    """Return the number of calls in a turn; it is the same on all ranks."""
    _seconds_of(call, 1)
    count = torch.tensor(min(max(int(_TURN_S / _seconds_of(call, 3)), 1), _MOST_CALLS))
    dist.broadcast(count, src=0)
    return int(count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.interface", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(ROWS), help=f"rows, default {','.join(ROWS)}")
    parser.add_argument("--turns", type=int, default=21, help="turns of each way, default 21")
    record.add_arguments(parser)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := sorted({*names} - {*ROWS}):
        parser.error(f"--only takes {', '.join(ROWS)}; got {', '.join(unknown)}")
    found = run_ranks(_measure, 2, names, max(given.turns, 1), timeout_s=280)[0]
    rows: list[list[record.Value]] = []
    for name, plain_name, turns in found.values():
        seconds, plain_s = (statistics.median(column) for column in zip(*turns, strict=True))
        rows.append([name, seconds, plain_name, plain_s, seconds / plain_s])
        print(
            f"{name:24} {1e6 * seconds:10.2f} us   {plain_name:24} {1e6 * plain_s:10.2f} us   {seconds / plain_s:6.2f}"
        )
    columns = [
        ("what", "text"),
        ("time", "seconds"),
        ("beside", "text"),
        ("its time", "seconds"),
        ("share", "fraction"),
    ]
    record.write(
        given.json, given.note, machine_facts(""), [record.Table("interface", columns, rows)], {"turns": found}
    )


if __name__ == "__main__":
    main()
