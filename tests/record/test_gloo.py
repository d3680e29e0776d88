"""What a job on torch's own Gloo does is recorded, too: its calls, whom they wait for, and how they ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from phalanx.record.box import load_boxes
from tests.diagnose.asked import asked
from tests.killed import kill_unseen
from tests.launch.jobs import await_line

pytestmark = [
    pytest.mark.usefixtures("warm_jobs"),
    pytest.mark.skipif(
        not hasattr(torch.distributed.ProcessGroup, "register_pre_hook"),
        reason="before torch 2.14 groups have no hooks",
    ),
]
PHALANX = [sys.executable, "-m", "phalanx"]
CALLS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
pair, alone = dist.new_group([0, 1]), dist.new_group([1])
x = torch.ones(3)
dist.all_reduce(x, group=pair)
dist.all_reduce(x, async_op=True).wait()
dist.broadcast(x, 0)
dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
dist.barrier()
del model, pair, alone  # Gloo's threads end with the last reference; one that frees a tensor later would abort
dist.destroy_process_group()
"""


# Two interpreters that have not been forked end in each of these ways, as children of theirs that take their places in
# a group; then they call, but without DDP, which would import torch._dynamo. Gloo may crash an interpreter that ends.
WAYS = {"ends": [0, 0], "raises": [1, 0], "destroys": [0, 0], "calls_back": [0, 0]}
LEAVES = """
import gc, os, sys, time, torch, torch.distributed as dist

class Late:
    def __init__(self, *needs):
        self.needs = needs
    def __del__(self):
        create, flags, sleep = self.needs
        create("ending", flags)
        sleep(0.5)

def leave(way, rank):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store_{way}", rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=pair)
    if way == "calls_back":  # rank 1 leaves once the interpreter of rank 0 is ending: sys is emptied last
        if rank == 0:
            heard = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda done: 1)
            sys.late = Late(os.open, os.O_CREAT | os.O_WRONLY, time.sleep)
        else:
            while not os.path.exists("ending"):
                time.sleep(0.001)
            os._exit(0)
    elif rank == 0:
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in (None, pair)]
        globals().update(kept=(works, pair))  # until the interpreter ends
        if way == "raises":
            raise ValueError("leaves")
        if way == "destroys":
            dist.destroy_process_group()
    else:
        globals().update(kept=pair)
        time.sleep(0.2)  # ends while the other does

rank = os.environ["RANK"]
gc.freeze()  # children that end would else look through all of torch
for way in sys.argv[1:]:
    if (child := os.fork()) == 0:
        leave(way, int(rank))
        sys.exit()
    _, status = os.waitpid(child, 0)
    with open(f"{way}_{rank}", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
"""
NUM_LINES = {"forked": 0, "executed": LEAVES.count("\n")}
"""What comes before `CALLS`."""


def run(folder: Path, script: str, *args: str) -> Path:
    """Run a job of two ranks and return the folder of their black boxes."""
    (folder / "job.py").write_text(script)
    command = [*PHALANX, "run", "--nproc-per-node", "2", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (boxes,) = folder.glob("logs/job/*/blackbox/attempt_0")
    return boxes


@pytest.fixture(scope="module")
def executed(warm_jobs, tmp_path_factory):
    """The folder of a job whose two interpreters have left in all `WAYS`, and the one of their boxes."""
    folder = tmp_path_factory.mktemp("executed")
    without_ddp = "".join("\n" if "model" in line and "del" not in line else line for line in CALLS.splitlines(True))
    script = LEAVES + without_ddp.replace("del model, ", "del ")
    return folder, run(folder, script, "--no-python", sys.executable, "job.py", *WAYS)


@pytest.mark.parametrize("launch", NUM_LINES)
def test_each_call_has_its_group_number_and_line(request, tmp_path, launch):
    folder = run(tmp_path, CALLS, "job.py") if launch == "forked" else request.getfixturevalue("executed")[1]
    for box in load_boxes(folder).boxes:
        assert (box.world_size, len(box.events) >= 7) == (2, True)
        assert all(event.ended_ns > event.begun_ns for event in box.events)
        told = [(event.kind, event.op, event.text, event.seq, event.site) for event in box.events]

        def line(number):
            return f"job.py:{number + NUM_LINES[launch]}"

        joins = [one for one in told if one[1] == "join"]
        pair = joins[1][2]
        assert [one[2] for one in joins][:2] == ["default", pair]
        assert len(joins) == 2 + (box.rank == 1)
        of_ddp = [one for one in told if one[4] == line(10) or one[4] == line(11)]
        if launch == "forked":
            assert {one[0] for one in of_ddp} == {"call"}
            assert of_ddp[-1][1:] == ("all_reduce", "default", 3 + len(of_ddp), line(11))
        assert [one for one in told if one not in joins + of_ddp] == [
            ("collective", "all_reduce", pair, 1, line(6)),
            ("call", "all_reduce", "default", 1, line(7)),
            ("collective", "broadcast", "default", 2, line(8)),
            ("collective", "reduce_scatter", "default", 3, line(9)),
            ("collective", "barrier", "default", 4 + len(of_ddp), line(12)),
        ]


# Rank 1 of one pair hangs, while the other pair has no call to make.
HANGS = """
import threading, torch, torch.distributed as dist
dist.init_process_group("gloo")
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
rank = dist.get_rank()
for step in range(5):
    if (rank, step) == (1, 3):
        break
    dist.all_reduce(torch.ones(2), group=pairs[rank // 2])
print("hangs", flush=True)
threading.Event().wait()
"""


def test_whoever_is_missing_in_a_group_is_named_and_still_is_when_all_are_dead(cold_jobs, tmp_path):
    (tmp_path / "job.py").write_text(HANGS)
    command = [*PHALANX, "run", "--nproc-per-node", "4", "job.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for _ in range(3):
            await_line(process.stdout, "hangs")
        deadline = time.monotonic() + 60
        answer: dict[str, object] = {}
        while (
            answer.get("kind") != "absent"
            or [one["progress"] for one in answer["ranks"]][2:] != [{"default": 0, "2": 5}] * 2
        ):
            assert time.monotonic() < deadline, answer
            answer = json.loads(asked(tmp_path, "why", "--json", process.pid).stdout or "{}")
        assert (answer["culprits"], answer["waiters"]) == ([1], [0])
        assert (answer["call"]["op"], answer["call"]["seq"], answer["call"]["site"]) == ("all_reduce", 4, "job.py:9")
        seen = asked(tmp_path, "top", "--json", process.pid)
        assert (seen.returncode, "all_reduce #4" in json.dumps(json.loads(seen.stdout))) == (0, True)
        kill_unseen(process, [rank["pid"] for rank in answer["ranks"]])
    story = asked(tmp_path, "why", "job.py")
    assert story.returncode == 0
    assert "rank 0 (pid" in story.stdout
    assert "in all_reduce #4 of group '1' at job.py:9" in story.stdout
    assert "after all_reduce #3 of group '1' at job.py:9" in story.stdout


@pytest.mark.parametrize("way", ["ends", "raises", "destroys"])
def test_a_rank_that_leaves_while_a_collective_runs_ends_as_without_a_record(executed, way):
    assert codes(executed[0], way) == WAYS[way]


def test_gloo_may_call_back_when_the_interpreter_is_ending(executed):
    assert codes(executed[0], "calls_back") == WAYS["calls_back"]


def codes(folder: Path, way: str) -> list[int]:
    return [int((folder / f"{way}_{rank}").read_text()) for rank in range(2)]


def test_a_call_that_fails_stays_open_in_the_box(tmp_path):
    script = """
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
sys.stdin.read()
"""
    (tmp_path / "job.py").write_text(script)
    command = [*PHALANX, "run", "--nproc-per-node", "2", "job.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(90) == 1
    (folder,) = tmp_path.glob("logs/job/*/blackbox/attempt_0")
    last = load_boxes(folder).boxes[0].events
    (failed,) = [event for event in last if event.op == "all_reduce"]
    assert (failed.ended_ns, failed.site) == (0, "job.py:5")
