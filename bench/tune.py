"""``python -m bench.tune``: does ``phalanx tune`` find what an exhaustive search finds, and how long does it take?

The exhaustive search measures every combination of the settings that tune searches, in many turns. Then tune runs
several times, and each setup that it chooses is looked up in the results of the exhaustive search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.report import verdict_line
from phalanx.host.cpus import read_machine
from phalanx.tune.search import default_ranks, fastest, race, threads_to_try
from phalanx.tune.trials import Setup, Trials

_NEAR = 0.95  # a choice counts as near if it has at least this fraction of the best speed
_LEAST_NEAR, _MOST_S = 0.9, 60
_STARTS_WITHIN_S = 300.0
_OF_TRAINER = {"channels_last": True, "num_workers": 2}


def every_setup(with_trainer: bool) -> list[Setup]:
    """Return all combinations of the settings that ``phalanx tune`` searches on this machine."""
    machine = read_machine()
    places = [(ranks, threads) for ranks in default_ranks(machine) for threads in threads_to_try(machine, ranks)]
    num_settings = len(_OF_TRAINER)
    chosen = itertools.product((False, True), repeat=num_settings) if with_trainer else [(False,) * num_settings]
    trainers = [tuple(pair for pair, is_on in zip(_OF_TRAINER.items(), of, strict=True) if is_on) for of in chosen]
    return [
        Setup(ranks=ranks, threads=threads, memory=memory, fused=fused, changes=changes)
        for (ranks, threads), memory, fused, changes in itertools.product(
            places, ("auto", "default"), (False, True), trainers
        )
    ]


def exhaustive(script: list[str], *, with_trainer: bool) -> dict[Setup, float]:
    """Return the speed of every setup that starts: the median over all turns of the setup."""
    setups = every_setup(with_trainer)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder, Trials(script, folder, math.inf) as trials:
        failed = trials.start(setups, _STARTS_WITHIN_S)
        there = [setup for setup in setups if setup not in failed]
        found = race(there, trials.rate, math.inf, drops=False)
    return {setup: statistics.median(speeds) for setup, speeds in found.items()}


def tuned(script: list[str]) -> tuple[Setup, float]:
    """Return the setup that ``phalanx tune`` chooses, and the seconds that it takes."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        out = os.path.join(folder, "found.json")
        began_s = time.monotonic()
        command = [sys.executable, "-m", "phalanx", "tune", "--json", out, *script]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(out) as file:
            best: dict[str, Any] = json.load(file)["best"]
    best["changes"] = tuple((name, value) for name, value in best["changes"])
    return Setup(**best), time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="times that phalanx tune runs (default 10)")
    parser.add_argument("--plain", action="store_true", help="the script has no Trainer")
    parser.add_argument("script", nargs="*", default=["examples/train_digits.py"], help="script and arguments")
    given = parser.parse_args()
    print(f"measuring {len(every_setup(not given.plain))} setups, side by side: a minute or more", flush=True)
    speeds = exhaustive(given.script, with_trainer=not given.plain)
    best = fastest({setup: [speed] for setup, speed in speeds.items()})
    for setup in sorted(speeds, key=speeds.__getitem__, reverse=True):
        print(f"{speeds[setup]:10,.0f}/s  {speeds[setup] / speeds[best]:4.2f}  {setup}")
    shares, seconds = [], []
    for _ in range(given.runs):
        setup, took_s = tuned(given.script)
        shares.append(speeds[setup] / speeds[best])
        seconds.append(took_s)
        print(f"tune: {shares[-1]:.2f} of the best, {took_s:.0f} s  {setup}", flush=True)
    num_near = sum(share >= _NEAR for share in shares)
    for is_reached, text in (
        (num_near >= _LEAST_NEAR * len(shares), f"{num_near} of {len(shares)} choices within 5 % of the best"),
        (max(seconds) <= _MOST_S, f"at most {max(seconds):.0f} s (goal {_MOST_S} s)"),
    ):
        print(verdict_line(is_reached, text))


if __name__ == "__main__":
    main()
