"""Run by tests/test_plugin.py in a pytest of its own, with options."""

import os
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from tests.plugin import covered


@pytest.mark.ranks(2)
def test_fails_last(rank):
    print(f"printed by {rank}\n", end="")  # in one piece
    print(f"told by {rank}", file=sys.stderr)
    covered.of_rank(rank)
    secret = rank * 10 + 7
    dist.barrier()
    assert rank == 0 or secret == 0


@pytest.mark.ranks(2)
def test_after_it():
    dist.barrier()


@pytest.mark.skipif("PIDS" not in os.environ, reason="is waited for and ended")
@pytest.mark.ranks(2)
def test_waits_for_ever(rank):
    child = subprocess.Popen(["sleep", "1000"])
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(f"{os.environ['PIDS']}/{rank}", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {daemon.pid}\n")
    threading.Event().wait()
