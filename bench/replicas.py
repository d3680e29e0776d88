"""``python -m bench.replicas``: what it costs the training to keep each host's part of the state on another host, too.

Two hosts are namespaces of this machine (`tests.namespaces`), which needs root. Each host has one rank with half of the
parameters of an MLP with 17 M parameters, and with half of Adam's state, and takes snapshots as often as a Trainer
would. A turn takes some seconds. In every second turn, the supervisors copy the snapshots to the other host, as often
as they choose; in the other turns, they copy nothing. So both kinds of turns are measured in one job. Each host has one
processor, which does the work of its rank, of its supervisor and of its link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.report import machine_facts, verdict_line
from tests.namespaces import hosts, node_command, why_no_hosts

_SCRIPT = """
import json, math, os, sys, time, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
import phalanx.checkpoint as ckpt
from phalanx.checkpoint.memory import layout
num_turns, width, turn_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("phalanx")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
parts = {
    f"{kind}.{name}": distribute_tensor(value.detach(), mesh, [Shard(0)])
    for kind in ("weights", "exp_avg", "exp_avg_sq") for name, value in model.named_parameters()
}
fd = os.open(os.environ["PHALANX_SNAPSHOTS"], os.O_RDWR)
inputs = torch.randn(64, width)
done = torch.zeros(1)

def step():
    began_s = time.monotonic()
    model.zero_grad()
    model(inputs).square().mean().backward()
    dist.all_reduce(done)
    return time.monotonic() - began_s

def snapshot(number):
    began_s = time.monotonic()
    assert ckpt.snapshot("folder", parts, number) == ""
    return time.monotonic() - began_s

for number in range(3):
    taken = snapshot(number)
    took = [step() for _ in range(3)]
facts = torch.tensor([taken / min(took), turn_s / min(took)])
dist.all_reduce(facts, dist.ReduceOp.MAX)
every = math.ceil(facts[0].item() / 0.03)
num_snapshots = math.ceil(facts[1].item() / every)

def is_copying():
    asked, copied = layout.asked_copy(fd), layout.last_copied(fd)
    busy = torch.tensor(float(asked is not None and (copied is None or copied.step < asked.step)))
    dist.all_reduce(busy)
    return bool(busy)

for turn in range(num_turns):
    is_on = turn % 2
    layout.want_replicas(fd, is_on)
    while not is_on and is_copying():
        step()
    steps, copies = [], set()
    for _ in range(num_snapshots):
        number += 1
        snapshot(number)
        for _ in range(every):
            steps.append(step())
            copies.add(layout.last_copied(fd))
    if dist.get_rank() == 0:
        copied = layout.last_copied(fd)
        print(json.dumps({"is_on": is_on, "steps": steps, "every": every, "num_copies": len(copies) - 1,
              "took_ms": copied.took_ms if copied else -1}), flush=True)
os._exit(0)
"""
_PORT = 29513
_LIMIT_S = 900.0
_MOST_COST, _LONGER = 0.03, 2.0


def measure(rate: str, num_turns: int, width: int, turn_s: float) -> list[dict[str, Any]]:
    """Return the measurements of each turn."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name, hosts(2, rate=rate, delay_ms=0.1) as made:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT)
        started, cpus = [], sorted(os.sched_getaffinity(0))
        for number, host in enumerate(made):
            command = ["taskset", "-c", str(cpus[number % len(cpus)]), *node_command("2", made[0], _PORT)]
            command += ["--max-restarts", "1", str(folder / "train.py"), str(num_turns), str(width), str(turn_s)]
            output = {"stdout": subprocess.PIPE, "text": True} if not started else {"stdout": subprocess.DEVNULL}
            environ = {"OMP_NUM_THREADS": "1"}
            started.append(host.start(command, environ, cwd=folder, stderr=subprocess.DEVNULL, **output))
        said, _ = started[0].communicate(timeout=_LIMIT_S)
        return [json.loads(line[line.index("{") :]) for line in said.splitlines() if "{" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replicas", description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["10gbit", "10mbit"], help="bandwidths of the hosts' links")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-s", type=float, default=15.0, help="length of a turn")
    parser.add_argument("--width", type=int, default=2896, help="of the two layers; 2896: 17 M parameters")
    record.add_arguments(parser)
    asked = parser.parse_args(arguments)
    if why := why_no_hosts():
        print(why, file=sys.stderr)
        return 1
    is_good, rows = True, []
    for rate in asked.rates:
        turns = measure(rate, asked.turns, asked.width, asked.turn_s)
        told = turns[2:]  # the first pair of turns is the warm-up
        mean = {is_on: statistics.fmean(s for t in told if t["is_on"] == is_on for s in t["steps"]) for is_on in (0, 1)}
        per_turn_s = [statistics.fmean(turn["steps"]) for turn in told]
        costs = sorted(on_s / off_s - 1 for off_s, on_s in zip(per_turn_s[::2], per_turn_s[1::2], strict=True))
        cost = statistics.median(costs)
        longest = max(s for turn in told if turn["is_on"] for s in turn["steps"])
        longest_off = max(s for turn in told if not turn["is_on"] for s in turn["steps"])
        num_copies, took_s = sum(turn["num_copies"] for turn in told if turn["is_on"]), told[-1]["took_ms"] / 1e3
        print(f"{rate}: a snapshot every {told[0]['every']} steps; {num_copies} copied, the last in {took_s:.2f} s")
        print(
            f"{rate}: steps of {mean[0]:.4f} s on average, {mean[1]:.4f} s with replicas; "
            f"the longest {longest_off:.3f} s, {longest:.3f} s with replicas"
        )
        # on a slow link, no step may wait for a copy, and the cost is only reported
        is_slow = not rate.endswith("gbit")
        is_quiet = longest <= _LONGER * longest_off if is_slow else cost <= _MOST_COST
        reached = num_copies > 0 and is_quiet
        is_good &= reached
        goal = f"no step {_LONGER:g} times as long" if is_slow else f"at most {_MOST_COST:.0%}"
        span = f"pairs of turns {costs[0]:+.1%} to {costs[-1]:+.1%}"
        print(verdict_line(reached, f"{rate}: replicas cost {cost:+.1%} ({span}), {goal}"))
        rows.append([rate, mean[0], mean[1], longest_off, longest])
    columns = [("bandwidth", "text"), ("step", "seconds"), ("step with replicas", "seconds")]
    columns += [("longest", "seconds"), ("longest with replicas", "seconds")]
    table = record.Table("steps of two hosts that keep replicas for each other", columns, rows)
    record.write(asked.json, asked.note, machine_facts(""), [table], {})
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
