"""Streams on a shared screen, byte by byte."""

from __future__ import annotations

import os

import pytest

from phalanx.launch.output import LineStream, LiveStream, Screen


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
