"""Where a process stands, told by the environment of each launcher; a real one where it is installed."""

from __future__ import annotations

import pytest

from phalanx.host.schedulers import (
    Placement,
    contradiction,
    detect,
    detect_node,
    expand_counts,
    expand_hosts,
    first_host,
    unused_nodes,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # of the process on its node, in spite of its name
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-09]",
}
KUBEFLOW = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}


def numbers(place):
    return (
        place.rank,
        place.world_size,
        place.local_rank,
        place.local_world_size,
        place.node_rank,
        place.num_nodes,
        place.master_addr,
    )


@pytest.mark.parametrize(
    ("environ", "scheduler", "want"),
    [
        (TORCHRUN, "the environment", (5, 8, 1, 4, 1, 2, "host0")),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},
            "the environment",
            (1, 4, 0, 1, 1, 4, "127.0.0.1"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "far"}, "the environment", (1, 4, 0, 1, 1, 4, "far")),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2, 1, 2, None)),
        ({**OPEN_MPI, "MASTER_ADDR": "head"}, "Open MPI", (3, 4, 1, 2, 1, 2, "head")),
        (MPICH, "MPICH or Intel MPI", (1, 2, 1, 2, 0, 1, "127.0.0.1")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPICH or Intel MPI", (1, 2, 1, 2, 0, 1, "127.0.0.1")),
        (SLURM, "Slurm", (2, 3, 0, 1, 1, 2, "gpu03")),
        ({**SLURM, "PMI_RANK": "9", "PMI_SIZE": "10"}, "Slurm", (2, 3, 0, 1, 1, 2, "gpu03")),
        # mpirun starts its daemons with srun, so its ranks have both.
        ({**SLURM, **OPEN_MPI}, "Open MPI", (3, 4, 1, 2, 1, 2, None)),
        ({**SLURM, **MPICH}, "MPICH or Intel MPI", (1, 2, 1, 2, 0, 1, "127.0.0.1")),
        (KUBEFLOW, "Kubeflow", (2, 3, 0, 1, 2, 3, "job-master-0")),
        (
            {**KUBEFLOW, "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "auto"},
            "Kubeflow",
            (2, 3, 0, 1, 2, 3, "job-master-0"),
        ),
        # The inner launcher counts.
        ({**SLURM, **KUBEFLOW, **TORCHRUN}, "the environment", (5, 8, 1, 4, 1, 2, "host0")),
    ],
)
def test_each_environment_tells_the_place(environ, scheduler, want):
    place = detect(environ)
    assert place.scheduler == scheduler
    assert numbers(place) == want


def test_the_tasks_of_a_slurm_step_agree_on_a_port_that_other_steps_do_not_use():
    first, second = detect(SLURM), detect({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert first.master_port == second.master_port
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).master_port != first.master_port
    assert detect({**SLURM, "SLURM_JOB_ID": "4712"}).master_port != first.master_port
    assert 1024 < first.master_port < 32768  # below those that the system gives away


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        # A batch script, and the shell of salloc: neither is a task.
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "batch"},
    ],
)
def test_a_process_that_nobody_placed_is_alone(environ):
    assert detect(environ) is None
    assert detect_node(environ) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank 2, which must lie in \[0, 2\)"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'one'"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "two"}, r"like 2\(x3\),1, got 'two'"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "4"}, "asks for 4 ranks in this pod.*phalanx run train.py"),
        ({**KUBEFLOW, "PET_NNODES": "some"}, "N or MIN:MAX, got 'some'"),
    ],
)
def test_an_environment_that_contradicts_itself_is_an_error(environ, said):
    with pytest.raises(ValueError, match=said):
        detect(environ)


def test_a_launcher_takes_its_node_from_one_task_per_node():
    environ = {**SLURM, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    place = detect_node(environ)
    assert (place.node_rank, place.num_nodes, place.master_addr) == (1, 2, "gpu03")
    assert contradiction(place, 4) == ""


@pytest.mark.parametrize("environ", [TORCHRUN, KUBEFLOW, {**SLURM, **TORCHRUN}])
def test_a_launcher_inside_a_rank_or_a_pod_runs_a_job_of_its_own(environ):
    assert detect_node(environ) is None


@pytest.mark.parametrize(
    ("environ", "right"),
    [
        ({**SLURM, "SLURM_NODEID": "0", "SLURM_PROCID": "1"}, "srun --ntasks-per-node=1 phalanx run"),
        (OPEN_MPI, "mpirun --map-by ppr:1:node phalanx run"),
        (MPICH, "mpiexec -ppn 1 phalanx run"),
    ],
)
def test_a_launcher_that_is_started_several_times_per_node_is_told_the_right_calls(environ, right):
    said = contradiction(detect_node(environ), 4)
    assert "started phalanx run 2 times on this node, and each would start 4 ranks" in said
    assert right in said
    assert "phalanx.init()" in said


def test_nodes_that_a_batch_script_leaves_out_are_counted():
    batch = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    assert unused_nodes(batch) == 2
    assert unused_nodes({**batch, "SLURM_JOB_NUM_NODES": "1"}) == 0
    assert unused_nodes({**SLURM, **batch}) == 0
    assert unused_nodes({}) == 0


def test_slurms_lists_are_read():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    assert [first_host(text) for text in ("gpu[03-05,9],login1", "node7", "a,b", "r[1,5]n[02-04]-ib,x")] == [
        "gpu03",
        "node7",
        "a",
        "r1n02-ib",
    ]


def test_a_place_outside_its_world_is_an_error():
    with pytest.raises(ValueError, match=r"local rank 2, which must lie in \[0, 2\)"):
        Placement(scheduler="x", rank=0, world_size=4, local_rank=2, local_world_size=2)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu03", ("gpu03",)),
        ("gpu[03-05,9],login1", ("gpu03", "gpu04", "gpu05", "gpu9", "login1")),
        ("a[1-2]b[08-09]", ("a1b08", "a1b09", "a2b08", "a2b09")),
        ("a-b,c", ("a-b", "c")),
        ("x[1-999999999]", ("x1-999999999",)),
        ("", ()),
    ],
)
def test_slurms_hosts_are_told_one_by_one(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts
