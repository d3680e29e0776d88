"""A victim is told from a cause by what engines really say; Gloo and torch's store say it here and now."""

from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from phalanx._errors import Failure
from phalanx._errors.facts import Peer
from phalanx.failure.ending import Ending, alike, find_culprit, read_stderr
from phalanx.failure.last_words import LastWords
from phalanx.failure.victims import is_victim


def peer_dies(rank, world_size, operation):
    if rank == 1:
        os._exit(7)
    if operation == "all_reduce":
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
    elif operation == "monitored_barrier":
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))
    else:
        dist.send(torch.ones(10**7), 1)


def store_dies(rank, world_size):
    if rank == 0:
        os._exit(7)
    dist.distributed_c10d._get_default_store().get("never")


@pytest.mark.parametrize("operation", ["all_reduce", "monitored_barrier", "send"])
def test_gloo_says_that_a_peer_died(run_ranks, operation):
    survivor, dead = run_ranks(peer_dies, 2, operation, backend="gloo", expect_failures=True)
    assert survivor.is_victim, survivor
    assert (dead.exitcode, dead.is_victim) == (7, False)


def test_the_store_says_that_its_server_died(run_ranks):
    dead, survivor = run_ranks(store_dies, 2, backend="gloo", init_method="env", expect_failures=True)
    assert survivor.is_victim, survivor
    assert not dead.is_victim


# As printed by NCCL, MPI and others, which are not at hand everywhere.
SAID = [
    ("DistBackendError", "NCCL error in: ... ncclRemoteError: A call failed possibly due to a network error"),
    ("DistBackendError", "[PG 1 Rank 7] ... [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"),
    ("DistBackendError", "NCCL communicator was aborted on rank 1."),
    ("DistBackendError", "ncclInternalError: ... socketProgress: Connection closed by remote peer host<4711>"),
    ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"),
    ("DistStoreError", "wait timeout after 1000ms, keys: /default_pg/0//never"),
    ("Exception", "MPI_ERR_PROC_FAILED: Process Failure"),
    ("RankFailed", "rank 1 (pid 9) was killed"),
    ("ConnectionResetError", "[Errno 104]"),
]


@pytest.mark.parametrize(("kind", "message"), SAID)
def test_what_other_engines_say_is_a_victims(kind, message):
    assert is_victim(LastWords(kind, message))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ValueError", "bad learning rate"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("TimeoutError", "the data server did not answer"),
        ("CollectiveMismatch", "rank 0 called all_reduce, rank 1 barrier"),
        ("DistBackendError", "NCCL error: unhandled cuda error"),
        ("FileNotFoundError", "no such file: peers.txt"),
    ],
)
def test_a_cause_is_no_victim(kind, message):
    assert not is_victim(LastWords(kind, message))


VICTIM = LastWords(
    "phalanx.RankFailed", "rank 0: all_reduce #4: rank 1 (pid 9) was killed", is_victim=True, is_told=True
)
RAISED = LastWords("ValueError", "bad", is_told=True)
ENDS = {
    "victim": {"exitcode": 1, "last_words": VICTIM, "when_s": 1.0},
    "hung": {"exitcode": -6, "hung": True, "when_s": 2.0},
    "ended": {"exitcode": -15, "ended_by_us": True, "when_s": 2.0},
    "exited": {"exitcode": 7, "when_s": 3.0},
    "raised": {"exitcode": 1, "last_words": RAISED, "when_s": 4.0},
    "killed": {"exitcode": -9, "when_s": 5.0},
    "returned": {"exitcode": 0},
}


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        (["victim", "raised"], "raised"),
        (["victim", "exited", "killed"], "killed"),
        (["raised", "exited"], "exited"),
        (["hung", "victim"], "victim"),
        (["hung", "ended"], "hung"),
        (["ended", "returned"], None),
    ],
)
def test_one_order_of_causes(ends, cause):
    outcomes = {name: Ending(rank=rank, pid=rank + 10, **ENDS[name]) for rank, name in enumerate(ends)}
    assert find_culprit(outcomes.values()) is (outcomes[cause] if cause else None)


def said(rank, culprit, text="rank 0: all_reduce #4: rank 1 was killed"):
    failure = Failure(kind="rank_ended", rank=rank, op="all_reduce", seq=4 + rank, culprits=(Peer(rank=culprit),))
    return LastWords("phalanx.RankFailed", text, failure=failure)


def test_ranks_that_met_the_same_are_told_by_the_facts():
    assert alike(said(0, 2), said(1, 2, "rank 1: quite another text"))
    assert not alike(said(0, 2), said(0, 3))
    assert alike(LastWords("ValueError", "rank 0: bad"), LastWords("ValueError", "rank 1: bad"))
    assert not alike(LastWords("ValueError", "bad"), LastWords("ValueError", "worse"))
    assert not alike(LastWords(), LastWords())


ABORTED = b"""terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: [Rank 3] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST) ran for 1800011 milliseconds.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5a9616c1b6 in libc10.so)

Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
  File "train.py", line 9 in step
"""


@pytest.mark.parametrize("carets", ["", "    ^^^^^^\n", "    \n"], ids=["none", "carets", "spaces"])
def test_an_exception_at_the_first_line_of_a_function_is_found(carets):
    """Where Ctrl-C comes as a function is entered, Python 3.11 prints spaces in the place of carets."""
    stack = '  File "/t.py", line 7, in <module>\n    work()\n  File "/t.py", line 3, in work\n    def work():\n'
    words = read_stderr(f"Traceback (most recent call last):\n{stack}{carets}KeyboardInterrupt\n\nlater\n".encode())
    assert (words.kind, words.lines[-1]) == ("KeyboardInterrupt", "KeyboardInterrupt")


def test_a_rank_that_native_code_aborts_because_of_a_peer_is_a_victim():
    words = read_stderr(ABORTED)
    assert words.kind == "c10::DistBackendError"
    end = Ending(rank=3, pid=10, exitcode=-6, last_words=words)
    assert end.is_victim
    assert 'File "train.py", line 9 in step' in "\n".join(words.lines)
    assert "Watchdog caught" in words.message


def test_of_two_ranks_at_one_deadline_the_one_that_ended_the_group_is_the_cause():
    """Whichever process ends first: the other knows only that a peer has reached its deadline."""
    failures = [
        Failure(kind="rank_missing", rank=0, by=Peer(rank=1)),
        Failure(kind="rank_missing", rank=1, timeout_s=2.0),
    ]
    words = [LastWords("phalanx.CollectiveTimeout", "late", failure=failure, is_told=True) for failure in failures]
    outcomes = [Ending(rank=n, pid=1, exitcode=1, when_s=float(n), last_words=one) for n, one in enumerate(words)]
    assert find_culprit(outcomes) is outcomes[1]
