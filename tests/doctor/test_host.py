"""What the doctor says of one host: on machines laid out in a folder, and on this one."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import subprocess
import sys
import time

import pytest

from phalanx.doctor import examination, limits, processors
from phalanx.doctor.finding import ok
from phalanx.doctor.limits import Limit
from phalanx.host.cpus import Machine
from phalanx.host.processes import count_threads
from tests.denial import deny

GIB = 1 << 30
MEMINFO = "MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable: {} kB\n"
NO_LIMITS = {name: Limit(None, None) for name in ("AS", "MEMLOCK", "NOFILE", "NPROC")}


MOUNTS = """\
30 23 0:26 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""


@pytest.fixture
def lay_out(tmp_path):
    """Return a function that writes files of /proc and /sys below a root, and returns the root."""

    def write(**files):
        for name, text in {"proc__self__mountinfo": MOUNTS, **files}.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return write


def meminfo(total_bytes, available_bytes):
    return MEMINFO.format(total_bytes // 1024, available_bytes // 1024)


def cgroup(root, folder, **files):
    path = os.path.join(root, "sys/fs/cgroup", folder)
    os.makedirs(path)
    for name, text in files.items():
        with open(os.path.join(path, name.replace("__", ".")), "w") as file:
            file.write(str(text))


def level_of(findings):
    (finding,) = findings
    return finding.level


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("available", "num_ranks", "level"),
    [(8 * GIB, 4, "ok"), (8 * GIB, 64, "warning"), (GIB, 4, "warning"), (GIB // 8, 1, "problem")],
)
def test_memory_is_measured_against_the_ranks(lay_out, available, num_ranks, level):
    root = lay_out(proc__meminfo=meminfo(16 * GIB, available))
    assert level_of(limits.examine_memory(num_ranks, root)) == level


def test_a_limit_of_cgroup_v2_counts_without_the_cache_that_can_be_dropped(lay_out):
    root = lay_out(proc__meminfo=meminfo(64 * GIB, 60 * GIB), proc__self__cgroup="0::/pod/container\n")
    cgroup(root, "pod", memory__max=2 * GIB, memory__current=3 * GIB // 2, memory__stat=f"inactive_file {GIB}\n")
    cgroup(root, "pod/container", memory__max="max", memory__current=GIB)
    (finding,) = limits.examine_memory(2, root)
    assert finding.level == "ok"
    assert "cgroup limit 2 GiB, 512 MiB of it used" in finding.found
    assert level_of(limits.examine_memory(4, root)) == "warning"


@pytest.mark.parametrize(("limit", "level"), [(300 << 20, "problem"), (0x7FFFFFFFFFFFF000, "ok")])
def test_a_limit_of_cgroup_v1_counts_and_its_largest_number_is_none(lay_out, limit, level):
    root = lay_out(proc__meminfo=meminfo(64 * GIB, 60 * GIB), proc__self__cgroup="4:memory:/job\n1:cpu:/\n")
    cgroup(root, "memory/job", memory__limit_in_bytes=limit, memory__usage_in_bytes=200 << 20)
    assert level_of(limits.examine_memory(1, root)) == level


@pytest.mark.parametrize(
    ("mode", "environ", "level", "said"),
    [
        ("always [madvise] never", {}, "ok", "kept, huge pages"),
        ("always madvise [never]", {}, "note", "huge pages are never"),
        ("always [madvise] never", {"MALLOC_ARENA_MAX": "1"}, "note", "MALLOC_ARENA_MAX is set): steps are slower"),
    ],
)
def test_what_becomes_of_freed_memory_is_told(lay_out, mode, environ, level, said):
    root = lay_out(proc__meminfo=meminfo(16 * GIB, 8 * GIB), sys__kernel__mm__transparent_hugepage__enabled=mode)
    (finding,) = limits.examine_freed_memory(2, environ, root)
    assert finding.level == level
    assert said in finding.found
    assert bool(finding.todo) == (level == "note")


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("name", "limit", "todo"),
    [
        ("AS", Limit(4 * GIB, None), "ulimit -v unlimited"),
        ("NOFILE", Limit(128, 4096), "ulimit -n 4096"),
        ("NOFILE", Limit(128, 128), "ask root"),
        ("NPROC", Limit(60, None), "ulimit -u 4096"),
    ],
)
def test_a_limit_that_is_too_small_is_named_with_the_command_that_raises_it(name, limit, todo):
    (finding,) = limits.examine_limits(2, 2, {**NO_LIMITS, name: limit})
    assert finding.level == "warning"
    assert f"RLIMIT_{name}" in finding.found
    assert todo in finding.todo


def test_memory_may_be_locked_where_there_is_infiniband(lay_out):
    locked = {**NO_LIMITS, "MEMLOCK": Limit(64 << 10, None)}
    assert level_of(limits.examine_limits(2, 2, locked, lay_out())) == "ok"
    root = lay_out(sys__class__infiniband__mlx5_0="")
    (finding,) = limits.examine_limits(2, 2, locked, root)
    assert finding.level == "warning"
    assert "ulimit -l unlimited" in finding.todo


def test_this_machine_has_shared_memory_and_limits():
    assert level_of(limits.try_shared_memory()) == "ok"
    assert set(limits.read_limits()) == set(NO_LIMITS)
    assert count_threads(os.getuid()) >= 1


def test_shared_memory_that_can_not_be_had_is_a_problem_of_that_system_call():
    program = "from phalanx.doctor import limits; print(*limits.try_shared_memory(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert "level='problem'" in done.stdout, done.stderr
    assert "File too large" in done.stdout


def test_the_end_of_a_process_is_seen_here():
    assert level_of(limits.try_watching()) == "ok"


def watch_without_pidfd(rank, world_size, error):
    deny("pidfd_open", error=error)
    return limits.try_watching()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_a_pidfd_that_can_not_be_had_is_told_with_what_it_costs(run_ranks, error):
    ((finding,),) = run_ranks(watch_without_pidfd, 1, error, backend=None, init=False)
    assert finding.level == "warning"
    assert f"pidfd_open: {os.strerror(error)}: the death of a rank is noticed through /proc" in finding.found
    assert "seccomp" in finding.todo


@pytest.mark.parametrize(
    ("size", "free", "level"),
    [(8 * GIB, 7 * GIB, "ok"), (64 << 20, 64 << 20, "warning"), (8 * GIB, 1 << 20, "warning")],
)
def test_a_small_dev_shm_is_told_with_whom_it_concerns(size, free, level):
    block = 4096
    found = os.statvfs_result((block, block, size // block, free // block, free // block, 0, 0, 0, 0, 255))
    (finding,) = limits.examine_dev_shm(found)
    assert finding.level == level
    assert "DataLoader" in finding.found
    assert level_of(limits.examine_dev_shm(None)) == "warning"


# ---------------------------------------------------------------- processors


def machine(num_cores=4, quota=None, nodes=1, threads=1):
    per_node = num_cores // nodes
    cores = tuple(tuple(range(core, num_cores * threads, num_cores)) for core in range(num_cores))
    return Machine(cores=cores, numa_nodes=tuple(cpu // per_node for cpu in range(num_cores)), quota_cpus=quota)


@pytest.mark.parametrize(
    ("given", "num_ranks", "level", "said"),
    [
        (machine(), 4, "ok", "4 physical cores, for 4 ranks"),
        (machine(), 5, "warning", "they share cores"),
        (machine(quota=1.5), 2, "warning", "quota 1.5 CPUs"),
    ],
)
def test_ranks_are_counted_against_cores_and_quota(lay_out, given, num_ranks, level, said):
    finding, _ = processors.examine_cpus(given, num_ranks, 8, lay_out())
    assert finding.level == level
    assert said in finding.found


def test_numa_nodes_are_told_with_the_cores_of_each_rank(lay_out):
    finding = processors.examine_cpus(machine(8, nodes=2), 2, 8, lay_out())[1]
    assert finding.found == "2 nodes of 4 + 4 cores; 2 ranks x 4 threads, pinned to CPUs 0-3 | 4-7"


def test_a_quota_that_stops_its_processes_often_is_told(lay_out):
    root = lay_out(proc__self__cgroup="0::/pod\n")
    cgroup(root, "pod", cpu__stat="nr_periods 1000\nnr_throttled 300\n")
    found = processors.examine_cpus(machine(), 2, 4, root)
    assert ["30 % of its periods" in finding.found for finding in found if finding.level == "warning"] == [True]


@pytest.mark.parametrize(
    ("given", "omp", "torch_threads", "level"),
    [
        (machine(), "", 4, "ok"),
        (machine(quota=2.0), "", 4, "note"),
        (machine(), "2", None, "ok"),
        (machine(), "4", None, "warning"),
        (machine(), "many", None, "warning"),
        (machine(threads=2), "4", None, "note"),
        (machine(threads=2), "8", None, "warning"),
    ],
)
def test_threads_of_all_ranks_are_counted_against_the_cpus(given, omp, torch_threads, level):
    assert level_of(processors.examine_threads(given, 2, omp, torch_threads)) == level


@pytest.mark.parametrize(
    ("governors", "level", "said"),
    [
        ([], "ok", "the firmware or the hypervisor sets it"),
        (["performance"] * 4, "ok", "governor performance"),
        (["performance", "powersave", "powersave", "performance"], "note", "governor powersave on 2 of 4 CPUs"),
    ],
)
def test_a_clock_that_saves_power_is_told(lay_out, governors, level, said):
    names = (f"sys__devices__system__cpu__cpu{cpu}__cpufreq__scaling_governor" for cpu in range(4))
    root = lay_out(**dict(zip(names, governors, strict=False)))
    (finding,) = processors.examine_places(machine(), root)
    assert (finding.topic, finding.level) == ("clock", level)
    assert said in finding.found
    assert ("cpupower" in finding.todo) == (level == "note")


def test_a_governor_that_can_not_be_read_is_told(lay_out):
    root = lay_out()
    os.makedirs(os.path.join(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    (finding,) = processors.examine_places(machine(), root)
    assert (finding.level, "governor unreadable on 1 of 4 CPUs" in finding.found) == ("note", True)


@pytest.mark.parametrize(
    ("quota", "found", "whole"),
    [
        (2.5, "2.5 CPUs: 2 threads can't use all of it", 2),
        (1.5, "1.5 CPUs: 1 thread can't use all of it", 2),
        (0.5, "0.5 CPUs: its one thread is stopped often", 1),
    ],
)
def test_a_quota_with_a_fraction_is_told_with_a_whole_one(lay_out, quota, found, whole):
    finding, _ = processors.examine_places(machine(quota=quota), lay_out())
    assert (finding.topic, finding.level, finding.found) == ("quota", "note", found)
    assert f"--cpus {whole}" in finding.todo


def test_a_whole_quota_is_not_told(lay_out):
    assert len(processors.examine_places(machine(quota=2.0), lay_out())) == 1


def test_cores_whose_other_thread_is_not_ours_are_told(lay_out):
    finding, _ = processors.examine_places(dataclasses.replace(machine(), num_split_cores=2), lay_out())
    assert (finding.topic, finding.level) == ("hyperthreads", "note")
    assert "some hardware threads of 2 cores are not ours" in finding.found


@pytest.mark.parametrize(
    ("total", "free", "level", "said"),
    [
        (0, 0, "ok", "none"),
        (8 * GIB, 8 * GIB, "ok", "none in use"),
        (8 * GIB, 5 * GIB, "note", "3 GiB of 8 GiB in use"),
    ],
)
def test_swap_that_is_in_use_is_told(lay_out, total, free, level, said):
    meminfo = f"MemTotal: 8 kB\nSwapTotal:  {total // 1024} kB\nSwapFree:  {free // 1024} kB\n"
    (finding,) = limits.examine_swap(lay_out(proc__meminfo=meminfo))
    assert (finding.level, finding.found.startswith(said)) == (level, True)
    assert bool(finding.todo) == (level == "note")


# ---------------------------------------------------------------- tests that fail themselves


def test_a_test_that_hangs_or_fails_is_a_finding_and_the_others_go_on():
    hung = examination._guarded("disk", lambda: time.sleep(0.5) or [], 0.05)
    assert (hung[0].topic, hung[0].level) == ("disk", "warning")
    assert "did not end within 0.05 s" in hung[0].found
    broken = examination._guarded("disk", lambda: [][0])
    assert "IndexError" in broken[0].found
    assert examination._guarded("disk", lambda: [ok("disk", "whole")])[0].found == "whole"
    time.sleep(0.5)  # until the first one's thread has ended
