"""A job whose hosts each have a part of the state goes on from memory when hosts are killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.namespaces import hosts

pytestmark = pytest.mark.usefixtures("needs_hosts", "warm_hosts")
LIMIT_S = 90
PORT = "29511"
EVERY = 5  # steps between snapshots

TRAIN = """
import hashlib, json, sys, time
import torch, torch.distributed as dist
import torch.distributed.tensor
import phalanx.checkpoint as ckpt
from phalanx.checkpoint.memory.snapshots import memory

def say(**facts):
    print(json.dumps(facts), flush=True)

every, steps_after, most_ranks = map(int, sys.argv[1:])
dist.init_process_group("phalanx")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
weight = dist.tensor.distribute_tensor(torch.arange(1200, dtype=torch.float64), mesh, [dist.tensor.Shard(0)])
state = {"weight": weight, "step": 0}
found = ckpt.load("folder", state, missing="ignore")
if found:
    say(loaded=found.step, source=found.source, size=size)
last = found.step + steps_after if found and steps_after and size <= most_ranks else 10**6
while state["step"] < last:
    state["step"] += 1
    with torch.no_grad():
        total = weight.to_local().sum()
        dist.all_reduce(total)
        weight.to_local().mul_(3).add_(total).remainder_(1009)
    if state["step"] % every == 0:
        assert ckpt.snapshot("folder", state, state["step"]) == ""
        if safe := memory()._slots.safe:
            say(step=state["step"], safe=safe[1])
    time.sleep(0.01)
say(digest=hashlib.sha256(weight.full_tensor().numpy().tobytes()).hexdigest(), step=state["step"])
dist.destroy_process_group()
"""


@pytest.fixture
def jobs():
    """Processes that a test starts; their pipes are closed at its end."""
    started = []
    yield started
    for process in started:
        with process:
            process.kill()


def launch(jobs, made, folder, nodes, *flags, steps_after=0, most_ranks=9, endpoint=None, script=TRAIN):
    """Start the job's supervisor on each host; at most so many ranks end, so many steps after they have loaded."""
    path = folder / "train.py"
    path.write_text(script)
    for host in made:
        command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--nnodes", nodes]
        place = f"{(endpoint or made[0]).address}:{PORT}"
        command += ["--rdzv-id", "job", "--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--max-restarts", "3"]
        command += ["--log-dir", str(folder / host.name), *flags]
        command += map(str, (path, EVERY, steps_after, most_ranks))
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
        jobs.append(host.start(command, **options))


def await_fact(job, name, limit_s=LIMIT_S):
    """Return the next facts with this name that a job's rank prints."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        line = job.stdout.readline()
        print(f"{job.pid} {time.strftime('%X')}: {line}", end="")  # pytest shows it for a test that fails
        assert line, f"job {job.pid} has ended"
        begin = line.find('{"')  # a Trainer says other things, too
        if begin >= 0 and name in (facts := json.loads(line[begin:])):
            return facts
    raise AssertionError(f"no {name} within {limit_s} s")


def check_went_on(job, size, safe):
    """See that a job goes on with so many ranks, from memory, and has what was safe; return what it has loaded."""
    loaded = await_fact(job, "loaded")
    assert (loaded["size"], loaded["source"]) == (size, "memory")
    assert loaded["loaded"] >= safe
    return loaded


def digest_of_undisturbed(num_steps):
    """Return the digest of the same training in one process: all numbers are whole, so no sum depends on its order."""
    weight = torch.arange(1200, dtype=torch.float64)
    for _ in range(num_steps):
        weight = (weight * 3 + weight.sum()).remainder(1009)
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


def test_the_part_of_a_killed_host_comes_from_another_and_is_kept_twice_again(jobs, tmp_path):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3")
        safe = await_fact(jobs[2], "safe")["safe"]
        made[0].kill()
        loaded = check_went_on(jobs[2], 2, safe)
        while (safe := await_fact(jobs[2], "safe")["safe"]) <= loaded["loaded"]:  # what was lost is kept once, so far
            pass
        made[1].kill()
        check_went_on(jobs[2], 1, safe)
        await_fact(jobs[2], "step")


def test_two_of_four_hosts_can_be_killed_at_once_with_two_replicas(jobs, tmp_path):
    with hosts(4) as made:
        launch(jobs, made, tmp_path, "1:4", "--replicas", "2")
        await_fact(jobs[0], "safe")
        made[1].kill()
        made[2].kill()
        while (loaded := await_fact(jobs[0], "loaded"))["size"] > 2:  # they may be missed one after the other
            assert loaded["source"] == "memory"
        assert loaded["source"] == "memory"
        await_fact(jobs[0], "step")


def check_spare(jobs, folder, num_snapshots=0, pause_s=0.0):
    """Kill a host so much later; a spare takes its place, and the end is that of the undisturbed training."""
    with hosts(3) as made:
        launch(jobs, made[:2], folder, "2", steps_after=23)
        await_fact(jobs[0], "safe")
        launch(jobs, made[2:], folder, "2", steps_after=23, endpoint=made[0])
        assert "this one is a spare" in next(line for line in jobs[2].stderr if "nodes of the job" in line)
        for _ in range(num_snapshots):
            await_fact(jobs[0], "safe")
        time.sleep(pause_s)
        made[1].kill()
        for job in (jobs[0], jobs[2]):
            assert await_fact(job, "loaded")["source"] == "memory"
            facts = await_fact(job, "digest")
            assert facts["digest"] == digest_of_undisturbed(facts["step"])


def test_a_spare_that_takes_the_place_of_a_killed_host_changes_no_bit(jobs, tmp_path):
    check_spare(jobs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_spare_changes_no_bit_at_any_moment(jobs, tmp_path, seed):
    drawn = random.Random(seed)
    check_spare(jobs, tmp_path, drawn.randrange(10), drawn.uniform(0, 0.1))


def test_a_host_that_is_told_to_go_leaves_its_part_of_the_state_to_the_others(jobs, tmp_path):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3", "--drain", steps_after=23)
        safe = await_fact(jobs[0], "safe")["safe"]
        jobs[1].terminate()
        for job in (jobs[0], jobs[2]):
            check_went_on(job, 2, safe)
            facts = await_fact(job, "digest")
            assert facts["digest"] == digest_of_undisturbed(facts["step"])
        ends = [job.communicate(timeout=LIMIT_S)[1] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 75, 0], ends
        assert not any("restart 1" in said for said in ends), ends  # it costs none


@pytest.mark.parametrize("how", ["goes", "is killed"])
def test_of_two_hosts_that_leave_at_once_or_one_beside_a_killed_one_nothing_is_lost(jobs, tmp_path, how):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3", "--drain", steps_after=23, most_ranks=1)
        await_fact(jobs[0], "safe")
        jobs[1].terminate()
        if how == "goes":
            jobs[2].terminate()
        else:
            made[2].kill()
        for size in (2, 1):
            loaded = await_fact(jobs[0], "loaded")
            assert (loaded["size"], loaded["source"]) == (size, "memory")
        facts = await_fact(jobs[0], "digest")
        assert facts["digest"] == digest_of_undisturbed(facts["step"])
        assert [job.wait(LIMIT_S) for job in jobs[:2]] == [0, 75]


@pytest.mark.slow
def test_of_two_hosts_one_that_came_back_leaves_the_other_to_go_on_alone_again(jobs, tmp_path):
    with hosts(2) as made:
        launch(jobs, made, tmp_path, "1:2")
        for _ in range(2):
            await_fact(jobs[0], "safe")
            jobs[-1].kill()
            while (loaded := await_fact(jobs[0], "loaded"))["size"] > 1:
                assert loaded["source"] == "memory"
            assert loaded["source"] == "memory"
            launch(jobs, made[1:], tmp_path, "1:2", endpoint=made[0])
            while (loaded := await_fact(jobs[0], "loaded"))["size"] < 2:
                assert loaded["source"] == "memory"
            assert loaded["source"] == "memory"


TRAINER = """
import json, os, torch, phalanx
from phalanx.checkpoint.memory.snapshots import memory
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

class Callback:
    def on_step(self, trainer):
        if os.environ["LOCAL_RANK"] == "0":
            safe = memory()._slots.safe
            facts = {"size": os.environ["GROUP_WORLD_SIZE"], "step": trainer.step, "safe": safe[1] if safe else 0}
            print(json.dumps(facts), flush=True)

phalanx.init()
model = torch.nn.Linear(8, 8)
fully_shard(model)
options = {"max_steps": 10**9, "save_every": 10**9, "callbacks": [Callback()], "folder": "run", "global_batch_size": 8}
trainer = phalanx.Trainer(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss, **options)
trainer.fit(TensorDataset(torch.ones(32, 8), torch.ones(32, 8)))
"""


def test_a_trainer_with_a_divided_model_goes_on_from_the_replica_of_a_killed_host(jobs, tmp_path):
    with hosts(2) as made:
        launch(jobs, made, tmp_path, "1:2", script=TRAINER)
        while not (safe := (facts := await_fact(jobs[0], "safe"))["safe"]):
            assert facts["size"] == "2"
        made[1].kill()
        while facts["size"] == "2":
            facts = await_fact(jobs[0], "step")
        assert facts["step"] > safe  # nothing was on disk


FSDP = """
import json, os, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import phalanx.checkpoint as ckpt
from phalanx.checkpoint.memory.snapshots import memory

def say(**facts):
    print(json.dumps(facts), flush=True)

def num_received():
    with open("/proc/net/dev") as file:
        return next(int(line.split()[1]) for line in file if line.strip().startswith("eth0:"))

dist.init_process_group("phalanx")
size = dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(3)))
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
inputs = torch.ones(8, 600)
state = {"model": model, "optimizer": optimizer, "step": 0}
before = num_received()
found = ckpt.load("folder", state, missing="ignore")
if found:
    say(loaded=found.step, source=found.source, size=size, came=num_received() - before)
dist.barrier()  # until each has counted, nobody sends what belongs to the training
while memory()._slots.safe is None or memory()._slots.safe[0] < memory()._attempt:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    if state["step"] % 5 == 0:
        assert ckpt.snapshot("folder", state, state["step"]) == ""
while memory()._is_copying():
    time.sleep(0.01)
dist.barrier()  # no host copies anything from here on
say(settled=state["step"], size=size, rank=dist.get_rank(), pid=os.getpid())
while True:
    dist.barrier()
    time.sleep(0.02)
"""
NUM_ELEMS = 3 * 600 * 601  # of the model above; Adam keeps two more of each


def test_each_host_gets_only_what_its_ranks_need_of_fsdp2s_state(jobs, tmp_path):
    part_bytes, least_bytes = 3 * 4 * NUM_ELEMS // 3, 256 << 10  # headers, and what launchers tell each other
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3", script=FSDP)
        settled = [await_fact(job, "settled") for job in jobs]
        os.kill(settled[1]["pid"], signal.SIGKILL)
        for job in jobs:
            loaded = await_fact(job, "loaded")
            assert (loaded["size"], loaded["source"]) == (3, "memory")
            assert loaded["came"] < least_bytes, loaded
        by_rank = {await_fact(job, "settled")["rank"]: number for number, job in enumerate(jobs)}
        made[by_rank[1]].kill()  # the host of rank 2 has its replica, and that of rank 0 needs half of it
        came = []
        for rank in (0, 2):
            loaded = await_fact(jobs[by_rank[rank]], "loaded")
            assert (loaded["size"], loaded["source"]) == (2, "memory")
            came.append(loaded["came"])
        assert came[1] < least_bytes, came
        assert part_bytes // 2 <= came[0] < part_bytes // 2 + least_bytes, came
