"""``python -m bench.replicas``: what it costs the training to keep each host's part of the state on another host, too.

Two hosts are namespaces of this machine (`tests.namespaces`); it needs root. Each has one rank with half of the
parameters of an MLP and of Adam's state, 17 M parameters together, and takes snapshots as often as a Trainer would. In
turns of a few snapshots, the supervisors copy them to the other host or do not, so both are measured in one job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import record
from bench.report import machine_facts, verdict_line
from tests.namespaces import hosts, why_no_hosts

_SCRIPT = """
import json, math, os, sys, time, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
import phalanx.checkpoint as ckpt
from phalanx import _snapshots
num_turns, width = int(sys.argv[1]), int(sys.argv[2])
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
longest = torch.tensor([taken / min(took)])
dist.all_reduce(longest, dist.ReduceOp.MAX)
every = math.ceil(longest.item() / 0.03)
for turn in range(num_turns):
    is_on = turn % 2
    _snapshots.want_replicas(fd, is_on)
    steps, snapshots = [], []
    for _ in range(2):
        number += 1
        snapshots.append(snapshot(number))
        steps += [step() for _ in range(every)]
    while is_on and (_snapshots.last_copied(fd) or (0, 0))[:2] < (1, number - 1):
        steps.append(step())  # a slow link takes longer
        if len(steps) > 20 * every:
            break
    if dist.get_rank() == 0:
        copied = _snapshots.last_copied(fd)
        print(json.dumps({"is_on": is_on, "steps": steps, "snapshots": snapshots, "every": every,
              "copied": copied and list(copied)}), flush=True)
os._exit(0)
"""
_PORT = 29513
_LIMIT_S = 900.0
_MOST_COST = 0.03


def measure(rate: str, num_turns: int, width: int) -> list[dict[str, object]]:
    """Return what each turn measured."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name, hosts(2, rate=rate, delay_ms=0.1) as made:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT)
        started = []
        for host in made:
            command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--nnodes", "2"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].address}:{_PORT}"]
            command += ["--max-restarts", "1", str(folder / "train.py"), str(num_turns), str(width)]
            output = {"stdout": subprocess.PIPE, "text": True} if not started else {"stdout": subprocess.DEVNULL}
            environ = {"OMP_NUM_THREADS": "1"}
            started.append(host.start(command, environ, cwd=folder, stderr=subprocess.DEVNULL, **output))
        said, _ = started[0].communicate(timeout=_LIMIT_S)
        return [json.loads(line[line.index("{") :]) for line in said.splitlines() if "{" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replicas", description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["10gbit", "1mbit"], help="bandwidths of the hosts' links")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--width", type=int, default=2896, help="of the two layers; 2896: 17 M parameters")
    record.add_arguments(parser)
    asked = parser.parse_args(arguments)
    if why := why_no_hosts():
        print(why, file=sys.stderr)
        return 1
    is_good, rows = True, []
    for rate in asked.rates:
        turns = measure(rate, asked.turns, asked.width)
        steps = {is_on: [s for turn in turns[2:] if turn["is_on"] == is_on for s in turn["steps"]] for is_on in (0, 1)}
        mean = {is_on: statistics.fmean(took) for is_on, took in steps.items()}
        median = {is_on: statistics.median(took) for is_on, took in steps.items()}
        cost, middle = mean[1] / mean[0] - 1, median[1] / median[0] - 1
        longest = max(steps[1])
        copied = turns[-1]["copied"]
        print(
            f"{rate}: a snapshot every {turns[0]['every']} steps, copied in {copied[3] / 1e3 if copied else -1:.2f} s"
        )
        print(f"{rate}: steps of {mean[0]:.4f} s on the mean, {mean[1]:.4f} s with replicas; longest {longest:.3f} s")
        reached = cost <= _MOST_COST
        is_good &= reached
        print(
            verdict_line(reached, f"{rate}: replicas cost {cost:+.1%} (median {middle:+.1%}), at most {_MOST_COST:.0%}")
        )
        rows.append([rate, mean[0], mean[1], longest])
    columns = [("link", "text"), ("step", "seconds"), ("step with replicas", "seconds"), ("longest", "seconds")]
    table = record.Table("steps of two hosts that keep replicas for each other", columns, rows)
    record.write(asked.json, asked.note, machine_facts(""), [table], {})
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
