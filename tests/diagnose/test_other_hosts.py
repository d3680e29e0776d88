"""A job on several hosts is asked about on one of them, and the others answer. Here both are this one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.diagnose.jobs import Job, find_job
from phalanx.diagnose.stacks import find_py_spy
from phalanx.diagnose.why.activity import Activity, Call
from phalanx.diagnose.why.evidence import Elsewhere
from phalanx.diagnose.why.other_hosts import OtherHosts, RankEvidence
from phalanx.host.ports import ReservedPort
from phalanx.launch.nodes.questions import socket_of
from tests.diagnose.asked import asked
from tests.launch.jobs import await_line

pytestmark = pytest.mark.usefixtures("warm_jobs")

PHALANX = [sys.executable, "-m", "phalanx"]
SCRIPT = """
import threading, torch, torch.distributed as dist
dist.init_process_group("phalanx")
for step in range(9):
    if (dist.get_rank(), step) == (3, 3):
        print("there", flush=True); threading.Event().wait()
    dist.all_reduce(torch.ones(2))
"""


def start(folder: Path, node_rank: int, port: int) -> subprocess.Popen[str]:
    place = ["--nnodes", "2", "--node-rank", node_rank, "--master-addr", "127.0.0.1", "--master-port", port]
    return subprocess.Popen(
        [*PHALANX, "run", *map(str, place), "--nproc-per-node", "2", "stuck.py"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def why(pid: int) -> str:
    return asked(".", "why", pid).stdout


@pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
def test_a_rank_that_is_missing_on_another_host_is_named_with_its_line_there(tmp_path):
    (tmp_path / "stuck.py").write_text(SCRIPT)
    with contextlib.closing(ReservedPort()) as reserved, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(start(tmp_path, node_rank, reserved.port)) for node_rank in range(2)]
        await_line(jobs[1].stdout, "there")
        deadline = time.monotonic() + 90
        there = f"on host {re.escape(socket.gethostname())}"
        together = (
            rf"^ranks 0, 1 and 2 \(pids .+\) \(also {there}\): each waits in all_reduce "  # until all have come to rest
        )
        while not re.search(together, said := why(jobs[0].pid), re.MULTILINE):
            assert time.monotonic() < deadline, said
        assert re.search("^rank 3 has not called all_reduce #4", said, re.MULTILINE)  # behind a caution, if it is early
        pattern = r"it has been in <module> at stuck\.py:6 \(in Event\.wait\)( for [\d.]+ s)? "
        assert re.search(f"{pattern}{there}; 3 ranks have waited up to ", said), said
        assert re.search(rf"^rank 3 \({there}\): has been in <module> at stuck\.py:6", said, re.MULTILINE), said
        assert " on host " not in why(jobs[1].pid).splitlines()[0]
        heard = OtherHosts(find_job(str(jobs[0].pid))).answers()
        assert ([one.doing.rank for one in heard.seen], heard.is_complete) == ([2, 3], True)
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.communicate(timeout=60)


@pytest.mark.parametrize("said", [b"", b"\xff\n[]\n{}\n", b'{"host": 3, "ranks": [{"doing": "x"}]}\n', b"[" * 100_000])
def test_what_no_agent_would_answer_is_left_out(said):
    assert answers_to(said) == Elsewhere()


WAITING = Activity(2, 7, Call("all_reduce", "train.py:3", seq=4, since_s=1.5), "asleep", progress={"default": 4})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "2"}, {"since_s": float("inf")}, {"depth": 10**400}, {"progress": {"default": None}},
        {"call": {"op": "all_reduce", "site": "train.py:3", "since_s": "1.5"}}, {"threads": [{"name": "main"}]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_a_host_that_answers_with_values_of_wrong_types_is_left_out(wrong):
    facts = dataclasses.asdict(RankEvidence(WAITING, (), ""))
    is_of_rank = wrong.keys() <= facts.keys()
    wrong = facts | (wrong if is_of_rank else {"doing": facts["doing"] | wrong})
    said = [json.dumps({"host": "hb", "ranks": [one]}).encode() for one in (facts, wrong)]
    (seen,) = answers_to(said[0]).seen
    assert seen.doing == dataclasses.replace(WAITING, host="hb")
    assert answers_to(said[1]) == Elsewhere()


@pytest.mark.parametrize("num_silent", [0, 1])
def test_it_is_known_which_hosts_have_answered_also_without_a_rank_and_whether_all_have(num_silent):
    said = b'{"host": "hb", "ranks": []}\n{"num_silent": %d}\n' % num_silent
    assert answers_to(said) == Elsewhere(hosts=("hb",), is_complete=num_silent == 0)


def answers_to(said: bytes) -> Elsewhere:
    """Return what is heard of other hosts if their agent says this."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_of(os.getpid()))
        listener.listen()

        def answer() -> None:
            asking, _ = listener.accept()
            with asking:
                asking.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        asked = OtherHosts(Job("train.py", "phalanx run", os.getpid(), 4, ()))
        thread.join()
        return asked.answers()


def test_without_an_agent_there_are_no_other_answers():
    assert OtherHosts(Job("train.py", "phalanx run", os.getpid(), 4, ())).answers() == Elsewhere()
