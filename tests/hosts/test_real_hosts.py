"""Ranks on hosts with networks of their own: they meet, a cut or killed host is named, wrong settings are refused."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from phalanx.failure.losses import load_losses
from tests.hosts.forks import Forks
from tests.namespaces import hosts

pytestmark = pytest.mark.usefixtures("needs_hosts")
LIMIT_S = 60
PORT = "29511"
GOES_ON_WITHIN_S = 8.0  # mostly a second start of the ranks, on two cores
GOES_ON_AFTER_CUT_S = 10.0
NAMED_WITHIN_S = 3.0  # a silent host is lost after one to two seconds, since the kernel probes once a second

SCRIPT = """
import json, sys, time, torch, torch.distributed as dist
def say(**facts):
    print(json.dumps({"at": time.monotonic(), **facts}), flush=True)
try:
    dist.init_process_group("phalanx")
    tensor = torch.full((100_003,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    got = torch.zeros(3)
    rank, num = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % num)
    dist.recv(got, (rank - 1) % num)
    sent.wait()
    say(sum=tensor.unique().tolist(), got=got[0].item(), core=type(dist.group.WORLD._operations._core).__name__)
    if "wait" in sys.argv:
        if rank == 0:
            dist.recv(got, num - 1)
        while True:
            dist.all_reduce(tensor) if "busy" in sys.argv else dist.barrier()
            time.sleep(1000 if "idle" in sys.argv else 0)
    dist.destroy_process_group()
except Exception as error:
    say(error=type(error).__name__, ranks=getattr(error, "ranks", ()), text=str(error))
    sys.exit(1)
"""


@pytest.fixture
def jobs():
    """Processes that a test starts; their pipes are closed at its end."""
    started = []
    yield started
    for process in started:
        with process:
            process.kill()


@pytest.fixture(scope="module")
def forks():
    """Where ranks come from that are on their own: they are many."""
    with contextlib.closing(Forks()) as made:
        yield made


@pytest.fixture
def start(jobs, forks):
    """``start(placed, *arguments, **variables)`` starts one rank for each host in `placed`, in order."""

    def start_ranks(placed, *arguments, **variables):
        environ = {"WORLD_SIZE": str(len(placed)), "MASTER_ADDR": placed[0].address, "MASTER_PORT": PORT, **variables}
        processes = [
            forks.start(host, SCRIPT, {**environ, "RANK": str(rank)}, *arguments) for rank, host in enumerate(placed)
        ]
        jobs.extend(processes)
        return processes

    return start_ranks


def said_by(process):
    """Return the next that a rank says."""
    line = process.stdout.readline()
    assert line, process.communicate(timeout=LIMIT_S)[1]
    return json.loads(line)


@pytest.mark.parametrize("layout", ["ab", "aabb", "abc", "aab"])
def test_ranks_of_several_hosts_meet(start, layout):
    with hosts(len(set(layout))) as made:
        placed = [made["abc".index(name)] for name in layout]
        processes = start(placed)
        total = sum(range(1, len(layout) + 1))
        for rank, process in enumerate(processes):
            said = said_by(process)
            assert (said["sum"], said["got"]) == ([total], (rank - 1) % len(layout))
            assert said["core"] == "BridgedGroup"
        for process in processes:
            assert process.communicate(timeout=LIMIT_S) == ("", "")
            assert process.returncode == 0


def test_hosts_of_one_name_are_told_apart_by_their_networks(start):
    # As containers are: one kernel, networks of their own, and here the same hostname.
    with hosts(2) as (a, b):
        b.run("hostname", a.name)
        processes = start([a, b], "wait")
        assert {said_by(process)["core"] for process in processes} == {"BridgedGroup"}
        b.kill()
        said = said_by(processes[0])
        assert said["ranks"] == [1]
        assert f"on host {a.name}#1 is gone" in said["text"]


@pytest.mark.parametrize("way", ["cut", "kill"])
@pytest.mark.parametrize("layout", ["aabb", "abc"])
@pytest.mark.parametrize("lost", [0, 1], ids=["with the store", "another"])
def test_a_host_that_vanishes_is_named_by_every_survivor(start, layout, way, lost):
    with hosts(len(set(layout))) as made:
        placed = [made["abc".index(name)] for name in layout]
        processes = start(placed, "wait")
        for process in processes:
            said_by(process)
        began_s = time.monotonic()
        getattr(made[lost], way)()
        gone = [rank for rank, host in enumerate(placed) if host is made[lost]]
        for rank in set(range(len(layout))) - set(gone):
            said = said_by(processes[rank])
            assert said["error"] == "RankFailed", said
            assert set(said["ranks"]) <= set(gone)
            assert f"host {made[lost].name}" in said["text"]
            assert said["at"] - began_s < NAMED_WITHIN_S


def test_a_cut_in_the_middle_of_a_large_message_is_noticed(start):
    with hosts(2, rate="1gbit") as (a, b):
        processes = start([a, b], "wait", "busy")
        for process in processes:
            said_by(process)
        b.cut()
        began_s = time.monotonic()
        said = said_by(processes[0])
        assert (said["error"], said["ranks"]) == ("RankFailed", [1])
        assert said["at"] - began_s < NAMED_WITHIN_S
        b.kill()


# ---------------------------------------------------------------- settings


OWN_STORE = """
from datetime import timedelta
import torch.distributed as dist
wait = timedelta(seconds=20)
store = dist.TCPStore("{master}", {port}, 2, {rank} == 0, wait, wait_for_workers=False)
dist.init_process_group("phalanx", store=store, rank={rank}, world_size=2)
"""


def test_a_master_that_only_its_own_host_reaches_is_refused(jobs):
    with hosts(2) as (a, b):
        for rank, (host, master) in enumerate([(a, "localhost"), (b, a.address)]):
            code = OWN_STORE.format(master=master, port=PORT, rank=rank)
            jobs.append(host.start([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True))
        said = jobs[0].communicate(timeout=LIMIT_S)[1]
        assert "PhalanxError: rank 0: init_process_group: host host-a has no way to the other hosts" in said
        assert "this host's loopback, and no other host can reach it" in said
        assert "Set MASTER_ADDR to an address that every host reaches, or GLOO_SOCKET_IFNAME" in said


def test_the_interface_that_gloo_is_told_is_taken(start):
    with hosts(2) as (a, b):
        for number, host in enumerate((a, b)):  # a second address, on an interface of its own name
            host.run("ip", "address", "add", f"10.88.0.{number + 1}/24", "dev", host.interface)
        processes = start([a, b], GLOO_SOCKET_IFNAME="eth0")
        for process in processes:
            assert said_by(process)["sum"] == [3.0]
        processes = start([a, b], GLOO_SOCKET_IFNAME="ib7")
        first, second = (said_by(process) for process in processes)
        assert first["error"] == second["error"] == "PhalanxError"
        assert "GLOO_SOCKET_IFNAME is ib7, which has no address here; there are eth0, lo" in first["text"]
        assert "GLOO_SOCKET_IFNAME" in second["text"] or "the job's store is gone" in second["text"]


# ---------------------------------------------------------------- under the launcher

TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.ones(4)
dist.all_reduce(tensor)
print("hosts", os.environ["GROUP_WORLD_SIZE"], "sum", tensor[0].item(), flush=True)
while not tensor[0] < 0:
    tensor = torch.full((4,), -1.0 if os.path.exists("enough") else 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
dist.destroy_process_group()
"""


def launch(jobs, made, folder, nodes, *, endpoint=None, num_hosts=None, flags=()):
    """Start the job's supervisor on each host; return when they train with so many hosts, all of them by default.

    Args:
        endpoint: Host where they meet, or several in order; default: the first.
    """
    places = endpoint if isinstance(endpoint, list) else [endpoint or made[0]]
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--nnodes", nodes]
    command += [
        "--rdzv-id",
        "job",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        ",".join(f"{place.address}:{PORT}" for place in places),
    ]
    command += ["--max-restarts", "2", *flags]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    started = [host.start([*command, "--log-dir", str(folder / host.name), str(script)], **options) for host in made]
    jobs += started
    for job in started if num_hosts != 0 else []:
        await_size(job, num_hosts or len(made))


PHASES = (
    r"phalanx run: resuming after [\d.]+ s "
    r"\(noticed [\d.]+, ended [\d.]+, agreed [\d.]+, (?:started [\d.]+, )?first collective (?:seen )?[\d.]+\)\n"
)


def await_size(job, num_hosts):
    """Read what a supervisor shows until its ranks train with those of so many hosts."""
    said = []
    while f"hosts {num_hosts} sum {2.0 * num_hosts}\n" not in "".join(said):
        said.append(job.stdout.readline())
        assert said[-1], (said, job.communicate(timeout=LIMIT_S)[1])


@pytest.mark.parametrize("way", ["kill", "cut"])
@pytest.mark.parametrize("lost", [0, 2], ids=["where nodes meet", "another"])
def test_a_job_goes_on_without_a_host(jobs, tmp_path, lost, way):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3")
        began_s = time.monotonic()
        getattr(made[lost], way)()
        living = [job for host, job in zip(made, jobs, strict=True) if host is not made[lost]]
        for job in living:
            await_size(job, 2)
        assert time.monotonic() - began_s < (GOES_ON_WITHIN_S if way == "kill" else GOES_ON_AFTER_CUT_S)
        (tmp_path / "enough").touch()
        for job in living:
            said = job.communicate(timeout=LIMIT_S)[1]
            assert said.count("restart 1 of 2") == 1
            assert len(re.findall(PHASES, said)) == 1, said
            assert job.returncode == 0
        for host in (host for host in made if host is not made[lost]):
            [run] = (tmp_path / host.name).iterdir()
            [loss] = load_losses(run)
            assert (loss.ending.host, loss.num_ranks) == (made[lost].name, 2)
            assert loss.node_sign == ("refused" if way == "kill" else "silent")
            assert way == "kill" or 1.9 < loss.silent_s <= loss.phases_s["noticed"] < GOES_ON_AFTER_CUT_S
        if way == "cut":  # it knows that the others may go on, and does not
            assert any("are not a majority" in line for line in jobs[lost].stderr)
            made[lost].kill()
            assert "hosts 1" not in jobs[lost].communicate(timeout=LIMIT_S)[0]


@pytest.mark.parametrize("lost", [0, 1], ids=["where nodes meet", "another"])
def test_of_two_hosts_either_can_be_killed(jobs, tmp_path, lost):
    with hosts(2) as made:
        launch(jobs, made, tmp_path, "1:2")
        made[lost].kill()
        await_size(jobs[1 - lost], 1)


def test_a_host_that_is_started_again_finds_the_job_that_moved_on(jobs, tmp_path):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "2:3")
        made[0].kill()
        for job in jobs[1:]:
            await_size(job, 2)
        launch(jobs, made[:1], tmp_path, "2:3", num_hosts=3)
        for job in jobs[1:]:
            await_size(job, 3)
        (tmp_path / "enough").touch()
        for job in jobs[1:]:
            assert job.communicate(timeout=LIMIT_S)[1].count("nodes of the job: 3, before 2: all go on together") <= 1
            assert job.returncode == 0


@pytest.mark.parametrize("flags", [(), ("--spares", "1")])
def test_a_third_host_takes_the_place_of_one_that_is_lost(jobs, tmp_path, flags):
    with hosts(3) as made:
        launch(jobs, made[:2], tmp_path, "2", flags=flags)
        launch(jobs, made[2:], tmp_path, "2", endpoint=made[0], num_hosts=0, flags=flags)
        assert "this one is a spare" in next(line for line in jobs[2].stderr if "nodes of the job" in line)
        made[1].kill()
        for job in (jobs[0], jobs[2]):
            await_size(job, 2)
        (tmp_path / "enough").touch()
        said = {}
        for job in (jobs[0], jobs[2]):
            said[job] = job.communicate(timeout=LIMIT_S)[1]
            assert job.returncode == 0
        place = f"this spare takes the place of {made[1].name}, with ranks 2 and 3\n"
        assert [said[job].count(place) for job in (jobs[0], jobs[2])] == [0, 1], said


def test_nodes_meet_at_the_first_of_several_places_where_a_host_lives(jobs, tmp_path):
    with hosts(3) as (a, b, c):
        places = [a, b]
        launch(jobs, [b, c], tmp_path, "1:3", endpoint=places)  # the first is down
        launch(jobs, [a], tmp_path, "1:3", endpoint=places, num_hosts=3)
        b.kill()
        for job in jobs[1:]:
            await_size(job, 2)
        launch(jobs, [b], tmp_path, "1:3", endpoint=places, num_hosts=3)


def test_two_hosts_that_die_one_after_the_other_are_gone_on_without(jobs, tmp_path):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3")
        made[0].kill()
        time.sleep(0.05)  # the others have begun to go on
        made[1].kill()
        await_size(jobs[2], 1)


def test_a_supervisor_that_is_stopped_is_gone_on_without(jobs, tmp_path):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3")
        jobs[1].send_signal(signal.SIGSTOP)
        for job in (jobs[0], jobs[2]):
            await_size(job, 2)


def test_a_host_whose_agent_is_stopped_says_so_and_ends(jobs, tmp_path):
    with hosts(2) as made:
        launch(jobs, made, tmp_path, "1:2")
        agent = made[1].run("pgrep", "-P", str(jobs[1].pid), "-f", "launch.nodes.agent").strip()
        made[1].run("kill", "-STOP", agent)
        await_size(jobs[0], 1)
        said = jobs[1].communicate(timeout=LIMIT_S)[1]
        assert jobs[1].returncode == 1
        assert f"the agent of this node (pid {agent}) has not answered for 10 s" in said
