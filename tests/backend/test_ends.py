"""Threads may be inside the backend when the interpreter ends: the exit code is the script's own, and so is its error.

The scripts hold the two windows open in which such a thread could do harm: while the interpreter ends, and when it is
gone but the process is not, as it runs the destructors of its libraries.
"""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from phalanx import _core

PRELUDE = """
import atexit, ctypes, os, sys, threading, time
import torch, torch.distributed as dist

class Late:
    # Calls a function when the interpreter ends: as an attribute of sys, which is emptied last.
    def __init__(self, function, *args):
        self.call = function, args
    def __del__(self):
        function, args = self.call
        function(*args)

def at_the_very_end():
    pass

atexit.register(lambda: at_the_very_end())  # before the backend's own, and so called after them
name, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group(name, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(200_000), None)  # threads look around every 50 ms
"""


@pytest.fixture
def run_pair(forked, tmp_path):
    """``run_pair(script, name="phalanx")`` runs a script on two ranks; returns the exit code and the stderr of each."""

    def run(script: str, name: str = "phalanx") -> list[tuple[int, str]]:
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(2):
                environ = {**os.environ, "RANK": str(rank), "PHALANX_REPLACE": name if name == "gloo" else ""}
                command = ["-c", PRELUDE + script, name, tmp_path]
                ranks.append(stack.enter_context(forked.start(*command, env=environ)))
            said = [rank.communicate(timeout=120)[1] for rank in ranks]
        return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]

    return run


def test_this_interpreter_parks_threads_that_come_back_to_it_too_late():
    assert _core.PARKS_THREADS or sys.version_info >= (3, 14)


WAITS = """
sys.late = Late(time.sleep, 0.2)
calls = [
    lambda group: dist.all_reduce(torch.ones(3), group=group),
    lambda group: dist.recv(torch.ones(3), 1 - rank, group=group),
    lambda group: dist.irecv(torch.ones(3), 1 - rank, group=group).wait(),
    lambda group: dist.broadcast(torch.ones(3), 1 - rank, group=group, async_op=True).wait(),
    lambda group: dist.barrier(group=group, async_op=True).get_future().wait(),
    lambda group: dist.monitored_barrier(group=group),
]
groups = [[dist.new_group() for _ in calls] for _ in range(2)][rank]  # nobody calls anything in the other rank's
inside = threading.Barrier(len(calls) + 1)

def wait_for_ever(call, group):
    inside.wait()
    while True:
        call(group)

for call, group in zip(calls, groups):
    threading.Thread(target=wait_for_ever, args=(call, group), daemon=True).start()
inside.wait()
dist.barrier()
if rank == 0:
    raise ValueError("my own")
sys.exit(7)
"""


@pytest.mark.parametrize("name", ["phalanx", "gloo"])
def test_threads_that_wait_when_a_script_ends_leave_its_exit_code_and_its_error_alone(run_pair, name):
    (first, said), (second, _) = run_pair(WAITS, name)
    assert (first, second) == (1, 7), said
    assert "ValueError: my own" in said


# Rank 1 takes part in what rank 0 has begun only once the interpreter of rank 0 is ending.
GOES_ON = """
def go_and_wait(create, flags, access, sleep, go, done):
    create(go, flags)
    while not access(done, 0):
        sleep(0.001)
    sleep(0.05)

flags = os.O_CREAT | os.O_WRONLY
go, done = f"{folder}/go", f"{folder}/done"
many = [torch.ones(100_000) for _ in range(20)]
if rank == 0:
    kept = [dist.all_reduce(one, async_op=True) for one in many[:5]]
    kept += [dist.all_reduce(one, async_op=True).get_future() for one in many[5:10]]
    kept += [dist.all_reduce(one, async_op=True).get_future().then(lambda done: 1) for one in many[10:15]]
    for one in many[15:]:
        dist.irecv(one, 1)
    sys.late = Late(go_and_wait, os.open, flags, os.access, time.sleep, go, done)
else:
    while not os.access(go, 0):
        time.sleep(0.001)
    for one in many[:15]:
        dist.all_reduce(one)
    for one in many[15:]:
        dist.send(one, 0)
    os.open(done, flags)
"""


def test_operations_that_finish_while_the_interpreter_ends_touch_nothing_of_it(run_pair):
    for code, said in run_pair(GOES_ON):
        assert (code, said) == (0, "")


AT_EXIT = """
def at_the_very_end():
    total = torch.ones(1)
    dist.all_reduce(total, async_op=True).get_future().wait()
    print(total.item(), file=sys.stderr)

dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda done: print("then", file=sys.stderr))
"""


def test_a_function_that_runs_at_exit_may_wait_for_a_future(run_pair):
    for code, said in run_pair(AT_EXIT):
        assert (code, said) == (0, "then\n2.0\n")
