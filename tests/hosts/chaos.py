"""Accidents that happen to a job of three hosts again and again, and what has to hold through all of them.

    python -m tests.hosts.chaos --kind kill --rounds 100 --seed 7

As root. A round is one accident of the kind: after it the job has to train on, and on all hosts once it is undone.
Every rank writes down each step that it has done. The clock is the machine's, so the steps of all hosts have one order:

- two sides never train at the same time;
- of the steps that were done, at most one is done again: the one whose snapshot was not whole;
- the sum that the job computes is right at each step, and each checkpoint on disk is whole.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.namespaces import Host, hosts

SCRIPT = """
import os, socket, sys, time, torch, torch.distributed as dist
import phalanx.checkpoint as ckpt
dist.init_process_group("phalanx")
world, attempt = os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
side = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
state = {"step": 0, "sum": torch.zeros(1000, dtype=torch.int64)}
ckpt.load("folder", state, missing="ignore")
is_over = False
with open(f"{socket.gethostname()}.steps", "a", buffering=1) as file:
    while not is_over:
        step = torch.full((1001,), state["step"])
        step[-1] = os.path.exists("enough") * int(world)
        dist.all_reduce(step)  # of ranks that are at different steps the sum is not theirs
        done_s = time.monotonic()
        is_over = bool(step[-1])
        state["sum"] += step[:-1] // int(world)
        state["step"] += 1
        ckpt.snapshot("folder", state, state["step"])
        if state["step"] % 50 == 0:
            ckpt.save("folder", state, state["step"])
        total = int(state["sum"][0])
        print(state["step"], world, attempt, side, done_s, total, file=file)
        time.sleep(0.01)
dist.destroy_process_group()
"""
PORT = 29511
MOST_AGAIN = 1
_STARTS_S = 90.0
_GOES_ON_S = 60.0
_POLL_S = 0.01
_SILENT_S = 4.0  # longer than a host may be silent


class Step(NamedTuple):
    """A step that a rank has done.

    Attributes:
        side: Attempt, and where its ranks have met: no two sides have the same.
        when_s: When its all_reduce was over.
    """

    host: str
    number: int
    world_size: int
    side: tuple[int, str]
    when_s: float
    total: int


class Job:
    """A job of one rank on each host.

    Attributes:
        steps: In the order in which they were read.
    """

    def __init__(self, made: tuple[Host, ...], folder: Path, log_folder: Path | None = None) -> None:
        self.made, self.folder = made, folder
        self.steps: list[Step] = []
        self._log_folder = log_folder or folder
        self._read: dict[str, int] = collections.defaultdict(int)
        self.supervisors: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "train.py").write_text(SCRIPT)
        for host in made:
            self.start(host)

    def start(self, host: Host) -> None:
        """Start the job's command on a host, for the first time or again."""
        command = [sys.executable, "-m", "phalanx", "run", "--nnodes", f"1:{len(self.made)}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100000", "--rdzv-id", "chaos", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"{self.made[0].address}:{PORT}"]
        command += ["--log-dir", str(self._log_folder / f"{host.name}-{len(self.steps)}"), "train.py"]
        with (self.folder / f"{host.name}.out").open("ab") as out:
            environ = {"OMP_NUM_THREADS": "1"}
            quiet = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self.supervisors[host.name] = host.start(command, environ, cwd=self.folder, **quiet)

    def read(self) -> None:
        """Read what the ranks have written since."""
        for host in self.made:
            path = self.folder / f"{host.name}.steps"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[host.name])
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read[host.name] += len(text)
            for line in text.decode().splitlines():
                number, world_size, attempt, side, when_s, total = line.split()
                side_ = (int(attempt), side)
                self.steps.append(Step(host.name, int(number), int(world_size), side_, float(when_s), int(total)))

    def await_steps(self, who: list[Host], world_size: int | None = None, limit_s: float = _GOES_ON_S) -> None:
        """Wait for a step of one side on these hosts that began to be waited for now.

        Raises:
            AssertionError: None has come within the limit.
        """
        began_s = time.monotonic()
        names = {host.name for host in who}
        while time.monotonic() - began_s < limit_s:
            num_before = len(self.steps)
            self.read()
            newest = {step.host: step for step in self.steps[-1000:] if step.when_s > began_s}
            sides = {newest[name].side if name in newest else None for name in names}
            sizes = {newest[name].world_size for name in names if name in newest}
            if None not in sides and len(sides) == 1 and (world_size is None or sizes == {world_size}):
                return
            if len(self.steps) == num_before:
                time.sleep(_POLL_S)
        raise AssertionError(f"no common step on {sorted(names)} within {limit_s:g} s: {newest}\n{self.said()}")

    def await_all(self) -> None:
        """Wait until all hosts train together."""
        self.await_steps([*self.made], len(self.made), _STARTS_S)

    def others(self, *lost: Host) -> list[Host]:
        return [host for host in self.made if host not in lost]

    def finish(self) -> None:
        """Let the job come to its end, on all hosts."""
        self.await_all()
        (self.folder / "enough").touch()
        for name, supervisor in self.supervisors.items():
            assert supervisor.wait(_GOES_ON_S) == 0, (name, self.said())
        if [*self.folder.glob("folder/step-*")]:  # none if an accident met the only one while it was written
            verify = [sys.executable, "-m", "phalanx", "ckpt", "verify", "folder", "--all"]
            subprocess.run(verify, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
        self.read()
        self.check()
        last = {step.host: step for step in self.steps}
        assert {(step.number, step.side) for step in last.values()} == {(self.steps[-1].number, self.steps[-1].side)}

    def said(self) -> str:
        """Return the last that each supervisor has said."""
        return "\n".join(f"{host.name}: {(self.folder / f'{host.name}.out').read_text()[-1500:]}" for host in self.made)

    def check(self) -> None:
        """Check all steps so far.

        Raises:
            AssertionError: Two sides have trained at once, steps were lost, or a sum is wrong.
        """
        sides: dict[tuple[int, str], list[Step]] = {}
        for step in self.steps:
            assert step.total == step.number * (step.number - 1) // 2, step
            sides.setdefault(step.side, []).append(step)
        in_time = sorted(sides.values(), key=lambda steps: min(step.when_s for step in steps))
        newest, last_s = 0, 0.0
        for steps in in_time:
            first = min(steps, key=lambda step: step.when_s)
            assert first.when_s > last_s, f"two sides at once: {first} before {last_s}\n{self.said()}"
            again = newest - min(step.number for step in steps) + 1
            assert again <= MOST_AGAIN, f"{again} steps again: {first}\n{self.said()}"
            newest = max(newest, *(step.number for step in steps), 0)
            last_s = max(step.when_s for step in steps)


# ---------------------------------------------------------------- accidents

Accident = Callable[[Job, random.Random], None]


def kill(job: Job, drawn: random.Random) -> None:
    """Kill all processes of a host; the others go on."""
    lost = drawn.choice(job.made)
    _random_moment(drawn)
    lost.kill()
    job.await_steps(job.others(lost))
    job.start(lost)


def kill_first(job: Job, drawn: random.Random) -> None:
    """Kill the host of rank 0, which leads."""
    job.read()
    address = job.steps[-1].side[1].partition(":")[0]
    lost = next(host for host in job.made if host.address == address)
    _random_moment(drawn)
    lost.kill()
    job.await_steps(job.others(lost))
    job.start(lost)


def kill_two(job: Job, drawn: random.Random) -> None:
    """Kill two hosts, the second 50 ms after the first; the third goes on."""
    _kill_two(job, drawn, 0.05)


def kill_in_recovery(job: Job, drawn: random.Random) -> None:
    """Kill a second host at a random moment of the recovery from the first's loss."""
    _kill_two(job, drawn, drawn.uniform(0, 1.0))


def _kill_two(job: Job, drawn: random.Random, apart_s: float) -> None:
    one, other = drawn.sample(job.made, 2)
    _random_moment(drawn)
    one.kill()
    time.sleep(apart_s)
    other.kill()
    job.await_steps(job.others(one, other))
    job.start(other)
    job.start(one)


def cut(job: Job, drawn: random.Random) -> None:
    """Cut a host off, in one direction or both, or two from each other, for a moment or until one is lost."""
    one, other = drawn.sample(job.made, 2)
    third = job.others(one, other)[0]
    muted = drawn.choice((
        [(one, other), (one, third), (other, one), (third, one)],
        [(one, other), (one, third)],
        [(other, one), (third, one)],
        [(one, other), (other, one)],
        [(one, other)],
    ))  # fmt: skip
    _random_moment(drawn)
    for sender, receiver in muted:
        sender.mute(receiver)
    time.sleep(drawn.choice((drawn.uniform(0, 2), drawn.uniform(1.5, 2.5), drawn.uniform(2.5, 6))))
    for sender, receiver in muted:
        sender.unmute(receiver)


def cut_off(job: Job, drawn: random.Random) -> None:
    """Pull the cable of a host until the others go on."""
    lost = drawn.choice(job.made)
    lost.cut()
    job.await_steps(job.others(lost), len(job.made) - 1)
    lost.mend()


def kill_cut_off(job: Job, drawn: random.Random) -> None:
    """Kill a host that is cut off: its peers keep connections that are half open."""
    lost = drawn.choice(job.made)
    lost.cut()
    lost.kill()
    job.await_steps(job.others(lost), len(job.made) - 1)
    lost.mend()
    job.start(lost)


def stall(job: Job, drawn: random.Random) -> None:
    """Hold back what is sent to a host, which comes late and in full."""
    late = drawn.choice(job.made)
    late.stall()
    time.sleep(drawn.uniform(0.1, _SILENT_S))
    late.resume()


def stop(job: Job, drawn: random.Random) -> None:
    """Stop a supervisor: its host is gone on without, and started again."""
    lost = drawn.choice(job.made)
    job.supervisors[lost.name].send_signal(signal.SIGSTOP)
    job.await_steps(job.others(lost), len(job.made) - 1)
    if drawn.random() < 0.5:  # a supervisor that wakes up late ends, and disturbs nobody
        job.supervisors[lost.name].send_signal(signal.SIGCONT)
        job.supervisors[lost.name].wait(_GOES_ON_S)
    lost.kill()
    job.start(lost)


ACCIDENTS: dict[str, Accident] = {
    "kill": kill,
    "kill-first": kill_first,
    "kill-two": kill_two,
    "kill-in-recovery": kill_in_recovery,
    "cut": cut,
    "cut-off": cut_off,
    "kill-cut-off": kill_cut_off,
    "stall": stall,
    "stop": stop,
}


def _random_moment(drawn: random.Random) -> None:
    time.sleep(drawn.uniform(0, 0.2))


def play(folder: Path, kinds: list[str], seed: int, *, is_told: bool = False) -> Job:
    """Have one accident after the other happen to a job of three hosts, in the order of `kinds`, and check everything.

    Raises:
        AssertionError: Something did not hold; the message names seed and round.
    """
    with hosts(3, delay_ms=0.1) as made:
        job = Job(made, folder)
        job.await_all()
        for number, kind in enumerate(kinds):
            try:
                began_s = time.monotonic()
                ACCIDENTS[kind](job, random.Random(f"{seed} {number}"))
                after_s = time.monotonic()
                job.await_all()
                job.check()
            except BaseException as error:
                raise AssertionError(f"seed {seed}, round {number}: {kind}") from error
            if is_told:
                took = f"{after_s - began_s:.2f} s, together after {time.monotonic() - began_s:.2f} s"
                print(f"{number} {kind}: {took}, step {job.steps[-1].number}", flush=True)
        job.finish()
        return job


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=["any", *ACCIDENTS], default="any", help="kind of the accidents")
    parser.add_argument("--rounds", type=int, default=10, help="number of accidents")
    parser.add_argument("--seed", type=int, default=1, help="seed of kinds, victims and moments")
    asked = parser.parse_args()
    drawn = random.Random(asked.seed)
    names = [*ACCIDENTS] if asked.kind == "any" else [asked.kind]
    kinds = [drawn.choice(names) for _ in range(asked.rounds)]
    with tempfile.TemporaryDirectory(prefix="phalanx-chaos-") as folder:
        job = play(Path(folder), kinds, asked.seed, is_told=True)
    sides = len({step.side for step in job.steps})
    print(f"{asked.rounds} accidents, {job.steps[-1].number} steps on {sides} sides, one after the other")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
