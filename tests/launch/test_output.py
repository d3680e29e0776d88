"""Streams on a shared screen, byte by byte."""

from __future__ import annotations

import os

import pytest

from phalanx.launch.output import LineStream, LiveStream, Screen
from phalanx.launch.tracebacks import VictimFilter


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


class Kept:
    """A stream that keeps what it is fed."""

    def __init__(self):
        self.data = b""

    def feed(self, data):
        self.data += data

    def finish(self):
        pass


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
    stream = VictimFilter(kept)
    for start in range(0, len(printed), piece_bytes):
        stream.feed(printed[start : start + piece_bytes])
    stream.finish()
    assert kept.data == shown


def test_what_is_no_traceback_passes_at_once():
    kept = Kept()
    stream = VictimFilter(kept)
    for word in (b"name? ", b"\r10%", b"\r20%", b"\n", b"[INFO] go", b" on", b"\nTrain: 3"):
        stream.feed(word)
        assert kept.data.endswith(word)


def test_interrupts_are_left_out_when_asked():
    printed = CAUSE.replace(b"ValueError: bad learning rate", b"KeyboardInterrupt")
    for hides, shown in ((False, printed), (True, b"after\n")):
        kept = Kept()
        stream = VictimFilter(kept)
        stream.hides_interrupts = hides
        stream.feed(printed)
        assert kept.data == shown
