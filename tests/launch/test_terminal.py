"""What a person at a terminal sees and types."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from tests.launch.jobs import PHALANX_RUN, Terminal, write_script

pytestmark = pytest.mark.usefixtures("warm_jobs")


@pytest.fixture
def terminal(tmp_path):
    """``terminal(source, *flags)`` runs a job of two ranks on a terminal."""
    opened = []

    def open_terminal(source, *flags):
        command = [*PHALANX_RUN, "--nproc-per-node", "2", "--no-preload", *flags, write_script(tmp_path, source)]
        opened.append(Terminal(command, tmp_path))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def longest_line(terminal):
    return max(
        len(line) for line in re.sub(r"\x1b\[[0-?]*[A-Za-z]", "", terminal.shown).replace("\r", "\n").splitlines()
    )


FOREVER = """
print("up", flush=True)
while True: signal.pause()
"""


def test_ctrl_c_ends_the_job_in_one_line_without_a_traceback(terminal):
    screen = terminal(FOREVER)
    screen.read_until("up", count=2)
    screen.type("\x03")
    assert screen.finish() == 130
    assert "phalanx run: SIGINT: ending 2 ranks; Ctrl-C again kills them\r\n" in screen.shown
    assert "Traceback" not in screen.shown
    assert "KeyboardInterrupt" not in screen.shown


@pytest.mark.parametrize(
    ("does", "said"),
    [("pass", "no Trainer has saved since the first"), ("note_preempted()", "a Trainer has ended as asked")],
)
def test_a_second_ctrl_c_kills_at_once_and_says_what_was_saved(terminal, does, said):
    screen = terminal(
        f"""
        from phalanx.record.notes import note_preempted
        def stay(*_):
            {does}
            print("not yet", flush=True)
        for sig in (signal.SIGINT, signal.SIGTERM): signal.signal(sig, stay)
        print("up", flush=True)
        while True: signal.pause()
        """
    )
    screen.read_until("up", count=2)
    screen.type("\x03")
    screen.read_until("not yet", count=2)
    screen.type("\x03")
    assert screen.finish() == 130
    assert f"phalanx run: SIGINT again: killing 2 ranks at once; {said}\r\n" in screen.shown.replace("\r\n  ", " ")


def test_the_note_of_a_rank_that_waits_is_folded_with_its_prefix(terminal, monkeypatch):
    monkeypatch.setenv("PHALANX_STALL_S", "0.5")
    screen = terminal(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("phalanx")
        def a_function_that_waits_for_the_other_rank():
            dist.all_reduce(torch.ones(2))
        if os.environ["RANK"] == "0": signal.pause()
        a_function_that_waits_for_the_other_rank()
        """
    )
    screen.read_until("(timeout 1800.0 s)")
    assert longest_line(screen) <= 80
    assert re.search(r"\[rank 1\]\S* phalanx: rank 1: all_reduce #1 of group 'default' at ", screen.shown)
    assert re.search(r"\[rank 1\]\S*   \S.*\(timeout 1800\.0 s\)", screen.shown)
    screen.type("\x03")
    assert screen.finish() == 130


def test_a_ctrl_c_that_a_rank_has_lost_comes_again_and_leaves_no_traceback(terminal):
    """As in a callback of an import, where Python prints the exception and goes on."""
    screen = terminal(
        """
        class Callback:
            def __del__(self):
                print("up", flush=True)
                while True: signal.pause()
        Callback()
        print("gone on", flush=True)
        while True: signal.pause()
        """
    )
    screen.read_until("up", count=2)
    screen.type("\x03")
    assert screen.finish() == 130
    assert screen.shown.count("gone on") == 2
    assert "Exception ignored" not in screen.shown
    assert "Interrupt" not in screen.shown


TICKING = """
print("up", os.getpid(), flush=True)
while True: time.sleep(0.05)
"""


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_stops_the_ranks_too_and_fg_and_bg_let_them_go_on(tmp_path):
    command = shlex.join([*PHALANX_RUN, "--nproc-per-node", "2", "--no-preload", write_script(tmp_path, TICKING)])
    shell = Terminal(["sh", "-i"], tmp_path)
    try:
        shell.type(f"PS1=; {command}\n")
        shell.read_until("up", count=2)
        shell.read_until("\n", count=shell.shown.count("\n"))
        pids = [int(pid) for pid in re.findall(r"up (\d+)\r", shell.shown)]
        for number, (back, typed) in enumerate((("fg", "fg\n"), ("bg", "bg\n")), 1):
            shell.type("\x1a")
            shell.read_until("Stopped", count=number)
            assert await_states(pids, "T"), back
            shell.type(typed)
            assert await_states(pids, "SR"), back
        shell.type("kill %1\n")
        shell.read_until("SIGTERM: ending 2 ranks")
        shell.type("wait; exit\n")
        shell.finish()
        assert "Traceback" not in shell.shown
    finally:
        shell.close()


def await_states(pids, states, limit_s=20):
    """Return whether each process comes to one of these states within the limit."""
    deadline = time.monotonic() + limit_s
    while not all(state_of(pid) in states for pid in pids):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)  # a stop makes no event for others than the parent
    return True


def test_the_prefix_is_coloured_by_rank(terminal):
    screen = terminal("print('hello')")
    assert screen.finish() == 0
    assert "\x1b[36m[rank 0]\x1b[0m hello\r\n" in screen.shown
    assert "\x1b[33m[rank 1]\x1b[0m hello\r\n" in screen.shown


def test_a_long_warning_of_all_ranks_is_one_beside_a_progress_bar(terminal):
    screen = terminal(
        """
        import warnings
        from phalanx.train.report.progress import ProgressBar
        bar = ProgressBar.open(3)
        open(f"up{RANK}", "w").close()
        while not os.path.exists(f"up{1 - RANK}"): time.sleep(0.002)
        warnings.warn("a loader that is not divided " * 5, stacklevel=1)
        print("words", file=sys.stderr)
        if bar: bar.close()
        """
    )
    assert screen.finish() == 0
    (line,) = (line for line in screen.shown.splitlines() if "UserWarning" in line)
    assert "[all ranks] " in line
    assert line.endswith("divided ")
    assert screen.shown.count("words") == 2


def test_what_is_printed_above_a_progress_bar_is_not_cut_into_lines(terminal):
    screen = terminal(
        """
        from phalanx.train.report.progress import ProgressBar
        bar = ProgressBar.open(3)
        if bar: print("a line that is longer than the screen is wide, " * 2 + "whole")
        if bar: bar.close()
        """
    )
    assert screen.finish() == 0
    assert "a line that is longer than the screen is wide, " * 2 + "whole\r\n" in screen.shown


def test_the_progress_bar_of_a_run_that_goes_on_begins_at_its_step(terminal):
    screen = terminal(
        """
        from phalanx.train.report.progress import ProgressBar
        bar = ProgressBar.open(300, 75)
        if bar: bar.close()
        """
    )
    assert screen.finish() == 0
    assert " 75/300" in screen.shown


@pytest.mark.slow
def test_a_run_that_is_over_has_no_progress_bar(terminal):
    screen = terminal(
        """
        import phalanx, torch
        for _ in range(2):
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            data = torch.utils.data.TensorDataset(torch.ones(64, 1), torch.ones(64, 1))
            trainer = phalanx.Trainer(model, optimizer, torch.nn.functional.mse_loss, max_epochs=1, folder="run")
            trainer.fit(data)
        """
    )
    assert screen.finish() == 0
    first, second = screen.shown.split("already finished at step 2")
    assert "starting" in first
    assert "starting" not in second
    assert re.search(r"\r\n\S+\[rank 0\]\S+   max_epochs; to start over, .* or another folder\r\n", second)
    assert longest_line(screen) <= 80


@pytest.mark.parametrize(("exported", "told"), [("80", "71 71 "), ("60", "60 71 60"), ("", "71 71 ")])
def test_columns_exported_by_a_shell_leave_room_for_the_prefix(terminal, monkeypatch, exported, told):
    monkeypatch.setenv("COLUMNS", exported)
    screen = terminal(
        """
        import shutil
        sizes = shutil.get_terminal_size().columns, RANK or os.get_terminal_size(1).columns
        if RANK == 0: print(*sizes, os.environ["COLUMNS"], end="|")
        """
    )
    assert screen.finish() == 0
    assert f" {told}|" in screen.shown


def test_rank_0_reads_what_is_typed(terminal):
    screen = terminal("print('hello', input('name? ') if RANK == 0 else sys.stdin.read() == '')")
    screen.read_until("name? ")
    screen.type("Ada\n")
    assert screen.finish() == 0
    assert "hello Ada\r\n" in screen.shown
    assert "hello True\r\n" in screen.shown


def test_ctrl_d_is_the_end_of_rank_0s_input(terminal):
    screen = terminal("if RANK == 0: print('up', flush=True); print('read', repr(sys.stdin.read()))")
    screen.read_until("up")
    screen.type("words\n\x04")
    assert screen.finish() == 0
    assert "read 'words\\n'\r\n" in screen.shown


def test_rank_0_has_a_terminal_of_its_own_to_ask_for_a_password(terminal):
    screen = terminal("import getpass\nif RANK == 0: print('hello', getpass.getpass('password? '))")
    screen.read_until("password? ")
    screen.type("secret\n")
    assert screen.finish() == 0
    assert "hello secret\r\n" in screen.shown


def test_rank_0_follows_the_size_of_the_terminal(terminal):
    screen = terminal(
        """
        def show(*_):
            print("columns", os.get_terminal_size().columns, flush=True)
            if _: os._exit(0)
        if RANK == 0:
            signal.signal(signal.SIGWINCH, show)
            show()
            while True: signal.pause()
        """
    )
    prefix_columns = len("[rank 0] ")
    screen.read_until(f"columns {80 - prefix_columns}\r\n")
    screen.resize(50, 120)
    assert screen.finish() == 0
    assert f"columns {120 - prefix_columns}\r\n" in screen.shown


def test_the_last_words_end_the_screen(terminal):
    screen = terminal("if RANK == 1: raise ValueError('bad learning rate')\nwhile True: signal.pause()")
    assert screen.finish() == 1
    last = screen.shown.rstrip().splitlines()
    assert any("rank 1" in line and "raised ValueError and exited with code 1" in line for line in last)
    assert last[-1].lstrip().startswith("log: logs/train/")
    assert last[-2].strip() == "rank 0: ended because of it"
    assert last[-3].strip() == "ValueError: bad learning rate"


def test_the_hint_of_a_killed_rank_is_broken_between_words_and_whole_in_the_log(terminal, tmp_path):
    screen = terminal("if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\nwhile True: signal.pause()")
    assert screen.finish() == 137
    assert longest_line(screen) <= 80
    hint = " ".join(screen.shown[screen.shown.index("hint: ") :].split())
    (log,) = tmp_path.rglob("launch.log")
    assert len(hint) > 80
    assert f"\n  {hint}\n" in log.read_text()
