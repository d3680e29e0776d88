"""A signal that asks the ranks to save ends no process that loads data for them, whoever sends it to whom."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
from pathlib import Path

import pytest

from phalanx import checkpoint
from tests.launch.jobs import LIMIT_S, PHALANX_RUN, write_script
from tests.launch.test_orphans import ends

pytestmark = pytest.mark.usefixtures("warm_jobs")

DATA = """
import torch, phalanx
from torch import nn
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.zeros(1)
"""
BY_HAND = """
def train():
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    with phalanx.init():
        model = phalanx.DistributedDataParallel(nn.Linear(1, 1))
        for step, (inputs, _) in enumerate(LOADER):
            model(inputs).mean().backward()
            if step == 2:
                print("trains", flush=True)
            is_asked = torch.tensor(float(bool(asked)))
            torch.distributed.all_reduce(is_asked)
            if is_asked:
                phalanx.checkpoint.save("folder", {"model": model.module}, step)
                sys.exit(75)

if __name__ == "__main__":
    train()
"""
TRAINER = """
class Callback:
    def on_step(self, trainer):
        if trainer.step == 3:
            print("trains", flush=True)

model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, global_batch_size=8, num_workers=2,
                          callbacks=(Callback(),), folder="folder", max_epochs=1)
trainer.fit(Numbers())
"""


def by_hand(loader):
    return BY_HAND.replace("LOADER", loader)


TORCHS = "DataLoader(Numbers(), batch_size=4, num_workers=2)"
FORKED_BY_A_SERVER = 'DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="forkserver")'
SPAWNED = 'phalanx.DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")'


def children_first(pid):
    """Return the processes under a process, each before its parent, and itself."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]
    return [below for child in children for below in children_first(child)] + [pid]


def _children(task):
    try:
        return (task / "children").read_text().split()
    except OSError:  # it has ended
        return []


def signal_all(job, sig=signal.SIGTERM):
    """Send a signal to every process of a job, as a service manager does; those that load data are the first."""
    for pid in children_first(job.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


@pytest.mark.parametrize(
    ("source", "send", "code", "num_ranks"),
    [
        (by_hand(TORCHS), subprocess.Popen.terminate, 143, 2),
        (by_hand(TORCHS), signal_all, 143, 2),
        (by_hand(FORKED_BY_A_SERVER), signal_all, 143, 1),  # whose worker imports torch anew, as the next one's
        (by_hand(SPAWNED), signal_all, 143, 1),
        (TRAINER, signal_all, 75, 2),
    ],
    ids=["launcher", "all", "all, forked by a server", "all, spawned", "all, trainer"],
)
def test_ranks_that_are_told_to_end_save_although_processes_load_data_for_them(tmp_path, source, send, code, num_ranks):
    command = [*PHALANX_RUN, "--nproc-per-node", str(num_ranks), write_script(tmp_path, DATA + source)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command, **options) as job:
        try:
            while "trains" not in (line := job.stdout.readline()):
                assert line, job.stderr.read()
            send(job)
            _, said = job.communicate(timeout=LIMIT_S)
        finally:
            job.kill()
    assert job.returncode == code, said
    assert "DataLoader worker" not in said
    assert checkpoint.list_checkpoints(tmp_path / "folder")


PLACES = ("import", "data")  # where a worker that starts, or its fork server, may wait until a test goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
YOUNG = """
import os, signal, sys

def wait_in(place):
    os.write(1, b"%s\\n" % place.encode())
    open(place).close()  # which waits until somebody opens it to write

if __name__ == "__mp_main__":
    wait_in("import")

class Numbers(list):
    def __setstate__(self, state):
        wait_in("data")

if __name__ == "__main__":
    from torch.utils.data import DataLoader
    from phalanx._torch import shield

    shield.watch()
    data = Numbers([1])
    data.has_state = True
    loading = iter(DataLoader(data, num_workers=1, multiprocessing_context=sys.argv[1]))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    sys.stdin.readline()
    if sys.argv[2:] != ["ends"]:
        print(next(loading), flush=True)
"""


WITH_YOUNG = """
import os, sys

class Young(Numbers):
    def __init__(self):
        self.has_state = True

    def __setstate__(self, state):
        os.write(1, b"starts\\n")
        open("goes on").close()

if __name__ == "__main__":
    phalanx.init()
    loader = DataLoader(Young(), batch_size=4, num_workers=1, sampler=phalanx.DistributedSampler(Young()),
                        multiprocessing_context=sys.argv[1])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    phalanx.Trainer(model, optimizer, nn.functional.mse_loss, folder="folder", max_epochs=1).fit(loader)
"""


@pytest.mark.parametrize(("method", "sig"), [("spawn", signal.SIGTERM), ("forkserver", signal.SIGUSR1)])
def test_ranks_save_if_all_are_signalled_while_workers_start(tmp_path, method, sig):
    os.mkfifo(tmp_path / "goes on")
    command = [*PHALANX_RUN, "--nproc-per-node", "1", write_script(tmp_path, DATA + WITH_YOUNG), method]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command, **options) as job:
        try:
            while "starts" not in (line := job.stdout.readline()):
                assert line, job.stderr.read()
            signal_all(job, sig)
            goes_on = os.open(tmp_path / "goes on", os.O_RDWR)
            _, said = job.communicate(timeout=LIMIT_S)
            os.close(goes_on)
        finally:
            job.kill()
    assert job.returncode == 75, said
    assert "DataLoader worker" not in said
    assert checkpoint.list_checkpoints(tmp_path / "folder")


@contextlib.contextmanager
def forked_rank(forked, *args, **options):
    """Run a forked Python program; yields it, and the ends of its stdin and its stdout."""
    given, give = os.pipe()
    told, tell = os.pipe()
    with os.fdopen(give, "w") as stdin, os.fdopen(told) as stdout, contextlib.ExitStack() as stack:
        try:
            rank = stack.enter_context(forked.start(*args, stdin=given, stdout=tell, **options))
        finally:
            os.close(given)
            os.close(tell)
        yield rank, stdin, stdout


@contextlib.contextmanager
def young_workers(forked, tmp_path, *args):
    """Run a process whose worker waits in each of `PLACES`; yields `go_on(place)` behind what `forked_rank` does."""
    for place in PLACES:
        os.mkfifo(tmp_path / place)
    script = tmp_path / "rank.py"
    script.write_text(YOUNG)
    with forked_rank(forked, script, *args, cwd=tmp_path) as started, contextlib.ExitStack() as opened:

        def go_on(place):  # to write alone would wait for one that reads
            opened.callback(os.close, os.open(tmp_path / place, os.O_RDWR))

        yield *started, go_on


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_hear_no_signals_that_ask_a_rank_to_save(forked, tmp_path, method):
    with young_workers(forked, tmp_path, method) as (rank, stdin, stdout, go_on):
        for place in PLACES:
            assert stdout.readline() == f"{place}\n"
            for sig, child in itertools.product(SIGNALS, children_first(rank.pid)[:-1]):
                with contextlib.suppress(ProcessLookupError):  # Python's tracker of resources ends, and starts again
                    os.kill(child, sig)
            go_on(place)
        stdin.close()
        assert stdout.readline() == "tensor([1])\n"
        assert rank.wait(LIMIT_S) == 0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_end_with_their_rank(forked, tmp_path, method):
    with young_workers(forked, tmp_path, method, "ends") as (rank, stdin, stdout, go_on):
        assert stdout.readline() == "import\n"
        go_on("import")
        assert stdout.readline() == "data\n"
        children = children_first(rank.pid)[:-1]
        stdin.close()
        assert rank.wait(LIMIT_S) == 0
        assert all(ends(child) for child in children)


STUCK = """
import os, signal, sys
from torch.utils.data import DataLoader
from phalanx._torch import shield

class Stuck:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            signal.pause()

shield.watch()
loading = iter(DataLoader(Stuck(), num_workers=2))
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_workers_obey_the_end_of_their_rank_and_whoever_comes_once_it_was_killed(forked, is_killed):
    with forked_rank(forked, "-c", STUCK) as (rank, stdin, stdout):
        workers = [int(stdout.readline()) for _ in range(2)]
        for sig, worker in itertools.product(SIGNALS, workers):
            os.kill(worker, sig)
        if is_killed:
            os.kill(rank.pid, signal.SIGKILL)
            rank.wait(LIMIT_S)
            assert not any(ends(worker, 0) for worker in workers)
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
        else:
            stdin.close()
            assert rank.wait(LIMIT_S) == 0
        assert all(ends(worker) for worker in workers)
