"""``phalanx explain`` finds what is meant, says it in the reader's language, and needs no terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from phalanx import cli
from phalanx.failure.explain.entries import entries


def explain(capsys, *args):
    code = cli.main(["explain", *args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture(autouse=True)
def english(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


def test_a_name_shows_its_entry_plainly_in_80_columns(capsys):
    code, out, err = explain(capsys, "timeout")
    assert (code, err) == (0, "")
    assert out.startswith("timeout\n\nAn operation passed its deadline")
    assert "Likely causes" in out
    assert "\x1b" not in out
    assert all(len(line) <= 80 and line == line.rstrip() for line in out.splitlines())


def test_a_terminal_gets_the_entry_formatted():
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "phalanx", "explain", "timeout"]
    environ = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=child, stderr=child, env=environ) as process:
        os.close(child)
        printed = b""
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:  # it has ended
                break
            printed += data
            if not data:
                break
    os.close(parent)
    assert process.returncode == 0
    assert b"\x1b[1mtimeout" in printed


@pytest.mark.parametrize(
    ("pasted", "name"),
    [
        ("Connection closed by peer", "gloo-connection-closed"),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:3",
            "gloo-connection-closed",
        ),
        ("Timed out waiting 1800000ms for recv operation to complete", "gloo-timeout"),
        ("Watchdog caught collective operation timeout", "nccl-timeout"),
        ("Expected to have finished reduction in the prior iteration before starting a new one", "unused-parameters"),
        ("Default process group has not been initialized", "no-process-group"),
        ("CUDA error: device-side assert triggered", "device-side-assert"),
        ("OSError: [Errno 24] Too many open files", "open-files"),
        ("Address already in use", "port-in-use"),
        ("all_reduce timed out after 30.0 s (phalanx explain timeout)", "timeout"),
        ("[rank 0] stopped by Ctrl-C: saved after step 32; start again to resume", "ending"),
        ('stopped by Ctrl-C: saved after step 32; start again with resume="auto" to resume', "ending"),
        ("Ctrl-C: saving after this step; once more to end at once", "ending"),
        ("preempted by SIGUSR1: saved after step 237; job 1 is queued again", "ending"),
        ("exit code 1", "exit-1"),
        ("exit code 137", "exit-137"),
        ("exit code: 137", "exit-137"),
        ("exited with code 139", "exit-139"),
        ("137", "exit-137"),
        ("exit 137", "exit-137"),
        ("code 143", "exit-143"),
        ("exitcode  : -9 (pid: 4711)", "exit-137"),
        ("Signal 9 (SIGKILL) received by PID 12345", "exit-137"),
        ("phalanx run: rank 1 (pid 137) exited with code 3", "rank-exited"),
        ("killed by SIGSEGV", "exit-139"),
        ("CUDA error: out of memory", "cuda-out-of-memory"),
        ("already finished at step 48; nothing to train", "already-finished"),
        ("another Trainer of this process has trained in", "same-folder"),
        ("No module named 'phalanx'", "not-installed"),
        ("Expected all tensors to be on the same device", "different-devices"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "child-failed"),
    ],
)
def test_a_pasted_message_shows_its_entry(capsys, pasted, name):
    code, out, _ = explain(capsys, *pasted.split())
    assert (code, out.splitlines()[0]) == (0, name)


def test_a_log_is_read_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("epoch 1\nOSError: [Errno 28] No space left on device\nbye\n"))
    code, out, _ = explain(capsys, "-")
    assert (code, out.splitlines()[0]) == (0, "disk-full")


def test_a_closed_standard_input_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = explain(capsys, "-")
    assert code == 2
    assert err.endswith("phalanx explain: - reads the message from standard input, which is closed\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("timout", "no entry 'timout', did you mean timeout? Right: phalanx explain timeout"),
        ("xylophone", "no entry 'xylophone'; phalanx explain lists all\n"),
        ("there is nothing like this anywhere", "no entry fits this message"),
    ],
)
def test_what_has_no_entry_is_refused(capsys, given, said):
    code, out, err = explain(capsys, given)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("variable", ["LC_ALL", "LC_MESSAGES", "LANG"])
def test_the_environment_chooses_the_language(capsys, monkeypatch, variable):
    monkeypatch.setenv(variable, "zh_CN.UTF-8")
    assert "怎么办" in explain(capsys, "timeout")[1]
    assert "What to do" in explain(capsys, "timeout", "--language", "en")[1]


def test_chinese_has_no_spaces_between_its_characters(capsys):
    _, out, _ = explain(capsys, "rank-left", "--language", "zh")
    assert "发生了什么\uff1a被点名的" in out


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_a_name_all_entries_are_listed(capsys, language):
    code, out, _ = explain(capsys, "--language", language)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "] == [*entries()]
