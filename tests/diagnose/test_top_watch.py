"""What `phalanx top` sees of jobs that run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from phalanx.diagnose.jobs import Job, find_job, find_jobs
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.watch import Watch
from tests.diagnose.puppets import LAUNCHERS, LINE, Puppets, until

pytestmark = pytest.mark.usefixtures("warm_jobs")


@pytest.fixture(scope="module")
def puppets(tmp_path_factory) -> Iterator[Puppets]:
    with Puppets(tmp_path_factory.mktemp("job")) as job:
        job.wait_for_ranks()
        yield job


@pytest.fixture
def look(puppets) -> Iterator:
    """``look()`` returns the job's ranks."""
    with contextlib.closing(Watch(str(puppets.pid), 1.0)) as watch:
        yield lambda: watch.look()[0].ranks


def states(ranks: list[RankView]) -> list[tuple[str, str]]:
    return [(rank.state, rank.what) for rank in ranks]


def test_who_waits_in_a_collective_and_who_computes_is_told(puppets, look):
    puppets.order(1, "compute")
    puppets.order(0, "reduce")
    waiting, _ = until(look, lambda ranks: [rank.state for rank in ranks] == ["waiting", "computing"])
    assert waiting.what.startswith("all_reduce #")
    assert waiting.site == f"puppet.py:{LINE}"
    first = waiting.since_s
    assert until(look, lambda ranks: ranks[0].since_s > first + 0.2)[0].what == waiting.what
    until(look, lambda ranks: ranks[1].cpu_percent > 20 > ranks[0].cpu_percent)  # it computed, too, before it waited
    puppets.order(1, "reduce")
    asleep = until(look, lambda ranks: ranks[0].state == "asleep")[0]
    assert (asleep.what, asleep.site) == (f"since {waiting.what}", waiting.site)


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("load data", "loading data"),
        ("checkpoint", "writing a checkpoint"),
        ("snapshot", "writing a checkpoint"),
        ("forward", "computing"),
    ],
)
def test_phases_are_told(puppets, look, phase, state):
    puppets.order(0, f"phase {phase}")
    until(look, lambda ranks: states(ranks)[0] == (state, phase))
    puppets.order(0, "phase backward")
    until(look, lambda ranks: states(ranks)[0] == ("computing", "backward"))
    puppets.order(0, "steps 0")
    until(look, lambda ranks: ranks[0].state == "asleep")


def test_a_rank_that_sleeps_before_any_collective_has_slept_since_it_joined(tmp_path):
    with Puppets(tmp_path) as job:
        job.wait_for_ranks()
        with contextlib.closing(Watch(str(job.pid), 1.0)) as watch:
            joined = ("asleep", "since init_process_group")
            until(lambda: watch.look()[0].ranks, lambda ranks: states(ranks) == [joined, joined])


def test_a_stopped_rank_is_told_whatever_it_was_doing(puppets, look):
    puppets.order(0, "phase load data")
    pid = look()[0].pid
    os.kill(pid, signal.SIGSTOP)
    until(look, lambda ranks: states(ranks)[0] == ("stopped", "by a signal"))
    os.kill(pid, signal.SIGCONT)
    until(look, lambda ranks: states(ranks)[0] == ("loading data", "load data"))
    puppets.order(0, "steps 0")


def test_steps_have_a_number_a_rate_and_times(puppets, look):
    puppets.order(0, "steps 40")
    rank = until(look, lambda ranks: ranks[0].step == 40)[0]
    assert 5 < rank.steps_per_s < 110
    assert rank.samples_per_s == pytest.approx(32 * rank.steps_per_s, rel=0.05)
    assert all(0.009 < seconds < 1 for seconds in rank.step_times_s)
    slower = until(look, lambda ranks: ranks[0].steps_per_s < rank.steps_per_s / 2)[0]
    assert slower.step == 40


def test_what_a_rank_uses_is_measured(puppets, look):
    look()
    for rank in look():
        assert 0 < rank.pss_bytes < rank.rss_bytes < 10 << 30
        assert rank.num_threads > 0
        assert 0 <= rank.minor_faults_per_s < 1e6
        assert rank.major_faults_per_s >= 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_any_launcher_and_backend(tmp_path, launcher):
    began_s = time.monotonic()
    with Puppets(tmp_path, launcher, "gloo") as job:
        job.wait_for_ranks()
        pids = {int((tmp_path / f"pid_{rank}").read_text()) for rank in range(2)}
        with contextlib.closing(Watch(str(job.pid), 1.0)) as watch:
            for backend in ("gloo", "phalanx"):
                if backend != "gloo":
                    job.order(0, f"group {backend}")
                    job.order(1, f"group {backend}")
                job.order(1, "compute")
                no_record = (launcher, backend) == ("torchrun", "gloo")
                idle = ["waiting" if no_record else "asleep", "computing"]
                until(lambda: watch.look()[0].ranks, lambda ranks, idle=idle: [rank.state for rank in ranks] == idle)
                job.order(0, "reduce")
                both = ["waiting", "computing"]
                until(lambda: watch.look()[0].ranks, lambda ranks, both=both: [rank.state for rank in ranks] == both)
                job.order(1, "reduce")
            (seen,) = watch.look()
            assert (seen.name, seen.launcher, seen.world_size) == ("puppet.py", launcher, 2)
            assert 0 < seen.seconds < time.monotonic() - began_s
        for rank in range(2):
            job.order(rank, "load")
        found = until(lambda: job_of(pids), lambda found: all(rank.helpers for rank in found.ranks))
        told = (found.name, found.launcher, found.launcher_pid, found.world_size)
        assert told == ("puppet.py", launcher, job.pid, 2)
        assert [rank.rank for rank in found.ranks] == [0, 1]
        assert {rank.pid for rank in found.ranks} == pids
        helpers = [helper for rank in found.ranks for helper in rank.helpers]
        assert len({helper.parent for helper in helpers}) == 2
        assert all(rank.process.state in "SRD" and rank.process.num_threads > 1 for rank in found.ranks)
        for of in (job.pid, *pids, helpers[0].pid):
            assert find_job(str(of)).pids == found.pids


def job_of(pids: set[int]) -> Job:
    """Return the one job of which these are processes."""
    (found,) = [one for one in find_jobs() if one.pids & pids]
    return found


def test_a_job_that_ends_while_it_is_watched_is_gone(tmp_path):
    with Puppets(tmp_path) as job:
        job.wait_for_ranks()
        with contextlib.closing(Watch(str(job.pid), 1.0)) as watch:
            (before,) = watch.look()
            os.kill(before.ranks[1].pid, signal.SIGKILL)
            seen = until(watch.look, lambda jobs: all(rank.state == "gone" for rank in jobs[0].ranks))[0]
            assert seen.name == "puppet.py"
            assert [(rank.cpu_percent, rank.pss_bytes, rank.num_threads) for rank in seen.ranks] == [
                (None, None, None)
            ] * 2


def test_a_process_that_reads_its_standard_input_is_told_from_one_that_waits():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with contextlib.closing(Watch(str(process.pid), 1.0)) as watch:
            wanted = [("reading", "its standard input")]
            until(lambda: watch.look()[0].ranks, lambda ranks: states(ranks) == wanted)
        process.communicate(b"\n")


def test_a_process_that_is_no_rank_is_shown_as_it_is():
    with subprocess.Popen(["sleep", "60"]) as process, contextlib.closing(Watch(str(process.pid), 1.0)) as watch:
        (seen,) = until(watch.look, lambda jobs: jobs[0].ranks[0].state in ("waiting", "asleep"))
        assert (seen.name, seen.ranks[0].step) == ("sleep", None)
        process.kill()
        process.wait()
        assert watch.look()[0].ranks[0].state == "gone"


AS_NOBODY = """
import os, sys
from phalanx.diagnose.top.watch import Watch
os.seteuid(65534)
(seen,) = Watch(sys.argv[1], 1.0).look()
print(seen.name, seen.ranks[0].state, seen.ranks[0].pss_bytes, seen.ranks[0].note, sep="; ")
"""


def test_of_another_users_process_it_is_shown_what_may_be_seen():
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with subprocess.Popen(["sleep", "60"]) as process:
        command = [sys.executable, "-c", AS_NOBODY, str(process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        process.kill()
    assert done.stderr == ""
    note = f"pid {process.pid} may not be looked into: it belongs to root"
    assert done.stdout == f"sleep; waiting; None; {note}\n"


def test_who_sleeps_without_a_record_is_asleep_and_who_polls_waits():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for code, state in (("time.sleep(60)", "asleep"), ("while True: time.sleep(0.01)", "waiting")):
        command = [sys.executable, "-c", f"import time\n{code}"]
        with subprocess.Popen(command, env={**os.environ, **place}) as process:
            try:
                with contextlib.closing(Watch(str(process.pid), 1.0)) as watch:
                    until(lambda watch=watch: watch.look()[0].ranks, lambda ranks, of=state: ranks[0].state == of)
            finally:
                process.kill()
