"""Streams on a shared screen, byte by byte."""

from __future__ import annotations

import os

import pytest

from phalanx.failure import tracebacks
from phalanx.failure.tracebacks import HeldTracebacks
from phalanx.launch.screen.output import LineStream, LiveStream, Screen
from phalanx.launch.screen.warning_filter import FilteredStream, WarningFilter
from tests.launch.streams import Kept


@pytest.fixture
def screen():
    """A screen on a pipe, and a function that returns what has been shown on it since."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)

    def shown():
        try:
            return os.read(read_fd, 65536)
        except BlockingIOError:
            return b""

    yield Screen(write_fd), shown
    os.close(read_fd)
    os.close(write_fd)


def test_a_line_in_pieces_comes_out_whole(screen):
    screen, shown = screen
    stream = LineStream(screen, b"[rank 1] ")
    stream.feed(b"one, ")
    assert shown() == b""
    stream.feed(b"two\nthr")
    assert shown() == b"[rank 1] one, two\n"
    stream.finish()
    assert shown() == b"[rank 1] thr\n"


def test_windows_line_ends_and_empty_lines_survive(screen):
    screen, shown = screen
    LineStream(screen, b"> ").feed(b"a\r\n\nb\n")
    assert shown() == b"> a\n> \n> b\n"


def test_another_ranks_line_is_slipped_in_above_the_live_one(screen):
    screen, shown = screen
    live, other = LiveStream(screen, b"0: "), LineStream(screen, b"1: ")
    live.feed(b"\rstep 1")
    assert shown() == b"\r0: step 1"
    other.feed(b"hello\n")
    assert shown() == b"\r\x1b[2K1: hello\n0: step 1"
    live.feed(b"\rstep 2\n")
    other.feed(b"bye\n")
    assert shown() == b"\r0: step 2\n1: bye\n"


def test_while_a_prompt_is_open_the_live_rank_writes_whole_lines_above_it(screen):
    screen, shown = screen
    live, prompt = LiveStream(screen, b"0: "), LiveStream(screen, b"1: ")
    live.feed(b"loss 3.0")
    screen.lend(prompt)
    prompt.feed(b"(Pdb) ")
    assert shown() == b"0: loss 3.0\n1: (Pdb) "
    live.feed(b"\n")
    assert shown() == b""  # the line was ended for it
    live.feed(b"\x1b[2Kstep 1\nste")
    assert shown() == b"\r\x1b[2K0: step 1\n1: (Pdb) "
    live.finish()  # it has ended
    assert shown() == b"\r\x1b[2K0: ste\n1: (Pdb) "
    live.feed(b"\rstep 2")
    screen.open_line = b""  # somebody has typed a line
    screen.borrower = None
    live.feed(b", loss 2.0")
    assert shown() == b"\r0: step 2, loss 2.0"
    screen.lend(prompt)
    prompt.feed(b"(Pdb) ")
    assert shown() == b"\n1: (Pdb) "
    prompt.finish()
    screen.borrower = None
    live.feed(b"\n\nend\n")
    assert shown() == b"\n\n0: end\n"


def test_an_escape_sequence_torn_in_two_stays_one(screen):
    screen, shown = screen
    live = LiveStream(screen, b"0: ")
    live.feed(b"\x1b[3")
    assert shown() == b""
    live.feed(b"1mred")
    assert shown() == b"0: \x1b[31mred"
    live.finish()
    assert shown() == b"\n"


VICTIM = b"""\
before
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 9, in <module>
[rank3]:     dist.all_reduce(tensor)
[rank3]: phalanx.RankFailed: rank 1 (pid 7) was killed by SIGKILL
[rank3]: Look at what rank 1 printed last.
after
"""
CAUSE = b"""\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
ValueError: bad learning rate
after
"""
CHAINED = b"""\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
KeyError: 'lr'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
ValueError: bad learning rate
"""
ONE_LINE = b"before\nRankFailed: rank 1 (pid 7) was killed by SIGKILL (traceback in the log)\nafter\n"


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (VICTIM, ONE_LINE),
        (CAUSE, CAUSE),
        (CHAINED, CHAINED),
        (CAUSE[:50], CAUSE[:50]),
        (b"T\rTr\n[x\n", b"T\rTr\n[x\n"),
    ],
)
def test_a_victims_traceback_is_one_line_and_any_other_is_whole(printed, shown, piece_bytes):
    kept = Kept()
    stream = HeldTracebacks(kept)
    for start in range(0, len(printed), piece_bytes):
        stream.feed(printed[start : start + piece_bytes])
    stream.finish()
    assert kept.data == shown


def test_what_is_no_traceback_passes_at_once():
    kept = Kept()
    stream = HeldTracebacks(kept)
    for word in (b"name? ", b"\r10%", b"\r20%", b"\n", b"[INFO] go", b" on", b"\nTrain: 3"):
        stream.feed(word)
        assert kept.data.endswith(word)


def test_interrupts_are_left_out_when_asked():
    printed = CAUSE.replace(b"ValueError: bad learning rate", b"KeyboardInterrupt")
    for hides, shown in ((False, printed), (True, b"after\n")):
        kept = Kept()
        stream = HeldTracebacks(kept)
        stream.hides_interrupts = hides
        stream.feed(printed)
        stream.finish()
        assert kept.data == shown


def test_a_traceback_waits_for_the_end_of_its_rank_and_is_left_to_the_report():
    for printed in (CAUSE.replace(b"after\n", b""), VICTIM.replace(b"before\n", b"").replace(b"after\n", b""), CHAINED):
        kept = Kept()
        stream = HeldTracebacks(kept)
        stream.feed(b"before\n" + printed)
        stream.release_late()
        assert kept.data == b"before\n"
        stream.settle()
        stream.finish()
        assert kept.data == b"before\n"


def test_a_traceback_is_shown_when_the_rank_goes_on(monkeypatch):
    kept = Kept()
    stream = HeldTracebacks(kept)
    stream.feed(CAUSE)
    assert (kept.data, stream.is_holding) == (b"", True)
    monkeypatch.setattr(tracebacks, "HOLD_S", 0.0)
    stream.release_late()
    assert (kept.data, stream.is_holding) == (CAUSE, False)
    stream.feed(CAUSE)
    stream.feed(b"\r10%")  # a progress bar
    assert kept.data == CAUSE + CAUSE + b"\r10%"


BACKTRACE = b"""\
[E1122 06:18:31 socket.cpp:1028] timed out
Exception raised from throwTimeoutError at socket.cpp:1030 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fe0 in libc10.so)
frame #1: <unknown function> + 0x15f6988 (0x7fe0 in libtorch_cpu.so)
<omitting python frames>
frame #17: _start + 0x21 (0x55 in python)

after
"""


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_a_backtrace_of_native_code_is_one_line(piece_bytes):
    kept = Kept()
    stream = HeldTracebacks(kept)
    for start in range(0, len(BACKTRACE), piece_bytes):
        stream.feed(BACKTRACE[start : start + piece_bytes])
    stream.finish()
    assert kept.data == b"[E1122 06:18:31 socket.cpp:1028] timed out\n(C++ frames: see the log)\nafter\n"


INTERRUPTED = [
    b"Traceback (most recent call last):\n  File 'x.py', line 1, in <module>\nKeyboardInterrupt\n",
    b"Exception ignored in: <function cb>\nTraceback (most recent call last):\nKeyboardInterrupt: \n",
    b"Fatal Python error: init_import_site: Failed to import the site module\nPython runtime state: initialized\n"
    b"Traceback (most recent call last):\n  File '<frozen site>', line 1, in main\nKeyboardInterrupt\n",
]


@pytest.mark.parametrize("interrupted", [*INTERRUPTED, INTERRUPTED[1] + INTERRUPTED[0]])
def test_after_ctrl_c_no_traceback_of_it_is_shown(interrupted):
    for hides, shown in ((True, b"before\n"), (False, b"before\n" + interrupted)):
        kept = Kept()
        stream = HeldTracebacks(kept)
        stream.hides_interrupts = hides
        stream.feed(b"before\n" + interrupted)
        stream.finish()
        assert kept.data == shown


def warn(number):
    return b"train.py:%d: UserWarning: slow\n  step()\n" % number


def test_a_warning_of_all_ranks_is_shown_once():
    shown = []
    warning_filter = WarningFilter(shown.append, 3)
    kept = [Kept() for _ in range(3)]
    streams = [FilteredStream(warning_filter, rank, stream) for rank, stream in enumerate(kept)]
    for rank, filtered in enumerate(streams):
        filtered.feed(b"a\n" + warn(1) + b"[W1122 06:18:3%d.5 socket.cpp:1028] late\nb\n" % rank)
    assert [stream.data for stream in kept] == [b"a\nb\n"] * 3
    assert shown == [
        b"[all ranks] train.py:1: UserWarning: slow\n[all ranks]   step()\n",
        b"[all ranks] [W1122 06:18:30.5 socket.cpp:1028] late\n",
    ]
    shown.clear()
    for filtered in streams[1:]:
        filtered.feed(warn(2))
    assert (shown, warning_filter.is_waiting) == ([], True)
    warning_filter.flush()
    assert shown == [b"[ranks 1 and 2] train.py:2: UserWarning: slow\n[ranks 1 and 2]   step()\n"]
    streams[0].feed(warn(2))
    assert (len(shown), warning_filter.is_waiting) == (1, False)
