"""How the runs of the engines are judged, and that one that hangs, dies or is wrong is told."""

from __future__ import annotations

import array
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from phalanx.doctor import engines, exercise, mpi_rank

TOLD = {"torch": "2.15.0", "phalanx": "0.1.0", "python": "3.11.7", "num_threads": 2, "cuda": "", "import_s": 2.0}
TOLD |= {"gloo": True, "nccl": False, "mpi": False}


def test_ranks_that_answer_hang_die_or_raise_are_told_apart():
    def rank_main(rank):
        if rank == 1:
            time.sleep(60)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            raise RuntimeError("a [/src/pair.cc:152] wrong turn\nException raised from here")
        return {"seconds": 0.5}

    results = exercise.in_processes(rank_main, 4, 2.0)
    assert results[0] == {"seconds": 0.5}
    assert "no answer within 2 s" in results[1]["error"]
    assert results[2]["error"] == "a rank died: SIGKILL"
    assert results[3]["error"] == "RuntimeError: a wrong turn"


def test_a_wait_is_abandoned_when_others_have_failed():
    assert exercise.answered(lambda: 0.25, lambda: False) == {"seconds": 0.25}
    assert exercise.answered(lambda: 1 / 0, lambda: False)["error"].startswith("ZeroDivisionError")
    over = threading.Event()
    assert exercise.answered(lambda: float(over.wait(60)), lambda: True)["error"] == exercise.ABANDONED
    (abandoned,) = [thread for thread in threading.enumerate() if thread.name == "doctor-call"]
    over.set()
    abandoned.join(10)


@pytest.mark.parametrize(
    ("told", "level", "said"),
    [
        (TOLD, "ok", "torch 2.15.0"),
        ({"error": "ImportError: libcudart.so.13"}, "problem", "libcudart"),
        (None, "problem", "SIGILL"),
    ],
)
def test_a_torch_that_can_not_be_imported_is_a_problem(told, level, said):
    (finding,) = engines.judge_torch(told, "it ended with SIGILL")
    assert finding.level == level
    assert said in finding.found


@pytest.mark.parametrize(
    ("origin", "word", "level", "said"),
    [
        ("", "", "ok", "Gloo itself; PHALANX_REPLACE=gloo replaces it with phalanx"),
        ("PHALANX_REPLACE", "gloo", "ok", "phalanx replaces Gloo (PHALANX_REPLACE=gloo)"),
        (
            "",
            "glo",
            "problem",
            "PHALANX_REPLACE must be gloo, or empty, did you mean gloo?, got 'glo': Gloo is not replaced",
        ),
        ("", "gloo", "problem", "PHALANX_REPLACE=gloo is set, and torch has not loaded phalanx: Gloo is not replaced"),
    ],
)
def test_it_is_told_whether_phalanx_stands_in_the_place_of_gloo(origin, word, level, said):
    finding = engines.judge_replacement({"replaced_by": origin}, word)
    assert (finding.topic, finding.level, finding.found) == ("gloo", level, said)


def test_a_backend_that_can_not_be_loaded_and_a_slow_import_are_told():
    findings = engines.judge_torch({**TOLD, "backend_error": "no _core", "import_s": 30.0}, "")
    assert [finding.level for finding in findings] == ["ok", "problem", "note"]


@pytest.mark.parametrize(
    ("gpus", "cuda", "num_seen", "level"),
    [
        ({"devices": []}, "", 0, "ok"),
        ({"devices": []}, "", 2, "warning"),
        ({"devices": [], "reason": "driver too old"}, "13.0", 2, "warning"),
        ({"error": "no answer within 15 s"}, "13.0", 2, "problem"),
        ({"devices": [{"name": "H100", "size_bytes": 80 << 30}], "nccl": "2.29"}, "13.0", 1, "ok"),
    ],
)
def test_gpus_that_torch_can_not_use_are_told(gpus, cuda, num_seen, level):
    (finding,) = engines.judge_gpus(gpus, {"cuda": cuda}, num_seen)
    assert finding.level == level


def mpi_line(size=2, is_right=True):
    told = {"size": size, "is_right": is_right, "seconds": 1e-4, "library": "Open MPI v4.1.4"}
    return f"doctor:{json.dumps(told)}\n"


@pytest.mark.parametrize(
    ("code", "out", "level", "said"),
    [
        (0, mpi_line(), "ok", "Open MPI v4.1.4"),
        (0, mpi_line(size=1) * 2, "problem", "another MPI"),
        (0, mpi_line(is_right=False), "problem", "a wrong sum"),
        (1, "", "problem", "no slots"),
        (None, "", "problem", "did not end within 8 s"),
    ],
)
def test_an_end_of_mpirun_is_judged(code, out, level, said):
    finding = engines.judge_mpi(code, out, "-----\nno slots\n", deadline_s=8.0)
    assert finding.level == level
    assert said in finding.found


def test_mpirun_inside_a_job_sees_nothing_of_it():
    job = {"SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PATH": "/bin"}
    given = engines.mpi_environment(job)
    assert "PATH" in given
    assert not {"SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & set(given)


class Ranks:
    """Ranks that are threads. Each has a clock, on which a collective takes what is given, and nothing else any time.

    The first two calls of a rank take 20 times as long: nobody has touched the memory.
    """

    def __init__(self, monkeypatch, *call_s):
        self.calls = [0] * len(call_s)
        self._call_s, self._clock_s, self._given = call_s, [0.0] * len(call_s), [None] * len(call_s)
        self._meet, self._local = threading.Barrier(len(call_s), timeout=30), threading.local()
        clock = SimpleNamespace(perf_counter=lambda: self._clock_s[self.rank])
        monkeypatch.setattr(exercise, "time", clock)

    @property
    def rank(self):
        return self._local.rank

    def run(self, main):
        """Return what ``main()`` returns on each rank."""

        def rank_main(rank):
            self._local.rank = rank
            return main()

        with ThreadPoolExecutor(len(self.calls)) as pool:
            return list(pool.map(rank_main, range(len(self.calls))))

    def call(self):
        """Let the time of a collective pass."""
        self.calls[self.rank] += 1
        self._clock_s[self.rank] += self._call_s[self.rank] * (20 if self.calls[self.rank] <= 2 else 1)

    def join(self, given, how):
        """Return ``how(all)`` of what the ranks give."""
        self._given[self.rank] = given
        self._meet.wait()
        joined = how(self._given)
        self._meet.wait()
        return joined

    def sum_in_place(self, buffer, is_wrong=False):
        """Let a collective pass that sums buffers. Of zeros there is nothing to add, so nobody meets for them."""
        self.call()
        if buffer[0]:
            total = self.join(float(buffer[0]), sum)
            buffer[:] = array.array("f", [total]) * len(buffer)
            buffer[-1] += is_wrong


def test_a_collective_is_timed_warm_and_by_its_slowest_rank(monkeypatch):
    ranks = Ranks(monkeypatch, 50e-6, 60e-6)
    timed = ranks.run(lambda: exercise.time_calls(ranks.call, lambda number: ranks.join(number, max)))
    assert timed == [pytest.approx(60e-6)] * 2
    assert ranks.calls[0] == ranks.calls[1] > 1000


def test_a_slow_collective_is_timed_a_few_times(monkeypatch):
    ranks = Ranks(monkeypatch, 0.25, 0.25)
    timed = ranks.run(lambda: exercise.time_calls(ranks.call, lambda number: ranks.join(number, max)))
    assert timed == [pytest.approx(0.25)] * 2
    assert ranks.calls == [4, 4]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_engine_is_checked_once_and_timed_without_the_check(monkeypatch, is_wrong):
    ranks = Ranks(monkeypatch, 50e-6, 60e-6)

    class Group:
        def __init__(self, *_):
            self.allreduce = lambda tensors, op: SimpleNamespace(wait=lambda: self._reduce(*tensors, op))

        def _reduce(self, tensor, op):
            if op == dist.ReduceOp.MAX:
                tensor.fill_(ranks.join(tensor.item(), max))
            else:
                ranks.sum_in_place(tensor.numpy(), is_wrong)

    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    if is_wrong:
        with pytest.raises(ArithmeticError, match="the sum over 2 ranks is 4, and 3 is right"):
            ranks.run(lambda: exercise.all_reduce_by_gloo(None, ranks.rank, 2))
        return
    assert ranks.run(lambda: exercise.all_reduce_by_gloo(None, ranks.rank, 2)) == [pytest.approx(60e-6)] * 2
    assert ranks.calls[0] == ranks.calls[1] > 1000


@pytest.mark.parametrize("is_wrong", [False, True])
def test_mpi_is_timed_as_the_others_are(monkeypatch, capsys, is_wrong):
    ranks = Ranks(monkeypatch, 50e-6, 60e-6)

    class World:
        size = 2
        rank = property(lambda _: ranks.rank)

        def Allreduce(self, given, buffer):
            assert given == "in place"
            ranks.sum_in_place(buffer, is_wrong and ranks.rank == 1)

        def allreduce(self, number, how):
            return ranks.join(number, how)

    mpi = SimpleNamespace(
        COMM_WORLD=World(), IN_PLACE="in place", MAX=max, LAND=all, Get_library_version=lambda: "Open MPI v4, package"
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    ranks.run(mpi_rank.main)
    finding = engines.judge_mpi(0, capsys.readouterr().out, "", deadline_s=8.0)
    if is_wrong:
        assert finding.found == "a wrong sum from Open MPI v4"
        return
    assert finding.found == "mpi: 1 MiB on 2 local ranks in 60 us (Open MPI v4)"
    assert ranks.calls[0] == ranks.calls[1] > 1000
