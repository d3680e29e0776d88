"""Whom ranks wait for by torch's Flight Recorder, where neither stacks nor a black box tell, as on NCCL.

NCCL's thread, which writes the recorder's entries when something comes through a pipe, is played by one of Python; the
entries are torch's own, of Gloo.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys

import pytest

from phalanx.diagnose.jobs import find_job
from phalanx.diagnose.why import flight
from phalanx.diagnose.why.evidence import gather
from phalanx.diagnose.why.findings import conclude
from phalanx.diagnose.why.wording import sentence
from phalanx.host.processes import process_of
from tests.ports import free_port

SCRIPT = """
import os, sys, threading, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
asked = os.open(pipe, os.O_RDWR)

def answer():
    while os.read(asked, 128):
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
            file.write(_dump_fr_trace())

def read_image():
    never.wait()  # the line

never = threading.Event()
threading.Thread(target=answer, daemon=True).start()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
dist.barrier()
if rank == "1":
    os.write(1, b"stuck")
    read_image()
work = dist.all_reduce(torch.ones(3, 2), async_op=True)  # the call
os.write(1, b"stuck")
never.wait()
"""
LINE, CALL = (
    next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# the {what}" in line)
    for what in ("line", "call")
)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{tmp_path}/pipe_"
    environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{tmp_path}/dump_"
    environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            command = {"cwd": tmp_path, "env": {**environ, "RANK": rank}, "stdout": subprocess.PIPE, "text": True}
            ranks.append(stack.enter_context(subprocess.Popen([sys.executable, "train.py"], **command)))
            stack.callback(ranks[-1].kill)
        assert [rank.stdout.read(5) for rank in ranks] == ["stuck", "stuck"]
        yield find_job(str(ranks[0].pid))


def test_the_rank_that_has_not_called_is_named_though_none_waits_in_a_call(job, monkeypatch):
    monkeypatch.setattr(flight, "ANSWERS_S", 60.0)
    evidence = gather(job)
    finding = conclude(evidence)
    assert (finding.kind, finding.culprits) == ("absent", (1,))
    call = finding.call
    assert (call.op, call.group, call.seq, call.site) == ("all_reduce", "default", 3, f"train.py:{CALL}")
    said = sentence(finding, evidence.doings)
    assert said.startswith("rank 1 has not called all_reduce #3"), said
    assert f"read_image at train.py:{LINE}" in said


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trap",)


ENTRY = {
    "record_id": 4, "time_created_ns": 10**18, "state": "completed", "time_discovered_completed_ns": None, "frames": [],
    "process_group": ("7", "undefined"), "is_p2p": False, "profiling_name": "nccl:_all_gather_base",
    "collective_seq_id": 9, "input_sizes": [[2, 3], [4]],
}  # fmt: skip


@pytest.fixture
def question(tmp_path, monkeypatch):
    """The question to this process, as rank 3, which is to answer in the file dump_3."""
    pipe = tmp_path / "pipe_3.pipe"
    os.mkfifo(pipe)
    environ = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_"}
    monkeypatch.setattr(flight, "environment_of", lambda pid: environ)
    monkeypatch.chdir(tmp_path)
    me = process_of(os.getpid())
    assert flight.ask(3, me) is None, "nobody reads"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    yield flight.ask(3, me)
    assert os.read(reader, 100) == b"1\n"
    os.close(reader)


def test_entries_become_events(question, tmp_path):
    (tmp_path / "dump_3").write_bytes(pickle.dumps({"entries": [ENTRY]}))
    box = question.answer(0.0)
    (event,) = box.events
    assert (box.rank, box.num_events, event.kind, event.op) == (3, 5, "collective", "all_gather_base")
    assert (event.text, event.seq, event.value, event.site) == ("7", 9, 10, "")
    assert event.ended_ns == event.begun_ns


@pytest.mark.parametrize(
    "dump",
    [
        b"", b"nonsense", pickle.dumps(7), pickle.dumps({"entries": [{}]}), pickle.dumps({"entries": 3}),
        pickle.dumps({"entries": [{**ENTRY, "time_created_ns": "now"}]}), pickle.dumps({"entries": [ENTRY]})[:-20],
        pickle.dumps(Trap()), pickle.dumps({"entries": [{**ENTRY, "collective_seq_id": float("inf")}]}),
    ],
)  # fmt: skip
def test_what_is_no_dump_tells_nothing_and_runs_nothing(question, tmp_path, dump):
    (tmp_path / "dump_3").write_bytes(dump)
    assert question.answer(0.0) is None
    assert not (tmp_path / "trap").exists()


def test_a_dump_of_before_is_no_answer(tmp_path):
    (tmp_path / "dump_3").write_bytes(pickle.dumps({"entries": [ENTRY]}))
    assert flight.Question(3, process_of(os.getpid()), {tmp_path / "dump_3": 0}).answer(0.0) is not None
    before_ns = (tmp_path / "dump_3").stat().st_mtime_ns
    assert flight.Question(3, process_of(os.getpid()), {tmp_path / "dump_3": before_ns}).answer(0.0) is None


def test_a_pipe_that_is_none_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(flight, "environment_of", lambda pid: {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"})
    (tmp_path / "pipe_3.pipe").write_text("a file")
    assert flight.ask(3, process_of(os.getpid())) is None
    assert (tmp_path / "pipe_3.pipe").read_text() == "a file"
