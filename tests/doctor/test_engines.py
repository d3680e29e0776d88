"""How the runs of the engines are judged, and that one that hangs, dies or is wrong is told."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from phalanx.doctor import engines, exercise

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
        ("", "", "ok", "Gloo itself; PHALANX_REPLACE=gloo puts phalanx in its place"),
        ("PHALANX_REPLACE", "gloo", "ok", "phalanx stands in its place (PHALANX_REPLACE=gloo)"),
        ("", "glo", "problem", "PHALANX_REPLACE must be gloo, or empty, did you mean gloo?, got 'glo': Gloo stays"),
        ("", "gloo", "problem", "PHALANX_REPLACE=gloo is set, and torch has not loaded phalanx: Gloo stays"),
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
