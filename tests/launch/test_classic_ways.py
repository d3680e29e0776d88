"""The ways in which the classic tutorials start a script, each with the scripts' own three lines of set-up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launch.jobs import LIMIT_S
from tests.ports import free_port

TRAIN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    dist.broadcast(tensor, src=1)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(tensor, group=group)
    print(f"rank {rank} of {size} has {tensor.item()}\\n", end="", flush=True)

def init(rank, size, backend, method=None):
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)
    run(rank, size)
    dist.destroy_process_group()

def init_process(rank, size, backend, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    init(rank, size, backend)

if __name__ == "__main__":
    how, backend = sys.argv[1:3]
    if how == "spawn":
        mp.spawn(init_process, args=(4, backend, sys.argv[3]), nprocs=4)
    elif how == "processes":
        processes = [mp.Process(target=init_process, args=(rank, 4, backend, sys.argv[3])) for rank in range(4)]
        for process in processes: process.start()
        for process in processes: process.join()
        assert all(process.exitcode == 0 for process in processes)
    elif how == "launcher":
        dist.init_process_group(backend)
        run(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        init(int(sys.argv[3]), 4, backend, how)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(TRAIN)
    return str(path)


def check(outputs, size=4):
    """Each rank has the sum of 1 over all, and ranks 0 and 1 that of both."""
    lines = sorted(line[line.index("rank ") :] for out in outputs for line in out.splitlines() if " has " in line)
    want = [f"rank {rank} of {size} has {2.0 * size if rank < 2 else float(size)}" for rank in range(size)]
    assert [line[line.rindex("rank") :] for line in lines] == want


def run_all(commands, folder, environments=None):
    """Run the commands at once, as in so many terminals."""
    environments = environments or [{}] * len(commands)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    jobs = [
        subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, **pipes)
        for command, environ in zip(commands, environments, strict=True)
    ]
    ends = [job.communicate(timeout=LIMIT_S) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), [err for _, err in ends]
    return [out for out, _ in ends]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_four_terminals_with_variables_set_by_hand(script, tmp_path, backend):
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "4"}
    commands = [[sys.executable, script, "launcher", backend]] * 4
    check(run_all(commands, tmp_path, [{**meet, "RANK": str(rank)} for rank in range(4)]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_four_terminals_with_an_address_or_a_shared_file(script, tmp_path, method):
    url = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path}/sharedfile"
    check(run_all([[sys.executable, script, url, "phalanx", str(rank)] for rank in range(4)], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "processes"])
def test_torchs_own_multiprocessing(script, tmp_path, how):
    check(run_all([[sys.executable, script, how, "phalanx", free_port()]], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "phalanx run"])
def test_a_launcher(script, tmp_path, launcher):
    command = [sys.executable, "-m", *launcher.split(), "--nproc-per-node", "4", script, "launcher", "phalanx"]
    check(run_all([command], tmp_path))
