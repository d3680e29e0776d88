"""The first lines of ``phalanx run``, and the last ones where ranks have not trained together."""

from __future__ import annotations

import textwrap

import pytest

from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.host.block_pool import MemoryPolicy
from phalanx.host.cpus import Division, Share
from phalanx.launch.job import Job

from .jobs import run_job

pytestmark = pytest.mark.usefixtures("warm_jobs")

ALONE = "phalanx run: the ranks made no process group, so each has trained on its own;\n"
APART = "phalanx run: the ranks exchanged no gradients, so each has trained on its own;\n"
STEP = """
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
"""
INDENTED = textwrap.indent(STEP, "    ")
OWN_STORE = """
store = dist.FileStore("store", 2)
dist.init_process_group("phalanx", store=store, rank=RANK, world_size=2)
dist.destroy_process_group()
"""


def job(note, *, keeps=True, **fields):
    memory = MemoryPolicy(keeps=keeps, why="" if keeps else "MALLOC_ARENA_MAX is set")
    return Job(command=("python", "train.py"), divide=lambda _: Division((Share(),), note), memory=memory, **fields)


def test_the_usual_job_begins_with_one_line_that_fits_a_terminal():
    (line,) = job("2 ranks x 1 thread").opening("logs in logs/train_digits/20261121-163940-14529")
    assert line == "2 ranks x 1 thread; logs in logs/train_digits/20261121-163940-14529"
    assert len(f"phalanx run: {line}") <= 80


def test_what_does_not_fit_has_lines_of_its_own():
    note = "16 ranks x OMP_NUM_THREADS=16, not pinned: more threads than CPUs"
    unusual = job(note, keeps=False, is_tuned=True, num_local_ranks=16, min_local_ranks=2)
    logs = "logs in logs/train_digits/20261121-163940-14529"
    lines = unusual.opening(logs)
    assert "; ".join(lines) == (
        f"{note}, as tuned; memory not kept (MALLOC_ARENA_MAX is set); 2 at least, but --max-restarts is 0; {logs}"
    )
    assert len(lines) == 4
    assert max(map(len, lines[1:])) <= 67


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-preload",)], ids=["forked", "executed"])
def test_ranks_that_train_without_a_process_group_are_told(tmp_path, flags):
    done = run_job(tmp_path, "import torch" + STEP, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"{ALONE}phalanx run: use a Trainer, or phalanx.init() and DistributedDataParallel\n")
    assert max(map(len, done.stderr.splitlines())) <= 80


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="before torch 2.14 not every exchange is counted")
def test_ranks_that_train_in_a_group_without_a_wrapper_are_told(tmp_path):
    done = run_job(tmp_path, f"import torch, phalanx; phalanx.init().barrier(){STEP}phalanx.shutdown()")
    assert done.returncode == 0, done.stderr
    advice = "phalanx run: use a Trainer, or call what DistributedDataParallel(model) returns\n"
    assert done.stderr.endswith(f"{APART}{advice}")
    assert max(map(len, done.stderr.splitlines())) <= 80


@pytest.mark.parametrize(
    ("source", "num_ranks"),
    [
        ("import torch; torch.ones(3).sum()", 2),
        (f"import torch{STEP}", 1),
        (f"import torch, torch.distributed as dist; dist.init_process_group('gloo')\n{STEP}", 2),
        (f"import torch, phalanx; phalanx.init(); phalanx.shutdown()\n{STEP}", 2),
        (f"import torch, torch.distributed as dist{OWN_STORE}{STEP}", 2),
        (f"import torch, phalanx; phalanx.init(){STEP}torch.distributed.all_reduce(weight.data)", 2),
        (f"import torch\nif RANK == 0:{INDENTED}", 2),
        (f"import torch\nif not os.fork():{INDENTED}    sys.exit()\nos.wait()", 2),
    ],
    ids=["no training", "one rank", "gloo", "left", "own store", "averaged", "rank 0 alone", "child"],
)
def test_no_other_job_is_told_so(tmp_path, source, num_ranks):
    done = run_job(tmp_path, source, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    assert "trained on its own" not in done.stderr
