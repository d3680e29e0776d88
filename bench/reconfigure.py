"""``python -m bench.reconfigure``: time from the SIGKILL of one of three ranks to the next all_reduce of the other two.

Two ranks live through all rounds. In each round, another process joins them through torch's `reconfigure`, and is
killed while all three ranks are in an all_reduce. When the two ranks get the error, they reconfigure without the killed
rank and run an all_reduce. Gloo does the same in other processes, in turns with phalanx. The killed rank does not serve
the store, because Gloo could not continue without its store.

In an all_reduce, a rank of Gloo that reads no data from the killed rank gets no error before its timeout. The rank that
does get an error can't end the other rank's wait: neither its `abort` nor its `reconfigure` closes the connections. So
the result for Gloo is the timeout: 2 s here, because with 30 s the benchmark seemed to hang.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ENGINES = ("phalanx", "gloo")
_LIMIT, _OPERATION_LIMIT = timedelta(seconds=30), timedelta(seconds=2)
_CONTEXT = multiprocessing.get_context("fork")  # forked, because importing torch in each process would take seconds


class Rank:
    """A process that has a group and carries out orders from the parent, see `_serve`."""

    def __init__(self, engine: str, rank: int) -> None:
        self._pipe, end = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(end, engine, rank), daemon=True)
        self.process.start()

    def tell(self, *order: Any) -> None:
        self._pipe.send(order)

    def answer(self) -> Any:
        if not self._pipe.poll(2 * _LIMIT.total_seconds()):
            raise TimeoutError(f"pid {self.process.pid} does not answer")
        return self._pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)


def _serve(pipe: Any, engine: str, rank: int) -> None:
    """Read the port of the store, then orders: ``handle``; ``form``, uuid, handles; ``lose``, uuid, handles; ``end``.

    On ``lose``, the rank waits in an all_reduce until that fails, and then forms a new group.
    """
    store = dist.TCPStore("127.0.0.1", pipe.recv()[0], is_master=False, wait_for_workers=False)
    at = {"store": store, "rank": rank, "world_size": rank + 1}
    dist.init_process_group(engine, timeout=_OPERATION_LIMIT, enable_reconfigure=True, **at)
    pipe.send("ready")
    tensor = torch.ones(1)
    while (order := pipe.recv())[0] != "end":
        if order[0] == "handle":
            pipe.send(dist._get_reconfigure_handle())
            continue
        if order[0] == "lose":
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(tensor)
        failed_s = time.perf_counter()
        dist._reconfigure(order[1], order[2], timeout=_LIMIT).wait()
        formed_s = time.perf_counter()
        dist.all_reduce(tensor)
        pipe.send((failed_s, formed_s, time.perf_counter()))
    dist.destroy_process_group()


def lose_one(ranks: list[Rank], victim: Rank, uuid: int) -> list[float]:
    """Kill `victim`; return the seconds until it has ended, and until `ranks` have an error, a group and a result."""
    _form([*ranks, victim], uuid)
    for rank in ranks:
        rank.tell("handle")
    handles = [rank.answer() for rank in ranks]  # asked for before the death, as a program that expects deaths would do
    for rank in ranks:
        rank.tell("lose", uuid + 1, handles)
    # random, so that the death may happen at any time between two checks of the other ranks
    time.sleep(random.uniform(0.05, 0.15))
    begin_s = time.perf_counter()
    victim.kill()
    multiprocessing.connection.wait([victim.process.sentinel])
    ended_s = time.perf_counter() - begin_s
    return [ended_s, *(max(times) - begin_s for times in zip(*(rank.answer() for rank in ranks), strict=True))]


def _form(ranks: list[Rank], uuid: int) -> None:
    for rank in ranks:
        rank.tell("handle")
    handles = [rank.answer() for rank in ranks]
    for rank in ranks:
        rank.tell("form", uuid, handles)
    for rank in ranks:
        rank.answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="number of deaths for each engine")
    rounds = parser.parse_args().rounds
    sets = {engine: [Rank(engine, min(number, 2)) for number in range(2 + rounds)] for engine in ENGINES}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for ranks in sets.values():
        for rank in ranks:
            rank.tell(store.port)
        for rank in ranks:
            rank.answer()
    taken: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
    for number in range(rounds):
        for engine, ranks in sets.items():
            taken[engine].append(lose_one(ranks[:2], ranks[2 + number], 2 * number + 1))
    for engine, ranks in sets.items():
        for rank in ranks[:2]:
            rank.tell("end")
        ends, errors, groups, results = zip(*taken[engine], strict=True)
        print(
            f"{engine:>8}: ended after {_ms(ends)}, error after {_ms(errors)}, group after {_ms(groups)}, "
            f"result after {_ms(results)} (from {1e3 * min(results):.1f} to {1e3 * max(results):.1f} ms)"
        )


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms"


if __name__ == "__main__":
    main()
