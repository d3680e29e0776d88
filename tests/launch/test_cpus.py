"""The machine as read from its files, and how ranks share it."""

from __future__ import annotations

import os

import pytest

from phalanx.host.cpus import Machine, count_gpus, divide, format_ranges, read_machine


def machine(num_cores, *, num_nodes=1, threads=1, quota=None):
    """A machine whose second hardware threads are numbered after all first ones, as Linux does."""
    cores = tuple(tuple(core + num_cores * t for t in range(threads)) for core in range(num_cores))
    return Machine(
        cores=cores, numa_nodes=tuple(core * num_nodes // num_cores for core in range(num_cores)), quota_cpus=quota
    )


MOUNTS = """\
30 23 0:26 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
"""


@pytest.fixture
def root(tmp_path):
    """Lay out files under a root folder and return it."""

    def write(files):
        for name, text in {"proc/self/mountinfo": MOUNTS, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return write


def topology(num_cpus, *, siblings, nodes):
    files = {f"sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list": siblings(c) for c in range(num_cpus)}
    return files | {f"sys/devices/system/node/node{n}/cpulist": text for n, text in enumerate(nodes)}


def test_cores_are_those_of_the_affinity_in_the_order_of_their_numa_nodes(root):
    # Two nodes, and even CPUs are on node 1; CPU c and c + 4 are one core.
    files = topology(8, siblings=lambda c: f"{c % 4},{c % 4 + 4}\n", nodes=["1,3,5,7\n", "0,2,4,6\n"])
    found = read_machine(root(files), range(8))
    assert found.cores == ((1, 5), (3, 7), (0, 4), (2, 6))
    assert found.numa_nodes == (0, 0, 1, 1)
    assert (found.num_cpus, found.num_cores, found.quota_cpus) == (8, 4, None)
    some = read_machine(root(files), [0, 1, 2, 5])
    assert some.cores == ((1, 5), (0,), (2,))


def two_sockets(root, *, num_cores=8, usable=None):
    """Two sockets, two hardware threads a core; Linux numbers the second ones of all cores after the first."""
    half = num_cores // 2
    nodes = [
        f"{n * half}-{(n + 1) * half - 1},{num_cores + n * half}-{num_cores + (n + 1) * half - 1}\n" for n in (0, 1)
    ]
    siblings = lambda c: f"{c % num_cores},{c % num_cores + num_cores}\n"  # noqa: E731
    files = topology(2 * num_cores, siblings=siblings, nodes=nodes)
    return read_machine(root(files), usable or range(2 * num_cores))


@pytest.mark.parametrize(
    ("num_ranks", "num_threads", "cpus"),
    [
        (1, 8, ""),
        (2, 4, "0-3,8-11 | 4-7,12-15"),
        (4, 2, "0-1,8-9 | 2-3,10-11 | 4-5,12-13 | 6-7,14-15"),
        (8, 1, "0,8 | 1,9 | 2,10 | 3,11 | 4,12 | 5,13 | 6,14 | 7,15"),
        (16, 1, ""),
    ],
)
def test_ranks_on_two_sockets_share_neither_cores_nor_sockets(root, num_ranks, num_threads, cpus):
    division = divide(num_ranks, two_sockets(root), pin=True)
    shares, note = division
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    assert note == f"{ranks} x {threads}{', not pinned: 8 cores' if num_ranks > 8 else ''}"
    assert division.cpus == cpus
    assert not any(share.is_crowded for share in shares)


def test_cores_with_a_hardware_thread_of_somebody_else_are_counted(root):
    assert two_sockets(root).num_split_cores == 0
    assert two_sockets(root, usable=[0, 8, 1, 2]).num_split_cores == 2


def test_a_machine_without_topology_has_a_core_per_cpu(root):
    assert read_machine(root({}), [2, 5]).cores == ((2,), (5,))


def test_this_machine_has_the_cpus_of_our_affinity():
    found = read_machine()
    assert sorted(cpu for core in found.cores for cpu in core) == sorted(os.sched_getaffinity(0))


V2 = "0::/user.slice/job\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/job/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n"}, 3.0),
        # In a container the path is the host's, and the files of the container's root count.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/user.slice/job/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/user.slice/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_quota_is_the_least_on_the_way_up(root, files, quota):
    assert read_machine(root(files), range(4)).quota_cpus == quota


@pytest.mark.parametrize(("quota", "num_cores"), [(None, 8), (2.5, 2), (0.5, 1), (16.0, 8)])
def test_a_quota_pays_for_so_many_cores(quota, num_cores):
    assert machine(8, quota=quota).num_cores == num_cores


@pytest.mark.parametrize(
    ("names", "environ", "num_gpus"),
    [
        ((), {}, 0),
        ((), {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), {}, 2),
        (("nvidia0", "nvidia1"), {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (("nvidia0", "nvidia1"), {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (("nvidia0", "nvidia1"), {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (("nvidia0", "nvidia1"), {"CUDA_VISIBLE_DEVICES": "1,7,0"}, 1),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 2),
    ],
)
def test_gpus_are_the_devices_that_are_there_and_visible(root, names, environ, num_gpus):
    assert count_gpus(environ, root({f"dev/{name}": "" for name in names})) == num_gpus


def test_amd_gpus_are_the_nodes_of_the_driver_that_have_an_id(root):
    nodes = "sys/class/kfd/kfd/topology/nodes"
    there = root({f"{nodes}/0/gpu_id": "0\n", f"{nodes}/1/gpu_id": "4711\n", f"{nodes}/2/gpu_id": "4712\n"})
    assert count_gpus({}, there) == 2
    assert count_gpus({"HIP_VISIBLE_DEVICES": "1"}, there) == 1


@pytest.mark.parametrize(
    ("num_ranks", "on", "note", "cpus"),
    [
        (1, machine(4), "1 rank x 4 threads", ""),
        (2, machine(2), "2 ranks x 1 thread", "0 | 1"),
        (2, machine(4, threads=2), "2 ranks x 2 threads", "0-1,4-5 | 2-3,6-7"),
        (3, machine(4, num_nodes=2), "3 ranks x 1 thread", "0 | 1 | 2-3"),
        (3, machine(2), "3 ranks x 1 thread, not pinned: 2 cores", ""),
        (2, machine(4, quota=3.0), "2 ranks x 1 thread, not pinned: quota of 3 CPUs", ""),
        (2, machine(4, quota=4.0), "2 ranks x 2 threads", "0-1 | 2-3"),
        (16, machine(16), "16 ranks x 1 thread", "0 | 1 | 2 | ... | 15"),
    ],
)
def test_cores_are_divided_and_a_few_words_say_how(num_ranks, on, note, cpus):
    division = divide(num_ranks, on, pin=True)
    shares, said = division
    assert (said, division.cpus) == (note, cpus)
    assert len(shares) == num_ranks
    assert len({share.num_threads for share in shares}) == 1


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 16])
def test_pinned_ranks_have_whole_cores_of_their_own_and_leave_none(num_ranks, num_nodes):
    on = machine(16, num_nodes=num_nodes, threads=2)
    shares, _ = divide(num_ranks, on, pin=True)
    cpus = [cpu for share in shares for cpu in share.cpus]
    assert sorted(cpus) == list(range(32))
    core_of = {cpu: core for core in on.cores for cpu in core}
    node_of = {cpu: node for core, node in zip(on.cores, on.numa_nodes, strict=True) for cpu in core}
    for share in shares:
        assert all(set(core_of[cpu]) <= set(share.cpus) for cpu in share.cpus)
        assert 1 <= share.num_threads <= len(share.cpus) // 2
        if num_ranks % num_nodes == 0:
            assert len({node_of[cpu] for cpu in share.cpus}) == 1


def test_nodes_that_are_too_unlike_are_divided_as_one():
    uneven = Machine(cores=((0,), (1,), (2,), (3,)), numa_nodes=(0, 0, 0, 1))
    shares, _ = divide(4, uneven, pin=True)
    assert [share.cpus for share in shares] == [(0,), (1,), (2,), (3,)]


def test_what_the_user_has_set_stays():
    shares, note = divide(2, machine(4), pin=False)
    assert (note, {share.cpus for share in shares}) == ("2 ranks x 2 threads, not pinned", {()})
    division = divide(2, machine(4), pin=True, omp_num_threads="2")
    assert (division.note, division.cpus) == ("2 ranks x OMP_NUM_THREADS=2", "0-1 | 2-3")
    shares, note = divide(2, machine(4), pin=True, omp_num_threads="8")
    assert (note, {share.cpus for share in shares}) == (
        "2 ranks x OMP_NUM_THREADS=8, not pinned: more threads than CPUs",
        {()},
    )


def test_no_rank_is_pinned_to_fewer_cpus_than_it_has_threads():
    # Parts of 1, 2 and 2 cores: the first has 2 CPUs.
    shares, note = divide(3, machine(5, threads=2), pin=True, omp_num_threads="3")
    assert (note, {share.cpus for share in shares}) == (
        "3 ranks x OMP_NUM_THREADS=3, not pinned: more threads than CPUs",
        {()},
    )


@pytest.mark.parametrize(
    ("num_ranks", "on", "omp", "is_crowded"),
    [
        (2, machine(2), "", False),
        (2, machine(4), "2", False),
        (2, machine(2), "2", True),
        (3, machine(2), "", True),
        (2, machine(8, quota=3.0), "2", True),
        (2, machine(8, quota=4.0), "2", False),
        (2, machine(2, threads=2), "2", False),
    ],
)
def test_ranks_are_crowded_where_their_threads_are_more_than_can_run(num_ranks, on, omp, is_crowded):
    assert {share.is_crowded for share in divide(num_ranks, on, pin=True, omp_num_threads=omp).shares} == {is_crowded}


def test_ranges_are_written_as_the_kernel_does():
    assert [format_ranges(n) for n in ([], [3], [0, 1, 2, 5], [1, 3])] == ["", "3", "0-2,5", "1,3"]
