"""``python -m bench.black_box``: what recording adds to an event, a small collective and a training step.

Each of these is measured with and without recording, in turns within the same processes, so that other load on the
machine affects both equally. Two ranks with one thread each run the collectives, and train the MLP 784-1024-10 with
batches of 64.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from bench import record
from bench.report import machine_facts
from phalanx import _core
from phalanx.record import writer
from phalanx.testing import run_ranks

_CALLS = 2000  # calls in a turn
_EVENTS, _TRIES = 2000, 50  # a try is shorter than a time slice of the scheduler, so few tries are interrupted
# steps in a turn; the first ones do not count, because the caches still hold the data of the previous turn
_STEPS, _SETTLING = 6, 2
_MOST_EVENT_S = 50e-9
_MOST_STEP = 0.01
Turn = tuple[float, float]  # seconds without recording, and seconds with recording


def _in_turns(measure: Callable[[], float], num_turns: int) -> list[Turn]:
    """Return the results of `measure` without and with recording, for each pair of turns except the first two pairs."""
    turns = []
    for number in range(num_turns + 2):
        found = {}
        for is_on in (False, True) if number % 2 else (True, False):
            (_core.resume_recording if is_on else _core.stop_recording)()
            found[is_on] = measure()
        turns.append((found[False], found[True]))
    return turns[2:]


def _core_events() -> float:
    return statistics.median(_core.seconds_of_events(_EVENTS) / _EVENTS for _ in range(_TRIES))


def _python_events() -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        writer.end(writer.begin_phase("forward"))
    return (time.perf_counter() - began) / _CALLS


def _small_collectives() -> float:
    tensor = torch.zeros(4)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(_CALLS):
        dist.all_reduce(tensor)
    return (time.perf_counter() - began) / _CALLS


def _steps_of_training(num_turns: int) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    length = 128 * _STEPS * num_turns
    data = TensorDataset(torch.randn(length, 784, generator=generator), torch.randint(10, (length,)))
    loader = phalanx.DataLoader(data, 64, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    ddp = phalanx.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def measure() -> float:
        ends = []
        for inputs, targets in itertools.islice(batches, _STEPS):
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(ends[_SETTLING - 1 :]))

    return measure


def _measure(rank: int, world_size: int, num_turns: int) -> dict[str, list[Turn]]:
    found = {
        "event in the core": _in_turns(_core_events, num_turns),
        "event from Python": _in_turns(_python_events, num_turns),
        "all_reduce of 4 elements": _in_turns(_small_collectives, num_turns),
        "step of the MLP 784-1024-10": _in_turns(_steps_of_training(num_turns), 8 * num_turns),
    }
    _core.resume_recording()
    return found


def main() -> None:
    """Print the medians without and with recording, and the time that recording adds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=50, help="turns of each kind (default: 50)")
    record.add_arguments(parser)
    given = parser.parse_args()
    found = run_ranks(_measure, 2, max(2, given.turns), timeout_s=280)[0]
    rows: list[list[record.Value]] = []
    shares = {}
    for what, turns in found.items():
        without, recorded = (statistics.median(column) for column in zip(*turns, strict=True))
        added = statistics.median(on - off for off, on in turns)
        shares[what] = added / without
        rows.append([what, without, recorded, added])
        print(f"{what:28} {1e6 * without:9.3f} us, recorded {1e6 * recorded:9.3f} us: {1e9 * added:7.0f} ns more")
    columns = [("what", "text"), ("without", "seconds"), ("recorded", "seconds"), ("added", "seconds")]
    record.write(
        given.json, given.note, machine_facts(""), [record.Table("black_box", columns, rows)], {"turns": found}
    )
    event_s = statistics.median(on for _, on in found["event in the core"])
    share = shares["step of the MLP 784-1024-10"]
    print(
        f"{'reached' if event_s <= _MOST_EVENT_S else 'missed'}: {1e9 * event_s:.0f} ns an event in the core "
        f"(at most {1e9 * _MOST_EVENT_S:.0f})"
    )
    print(f"{'reached' if share <= _MOST_STEP else 'missed'}: {share:.2%} of a step (at most {_MOST_STEP:.0%})")


if __name__ == "__main__":
    main()
