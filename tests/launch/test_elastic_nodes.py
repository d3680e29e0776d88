"""``--nproc-per-node MIN:MAX`` on several nodes: one goes on with fewer ranks, and takes them back.

The scripts need no torch: they write the heads of snapshots, which supervisors look at, and nothing behind them. The
node with the number 1 is the one in trouble.
"""

from __future__ import annotations

import socket

import pytest

from tests.launch.test_nodes import nodes

__all__ = ["nodes"]  # a fixture

HEAD = """
from phalanx.checkpoint.memory.layout import MAGIC, Head, region_offset
names = "TORCHELASTIC_RESTART_COUNT WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK"
ATTEMPT, SIZE, LOCAL_RANK, LOCAL_SIZE, NODE, NUM_NODES, ROLE_RANK = (int(os.environ[name]) for name in names.split())
os.write(1, f"{ATTEMPT} {SIZE} {NODE} of {NUM_NODES} {LOCAL_RANK} of {LOCAL_SIZE} {ROLE_RANK}\\n".encode())

def snapshots():
    step = 0
    while True:
        step += 1
        fd = os.open(os.environ["PHALANX_SNAPSHOTS"], os.O_RDWR)
        head = Head(MAGIC, 1, step, 0, LOCAL_SIZE, ATTEMPT, bytes(16))
        os.pwrite(fd, head.pack(), region_offset(LOCAL_RANK, step % 2))
        os.close(fd)
        time.sleep(0.05)
"""
RANK_3_DIES = """
if SIZE == 4:
    signal.pause() if RANK != 3 else sys.exit(3)
"""
HERE = socket.gethostname()
FAILED = "rank 3 failed before any progress"
FAILED_AGAIN = "rank 3 failed again before any progress"


@pytest.fixture
def run(nodes):
    """``run(source, *flags)`` runs a job on two nodes; returns its ranks, and the exit code and lines of each node."""

    def make(source, *flags, nnodes="2"):
        group = nodes(HEAD + source)
        for number in range(2):
            flags_here = ["--nproc-per-node", ["2", "1:2"][number], "--no-preload", "--no-keep", *flags]
            group.start(*flags_here, backend="static" if nnodes == "2" else "c10d", nnodes=nnodes)
            group.wait_for_rendezvous()  # so that the first is the node with the number 0
        ends = group.finish()
        ranks = sorted(line for _, out, _ in ends for line in out.splitlines())
        said = [
            [
                line.removeprefix("phalanx run: ")
                for line in err.partition("logs in ")[2].splitlines()[1:]
                if " the job at " not in line
            ]
            for _, _, err in ends
        ]
        return ranks, [code for code, _, _ in ends], said

    return make


def attempt(number, *local_sizes):
    """Return the lines of all ranks of an attempt in which nodes have so many of them."""
    places = [(node, local) for node, size in enumerate(local_sizes) for local in range(size)]
    return [
        f"[rank {rank}] {number} {len(places)} {node} of {len(local_sizes)} {local} of {local_sizes[node]} {rank}"
        for rank, (node, local) in enumerate(places)
    ]


def check(ranks, *attempts):
    """Check that there were these attempts, with so many ranks on each node.

    A rank may be ended before it writes its line; in the last attempt none is.
    """
    want, ranks = [{*attempt(number, *sizes)} for number, sizes in enumerate(attempts)], {*ranks}
    assert ranks <= set.union(*want)
    assert all(ranks & lines for lines in want)
    assert ranks >= want[-1]


def test_a_node_does_without_a_rank_that_always_dies_at_once(run):
    ranks, codes, said = run(RANK_3_DIES, "--max-restarts", "3")
    assert codes == [0, 0], said
    check(ranks, (2, 2), (2, 1))
    for lines in said:
        assert "restart 1 of 3" in lines
    assert f"{HERE}: going on with 1 rank, before 2: {FAILED}" in said[0]
    assert f"{HERE}: {FAILED}: going on with 1 rank of 1 to 2" in said[1]


def test_a_planned_restart_takes_the_rank_back_and_is_not_counted(run):
    source = RANK_3_DIES.replace("SIZE == 4", "ATTEMPT == 0") + "if SIZE == 3: snapshots()\n"
    ranks, codes, said = run(source, "--max-restarts", "1", "--regrow-after", "0.2")
    assert codes == [0, 0], said
    check(ranks, (2, 2), (2, 1), (2, 2))
    assert f"{HERE}: going on with 2 ranks, before 1: planned restart, which does not count" in said[0]
    planned = f"{HERE}: after 0.2 s with 1 rank: planned restart, which does not count, with 2 ranks x "
    assert any(line.startswith(planned) for line in said[1]), said[1]


def test_a_planned_restart_that_fails_costs_nothing_but_patience(run):
    source = RANK_3_DIES + "if ATTEMPT < 3: snapshots()\n"
    ranks, codes, said = run(source, "--max-restarts", "1", "--regrow-after", "0.2")
    assert codes == [0, 0], said
    check(ranks, (2, 2), (2, 1), (2, 2), (2, 1))
    back = f"{HERE}: {FAILED_AGAIN}: going back to 1 rank x "
    assert any(line.startswith(back) and line.endswith("; 2 again after 0.4 s") for line in said[1]), said[1]


def test_a_failure_on_another_node_is_the_occasion_to_take_the_rank_back_after_progress(run):
    fails_later = """
if ATTEMPT == 1 and RANK == 2:
    time.sleep = lambda _: open("progress", "w").close()  # behind the first snapshot
if ATTEMPT == 1 and RANK == 0:
    while not os.path.exists("progress"): time.sleep(0.02)
    sys.exit(4)
if ATTEMPT == 1: snapshots()
"""
    source = RANK_3_DIES.replace("SIZE == 4", "ATTEMPT == 0") + fails_later
    ranks, codes, said = run(source, "--max-restarts", "2", "--regrow-after", "0")
    assert codes == [0, 0], said
    check(ranks, (2, 2), (2, 1), (2, 2))
    assert f"{HERE}: going on with 2 ranks, before 1" in said[0]
    assert "restart 2 of 2" in said[1]


def test_without_snapshots_there_is_no_planned_restart(run):
    source = RANK_3_DIES + "time.sleep(1)\n"
    ranks, codes, said = run(source, "--max-restarts", "1", "--regrow-after", "0.1")
    assert codes == [0, 0], said
    check(ranks, (2, 2), (2, 1))


def test_a_node_of_which_the_fewest_ranks_fail_leaves_the_job_and_the_other_goes_on(run):
    source = "if NODE == 1: sys.exit(3)\nif NUM_NODES == 2: signal.pause()\n"
    ranks, codes, said = run(source, "--max-restarts", "3", nnodes="1:2")
    assert codes == [0, 3], said
    check(ranks, (2, 2), (2, 1), (2,))
    last = f"{HERE}: rank 2 failed again before any progress, and 1 rank of 1 to 2 is the minimum"
    assert f"{last}: this node leaves the job" in said[1]
    assert "restart 2 of 3" in said[0]
    assert "restart 3 of 3" not in said[0]


def test_without_further_restarts_the_job_ends_on_all_nodes(run):
    ranks, codes, said = run("sys.exit(3) if RANK == 3 else signal.pause()\n", "--max-restarts", "0")
    assert codes == [3, 3], said
    assert {*ranks} <= {*attempt(0, 2, 2)}
    assert not any("leaves the job" in line for lines in said for line in lines)
