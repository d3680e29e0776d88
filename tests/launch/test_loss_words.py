"""What a launcher says when nodes are lost, or come back."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from phalanx.launch.environment import Attempt
from phalanx.launch.nodes.joint_attempts import _changes
from phalanx.launch.nodes.messages import Start
from tests.launch.jobs import LIMIT_S
from tests.launch.test_nodes import nodes

__all__ = ["nodes"]  # a fixture


def test_the_last_loss_says_that_the_restarts_are_used_and_phalanx_why_does_later(nodes, tmp_path):
    group = nodes("print('training', os.environ['WORLD_SIZE'], flush=True)\nsignal.pause()")
    for _ in range(3):
        flags = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=60")
        group.start(*flags, backend="c10d", nnodes="1:3")
        group.wait_for_rendezvous()
    first, second, third = group.started
    for job in group.started:
        assert "training 3" in job.stdout.readline()
    third.kill()
    for job in (first, second):
        assert "training 2" in job.stdout.readline()
    second.kill()
    _, err = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 1
    used = "no restart is left of the 1 that --max-restarts allows; raise it"
    assert err.endswith(f" was lost: its process has ended; exit code 1\nphalanx run: {used}\n")
    assert "restart 1 of 1\nphalanx run: nodes of the job: 2, before 3: the others go on\n" in err
    [folder] = tmp_path.glob("node0/*")
    why = [sys.executable, "-m", "phalanx", "why", str(folder)]
    assert used in subprocess.run(why, capture_output=True, text=True, timeout=LIMIT_S).stdout.replace("\n", " ")


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_on_one_node_ends_the_job_and_the_other_says_so(nodes, tmp_path, interrupted):
    fail = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and RANK == 1: os._exit(9)\n"
    wait = "signal.pause()"
    group = nodes(f"{fail}print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n{wait}")
    for _ in range(2):
        group.start("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1")
        group.wait_for_rendezvous()
    for job in group.started:
        assert any("attempt 1" in line for line in iter(job.stdout.readline, ""))
    group.started[interrupted].send_signal(signal.SIGINT)
    ends = group.finish()
    assert [code for code, _, _ in ends] == [130, 130], ends
    said = f"#{interrupted} (rank {interrupted}) was stopped by Ctrl-C, which ends the job"
    other = 1 - interrupted
    assert re.search(f"phalanx run: node \\S+ {re.escape(said)}; exit code 130\n$", ends[other][2])
    assert not any(word in err for _, _, err in ends for word in ("restart is left", "was lost"))
    [folder] = tmp_path.glob(f"node{other}/*")
    why = [sys.executable, "-m", "phalanx", "why", str(folder)]
    assert said in " ".join(subprocess.run(why, capture_output=True, text=True, timeout=LIMIT_S).stdout.split())


@pytest.mark.parametrize(
    ("num_nodes", "num_before", "was_away", "said"),
    [
        (2, 0, False, []),
        (1, 2, False, ["nodes of the job: 1, before 2: the others go on"]),
        (2, 1, False, ["nodes of the job: 2, before 1: all go on together"]),
        (2, 2, False, ["nodes of the job: 2, as before: one was replaced, or was away for a moment"]),
        (2, 2, True, ["nodes of the job: 2; the others went on while this one was away, and now it is back"]),
        (2, 0, True, []),  # it joins
    ],
)
def test_a_change_of_the_nodes_is_told_from_where_this_one_stands(num_nodes, num_before, was_away, said):
    order = Start(Attempt(world_size=num_nodes, num_local_ranks=1, num_nodes=num_nodes, master_port=1))
    assert _changes(order, num_before, "", None, was_away=was_away) == said


@pytest.mark.slow
def test_a_launcher_that_was_stopped_says_for_how_long_and_what_to_do(nodes):
    group = nodes(
        "print('training', os.environ['WORLD_SIZE'], flush=True)\nif RANK or not ALONE: signal.pause()".replace(
            "ALONE", "os.environ['WORLD_SIZE'] == '1'"
        )
    )
    for _ in range(2):
        flags = ("--nproc-per-node", "1", "--no-preload", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=60")
        group.start(*flags, backend="c10d", nnodes="1:2")
        group.wait_for_rendezvous()
    first, second = group.started
    for job in group.started:
        assert "training 2" in job.stdout.readline()
    second.send_signal(signal.SIGSTOP)
    first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0
    second.send_signal(signal.SIGCONT)
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 1
    assert re.search(
        r"this launcher was stopped for 1\d s \(Ctrl-Z or SIGSTOP\), so the others count this node", err
    ), err
    assert "Traceback" not in err
