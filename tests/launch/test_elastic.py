"""``--nproc-per-node MIN:MAX``: the job goes on with fewer ranks, and takes them back.

Most scripts here need no torch: they write the heads of snapshots, which the supervisor looks at, and nothing behind
them.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from phalanx.checkpoint.memory.layout import MAGIC, Head, region_offset
from phalanx.failure.ending import Ending
from phalanx.host.block_pool import choose
from phalanx.host.cpus import divide, read_machine
from phalanx.launch.job import Job
from phalanx.launch.run.attempts import RestartPolicy
from tests.launch.jobs import LIMIT_S, PHALANX_RUN, run_job, write_script

pytestmark = pytest.mark.usefixtures("warm_jobs")

HEAD = """
from phalanx.checkpoint.memory.layout import MAGIC, Head, common_heads, is_restart_announced, region_offset
SIZE, ATTEMPT = (int(os.environ[name]) for name in ("WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
os.write(1, f"{ATTEMPT} of {SIZE}\\n".encode())  # whole, or not at all: another rank may already be dying

def snapshot(step):
    fd = os.open(os.environ["PHALANX_SNAPSHOTS"], os.O_RDWR)
    os.pwrite(fd, Head(MAGIC, 1, step, 0, SIZE, ATTEMPT, bytes(16)).pack(), region_offset(RANK, step % 2))
    while not any(head.step == step for head in common_heads(fd)):
        time.sleep(0.01)
    os.close(fd)

def snapshots_until(end_s, step=0):
    while time.monotonic() < end_s:
        step += 1
        snapshot(step)
        time.sleep(0.05)
"""
RANK_1_DIES = """
if SIZE == 2:
    signal.pause() if RANK == 0 else sys.exit(3)
"""
RANK_1_DIES_ONCE = RANK_1_DIES.replace("SIZE == 2", "SIZE == 2 and ATTEMPT == 0")
FAILED = "rank 1 failed before any progress: going on with 1 rank of 1 to 2"
FAILED_AGAIN = FAILED.replace("failed", "failed again")


def run(folder, source, *flags, num_ranks="1:2"):
    """Return exit code, which attempts there were with how many ranks, and what the supervisor said of each."""
    job = run_job(folder, HEAD + source, "--no-preload", *flags, num_ranks=num_ranks)
    lines = [line.split("] ", 1)[1] for line in job.stdout.splitlines()]
    attempts = sorted({tuple(map(int, line.split(" of "))) for line in lines})
    said = job.stderr.partition("logs in ")[2].splitlines()[1:]
    return job.returncode, attempts, [line.removeprefix("phalanx run: ") for line in said if "(pid " not in line]


def shares_note(num_ranks):
    omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
    return divide(num_ranks, read_machine(), pin=True, omp_num_threads=omp_num_threads).note


def test_a_rank_that_always_dies_at_once_is_done_without(tmp_path):
    code, attempts, said = run(tmp_path, RANK_1_DIES, "--max-restarts", "3")
    assert (code, attempts) == (0, [(0, 2), (1, 1)])
    assert said == [FAILED, f"restart 1 of 3: {shares_note(1)}"]


def test_environment_threads_and_cpus_follow_the_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    source = """
    import json
    if os.environ["WORLD_SIZE"] == "2":
        signal.pause() if RANK == 0 else sys.exit(3)
    names = "LOCAL_WORLD_SIZE ROLE_WORLD_SIZE OMP_NUM_THREADS".split()
    print(json.dumps([*(int(os.environ[name]) for name in names), sorted(os.sched_getaffinity(0))]))
    """
    job = run_job(tmp_path, source, "--no-preload", "--max-restarts", "1", num_ranks="1:2")
    assert job.returncode == 0, job.stderr
    num_threads = divide(1, read_machine(), pin=True).shares[0].num_threads
    assert job.stdout == f"[rank 0] {[1, 1, num_threads, sorted(os.sched_getaffinity(0))]}\n"


def test_after_progress_the_next_restart_has_all_ranks_again(tmp_path):
    source = (
        RANK_1_DIES_ONCE
        + """
if SIZE == 1:
    snapshot(1)
    sys.exit(5)
"""
    )
    code, attempts, said = run(tmp_path, source, "--max-restarts", "2")
    assert (code, attempts) == (0, [(0, 2), (1, 1), (2, 2)])
    assert said[2:] == ["1 rank made progress: going on with 2 ranks of 1 to 2", f"restart 2 of 2: {shares_note(2)}"]


def test_a_planned_restart_takes_the_ranks_back_and_is_not_counted(tmp_path):
    source = RANK_1_DIES_ONCE + "if SIZE == 1: snapshots_until(time.monotonic() + 60)\n"
    code, attempts, said = run(tmp_path, source, "--max-restarts", "1", "--regrow-after", "0.2")
    assert (code, attempts) == (0, [(0, 2), (1, 1), (2, 2)])
    planned = "after 0.2 s with 1 rank: planned restart, which does not count, with"
    assert said[2:] == [f"{planned} {shares_note(2)}, from the last snapshot"]


def test_ranks_can_tell_a_planned_restart_from_the_end_of_their_job(tmp_path):
    source = (
        RANK_1_DIES_ONCE
        + """
def tell(*_):
    fd = os.open(os.environ["PHALANX_SNAPSHOTS"], os.O_RDONLY)
    open("told", "w").write(str([is_restart_announced(fd, attempt) for attempt in range(3)]))
    sys.exit(0)

if SIZE == 1:
    signal.signal(signal.SIGTERM, tell)
    snapshots_until(time.monotonic() + 60)
"""
    )
    code, attempts, _ = run(tmp_path, source, "--max-restarts", "1", "--regrow-after", "0.2")
    assert (code, attempts) == (0, [(0, 2), (1, 1), (2, 2)])
    assert (tmp_path / "told").read_text() == "[False, True, False]"


def test_a_planned_restart_that_fails_costs_nothing_but_patience(tmp_path):
    source = RANK_1_DIES + "if ATTEMPT < 3: snapshots_until(time.monotonic() + 60)\n"
    code, attempts, said = run(tmp_path, source, "--max-restarts", "1", "--regrow-after", "0.2")
    assert (code, attempts) == (0, [(0, 2), (1, 1), (2, 2), (3, 1)])
    back = f"rank 1 failed again before any progress: going back to {shares_note(1)}; 2 again after 0.4 s"
    assert said[3:] == [back]


@pytest.mark.parametrize(
    ("regrow_after", "action"),
    [("0.1", "time.sleep(0.8)"), ("0", "snapshots_until(time.monotonic() + 0.8)")],
    ids=["without snapshots", "told never to"],
)
def test_there_is_no_planned_restart(tmp_path, regrow_after, action):
    flags = ("--max-restarts", "1", "--regrow-after", regrow_after)
    code, attempts, said = run(tmp_path, RANK_1_DIES_ONCE + f"if SIZE == 1: {action}\n", *flags)
    assert (code, attempts, len(said)) == (0, [(0, 2), (1, 1)], 2)


def test_when_the_least_fails_too_the_cause_is_named_and_its_code_returned(tmp_path):
    source = "if RANK == 1: sys.exit('no such device')\nsignal.pause()\n"
    code, attempts, said = run(tmp_path, source, "--max-restarts", "9", num_ranks="2:3")
    assert (code, attempts) == (1, [(0, 3), (1, 2)])
    assert "rank 1 failed again before any progress, and 2 ranks of 2 to 3 is the minimum" in said
    assert "  no such device" in said


def test_a_failure_after_progress_changes_nothing(tmp_path):
    source = """
if ATTEMPT < 2:
    snapshot(ATTEMPT)
    sys.exit(4)
"""
    code, attempts, said = run(tmp_path, source, "--max-restarts", "2")
    assert (code, attempts, said) == (0, [(0, 2), (1, 2), (2, 2)], ["restart 1 of 2", "restart 2 of 2"])


def run_refused(folder, *flags, environ=None):
    command = [*PHALANX_RUN, *flags, write_script(folder, "")]
    job = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **(environ or {})}
    )
    usage, line = job.stderr.splitlines()
    assert usage.startswith("usage: phalanx run ")
    assert line.startswith("phalanx run: ")
    return job.returncode, line


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (("--nproc-per-node", "2:1"), {}, "MIN:MAX with MIN <= MAX, got '2:1'"),
        (("--nproc-per-node", "0:2"), {}, "got '0:2'"),
        (("--nproc-per-node", "1:two"), {}, "got '1:two'"),
        ((), {"PET_NPROC_PER_NODE": "auto:2"}, "PET_NPROC_PER_NODE must be"),
        (("--nproc-per-node", "9999:cpu"), {}, "9999:cpu, but cpu means "),
        (("--regrow-after", "-1"), {}, "--regrow-after must be seconds of at least 0"),
    ],
)
def test_a_wrong_range_is_refused_in_one_line_below_the_usage(tmp_path, flags, environ, said):
    code, err = run_refused(tmp_path, *flags, environ=environ)
    assert code == 2
    assert said in err


def test_a_dry_run_shows_the_range_its_origin_and_what_the_least_has(cold_jobs, tmp_path):
    command = [*PHALANX_RUN, "--dry-run", "--max-restarts=1", write_script(tmp_path, "")]
    environ = {**os.environ, "PHALANX_NPROC_PER_NODE": "1:3"}
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, env=environ).stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["nproc-per-node", "1:3", "PHALANX_NPROC_PER_NODE"] in rows
    assert ["regrow-after", "60.0", "default"] in rows
    assert f"auto: {choose(os.environ, num_ranks=3)}" in shown
    assert shown.splitlines()[-2:] == [
        f"phalanx run: {shares_note(3)}; 1 at least",
        f"phalanx run: with the least: {shares_note(1)}",
    ]


def test_all_ranks_that_fail_again_after_progress_give_way_to_the_number_that_worked():
    fd = os.memfd_create("snapshots")
    job = Job(command=("train",), divide=lambda n: divide(n, read_machine(), pin=True), num_local_ranks=8,
              min_local_ranks=1, max_restarts=20, regrow_after_s=5.0)  # fmt: skip
    policy = RestartPolicy(job, fd)
    numbers = [policy.size.num_ranks]

    def fail(*, step=None):
        if step is not None:
            for rank in range(policy.size.num_ranks):
                head = Head(MAGIC, 1, step, 0, policy.size.num_ranks, policy.size.num_ended, bytes(16))
                os.pwrite(fd, head.pack(), region_offset(rank, step % 2))
        policy.after_failure(Ending(rank=0, pid=1, exitcode=1), lived_s=0.5)
        numbers.append(policy.size.num_ranks)

    for step in (None, None, None, 10, None, None, 11, 12):
        fail(step=step)
    os.close(fd)
    assert numbers == [8, 7, 6, 5, 8, 5, 4, 8, 8]
    assert not policy.is_over


TRAIN = """
import torch, torch.distributed as dist
import phalanx
from phalanx import checkpoint
STEPS = 120
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if ATTEMPT == 1 and RANK == 1:
    os._exit(9)  # its device has not come back yet
phalanx.init()
world_size = dist.get_world_size()
state = {"value": torch.zeros(3, dtype=torch.int64)}
loaded = checkpoint.load("run", state)
start = loaded.step if loaded else 0
print(ATTEMPT, world_size, start, torch.get_num_threads(), flush=True)
for step in range(start + 1, STEPS + 1):
    batch = torch.arange(12 * step, 12 * step + 12).reshape(4, 3)[RANK::world_size].sum(0)
    dist.all_reduce(batch)
    state["value"] = (state["value"] * 3 + batch) % 1_000_003
    assert checkpoint.snapshot("run", state, step) == ""
    if ATTEMPT == 0 and step == 5 and RANK == 1:
        os._exit(9)
    if world_size == 1:
        time.sleep(0.05)
print("value", *state["value"].tolist())
phalanx.shutdown()
"""


def test_training_loses_a_rank_goes_on_and_takes_it_back_without_losing_a_step(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = run_job(tmp_path, TRAIN, "--warm", "--max-restarts", "2", "--regrow-after", "0.5", num_ranks="1:2")
    assert job.returncode == 0, job.stderr
    want = [0, 0, 0]
    for step in range(1, 121):
        batch = [sum(12 * step + 3 * row + column for row in range(4)) for column in range(3)]
        want = [(value * 3 + of_batch) % 1_000_003 for value, of_batch in zip(want, batch, strict=True)]
    lines = [line.split("] ", 1)[1].split() for line in job.stdout.splitlines()]
    assert [line[1:] for line in lines if line[0] == "value"] == [list(map(str, want))] * 2, job.stderr
    starts = {int(line[0]): [int(field) for field in line[1:]] for line in lines if line[0] != "value"}
    threads = {n: divide(n, read_machine(), pin=True).shares[0].num_threads for n in (1, 2)}
    assert list(starts) == [0, 2, 3], job.stderr
    assert starts[0] == [2, 0, threads[2]]
    assert starts[2][0] == 1
    assert starts[2][1] in (4, 5)  # rank 0 may have been ended in mid-snapshot
    assert starts[2][2] == threads[1]
    assert starts[3][0] == 2
    assert starts[3][1] > 5
    assert starts[3][2] == threads[2]
    assert "planned restart" in job.stderr
