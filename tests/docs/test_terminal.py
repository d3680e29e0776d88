"""A recorded terminal shows what a person would have seen: the last state of each line, in its colours."""

from __future__ import annotations

import pytest

from tools.drawing.terminal import COLUMNS, Screen, svg_of


def screen_of(text):
    screen = Screen()
    screen.write(text)
    return screen


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\r\ntwo\r\n", "one\ntwo"),
        ("10 %\r20 %\r\n", "20 %"),  # a progress bar
        ("half of a bar\r\x1b[2Kdone\r\n", "done"),
        ("bar\r\n\x1b[1A\x1b[2Kgone", "gone"),
        ("\x1b[?25lhidden cursor\x1b[?25h", "hidden cursor"),
        ("x" * (COLUMNS + 3), "x" * COLUMNS + "\nxxx"),
        ("\x1b[1;36mbold cyan\x1b[0m", "bold cyan"),
    ],
)
def test_the_screen_is_the_last_state_of_each_line(written, shown):
    assert screen_of(written).text() == shown


def test_colours_become_attributes_and_text_is_escaped():
    svg = svg_of(screen_of("\x1b[31ma < b\x1b[0m and \x1b[1mc\x1b[22m"), "title", "description")
    assert "a &lt; b</text>" in svg
    assert 'fill="#ff7b72"' in svg
    assert 'font-weight="700">c</text>' in svg


def test_runs_keep_their_columns():
    svg = svg_of(screen_of("ab  \x1b[32mcd"), "title", "description")
    assert 'x="14.0" y="27" textLength="14.4">ab<' in svg
    assert 'x="42.8" y="27" textLength="14.4" fill="#3fb950">cd<' in svg
