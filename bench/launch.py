"""``python -m bench.launch``: whole jobs, from command to exit, of phalanx run, torchrun and plain python in turns.

The job is one all_reduce on two ranks; with plain python, it has one rank. For a warm start, the warm process already
runs, because the first turn, which does not count, has started it. The benchmark also measures the times from the death
of a rank to the end of the command, and to the first all_reduce of the next attempt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import record
from bench.report import machine_facts, verdict_line

_JOB = """
import os, torch, torch.distributed as dist
dist.init_process_group(os.environ.get("BACKEND", "phalanx"))
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""

_DYING = """
import os, signal, time, torch, torch.distributed as dist
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(1))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0":
    print("up", attempt, time.time(), flush=True)
if os.environ["RANK"] == "1":
    print("dead", attempt, time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    dist.all_reduce(torch.ones(1))
"""

# Limits for the launcher: as a fraction of another command's median, as seconds more than that median, or as seconds.
_MOST_OF_TORCHRUN = 0.45
_WARM_MOST_OF_COLD = 0.35
_WARM_MOST_OF_TORCHRUN = 0.12
_MOST_ABOVE_PYTHON_S = 0.25
_MOST_TO_REPORT_S = 0.3
_MOST_TO_RESTART_S = 0.5
_MOST_TO_BE_UP_S = 0.1


def _commands(script: str) -> dict[str, list[str]]:
    program = os.path.join(os.path.dirname(sys.executable), "torchrun")
    ours = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2"]
    return {
        "phalanx run": [*ours, script],
        "phalanx run --warm": [*ours, "--warm", script],
        "phalanx run --no-preload": [*ours, "--no-preload", script],
        "phalanx run --dry-run": [*ours, "--dry-run", script],  # the supervisor alone
        "torchrun": [
            program if os.path.exists(program) else shutil.which("torchrun") or program,
            "--nproc-per-node",
            "2",
            script,
        ],
        "python, one rank": [sys.executable, script],
    }


def _time_of(command: list[str], folder: str) -> float:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    environ = {**os.environ, **(alone if command[1].endswith(".py") else {})}
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
    return time.perf_counter() - begin


def _failures(folder: str, restarts: int) -> tuple[float, list[float]]:
    """Return the seconds from the last death to the end of the command, and from each death to the next all_reduce."""
    script = Path(folder, "dying.py")
    script.write_text(_DYING)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    done = subprocess.run([*command, str(script)], cwd=folder, capture_output=True, text=True, check=False)
    ended = time.time()
    moments: dict[tuple[str, int], float] = {}
    for line in done.stdout.splitlines():
        what, attempt, moment = line.split()[-3:]
        moments[what, int(attempt)] = float(moment)
    assert done.returncode == 137, done.stderr
    took = [moments["up", number + 1] - moments["dead", number] for number in range(restarts)]
    return ended - moments["dead", restarts], took


@contextlib.contextmanager
def _own_warm_processes(folder: str) -> Iterator[None]:
    """Use warm processes of this benchmark's own, apart from the user's, and end them."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = folder
    try:
        yield
    finally:
        subprocess.run([sys.executable, "-m", "phalanx", "warm", "--stop"], capture_output=True, check=False)
        del os.environ["XDG_RUNTIME_DIR"]
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def measure(rounds: int, restarts: int) -> dict[str, list[float]]:
    """Return the seconds of every run, by command, and the seconds after deaths, by the name of the measurement."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder, _own_warm_processes(folder):
        script = Path(folder, "job.py")
        script.write_text(_JOB)
        commands = _commands(str(script))
        samples: dict[str, list[float]] = {name: [] for name in commands}
        samples.update({"death to end of command": [], "death to next all_reduce": []})
        for number in range(-1, rounds):  # the first turn does not count, because it reads files into the cache
            for name in list(commands)[:: 1 if number % 2 else -1]:
                took = _time_of(commands[name], folder)
                if number >= 0:
                    samples[name].append(took)
            end_s, restart_s = _failures(folder, restarts)
            if number >= 0:
                samples["death to end of command"].append(end_s)
                samples["death to next all_reduce"] += restart_s
    return samples


def verdicts(samples: dict[str, list[float]]) -> dict[str, bool]:
    """Return a text for each target, with the measured value, and whether the target was reached."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    ratio = median["phalanx run"] / median["torchrun"]
    above = median["phalanx run"] - median["python, one rank"]
    warm = median["phalanx run --warm"]
    of_cold, of_torchrun = warm / median["phalanx run"], warm / median["torchrun"]
    end, restart = median["death to end of command"], median["death to next all_reduce"]
    up = median["phalanx run --dry-run"]
    return {
        f"{ratio:.2f} of torchrun's time (at most {_MOST_OF_TORCHRUN})": ratio <= _MOST_OF_TORCHRUN,
        f"warm: {of_cold:.2f} of the cold start's time (at most {_WARM_MOST_OF_COLD})": of_cold <= _WARM_MOST_OF_COLD,
        f"warm: {of_torchrun:.3f} of torchrun's time (at most {_WARM_MOST_OF_TORCHRUN})": of_torchrun
        <= _WARM_MOST_OF_TORCHRUN,
        f"{above:+.2f} s against python, one rank (at most +{_MOST_ABOVE_PYTHON_S})": above <= _MOST_ABOVE_PYTHON_S,
        f"{up:.2f} s for the supervisor alone, start to exit (at most {_MOST_TO_BE_UP_S})": up <= _MOST_TO_BE_UP_S,
        f"{end:.2f} s from a rank's death to the end of the command (at most {_MOST_TO_REPORT_S})": end
        <= _MOST_TO_REPORT_S,
        f"{restart:.2f} s from a rank's death to the next all_reduce (at most {_MOST_TO_RESTART_S})": restart
        <= _MOST_TO_RESTART_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each command (default 7)")
    parser.add_argument("--restarts", type=int, default=5, help="restarts of each failing job (default 5)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for launch.json")
    record.add_arguments(parser, "launch.json")
    given = parser.parse_args()
    samples = measure(given.rounds, given.restarts)
    for name, values in samples.items():
        print(f"{name:28} median {statistics.median(values):6.3f} s   {min(values):6.3f} to {max(values):6.3f}")
    for target, reached in verdicts(samples).items():
        print(verdict_line(reached, target))
    table = record.Table(
        "launch",
        [("what", "text"), ("median", "seconds")],
        [[name, statistics.median(values)] for name, values in samples.items()],
    )
    path = given.json or given.out / "launch.json"
    record.write(path, given.note, machine_facts(""), [table], {"samples": samples})


if __name__ == "__main__":
    main()
