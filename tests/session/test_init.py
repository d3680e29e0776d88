"""`phalanx.init` in a script started by each launcher, and without one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.host.schedulers import Placement
from phalanx.session import session as session_module
from tests.ports import free_port

LIMIT_S = 60

SCRIPT = """
import json, os, torch, torch.distributed as dist, phalanx
with phalanx.init() as session:
    tensor = torch.tensor([session.rank + 1.0])
    dist.all_reduce(tensor)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    said = {
        "rank": session.rank, "size": session.world_size, "local": [session.local_rank, session.local_world_size],
        "node": [session.node_rank, session.num_nodes], "sum": tensor.item(), "backend": session.backend,
        "device": str(session.device), "scheduler": session.scheduler, "environ": [n for n in names if n in os.environ],
    }
assert not dist.is_initialized()
print("said " + json.dumps(said) + "\\n", end="", flush=True)
"""
CONTRACT = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def clean(**variables):
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "PET_", "GROUP_", "NODE_RANK")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | variables


def said_by(*outputs):
    """What the ranks said, in rank order."""
    lines = [line for output in outputs for line in output.splitlines() if "said {" in line]
    return sorted((json.loads(line[line.index("{") :]) for line in lines), key=lambda said: said["rank"])


def run(command, **environ):
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=clean(**environ))


@pytest.fixture
def run_together(forked, script):
    """Start the script once per environment, as a scheduler does, and return what the ranks said and their stderr."""

    def run(environments):
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(forked.start(script, env=clean(**environ))) for environ in environments]
            ends = [process.communicate(timeout=LIMIT_S) for process in started]
        assert [process.returncode for process in started] == [0] * len(started), [err for _, err in ends]
        return said_by(*(out for out, _ in ends)), [err for _, err in ends]

    return run


def test_a_script_without_a_launcher_is_a_world_of_one(forked, script):
    done = forked.run(script, env=clean())
    assert done.returncode == 0, done.stderr
    (said,) = said_by(done.stdout)
    assert (said["rank"], said["size"], said["sum"]) == (0, 1, 1.0)
    assert (said["backend"], said["scheduler"]) == ("phalanx", "nobody")
    assert done.stderr == ""


def check_two_ranks(said, scheduler):
    assert [one["rank"] for one in said] == [0, 1]
    for one in said:
        assert (one["size"], one["sum"], one["scheduler"]) == (2, 3.0, scheduler)
        assert one["local"] == [one["rank"], 2]
        assert one["node"] == [0, 1]
        assert one["environ"] == CONTRACT
        assert (one["backend"], one["device"]) == ("phalanx", "cpu")


def test_it_is_placed_by_phalanx_run_and_by_torchrun(forked, script):
    ours = run([sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", script], PHALANX_WARM="1")
    check_two_ranks(said_by(ours.stdout), "the environment")
    torchruns = forked.run("-m", "torch.distributed.run", "--nproc-per-node", "2", script, env=clean())
    check_two_ranks(said_by(torchruns.stdout), "the environment")


MPIRUN = {
    "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "MPICH or Intel MPI": ["mpiexec.mpich", "-n", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True], ids=["", "under a shell"])
@pytest.mark.parametrize("scheduler", list(MPIRUN))
def test_it_is_placed_by_a_real_mpirun(script, scheduler, wrapped):
    launcher = MPIRUN[scheduler]
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    command = ["sh", "-c", f"{sys.executable} {script}; true"] if wrapped else [sys.executable, script]
    done = run([*launcher, *command])
    assert done.returncode == 0, done.stderr
    check_two_ranks(said_by(done.stdout), scheduler)


def test_a_launcher_that_mpirun_starts_twice_is_refused(script):
    launcher = MPIRUN["Open MPI"]
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    done = run([*launcher, sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", script])
    assert done.returncode == 2
    assert "Open MPI started phalanx run 2 times on this node, and each would start 2 ranks" in done.stderr


def test_it_is_placed_by_slurm(run_together):
    # As srun --ntasks=2 sets them on one node.
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node1",
    }
    tasks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    said, _ = run_together(tasks)
    check_two_ranks(said, "Slurm")


def test_pods_of_kubeflow_are_nodes(run_together):
    pod = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": free_port(),
    }
    pods = [{**pod, "PET_NODE_RANK": str(rank), "PHALANX_HOST": f"pod-{rank}"} for rank in range(2)]
    said, errors = run_together(pods)
    assert [(one["rank"], one["sum"], one["node"]) for one in said] == [(0, 3.0, [0, 2]), (1, 3.0, [1, 2])]
    assert {one["backend"] for one in said} == {"phalanx"}
    assert errors == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", socket.gethostname()])
def test_it_takes_variables_that_are_set_by_hand(run_together, host):
    # Which ranks share a host, they tell each other: no name of the master tells it.
    meet = {"MASTER_ADDR": host, "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    said, _ = run_together([{**meet, "RANK": str(rank)} for rank in range(2)])
    check_two_ranks(said, "the environment")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "the environment gives rank and world size, but not both MASTER_ADDR and MASTER_PORT: set them",
        ),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "Open MPI started 4 ranks on 2 hosts and does not say where rank 0 listens: set MASTER_ADDR",
        ),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"}, "phalanx run train.py"),
    ],
)
def test_an_incomplete_place_is_an_error_that_says_what_to_set(forked, script, environ, said):
    done = forked.run(script, env=clean(**environ))
    assert done.returncode == 1
    assert said in done.stderr


# ---------------------------------------------------------------- in the ranks of a test


def init_by_arguments(rank, world_size, init_method):
    with phalanx.init(init_method=init_method, rank=rank, world_size=world_size, timeout=7) as session:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return session.rank, tensor.item()


def init_again(rank, world_size):
    first = phalanx.init()
    assert phalanx.init() is first
    with pytest.raises(RuntimeError, match=r"call phalanx.shutdown\(\) first"):
        phalanx.init("gloo")
    phalanx.shutdown()
    phalanx.shutdown()
    assert not dist.is_initialized()
    second = phalanx.init("gloo", timeout=20)
    assert second.backend == "gloo"
    dist.barrier()
    phalanx.shutdown()


def adopt(rank, world_size):
    session = phalanx.init()
    assert (session.rank, session.world_size, session.local_rank) == (rank, world_size, rank)
    assert "gloo" in session.backend
    phalanx.shutdown()
    dist.barrier()  # the group is the script's


def raise_inside(rank, world_size):
    with phalanx.init():
        dist.barrier()
        if rank == 1:
            raise KeyError("learning_rate")
        dist.barrier()


class Unsayable(KeyError):
    def __str__(self):
        sys.exit(3)


def raise_what_can_not_be_said(rank, world_size, kind):
    with phalanx.init():
        dist.barrier()
        if rank == 1:
            raise Unsayable if kind == "unsayable" else KeyError("bad \udcff")
        dist.barrier()


def time_out(rank, world_size):
    with phalanx.init(timeout=2):
        if rank == 1:
            phalanx.testing.await_release("done")
            return
        try:
            dist.barrier()
        except phalanx.CollectiveTimeout:
            phalanx.testing.reached("timed out")


def test_arguments_win_over_the_environment(run_ranks, tmp_path):
    url = f"file://{tmp_path}/meet"
    results = run_ranks(init_by_arguments, 2, url, init=False, env={"RANK": "7", "WORLD_SIZE": "9"})
    assert results == [(0, 2.0), (1, 2.0)]


def test_a_second_init_is_the_same_session_or_an_error(run_ranks):
    run_ranks(init_again, 2, init=False)


def nest(rank, world_size):
    with phalanx.init() as outer:
        with phalanx.init() as inner:
            assert inner is outer
        dist.barrier()
    assert not dist.is_initialized()
    phalanx.init()
    dist.destroy_process_group()  # by the script itself
    with phalanx.init():
        dist.barrier()


def test_blocks_nest_and_a_group_that_was_ended_is_made_anew(run_ranks):
    run_ranks(nest, 2, init=False)


def leave_late(rank, world_size):
    """Rank 0 closes the store of its first session once the others have come to it for the second one."""
    with phalanx.init():
        if rank == 0:
            first = dist.distributed_c10d._get_default_store()  # keeps it open
    if rank == 0:
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        records = dist.PrefixStore("phalanx-roll", dist.TCPStore(*place, is_master=False, wait_for_workers=False))
        while any(records.get(f"rank/{other}") == b"null" for other in range(1, world_size)):
            time.sleep(0.01)
        del first, records
    with phalanx.init(timeout=20):
        dist.barrier()


def test_ranks_that_come_too_early_to_the_next_session_wait_for_its_store(run_ranks):
    run_ranks(leave_late, 3, init=False)


def tell_why_not_met(rank, world_size, calls):
    exec(calls, {"phalanx": phalanx, "dist": dist})
    return session_module.why_not_met()


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("pass", ""),
        ("phalanx.init('phalanx', timeout=50)", ""),
        ("phalanx.init(); dist.barrier()", "the script has used its process group before"),
        ("phalanx.init(); dist.new_group()", "more than one process group was made before"),
        ("dist.init_process_group('phalanx'); phalanx.init()", "a process group was made before"),
        ("phalanx.init('gloo')", "a process group that does not count its collectives was made before"),
    ],
)
def test_a_process_that_only_calls_init_meets_those_that_have_done_no_more(run_ranks, calls, why):
    assert run_ranks(tell_why_not_met, 1, calls, init=False) == [why]


def send_one(rank, world_size):
    phalanx.init()
    before = session_module.why_not_met()
    dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1))
    return before, session_module.why_not_met()


def test_a_message_counts_as_use_of_the_group(run_ranks):
    assert run_ranks(send_one, 2, init=False) == [("", "the script has used its process group before")] * 2


def test_a_group_that_the_script_made_is_adopted_and_kept(run_ranks):
    run_ranks(adopt, 2, backend="gloo")


def test_an_exception_in_the_block_is_the_cause_and_nobody_hangs(run_ranks):
    with pytest.raises(phalanx.RankError, match=r"rank 1 .* raised KeyError") as caught:
        run_ranks(raise_inside, 2, init=False, timeout_s=20)
    peer = caught.value.outcomes[0].error
    assert type(peer).__name__ == "RankFailed"
    assert "has left the group because of KeyError: 'learning_rate'" in str(peer)
    with pytest.raises(phalanx.RankError) as caught:
        run_ranks(raise_inside, 2, init=False, timeout_s=20, hosts=[1, 1])
    assert "has left the group because of KeyError: 'learning_rate'" in str(caught.value.outcomes[0].error)


@pytest.mark.parametrize("hosts", [None, [1, 1]])
@pytest.mark.parametrize("kind", ["unsayable", "surrogate"])
def test_an_exception_whose_message_can_not_be_sent_stays_the_cause(run_ranks, kind, hosts):
    options = {} if hosts is None else {"hosts": hosts}
    with pytest.raises(phalanx.RankError) as caught:
        run_ranks(raise_what_can_not_be_said, 2, kind, init=False, timeout_s=20, **options)
    ours, peer = caught.value.outcomes[1], caught.value.outcomes[0].error
    assert ours.last_words.name == ("Unsayable" if kind == "unsayable" else "KeyError")
    said = "Unsayable: <exception str() failed>" if kind == "unsayable" else "KeyError: 'bad \\udcff'"
    assert f"has left the group because of {said}" in str(peer)


def test_the_timeout_is_in_seconds(spawn_ranks):
    with spawn_ranks(time_out, 2, init=False) as ranks:
        ranks.wait_until_reached("timed out", ranks=[0])
        ranks.release("done", ranks=[1])
        assert all(outcome.ok for outcome in ranks.join(20))


def test_what_init_has_set_is_unset_by_shutdown(forked):
    source = """
        import os, phalanx
        before = dict(os.environ)
        with phalanx.init():
            assert os.environ["WORLD_SIZE"] == "1"
        assert dict(os.environ) == before
        """
    done = forked.run("-c", textwrap.dedent(source), env=clean())
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- devices: no GPU is needed to choose one


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(n)`` makes torch tell of so many."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return pretend


def place(local_rank, local_world_size=4):
    return Placement(
        scheduler="a test",
        rank=local_rank,
        world_size=local_world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        num_nodes=1,
    )


def test_the_backend_follows_the_devices(gpus, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    gpus(0)
    assert session_module._choose_backend() == ("phalanx", "")
    gpus(4)
    assert session_module._choose_backend() == ("cpu:phalanx,cuda:nccl", "")
    monkeypatch.setattr(session_module.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("x")))
    assert session_module._choose_backend() == ("cpu:gloo,cuda:nccl", "phalanx can't be loaded here: x")


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("phalnx", "there is no backend 'phalnx', did you mean phalanx? It takes gloo, mpi, nccl, phalanx, "),
        ("foo", "there is no backend 'foo'. It takes gloo, mpi, nccl, phalanx, "),
        ("cpu:phalanx,cuda:ncl", "there is no backend 'ncl', did you mean nccl? It takes "),
    ],
)
def test_an_unknown_backend_is_named_with_those_there_are(backend, said):
    with pytest.raises(ValueError, match=re.escape(f"phalanx.init: {said}")):
        phalanx.init(backend=backend)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["gloo", "PHALANX", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_torch_knows_is_taken(backend):
    assert session_module._known(backend) == backend


def test_each_local_rank_has_its_own_gpu_if_there_are_enough(gpus):
    gpus(4)
    both = "cpu:phalanx,cuda:nccl"
    assert session_module._choose_device(None, both, place(3)) == torch.device("cuda:3")
    assert session_module._choose_device(None, "phalanx", place(3)) == torch.device("cpu")
    assert session_module._choose_device("cpu", both, place(3)) == torch.device("cpu")
    assert session_module._choose_device("cuda", both, place(3)) == torch.device("cuda:3")
    assert session_module._choose_device("cuda:1", both, place(3)) == torch.device("cuda:1")
    gpus(1)  # each task of a scheduler may see one alone
    assert session_module._choose_device(None, both, place(3)) == torch.device("cuda:0")
    gpus(2)
    with pytest.raises(RuntimeError, match="local rank 3 and this host has 2 GPUs: start --nproc-per-node 2"):
        session_module._choose_device(None, both, place(3))
