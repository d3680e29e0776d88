"""A job on several nodes that makes room: asked on one of them, it ends on all, and nobody counts a failure."""

from __future__ import annotations

import signal

import pytest

from tests.launch.test_nodes import nodes

__all__ = ["nodes"]  # a fixture

ELASTIC = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=60")
# As the ranks of a Trainer do, all end when any of them was asked to; saving takes some of them longer.
TRAIN = """
from phalanx.record.notes import note_end_for_restart, note_preempted
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
signal.signal(signal.SIGINT, lambda *_: open("asked", "w").close())
print("training", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists("asked"): time.sleep(0.02)
"""
MAKE_ROOM = """
if SLOW: time.sleep(1.0)
note_preempted()
sys.exit(75)
"""
END_FOR_RESTART = """
if os.environ["WORLD_SIZE"] == "1": sys.exit()
note_end_for_restart()
sys.exit(75)
"""


def start_two(nodes, source, *flags):
    group = nodes(TRAIN + source)
    for _ in range(2):
        group.start(*ELASTIC, *flags, backend="c10d", nnodes="1:2")
        group.wait_for_rendezvous()
    for job in group.started:
        assert "training 2" in job.stdout.readline()
    return group


@pytest.mark.parametrize(
    ("sig", "slow", "asked"),
    [
        # Each pair of values is among the first four.
        (signal.SIGTERM, 0, 0),
        (signal.SIGTERM, 1, 1),
        (signal.SIGINT, 0, 1),
        (signal.SIGINT, 1, 0),
        pytest.param(signal.SIGTERM, 0, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 0, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_asked_on_one_node_to_make_room_ends_on_all(nodes, asked, slow, sig):
    group = start_two(nodes, MAKE_ROOM.replace("SLOW", f"RANK == {slow}"))
    group.started[asked].send_signal(sig)
    for code, out, err in group.finish():
        assert code == 75, err
        assert "training" not in out
        assert err.rstrip().endswith(
            "all ranks have ended as asked; exit code 75, run the same command again to continue"
        )
        assert "restart" not in err
        assert "was lost" not in err


def test_a_rank_that_ends_for_a_planned_restart_before_its_launcher_knows_has_not_failed(nodes):
    group = start_two(nodes, END_FOR_RESTART, "--drain")
    group.started[0].send_signal(signal.SIGTERM)
    (left, _, _), (code, out, err) = group.finish()
    assert (left, code) == (75, 0), err
    assert "training 1" in out
    assert "restart 1 of 3" not in err
    assert "exited with code 75" not in err


def test_a_spare_ends_with_the_job_that_makes_room_and_is_told_to_start_again(nodes):
    group = start_two(nodes, MAKE_ROOM.replace("SLOW", "False"))
    spare = group.start(*ELASTIC, backend="c10d", nnodes="1:2")
    said = next(line for line in spare.stderr if "nodes of the job are there" in line)
    assert "this one is a spare" in said
    group.started[0].send_signal(signal.SIGTERM)
    (code, out, err) = group.finish()[2]
    assert (code, out) == (75, ""), err
    assert "all ranks have ended as asked; exit code 75, run the same command again to continue" in err
    assert [code for code, _, _ in group.finish()] == [75, 75, 75]
