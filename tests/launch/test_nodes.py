"""A job on several nodes: here two launchers on one host, which know of each other only what nodes would."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from tests.launch.jobs import LIMIT_S, PHALANX_RUN, write_script
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("warm_jobs")


class Nodes:
    """Launchers that share a rendezvous, in one folder."""

    def __init__(self, folder, source):
        self._folder = folder
        self._script = write_script(folder, source)
        self.started = []
        self._endpoint = f"127.0.0.1:{free_port()}"

    @property
    def place(self):
        """Host and port at which the nodes meet."""
        host, port = self._endpoint.split(":")
        return host, int(port)

    def start(self, *flags, backend="static", nnodes="2", rank=None, script=""):
        """Start the next node and return its process."""
        number = len(self.started) if rank is None else rank
        command = [*PHALANX_RUN, "--nproc-per-node", "2", "--nnodes", nnodes, "--rdzv-id", "job"]
        command += ["--rdzv-backend", backend, "--rdzv-endpoint", self._endpoint]
        command += ["--node-rank", str(number)] if backend == "static" else []
        if ":" in nnodes and "--rdzv-conf" not in flags:  # or one may begin before the other has started
            command += ["--rdzv-conf", "last_call_timeout=60"]
        command += ["--log-dir", str(self._folder / f"node{number}"), *flags, script or self._script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.started.append(subprocess.Popen(command, cwd=self._folder, **pipes))
        return self.started[-1]

    def edit(self, more):
        """Append to the script."""
        with open(self._script, "a") as file:
            file.write(more)

    def wait_for_rendezvous(self):
        """Return once a node serves it."""
        with socket.socket() as probe:
            while probe.connect_ex(self.place) != 0:
                assert self.started[0].poll() is None
                time.sleep(0.05)

    def finish(self):
        """Return (exit code, stdout, stderr) of each node."""
        ends = [job.communicate(timeout=LIMIT_S) if job.returncode is None else ("", "") for job in self.started]
        return [(job.returncode, *end) for job, end in zip(self.started, ends, strict=True)]


@pytest.fixture
def nodes(tmp_path):
    """``nodes(source)`` returns `Nodes`; what still lives at the end is killed."""
    groups = []

    def make(source):
        groups.append(Nodes(tmp_path, source))
        return groups[-1]

    yield make
    for group in groups:
        for job in group.started:
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
def test_ranks_of_two_nodes_meet_and_start_again_together(nodes, backend):
    fail = 'if attempt == 0 and os.environ["GROUP_RANK"] == "1" and RANK % 2: os._exit(9)\n'
    group = nodes(MEET + fail + LEAVE)
    for _ in range(2):
        group.start("--max-restarts", "1", backend=backend)
    ends = group.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    out = lines(*(out for _, out, _ in ends))
    for attempt in range(2):
        for rank in range(4):
            want = f"[rank {rank}] attempt {attempt} 10.0 {rank % 2} 4 2 {rank // 2} 2"
            assert want in out
    assert len(out) == 8
    for _, _, err in ends:  # each node names the cause, wherever it was
        assert "exited with code 9\nphalanx run: restart 1 of 1\n" in err
    said = re.findall(r"^phalanx run: (\w+) the job at \S+ as (.*)$", "".join(err for _, _, err in ends), re.M)
    assert sorted(said) == [
        ("began", "node 0 (of 2), with ranks 0 and 1"),
        ("joined", "node 1 (of 2), with ranks 2 and 3"),
    ]


def test_a_failure_on_one_node_is_the_last_word_on_every_node(nodes):
    group = nodes(MEET + "if RANK == 2: raise ValueError('bad learning rate')\n" + LEAVE)
    for _ in range(2):
        group.start()
    ends = group.finish()
    assert [code for code, _, _ in ends] == [1, 1], ends
    for _, _, err in ends:
        last = err[err.rindex("phalanx run: rank") :]
        assert last.startswith("phalanx run: rank 2 (pid ")
        assert "raised ValueError and exited with code 1\n" in last
        assert "ValueError: bad learning rate" in last


def test_nodes_with_different_scripts_say_so_and_nodes_with_the_same_do_not(nodes, tmp_path):
    group = nodes(MEET + LEAVE)
    group.start()
    group.wait_for_rendezvous()
    group.edit("# edited meanwhile\n")
    group.start()
    for code, _, err in group.finish():
        assert code == 0, err
        assert f"{socket.gethostname()} runs another train.py than this host: its SHA-256 is " in err


def test_nodes_with_different_numbers_of_restarts_say_so(nodes):
    group = nodes(MEET + LEAVE)
    for number in (1, 2):
        group.start("--max-restarts", str(number), backend="c10d")
    for other, (code, _, err) in zip((2, 1), group.finish(), strict=True):
        assert code == 0, err
        assert f"{socket.gethostname()} was started with --max-restarts {other}, and this host with {3 - other}" in err
        assert "runs another" not in err


def test_too_few_nodes_are_told_with_who_is_there_and_the_time_that_is_left(nodes):
    group = nodes("print('started')")
    for _ in range(2):
        group.start("--rdzv-conf", "join_timeout=5", backend="c10d", nnodes="3:4")
    ends = group.finish()
    assert [(code, out) for code, out, _ in ends] == [(1, "")] * 2, ends
    here = socket.gethostname()
    said = f"waiting for nodes: 2 of at least 3 are here ({here}, {here}); "
    for _, _, err in ends:  # each node says it, not the one alone that leads
        assert re.search(f"{re.escape(said)}\\d+ s are left", err), err


def test_a_node_whose_peer_never_comes_says_where_it_waited(nodes):
    group = nodes("print('started')")
    group.start("--rdzv-conf", "timeout=1")
    ((code, out, err),) = group.finish()
    assert (code, out) == (1, "")
    assert re.search(r"gave up after [1-9] s at 127.0.0.1:\d+: waiting for the node with --node-rank 1; so far: ", err)
    assert "--rdzv-endpoint" in err
    assert "Traceback" not in err


def test_hosts_go_by_the_names_they_were_given_and_a_job_without_a_name_by_none(nodes, monkeypatch):
    monkeypatch.setenv("PHALANX_HOST", "left")
    group = nodes("print('started')")
    group.start("--rdzv-id", "none", "--rdzv-conf", "join_timeout=3", backend="c10d", nnodes="2:3")
    ((code, _, err),) = group.finish()
    assert code == 1
    assert "waiting for nodes: 1 of at least 2 are here (left); " in err
    assert re.search(
        r"gave up after [3-9] s at 127.0.0.1:\d+: waiting for nodes: 1 of at least 2 are here \(left\)", err
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_host_that_does_not_resolve_is_named_once_with_the_flag_to_correct(nodes, backend):
    group = nodes("print('started')")
    group.start("--rdzv-endpoint", "no-such-host.invalid:29500", "--rdzv-conf", "timeout=1.5", backend=backend)
    ((code, out, err),) = group.finish()
    assert (code, out) == (1, "")
    assert err.count("the name 'no-such-host.invalid' does not resolve here (") == 2, err  # and at the end
    assert "waiting for it. Correct --" in err
    assert "[W" not in err  # torch's own


def test_a_node_that_comes_later_is_taken_in(nodes):
    source = """
    print("nodes", os.environ["GROUP_WORLD_SIZE"], "ranks", os.environ["WORLD_SIZE"], flush=True)
    while os.environ["GROUP_WORLD_SIZE"] == "1": signal.pause()
    """
    flags = ("--rdzv-conf", "last_call_timeout=1", "--no-preload")
    group = nodes(source)
    first = group.start(*flags, backend="c10d", nnodes="1:2")
    assert sorted(first.stdout.readline() for _ in range(2)) == [
        f"[rank {rank}] nodes 1 ranks 2\n" for rank in range(2)
    ]
    group.start(*flags, backend="c10d", nnodes="1:2")
    ends = group.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert lines(*(out for _, out, _ in ends)) == [f"[rank {rank}] nodes 2 ranks 4" for rank in range(4)]
    assert "nodes of the job: 2, before 1: all go on together" in ends[0][2]


GO_ON = """
import torch, phalanx, phalanx.checkpoint as ckpt
phalanx.init("gloo")
state = {"step": 0, "weight": torch.zeros(70_000)}
found = ckpt.load("c", state, missing="ignore")
print("from", *((found.step, found.source, state["weight"][0].item()) if found else (0, "none")), flush=True)
for step in range(state["step"] + 1, 1_000_000):
    torch.distributed.barrier()
    said = ckpt.snapshot("c", {"step": step, "weight": torch.full((70_000,), float(step))}, step)
    assert not said, said
    if found is not None:
        break
    if step == 3:
        print("ready", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("lost", [0, 1], ids=["that others met at", "another"])
def test_a_node_that_is_killed_is_gone_on_without_from_the_memory_of_another(nodes, lost):
    group = nodes(GO_ON)
    for _ in range(2):
        group.start("--max-restarts", "1", backend="c10d", nnodes="1:2")
        group.wait_for_rendezvous()
    living = group.started[1 - lost]
    while "ready" not in (line := living.stdout.readline()):
        assert line, living.stderr.read()
    group.started[lost].kill()
    out, err = living.communicate(timeout=LIMIT_S)
    assert living.returncode == 0, err
    assert (
        f"node {socket.gethostname()} #{lost} (ranks {2 * lost} and {2 * lost + 1}) was lost: its process has ended"
        in err
    )
    begun = [line.split() for line in out.splitlines() if "from" in line]
    assert [words[4] for words in begun] == ["memory", "memory"], out
    assert len({words[3] for words in begun}) == 1
    assert all(int(words[3]) >= 2 and float(words[5]) == int(words[3]) for words in begun), (
        out
    )  # of 3 a rank may lack it


@pytest.mark.parametrize(
    ("leaving", "way"), [(0, "signal"), (1, "file")], ids=["that others met at by a signal", "another by a file"]
)
def test_a_node_that_is_to_go_leaves_after_a_snapshot_and_the_others_go_on(nodes, tmp_path, leaving, way):
    group = nodes(GO_ON)
    for number in range(2):
        flags = ["--drain"] if way == "signal" else ["--drain-file", str(tmp_path / f"go{number}")]
        if way == "file":
            (tmp_path / f"go{number}").touch()  # left over
            os.utime(tmp_path / f"go{number}", (1, 1))
        group.start(*flags, "--max-restarts", "1", backend="c10d", nnodes="1:2")
        group.wait_for_rendezvous()
    goes, stays = group.started[leaving], group.started[1 - leaving]
    while "ready" not in (line := stays.stdout.readline()):
        assert line, stays.stderr.read()
    if way == "signal":
        goes.terminate()
    else:
        while "was there before this job: it is no notice until it is touched" not in (line := goes.stderr.readline()):
            assert line
        (tmp_path / f"go{leaving}").touch()
    out, err = stays.communicate(timeout=LIMIT_S)
    assert stays.returncode == 0, err
    begun = [line.split() for line in out.splitlines() if "from" in line]
    assert [words[4] for words in begun] == ["memory", "memory"], out
    assert "nodes of the job: 1, before 2" in err
    assert "restart 1" not in err  # it costs none
    assert re.search(r"resuming from step \d+ after [\d.]+ s \(ended ", err), err
    err = goes.communicate(timeout=LIMIT_S)[1]
    assert goes.returncode == 75, err
    assert "this node has left the job; exit code 75" in err


def test_a_node_that_is_told_to_go_when_no_other_stays_lets_its_ranks_save(nodes, tmp_path):
    source = """
    import sys
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    print("ready", flush=True)
    while True: signal.pause()
    """
    group = nodes(source)
    job = group.start("--drain", "--no-preload", "--rdzv-conf", "last_call_timeout=0", backend="c10d", nnodes="1:2")
    for _ in range(2):
        assert "ready" in job.stdout.readline()
    job.terminate()
    ((code, out, err),) = group.finish()
    assert code == 128 + signal.SIGTERM, err
    assert out.count("saved") == 2
    assert "no other node stays, so the ranks are asked to save" in err
