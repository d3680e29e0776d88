"""``python -m bench.recovery``: how long a job pauses when one of its hosts is lost, and how many steps it repeats.

Hosts are namespaces of this machine (`tests.namespaces`), which needs root. Each turn starts a job on all hosts, waits
for some steps, and removes one host: all its processes are killed, or its link is cut. The benchmark measures the time
from then to the next step on another host, and counts the steps that are repeated. torchrun does not survive the loss
of the host at which the others meet, so with torchrun, another host is lost. If a job does not continue within 240 s,
the result is 240 s. In two cases, the script takes 3 s to start: in one case, the surviving ranks keep their processes;
in the other case, they are started again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import record
from bench.report import machine_facts, verdict_line
from tests.namespaces import Host, hosts, why_no_hosts

_SCRIPT = """
import os, socket, sys, time, torch, torch.distributed as dist
from datetime import timedelta
backend = os.environ["BACKEND"]
time.sleep(float(os.environ["START_S"]))
weight = torch.zeros(100_000)

def train():
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    state = {"step": 0, "weight": weight}
    if backend == "phalanx":
        ckpt.load("folder", state, missing="ignore")
    with open(f"{socket.gethostname()}.steps", "a", buffering=1) as file:
        while not os.path.exists("enough"):
            dist.all_reduce(state["weight"])
            state["step"] += 1
            time.sleep(0.01)
            if backend == "phalanx":
                ckpt.snapshot("folder", state, state["step"])
            if os.environ["LOCAL_RANK"] == "0":
                print(state["step"], os.environ["WORLD_SIZE"], time.monotonic(), file=file)

if backend == "phalanx":
    import phalanx, phalanx.checkpoint as ckpt
    phalanx.resilient(train)
else:
    train()
os._exit(0)
"""
_PORT = 29511
_STEPS_BEFORE = 30
_STARTS_S, _RECOVERS_S = 120.0, 240.0
_POLL_S = 0.01
_START_S = 3.0  # time to start a script that imports many modules, or reads its data
_TORCHRUN = "torchrun: another host is killed"


class Case(NamedTuple):
    """A launcher, which host is lost, and how; `most_s` is the longest allowed pause of the job."""

    launcher: str
    lost: int
    way: str
    most_s: float = 0.0
    start_s: float = 0.0
    flags: tuple[str, ...] = ()


def _command(case: Case, meeting_at: Host, num_hosts: int, host: Host, script: Path) -> list[str]:
    endpoint = f"{meeting_at.address}:{_PORT}"
    flags = ["--nnodes", f"1:{num_hosts}", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "bench"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    if case.launcher == "phalanx run":
        return [sys.executable, "-m", "phalanx", "run", *flags, *case.flags, str(script)]
    # With its defaults, torchrun would wait longer: 30 s for nodes that may still arrive, 15 s until a node counts as
    # lost.
    conf = f"last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={host is meeting_at}"
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, *flags, "--rdzv-conf", conf, "--local-addr", host.address, str(script)]


def _steps(folder: Path, host: Host) -> list[tuple[int, int, float]]:
    """Return the step number, the number of ranks and the time of each step that a host has done."""
    try:
        lines = (folder / f"{host.name}.steps").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    rows = [line.split() for line in lines if line.endswith("\n")]
    return [(int(step), int(size), float(when_s)) for step, size, when_s in rows]


def _await(condition: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(_POLL_S)


def turn(case: Case, num_hosts: int) -> tuple[float, int]:
    """Return the seconds without a step, and the number of repeated steps."""
    launcher, lost = case.launcher, case.lost
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name, hosts(num_hosts) as made:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(_SCRIPT)
        environ = {"BACKEND": "phalanx" if launcher == "phalanx run" else "gloo", "OMP_NUM_THREADS": "1"}
        environ["START_S"] = str(case.start_s)
        started = []
        for host in made:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            command = _command(case, made[0], num_hosts, host, script)
            started.append(host.start(command, {**environ, "GLOO_SOCKET_IFNAME": host.interface}, cwd=folder, **quiet))
        observer = made[1 if lost == 0 else 0]

        def all_train() -> bool:
            last = [steps[-1] if (steps := _steps(folder, host)) else (0, 0, 0.0) for host in made]
            return all(size == num_hosts and step >= _STEPS_BEFORE for step, size, _ in last)

        _await(all_train, _STARTS_S, f"{launcher}: not all hosts train")
        began_s = time.monotonic()
        getattr(made[lost], case.way)()

        def after() -> list[tuple[int, int, float]]:
            return [row for row in _steps(folder, observer) if row[1] < num_hosts and row[2] > began_s]

        try:
            _await(after, _RECOVERS_S, f"{launcher}: no step after the loss")
        except TimeoutError:
            if launcher == "phalanx run":
                raise
            return _RECOVERS_S, _steps(folder, observer)[-1][0]
        step, _, when_s = after()[0]
        before = [row for row in _steps(folder, observer) if row[1] == num_hosts]
        for host in made:
            host.kill()
        return when_s - began_s, max(0, before[-1][0] - step + 1)


def cases_of(num_hosts: int, *, with_torchrun: bool) -> dict[str, Case]:
    """Return the cases to measure, by name."""
    last = num_hosts - 1
    cases = {
        "phalanx: the first host is killed": Case("phalanx run", 0, "kill", 1.0),
        "phalanx: another host is killed": Case("phalanx run", last, "kill", 1.0),
        "phalanx: another host is killed, start of 3 s": Case("phalanx run", last, "kill", 1.0, _START_S),
        "phalanx --no-keep: another host is killed, start of 3 s": Case(
            "phalanx run", last, "kill", _START_S + 3, _START_S, ("--no-keep",)
        ),
        "phalanx: another host is cut off": Case("phalanx run", last, "cut", 5.0),
    }
    if num_hosts > 2:  # of two hosts whose link is cut, the one at which they met would continue
        cases["phalanx: the first host is cut off"] = Case("phalanx run", 0, "cut", 5.0)
    if with_torchrun:
        cases[_TORCHRUN] = Case("torchrun", last, "kill")
    return cases


def measure(rounds: int, num_hosts: int, cases: dict[str, Case]) -> dict[str, list[tuple[float, int]]]:
    """Return the results of all turns, by case."""
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            samples[name].append(turn(case, num_hosts))
            print(f"{name}: {samples[name][-1][0]:.2f} s, {samples[name][-1][1]} steps again", flush=True)
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--no-torchrun", action="store_true", help="leave torchrun out, which takes most of the time")
    record.add_arguments(parser)
    asked = parser.parse_args(arguments)
    if why := why_no_hosts():
        print(why, file=sys.stderr)
        return 1
    cases = cases_of(asked.hosts, with_torchrun=not asked.no_torchrun)
    samples = measure(asked.rounds, asked.hosts, cases)
    median = {name: statistics.median(took for took, _ in turns) for name, turns in samples.items()}
    for name, turns in samples.items():
        print(f"{name}: {median[name]:.2f} s (median of {len(turns)}), most {max(took for took, _ in turns):.2f} s")
    is_good = True
    for name in [name for name in samples if name != _TORCHRUN]:
        most_s = cases[name].most_s
        again = max(steps for _, steps in samples[name])
        reached = median[name] <= most_s and again <= 1
        is_good &= reached
        ratio = f", {median[_TORCHRUN] / median[name]:.1f} times faster than torchrun" if _TORCHRUN in median else ""
        print(verdict_line(reached, f"{name}: {median[name]:.2f} s (at most {most_s:g}), {again} steps again{ratio}"))
    columns = [("what", "text"), ("median", "seconds"), ("most", "seconds"), ("steps again", "count")]
    rows = [
        [name, median[name], max(took for took, _ in turns), float(max(steps for _, steps in turns))]
        for name, turns in samples.items()
    ]
    table = record.Table(f"after the loss of one of {asked.hosts} hosts", columns, rows)
    facts = machine_facts("")
    record.write(asked.json, asked.note, facts, [table], {name: list(turns) for name, turns in samples.items()})
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
