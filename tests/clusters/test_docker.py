"""docs/en/guides/clusters/docker.md: what a container's limits do, with the namespaces that Docker makes."""

from __future__ import annotations

import subprocess

import pytest

from tests.clusters._machines import PHALANX, script

LIMIT_S = 100
_DEFAULT_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
_TRAIN = """
import sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader

class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(8 << 20)  # 32 MiB

dist.init_process_group("phalanx")
tensor = torch.ones(32 << 20)  # 128 MiB
dist.all_reduce(tensor)
print("sum", tensor[-1].item(), flush=True)
for batch in DataLoader(Large(), batch_size=4, num_workers=int(sys.argv[1])):
    print("batch", tuple(batch.shape), flush=True)
dist.destroy_process_group()
"""


def run_in_container(two, tmp_path, num_workers):
    command = [*PHALANX, "run", "--nproc-per-node", "2", script(tmp_path, _TRAIN), str(num_workers)]
    job = two.start(0, command, setup=_DEFAULT_SHM)
    return job.communicate(timeout=LIMIT_S)[0], job.returncode


def test_messages_larger_than_a_containers_shared_memory_need_none_of_it(two, tmp_path):
    said, code = run_in_container(two, tmp_path, num_workers=0)
    assert code == 0, said
    assert said.count("sum 2.0") == said.count("batch (4, 8388608)") == 2


def test_loader_workers_that_find_no_shared_memory_are_named_with_what_to_do(two, tmp_path):
    said, code = run_in_container(two, tmp_path, num_workers=1)
    assert code != 0
    assert said.count("sum 2.0") == 2
    assert "/dev/shm" in said[said.index("hint: ") :]


def test_doctor_says_so_before(two):
    job = two.start(0, [*PHALANX, "doctor", "--timeout", "20"], setup=_DEFAULT_SHM)
    said = job.communicate(timeout=LIMIT_S)[0]
    assert "/dev/shm       64 MiB" in said
    assert "docker run --shm-size=8g or --ipc=host" in said


@pytest.mark.usefixtures("needs_hosts")
def test_two_containers_with_the_network_and_the_processes_of_their_host_share_memory(tmp_path):
    # docker run --network host --pid host: names, files and System V's memory are each container's own.
    path = script(tmp_path)
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "29655"]
    command = ["unshare", "--uts", "--ipc", "--mount", *PHALANX, "run", *flags, "--node-rank"]
    started = [
        subprocess.Popen(
            [*command, str(n), path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )
        for n in range(2)
    ]
    said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "".join(said).count(": 10\n") == 4


@pytest.mark.parametrize("setup", ["true", _DEFAULT_SHM])
def test_a_pid_1_that_is_told_to_stop_ends_its_ranks(two, tmp_path, setup):
    # docker stop: SIGTERM to the first process of the container, whose default is to ignore it.
    path = script(tmp_path, "import time; print('up', flush=True); time.sleep(1000)")
    contain = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    job = two.start(0, [*contain, *PHALANX, "run", "--nproc-per-node", "2", path], setup=setup)
    assert [job.stdout.readline() for _ in range(3)][-1].endswith("up\n")
    [child] = [int(pid) for pid in _children(job.pid)]
    subprocess.run(["kill", "-TERM", str(child)], check=True)
    said = job.communicate(timeout=LIMIT_S)[0]
    assert "SIGTERM: ending 2 ranks" in said
    assert job.returncode == 143


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
