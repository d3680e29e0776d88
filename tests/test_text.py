"""Numbers in messages."""

from __future__ import annotations

import io
import sys

import pytest

from phalanx._command_line import Parser, UsageError
from phalanx._text import broken, complain, ending_of, named, shortened


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2, 4, 5], "ranks 0-2, 4 and 5"),
        ([0, 2, 3, 7], "ranks 0, 2, 3 and 7"),
    ],
)
def test_ranks_are_named_in_runs(ranks, said):
    assert named("rank", ranks) == said


@pytest.mark.parametrize(
    ("path", "shown"),
    [("/home/me", "/home/me"), ("/home/me/project/a", ".../project/a"), ("/" + "x" * 20, "..." + "x" * 11)],
)
def test_of_a_path_that_is_too_long_the_end_is_shown(path, shown):
    assert ending_of(path, 14) == shown


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_that_is_too_long_is_cut_between_words_if_it_has_some():
    assert shortened("rank 1 timed out", 16) == "rank 1 timed out"
    assert shortened("rank 1 timed out", 15) == "rank 1 timed..."
    assert shortened("at /a/rather/long/path", 16) == "at /a/rather/..."


def test_a_message_is_broken_between_words_where_a_terminal_shows_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    for screen, said in (
        (Screen(), "no job of this user\n  is running\n"),
        (io.StringIO(), "no job of this user is running\n"),
    ):
        monkeypatch.setattr(sys, "stderr", screen)
        complain("no job of this user is running")
        assert screen.getvalue() == said


def test_what_is_broken_off_goes_on_below_its_own_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    lines = ["ok  clock    the firmware sets it"]
    assert broken(lines, Screen(), hang=13) == ["ok  clock    the", " " * 12 + "firmware", " " * 12 + "sets it"]
    assert broken(lines, Screen(), hang=9) == ["ok  clock    the", " " * 9 + "firmware sets", " " * 9 + "it"]


def test_a_mistake_in_a_command_line_is_broken_between_words_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser("phalanx fly", "phalanx fly [options] " + "PLACE " * 20, "Flies.")
    for screen, num_lines in ((Screen(), 5), (io.StringIO(), 2)):
        monkeypatch.setattr(sys, "stderr", screen)
        assert parser.refuse(UsageError("unknown flag --fast; " * 6, "hom", ["home"]), ["hom"]) == 2
        shown = screen.getvalue()
        assert len(shown.splitlines()) == num_lines
        assert " ".join(shown.split()).endswith("right: phalanx fly home")
        assert "phalanx fly home" in shown.splitlines()[-1]  # pasted, a broken call would be two
        assert num_lines == 2 or max(map(len, shown.splitlines())) <= 80
