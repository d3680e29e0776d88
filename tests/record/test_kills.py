"""After ``kill -9`` of all ranks at any moment, their boxes show the collective and the line at which each was."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from phalanx.record.box import load_boxes

pytestmark = pytest.mark.usefixtures("warm_jobs")

HAS_HOOKS = pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "register_pre_hook"), reason="before torch 2.14 groups have no hooks"
)
NUM_RANKS = 2
LIMIT_S = 60
# Each rank says in a file of its own, which nothing buffers, what it is about to call, and that it has returned.
SCRIPT = """
import os, random, sys
import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
said = os.open(f"said_{attempt}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
number = 0


def say(op, count):
    global number
    number += 1
    os.write(said, f"call {number} {op} {count} {sys._getframe(1).f_lineno}\\n".encode())


def done():
    os.write(said, f"done {number}\\n".encode())


os.write(said, f"pid {os.getpid()}\\n".encode())
dice, waits = random.Random(int(attempt)), random.Random(rank)
while True:
    size = dice.choice((1, 7, 4096, 300_000))
    kind = dice.randrange(4)
    if kind == 0:
        say("all_reduce", size); dist.all_reduce(torch.ones(size))
    elif kind == 1:
        say("broadcast", size); dist.broadcast(torch.ones(size), dice.randrange(2))
    elif kind == 2:
        work = (say("reduce", size), dist.reduce(torch.ones(size), 1, async_op=True))[1]
        work.wait()
    else:
        say("barrier", 0); dist.barrier()
    done()
    sum(range(waits.choice((0, 100, 20_000))))
"""


def lines_of(folder: Path, attempt: int, rank: int) -> list[str]:
    """What a rank has said so far, in whole lines."""
    path = folder / f"said_{attempt}_{rank}"
    return path.read_text().splitlines() if path.exists() else []


def kill_all(folder: Path, attempt: int, job: subprocess.Popen[str], dice: random.Random) -> None:
    """Kill all ranks of an attempt at some moment after its first collectives."""
    limit = time.monotonic() + LIMIT_S
    while not all(len(lines_of(folder, attempt, rank)) > 3 for rank in range(NUM_RANKS)):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < limit, f"attempt {attempt} did not begin"
        time.sleep(0.01)
    pids = [int(lines_of(folder, attempt, rank)[0].split()[1]) for rank in range(NUM_RANKS)]
    dice.shuffle(pids)
    time.sleep(dice.choice((0, dice.uniform(0, 0.2))))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def check(folder: Path, saved: Path, attempt: int) -> None:
    boxes = load_boxes(saved / f"attempt_{attempt}").boxes
    assert [box.rank for box in boxes] == list(range(NUM_RANKS))
    for box in boxes:
        said = lines_of(folder, attempt, box.rank)
        calls = {int(line.split()[1]): line.split()[2:] for line in said if line.startswith("call")}
        kind, number = said[-1].split()[0], int(said[-1].split()[1])
        events = [event for event in box.events if event.kind in ("collective", "call") and event.op != "join"]
        last = events[-1]
        where = f"attempt {attempt}, rank {box.rank}: said {said[-2:]}, recorded {last}"
        # A rank that has said what it calls may have been killed before it did.
        assert last.seq == number or (kind == "call" and last.seq == number - 1), where
        if last.kind != "call" and (
            kind == "done" or last.seq < number
        ):  # a call tells no end: Gloo's in the background
            assert last.begun_ns < last.ended_ns, where
        for event in events:
            op, count, line = calls[event.seq]
            assert (event.op, event.value, event.site) == (op, int(count), f"train.py:{line}"), where
        assert [event.seq for event in events] == list(range(events[0].seq, last.seq + 1)), where


@pytest.mark.parametrize("num_attempts", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["phalanx", pytest.param("gloo", marks=HAS_HOOKS)])
def test_what_each_rank_did_last_is_known_however_all_of_them_are_killed(tmp_path, backend, num_attempts):
    (tmp_path / "train.py").write_text(SCRIPT)
    dice = random.Random(18)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(NUM_RANKS), "--log-dir", "runs"]
    job = subprocess.Popen(
        [*command, "--max-restarts", str(num_attempts - 1), "train.py", backend],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        for attempt in range(num_attempts):
            kill_all(tmp_path, attempt, job, dice)
        output = job.communicate(timeout=LIMIT_S)[0]
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0
    assert re.search("SIGKILL", output)
    (saved,) = tmp_path.glob("runs/*/blackbox")
    assert len(list(saved.iterdir())) == num_attempts
    for attempt in range(num_attempts):
        check(tmp_path, saved, attempt)
