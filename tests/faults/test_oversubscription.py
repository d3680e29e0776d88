"""Ranks that share CPUs: they finish, they do not burn them, and spinning is chosen only where every rank has one."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.testing import await_release, reached

CPUS = sorted(os.sched_getaffinity(0))


def meet_on(rank, world_size, folder, cpus):
    os.sched_setaffinity(0, cpus[rank])
    dist.init_process_group("phalanx", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)


def does_it_spin(rank, world_size, folder, cpus):
    meet_on(rank, world_size, folder, cpus)
    spins = dist.group.WORLD._operations._core.spins
    dist.barrier()  # a rank that ends while another still connects would be missed there
    return spins


def does_it_spin_under_a_quota(rank, world_size, folder, cgroup, cpus):
    (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    return does_it_spin(rank, world_size, folder, cpus)


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def reduce_and_wait_for_a_late_rank(rank, world_size, folder, cpu, late_s):
    meet_on(rank, world_size, folder, [{cpu}] * world_size)
    tensor = torch.ones(1024)
    for _ in range(50):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    dist.barrier()
    before = cpu_seconds()
    reached("waiting")
    if rank == 0:
        await_release("come")
    dist.barrier()
    return tensor[0].item(), cpu_seconds() - before


@contextlib.contextmanager
def cgroup_with_one_cpu():
    """Yield a new cgroup whose quota pays for one CPU, or skip."""
    name = f"phalanx-test-{os.getpid()}"
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")
    if "cpu" in _words(v2 / "cgroup.subtree_control"):
        folder, limits = v2 / name, {"cpu.max": "100000 100000"}
    elif (v1 / "cpu.cfs_quota_us").exists():
        folder, limits = v1 / name, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    else:
        pytest.skip("no cgroup here has the cpu controller")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no right to make a cgroup: {error}")
    try:
        for file, text in limits.items():
            (folder / file).write_text(text)
        yield folder
    finally:
        deadline = time.monotonic() + 5
        while _words(folder / "cgroup.procs") and time.monotonic() < deadline:
            time.sleep(0.01)  # its last process is on its way out
        folder.rmdir()


def _words(file):
    try:
        return file.read_text().split()
    except OSError:
        return []


def test_eight_ranks_on_one_cpu_finish_and_do_not_burn_it_while_they_wait(spawn_ranks, tmp_path):
    late_s = 1.0
    with spawn_ranks(reduce_and_wait_for_a_late_rank, 8, str(tmp_path), CPUS[0], late_s, init=False) as ranks:
        ranks.wait_until_reached("waiting")
        time.sleep(late_s)  # the time over which the waiting ranks' use of the CPU is measured
        ranks.release("come", ranks=[0])
        outcomes = ranks.join(60)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert [outcome.value[0] for outcome in outcomes] == [1.0] * 8
    used_s = sum(outcome.value[1] for outcome in outcomes)
    assert used_s < 0.3 * late_s, f"8 ranks used {used_s:.2f} s of CPU time to wait for {late_s} s"


def test_ranks_with_a_cpu_each_spin(run_ranks, tmp_path):
    if len(CPUS) < 2:
        pytest.skip("one usable CPU")
    first, second = {CPUS[0]}, {CPUS[1]}
    both = first | second
    for case, cpus in enumerate([(first, second), (both, both), (first, both), (both, second)]):
        folder = tmp_path / str(case)
        folder.mkdir()
        assert run_ranks(does_it_spin, 2, str(folder), cpus, init=False) == [True] * 2, cpus


def test_ranks_that_share_a_cpu_do_not_spin(run_ranks, tmp_path):
    first = {CPUS[0]}
    cases = [(first, first)]
    if len(CPUS) > 1:
        second = {CPUS[1]}
        both = first | second
        cases += [(first, first, second), (both, both, both), (first, both, second), (both, both, second)]
    for case, cpus in enumerate(cases):
        folder = tmp_path / str(case)
        folder.mkdir()
        assert run_ranks(does_it_spin, len(cpus), str(folder), cpus, init=False) == [False] * len(cpus), cpus


def test_ranks_do_not_spin_where_a_quota_pays_for_fewer_cpus(run_ranks, tmp_path):
    if len(CPUS) < 2:
        pytest.skip("one usable CPU: the ranks would not spin without a quota either")
    cpus = ({CPUS[0]}, {CPUS[1]})
    with cgroup_with_one_cpu() as folder:
        arguments = (str(tmp_path), str(folder), cpus)
        assert run_ranks(does_it_spin_under_a_quota, 2, *arguments, init=False) == [False] * 2
