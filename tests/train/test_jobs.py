"""Whole jobs that train: asked to make room, killed, checked by ``phalanx check --resume``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from phalanx import checkpoint

pytestmark = pytest.mark.usefixtures("warm_jobs")

SCRIPT = Path(__file__).parent / "_small.py"
RUN = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2"]
LIMIT_S = 100


def records_of(folder, kind):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def run_and_interrupt(folder, arguments, send, flags=(), **environ):
    """Run the script and call `send(job, line)` for each line that it prints; return its code and its words."""
    command = [*RUN, *flags, str(SCRIPT), *arguments]
    environ = {**os.environ, "PHALANX_RUN_FOLDER": str(folder), **environ}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent
    ) as job:
        for line in job.stdout:
            send(job, line)
        errors = job.stderr.read()
        return job.wait(LIMIT_S), errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_asked_to_make_room_saves_and_ends_with_75_and_is_queued_again(tmp_path, number):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n')
    scontrol.chmod(0o755)

    def send(job, line):
        if "step 5 done" in line and "[rank 1]" in line:
            job.send_signal(number)

    environ = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    arguments = ["--num-workers", "1", "--shout-at", "5", "--epochs", "2000"]
    code, errors = run_and_interrupt(tmp_path / "run", arguments, send, ("--max-restarts", "3"), **environ)
    assert code == 75, errors
    assert "all ranks have ended as asked; exit code 75" in errors
    assert "restart" not in errors
    assert (tmp_path / "queued").read_text() == "requeue 4711\n"
    [preempted] = records_of(tmp_path / "run", "preempted")
    assert [c.step for c in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")][-1] == preempted["step"] >= 5


# torch waits half a minute for those who may still come, unless it is told not to.
NODES = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=last_call_timeout=1")


def family_of(pid):
    """Return a process and all of its descendants."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in family_of(child))]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(), NODES], ids=["one node", "one of two"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_of_a_job_is_a_signal_to_the_job(tmp_path, number, nodes):
    # As a service manager sends it, and Slurm where it keeps processes together without cgroups.
    def send(job, line):
        if "step 5 done" in line and "[rank 1]" in line:
            for pid in family_of(job.pid):
                os.kill(pid, number)

    code, errors = run_and_interrupt(tmp_path / "run", ["--shout-at", "5", "--epochs", "2000"], send, nodes)
    assert code == 75, errors
    assert "all ranks have ended as asked; exit code 75" in errors


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_until_ready(folder):
    """Return when the standby forker in a run of that folder has imported everything."""
    deadline = time.monotonic() + LIMIT_S
    while not any("ready" in log.read_text() for log in folder.glob("logs/_small/*/standby.log")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_reaper_holds_nobodys_socket_so_that_each_end_is_noticed_at_once(cold_jobs, tmp_path):
    held = {}

    def send(job, line):
        if "processes of the ranks" in line:
            wait_until_ready(tmp_path)
            for pid in family_of(job.pid):
                if Path(f"/proc/{pid}/comm").read_text() == "rank-reaper\n":
                    held[pid] = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]
            job.send_signal(signal.SIGTERM)

    run_and_interrupt(tmp_path / "run", ["--epochs", "1000"], send, ("--max-restarts", "1"))
    assert [sorted(set(names)) for names in held.values()] == [["anon_inode:[pidfd]"]] * 2


@pytest.mark.slow
def test_a_restart_is_forked_from_a_process_that_has_the_scripts_imports(tmp_path):
    parents, kept, printed = [], [], []

    def send(job, line):
        printed.append(line)
        if found := re.search(r"processes of the ranks: (\d+) (\d+)", line):
            kept.append(found[1])
            parents.append(parent_of(found[2]))
            if len(parents) == 1:
                wait_until_ready(tmp_path)
                os.kill(int(found[2]), signal.SIGKILL)

    code, errors = run_and_interrupt(tmp_path / "run", ["--epochs", "1000"], end_after(send), ("--max-restarts", "1"))
    assert code == 75, errors
    starts = records_of(tmp_path / "run", "start")
    assert [start["resumed_from"] and start["resumed_from"]["source"] for start in starts] == [None, "memory"]
    [modules] = (tmp_path / "logs" / "_small").glob("*/attempt_0/rank_0/modules.json")
    assert any("argparse" in names for _, names in json.loads(modules.read_text())["steps"])
    assert len(set(parents)) == 2  # the first forker was relieved
    assert len(set(kept)) == 1  # and the rank that was not to blame is still its child
    costs = [line for line in printed if "snapshots in memory" in line]
    assert costs
    assert all(re.search(r"(after each step|every \d+ steps): [\d.]+% of the time, [\d.]+ MiB", line) for line in costs)


def end_after(send):
    """Wrap `send` so that the job is asked to make room once it trains again."""
    starts = []

    def wrapped(job, line):
        send(job, line)
        if "resuming after step" in line:
            starts.append(line)
        if starts and "epoch" in line:
            job.send_signal(signal.SIGUSR1)
            starts.clear()

    return wrapped


FAILING = """
import os, signal, sys
import torch
import phalanx

fails = sys.argv[1] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0" else ""
if fails == "before it trains":
    os._exit(7)

class Callback:
    def on_step(self, trainer):
        if trainer.step == 6 and fails == "in the first step of an epoch":
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(int(sys.argv[2]))
model = torch.nn.Linear(4, 1)
inputs = torch.randn(40, 4)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
options = dict(max_epochs=2, global_batch_size=8, snapshot_every=1, callbacks=[Callback()], folder="run")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trainer = phalanx.Trainer(model, optimizer, torch.nn.functional.mse_loss, resume="never", **options)
trainer.fit(data)
"""


def run_failing(folder, fails, seed=0):
    """Run a job of two epochs of 5 steps whose first attempt fails, and is restarted; return what it prints."""
    (folder / "failing.py").write_text(FAILING)
    command = [*RUN, "--max-restarts", "1", "failing.py", fails, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert ("restart 1 of 1" in done.stderr) == bool(fails)
    return done.stdout


@pytest.mark.slow
def test_a_job_that_begins_anew_does_so_although_its_first_attempt_fails_before_it_trains(tmp_path):
    run_failing(tmp_path, "")
    printed = run_failing(tmp_path, "before it trains", seed=1)
    assert "already finished" not in printed
    [start] = records_of(tmp_path / "run", "start")
    assert start["resumed_from"] is None
    [before] = (tmp_path / "run").glob("checkpoints.before-*")
    assert (
        f'resume="never": the run that was in run is kept there as {before.name} and metrics.jsonl.before-' in printed
    )
    wanted = "phalanx run --nproc-per-node 2 --max-restarts 1 failing.py 'before it trains' 1"
    assert start["origin"]["command"] == wanted, "what was typed, not what each rank runs"


@pytest.mark.slow
def test_an_epoch_whose_steps_were_all_trained_before_a_restart_has_no_mean_loss_of_its_own(tmp_path):
    printed = run_failing(tmp_path, "in the first step of an epoch")
    assert "epoch 1, step 5: no steps were left to train" in printed  # begins anew no second time: it goes on
    assert "nan" not in printed
    epochs = records_of(tmp_path / "run", "epoch")
    assert [(record["step"], record["first_step"]) for record in epochs] == [(5, 1), (10, 6)]


def test_another_program_may_exit_with_75_and_is_restarted(tmp_path):
    (tmp_path / "plain.py").write_text("import sys; sys.exit(75)")
    command = [*RUN, "--max-restarts", "1", "--no-preload", "plain.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 75
    assert "restart 1 of 1" in done.stderr
    assert "made room" not in done.stderr


def check_resume(folder, *arguments):
    command = [sys.executable, "-m", "phalanx", "check", "--resume", "--nproc", "2", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)


@pytest.mark.slow
def test_check_resume_finds_a_script_that_resumes_to_the_bit(tmp_path):
    done = check_resume(tmp_path, "--epochs", "12")
    assert done.returncode == 0, done.stdout
    assert "killed: the same bits as the whole run" in done.stdout
    assert "preempted: the same bits as the whole run" in done.stdout


@pytest.mark.slow
def test_check_resume_finds_what_a_script_forgets(tmp_path):
    done = check_resume(tmp_path, "--epochs", "12", "--forgets")
    assert done.returncode == 1
    assert re.search(r"killed: \d+ differences from the whole run", done.stdout)
    assert re.search(r"model\.0\.bias.*by at most", done.stdout)


def test_verify_resume_is_check_and_refuses_what_run_refuses(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "verify-resume", "--nproc-per-nod", "2", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    usage, line = done.stderr.splitlines()
    assert usage.startswith("usage: phalanx check ")
    assert f"did you mean --nproc-per-node? Right: phalanx check --resume --nproc-per-node 2 {SCRIPT}" in line


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 160])
def test_on_a_terminal_one_progress_bar_shows_steps_loss_and_time_left_and_the_rest_where_there_is_room(
    tmp_path, columns
):
    shown = on_a_terminal([*RUN, str(SCRIPT), "--epochs", "10"], tmp_path, columns)
    bars = [line for line in re.split(r"[\r\n]+", shown) if "/400" in line and "loss" in line]
    assert bars
    for bar in bars:
        assert len(bar) <= columns
        assert re.search(r" \d+/400 loss [\d.e+-]+ (\d+:\d\d:\d\d|-:--:--) ", bar), bar
    more = r"epoch \d+, [\d,]+ samples/s, slowest rank \d+% behind"
    assert any(re.search(more if columns > 80 else r"epoch \d+, [\d,]+ samples/s *$", bar) for bar in bars), bars
    assert not any("\u2026" in bar for bar in bars)  # a part that does not fit is left out
    assert len(re.findall(r"epoch 10, step 400: loss [\d.e+-]+ *\r?\n", shown)) == 1
    assert "/400" not in re.split(r"report:\s", shown)[-1], "the bar is gone before the last line"


def on_a_terminal(command, folder, columns):
    """Run a command on a terminal and return what it showed."""
    environ = {**os.environ, "PHALANX_RUN_FOLDER": str(folder / "run"), "TERM": "xterm-256color"}
    environ.pop("COLUMNS", None)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(command, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder) as job:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the last writer has gone
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
        assert job.wait(LIMIT_S) == 0, shown.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
