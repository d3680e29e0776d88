"""Ctrl-C while a Trainer trains: the first saves, the second ends at once; nothing is started again."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from phalanx import checkpoint
from phalanx.train.resume.preemption import Preemption
from tests.launch.jobs import PHALANX_RUN, Terminal

pytestmark = pytest.mark.usefixtures("warm_jobs")

SCRIPT = str(Path(__file__).parent / "_small.py")
ALONE = [sys.executable]
LAUNCHED = [*PHALANX_RUN, "--nproc-per-node", "2", "--max-restarts", "3"]
_PAUSE_S = 0.3  # between two keys; what comes sooner counts as one


@pytest.fixture
def terminal(tmp_path):
    """``terminal(command, *arguments)`` runs the script on a terminal, for ever."""
    opened = []

    def open_terminal(command, *arguments):
        opened.append(Terminal([*command, SCRIPT, "--epochs", "100000", "--shout-at", "5", *arguments], tmp_path))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


@pytest.mark.parametrize(("command", "code"), [(ALONE, 130), (LAUNCHED, 75)], ids=["alone", "launched"])
def test_ctrl_c_saves_and_says_so(terminal, tmp_path, command, code):
    screen = terminal(command)
    screen.read_until("step 5 done")
    screen.type("\x03")
    assert screen.finish() == code, screen.shown
    assert screen.shown.count("Ctrl-C: saving after this step; once more to end at once") == 1
    assert re.search(r"stopped by Ctrl-C: saved after step \d+; start again to resume\r", screen.shown), screen.shown
    assert "Traceback" not in screen.shown
    assert "restart" not in screen.shown
    folder = tmp_path / "runs" / "_small"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [preempted] = [record for record in records if record["kind"] == "preempted"]
    assert preempted["signal"] == signal.SIGINT
    assert checkpoint.list_checkpoints(folder / "checkpoints")[-1].step == preempted["step"]
    assert "stopped by Ctrl-C" in (folder / "report.html").read_text()
    assert "preempted by" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(("command", "code"), [(ALONE, -signal.SIGINT), (LAUNCHED, 130)], ids=["alone", "launched"])
def test_a_second_ctrl_c_ends_at_once_and_says_what_is_on_disk(terminal, tmp_path, command, code):
    screen = terminal(command, "--never-saved")
    screen.read_until("step 5 done")
    screen.type("\x03")
    screen.read_until("saving\r\n")
    time.sleep(_PAUSE_S)
    screen.type("\x03")
    assert screen.finish() == code, screen.shown
    assert "Traceback" not in screen.shown
    assert "restart" not in screen.shown
    [saved] = checkpoint.list_checkpoints(tmp_path / "runs" / "_small")
    assert f"; the newest checkpoint on disk is that of step {saved.step}\r\n" in screen.shown.replace("\r\n  ", " "), (
        screen.shown
    )
    assert screen.shown.rfind("\x1b[?25l") <= screen.shown.rfind("\x1b[?25h")  # the cursor is back


def test_at_a_prompt_ctrl_c_ends_what_runs_and_not_the_process(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with Preemption() as asked, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert asked.signal == 0


def test_a_job_in_the_background_does_not_hear_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell sets it
    try:
        with Preemption() as asked:
            signal.raise_signal(signal.SIGINT)
        assert asked.signal == 0
    finally:
        signal.signal(signal.SIGINT, before)
