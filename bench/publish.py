"""``python -m bench.publish``: what it costs to publish a state, to read it, and to train beside a reader.

Two ways take turns within one process, so that other load on the machine affects both equally; the trainer's reader is
another process. Each row of the result has a function in `ROWS`, which prepares the state and yields the two ways. A
reported time is the time of one call, the median over the turns, and a reported share is the median of the turns'
shares.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

import phalanx
from bench import record
from bench.report import machine_facts

NAME = f"bench-{os.getpid()}"
_NUM_STEPS = 10
_READER = """
import sys, phalanx
for newest in phalanx.subscribe(sys.argv[1]):
    newest.state["0.weight"][0, 0].item()
"""


class Ways(NamedTuple):
    """Two ways to the same result, each with its name and a function that returns the seconds of one call."""

    name: str
    call: Callable[[], float]
    plain_name: str
    plain: Callable[[], float]


def timed(call: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s

    return run


def _tensor(mib: int) -> torch.Tensor:
    return torch.ones(mib << 18)


def _copy(mib: int) -> Callable[[], object]:
    source, target = _tensor(mib), _tensor(mib)
    return lambda: target.copy_(source)


@contextlib.contextmanager
def copied(mib: int) -> Iterator[Ways]:
    """Publishing a state from ordinary memory, compared with copying it into memory whose pages already exist."""
    state = {"weight": _tensor(mib)}
    with phalanx.publish(state, NAME) as publication:
        publication.update(state)  # makes the second of the two blocks that the publication alternates between
        yield Ways("publish", timed(lambda: publication.update(state)), "copy_", timed(_copy(mib)))


@contextlib.contextmanager
def in_place(mib: int) -> Iterator[Ways]:
    """Publishing a state that is already in the publication's buffers, compared with copying it."""
    with phalanx.publish({"weight": _tensor(mib)}, NAME) as publication:

        def publish() -> float:
            state = publication.buffers()
            state["weight"].fill_(1.0)
            return timed(lambda: publication.update(state))()

        publish()
        yield Ways("publish buffers", publish, "copy_", timed(_copy(mib)))


@contextlib.contextmanager
def mapped(mib: int) -> Iterator[Ways]:
    """A subscription that maps a new version, compared with a subscription that has already mapped it."""
    with phalanx.publish({"weight": _tensor(mib)}, NAME), phalanx.subscribe(NAME) as known:
        known.latest()
        yield Ways("latest, new", timed(lambda: phalanx.subscribe(NAME).latest()), "latest", timed(known.latest))


@contextlib.contextmanager
def read(mib: int) -> Iterator[Ways]:
    """Reading a whole version that was just mapped, compared with reading memory of this size whose pages exist."""
    own = _tensor(mib)
    with phalanx.publish({"weight": own}, NAME):

        def first_read() -> float:
            weight = phalanx.subscribe(NAME).latest().state["weight"]
            return timed(weight.sum)()

        yield Ways("first sum", first_read, "sum", timed(own.sum))


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def _steps(name: str) -> Callable[[], None]:
    """Return a function that runs some training steps, and then publishes the model unless the name is empty."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(64, 784), torch.randint(10, (64,))

    def run() -> None:
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if name:
            phalanx.publish(model.state_dict(), name)

    return run


@contextlib.contextmanager
def step_with_reader(_: int) -> Iterator[Ways]:
    """Ten steps and a publication that another process maps each time, compared with the same without a reader."""
    apart, beside = _steps(f"{NAME}-apart"), _steps(f"{NAME}-beside")
    apart(), beside()
    with subprocess.Popen([sys.executable, "-c", _READER, f"{NAME}-beside"]) as reader:
        beside()
        yield Ways("10 steps, read", timed(beside), "not read", timed(apart))
        for name in (f"{NAME}-apart", f"{NAME}-beside"):
            phalanx.publish(None, name).close()
        reader.wait(60)


@contextlib.contextmanager
def step_that_publishes(_: int) -> Iterator[Ways]:
    """Ten steps and a publication that another process maps each time, compared with ten steps alone."""
    with step_with_reader(0) as ways:
        yield Ways(ways.name, ways.call, "10 steps alone", timed(_steps("")))


ROWS = {
    "copied": copied,
    "in-place": in_place,
    "mapped": mapped,
    "read": read,
    "step": step_with_reader,
    "all-of-it": step_that_publishes,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(ROWS), help=f"rows, default {','.join(ROWS)}")
    parser.add_argument("--mib", type=int, default=1024, help="size of a state in MiB, default 1024")
    parser.add_argument("--turns", type=int, default=21, help="turns of each way, default 21")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, default 1")
    record.add_arguments(parser)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := sorted({*names} - {*ROWS}):
        parser.error(f"--only takes {', '.join(ROWS)}; got {', '.join(unknown)}")
    torch.set_num_threads(given.threads)
    found, rows = {}, []
    for name in names:
        with ROWS[name](given.mib) as ways:
            ways.call(), ways.plain()
            turns = []
            for number in range(max(given.turns, 1)):
                turn = [0.0, 0.0]
                for which in (0, 1) if number % 2 else (1, 0):
                    turn[which] = (ways.call, ways.plain)[which]()
                turns.append(turn)
        found[name] = turns
        seconds, plain_s = (statistics.median(column) for column in zip(*turns, strict=True))
        share = statistics.median(one / other for one, other in turns)
        rows.append([ways.name, seconds, ways.plain_name, plain_s, share])
        print(f"{ways.name:18} {1e3 * seconds:10.3f} ms   {ways.plain_name:16} {1e3 * plain_s:10.3f} ms   {share:6.3f}")
    columns = [("what", "text"), ("time", "seconds"), ("beside", "text"), ("its time", "seconds"), ("share", "ratio")]
    record.write(given.json, given.note, machine_facts(""), [record.Table("publish", columns, rows)], {"turns": found})


if __name__ == "__main__":
    main()
