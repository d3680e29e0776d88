"""``phalanx check --resume``: tests that a script ends with the same bits whether or not it is interrupted."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx import _env
from phalanx.checkpoint.comparison import compare
from phalanx.checkpoint.disk.folder import steps
from phalanx.launch.processes.descendants import die_with_parent
from phalanx.train.report.metrics import read_metrics
from phalanx.wire.waiting import wait_until

_LIMIT_S = 3600.0
_LOOK_EVERY_S = 0.01


class Failed(Exception):
    """A run failed; the message says how."""


def check_resume(run_arguments: Sequence[str]) -> int:
    """Run a script uninterrupted, with a rank killed, and preempted and resumed; compare the last checkpoints.

    Args:
        run_arguments: Arguments of ``phalanx run``: flags, a script that trains with a `Trainer`, and its arguments.

    Returns:
        0 if all three runs end with the same bits; 1 if not, or if a run failed.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-check-") as base:
        whole, killed, preempted = (os.path.join(base, name) for name in ("whole", "killed", "preempted"))
        try:
            print("1 of 3: the whole run", flush=True)
            _run(run_arguments, whole)
            middle = _middle_step(whole)
            print(f"2 of 3: rank 0 is killed after step {middle} and started again", flush=True)
            _run(["--max-restarts", "1", *run_arguments], killed, middle, _kill_rank)
            print(f"3 of 3: SIGUSR1 after step {middle}, and the job is started again", flush=True)
            _run(run_arguments, preempted, middle, _ask_for_room, code=_env.PREEMPTED_CODE)
            _run(run_arguments, preempted)
        except Failed as failure:
            print(f"phalanx check: {failure}")
            return 1
        return max(_report(whole, killed, "killed"), _report(whole, preempted, "preempted"))


def _run(
    arguments: Sequence[str],
    folder: str,
    step: int = 0,
    interrupt: Callable[[subprocess.Popen[bytes], int], None] | None = None,
    code: int = 0,
) -> None:
    """Run the job to its end, interrupting it after `step` if `interrupt` is given.

    Raises:
        Failed: The job has ended with a code other than `code`, or before it could be interrupted.
    """
    environ = {**_env.environment(), _env.FOLDER_VARIABLE: folder, "PHALANX_LOG_DIR": os.path.join(folder, "logs")}
    command = [sys.executable, "-m", "phalanx", "run", *arguments]
    end_with_us = functools.partial(die_with_parent, os.getpid())
    with (
        tempfile.TemporaryFile() as printed,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, preexec_fn=end_with_us
        ) as job,
    ):
        deadline = time.monotonic() + _LIMIT_S
        try:
            if interrupt is not None and (pid := _pid_once_past(folder, step, job, deadline)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    interrupt(job, pid)
                    interrupt = None
            ended = job.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"the job has not ended after {_LIMIT_S:g} s") from None
        finally:
            job.kill()
        if interrupt is None and ended == code:
            return
        printed.seek(0)
        why = f"with code {ended} instead of {code}" if interrupt is None else "before it could be interrupted"
        raise Failed(f"the job ended {why}. It has printed:\n{printed.read().decode(errors='replace')}")


def _pid_once_past(folder: str, step: int, job: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return rank 0's pid once rank 0 has logged `step` or a later step; None if the job ends or is late."""

    def look() -> int | None:
        if job.poll() is not None:
            return 0
        records = read_metrics(folder) if os.path.exists(os.path.join(folder, "metrics.jsonl")) else []
        if not any(record["kind"] == "step" and record["step"] >= step for record in records):
            return None
        return int(next(record["pid"] for record in reversed(records) if record["kind"] == "start"))

    return wait_until(look, deadline, least_s=_LOOK_EVERY_S, most_s=_LOOK_EVERY_S) or None


def _kill_rank(_: subprocess.Popen[bytes], pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _ask_for_room(job: subprocess.Popen[bytes], _: int) -> None:
    job.send_signal(signal.SIGUSR1)


def _middle_step(folder: str) -> int:
    try:
        logged = [record["step"] for record in read_metrics(folder) if record["kind"] == "step"]
    except FileNotFoundError:  # no Trainer
        logged = []
    if len(logged) < 2:
        raise Failed("the script must train with a phalanx.Trainer, for more steps than twice its log_every")
    return int(logged[len(logged) // 2 - 1])


def _report(whole: str, other: str, name: str) -> int:
    first, second = (os.path.join(folder, "checkpoints") for folder in (whole, other))
    differences: list[Any] = compare((first, steps(first)[-1]), (second, steps(second)[-1]))
    if not differences:
        print(f"{name}: the same bits as the whole run, to the last number of the state")
        return 0
    print(f"{name}: {len(differences)} differences from the whole run:")
    for difference in differences[:20]:
        print(f"  {difference}")
    return 1
