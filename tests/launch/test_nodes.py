"""A job on several nodes: here two launchers on one host, which know of each other only what nodes would."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tests.launch.jobs import LIMIT_S, PHALANX_RUN, write_script


@pytest.fixture
def run_nodes(tmp_path):
    """``run_nodes(source, *flags)`` runs a node per rank of nodes; returns (exit code, stdout, stderr) of each."""
    started = []

    def run_nodes(source, *flags, num_nodes=2, backend="static", nnodes=None, num_started=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        script = write_script(tmp_path, source)
        for node in range(num_started or num_nodes):
            command = [*PHALANX_RUN, "--nproc-per-node", "2", "--nnodes", nnodes or str(num_nodes)]
            command += ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
            command += ["--node-rank", str(node)] if backend == "static" else []
            command += ["--log-dir", str(tmp_path / f"node{node}"), *flags, script]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=tmp_path, **pipes))
        ends = [job.communicate(timeout=LIMIT_S) for job in started]
        return [(job.returncode, *end) for job, end in zip(started, ends, strict=True)]

    yield run_nodes
    for job in started:
        with job:
            job.kill()


MEET = """
import torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
tensor = torch.tensor([RANK + 1.0])
dist.all_reduce(tensor)
names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
print("attempt", attempt, tensor.item(), *(os.environ[name] for name in names), flush=True)
dist.barrier()
"""
LEAVE = """
dist.barrier()
dist.destroy_process_group()
"""


def lines(*outputs):
    return sorted(line for output in outputs for line in output.splitlines())


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_ranks_of_two_nodes_meet_and_start_again_together(run_nodes, backend):
    fail = 'if attempt == 0 and os.environ["GROUP_RANK"] == "1" and RANK % 2: os._exit(9)\n'
    ends = run_nodes(MEET + fail + LEAVE, "--max-restarts", "1", backend=backend)
    assert [code for code, _, _ in ends] == [0, 0], ends
    out = lines(*(out for _, out, _ in ends))
    for attempt in range(2):
        for rank in range(4):
            want = f"[rank {rank}] attempt {attempt} 10.0 {rank % 2} 4 2 {rank // 2} 2"
            assert want in out
    assert len(out) == 8
    for _, _, err in ends:  # each node names the cause, wherever it was
        assert "exited with code 9\nphalanx run: restart 1 of 1\n" in err


def test_a_failure_on_one_node_is_the_last_word_on_every_node(run_nodes):
    fail = "if RANK == 2: raise ValueError('bad learning rate')\n"
    ends = run_nodes(MEET + fail + LEAVE)
    assert [code for code, _, _ in ends] == [1, 1], ends
    for _, _, err in ends:
        last = err[err.rindex("phalanx run: rank") :]
        assert last.startswith("phalanx run: rank 2 (pid ")
        assert "raised ValueError and exited with code 1; exit code 1\n" in last
        assert "ValueError: bad learning rate" in last


def test_a_node_whose_peer_never_comes_says_where_it_waited(run_nodes):
    ((code, out, err),) = run_nodes("print('started')", "--rdzv-conf", "timeout=1", num_started=1)
    assert (code, out) == (1, "")
    assert "the nodes of 'job' lost each other at 127.0.0.1:" in err
    assert "--rdzv-endpoint" in err
    assert "Traceback" not in err


def test_nodes_from_min_to_max_start_with_those_that_came(run_nodes):
    source = """
    print("nodes", os.environ["GROUP_WORLD_SIZE"], "ranks", os.environ["WORLD_SIZE"], flush=True)
    """
    ends = run_nodes(source, "--rdzv-conf", "last_call_timeout=1", "--no-preload", backend="c10d", nnodes="1:3")
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert lines(*(out for _, out, _ in ends)) == [f"[rank {rank}] nodes 2 ranks 4" for rank in range(4)]
