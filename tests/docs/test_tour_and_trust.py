"""The tour names ten files and what to look at in them; "why you can trust this" names commands that exist."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.docs.blocks import REPOSITORY
from tests.test_layers import FLOORS

LANGUAGES = ("en", "zh")
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def rows(page: str, language: str) -> list[list[str]]:
    """Return the cells of the rows of all tables of a page, without their headings."""
    lines = (REPOSITORY / "docs" / language / page).read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return [
        row
        for row, following in zip(cells, [*cells[1:], [""]], strict=True)
        if not {row[0][:3], following[0][:3]} & {"---"}
    ]


def test_the_tour_names_ten_files_that_exist_in_both_languages() -> None:
    files = [row[1].strip("`") for row in rows("contributing/tour.md", "en")]
    assert files == [row[1].strip("`") for row in rows("contributing/tour.md", "zh")]
    assert len(files) == 10
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []
    assert files[0].startswith("examples/")


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_the_tour_says_to_look_at_is_there(language: str) -> None:
    for _, file, look_at, *_ in rows("contributing/tour.md", language):
        text = (REPOSITORY / file.strip("`")).read_text()
        assert [name for name in re.findall(r"`(\w+)`", look_at) if not re.search(rf"\bdef {name}\b", text)] == [], file


def commands(language: str) -> list[str]:
    return [
        command
        for row in rows("how_it_works/trust.md", language)
        for command in re.findall(r"`([^`]+)`", "".join(row[:2]))
    ]


def test_both_languages_prove_the_same_promises_by_the_same_commands() -> None:
    assert commands("en") == commands("zh")
    times = {
        language: [re.findall(r"[\d.]+", row[-1]) for row in rows("how_it_works/trust.md", language)]
        for language in LANGUAGES
    }
    assert times["en"] == times["zh"]


def test_a_command_that_proves_a_promise_runs_what_exists() -> None:
    tests = [path for command in commands("en") for path in re.findall(r"tests/[\w/.]+", command)]
    assert len(tests) > 10
    assert [path for path in tests if not (REPOSITORY / path).exists()] == []
    targets = {name for command in commands("en") for name in re.findall(r"^make ([a-z ]+)", command)}
    for target in " ".join(targets).split():
        assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", MAKEFILE, re.MULTILINE), target


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_overview_lists_rooms_from_the_bottom_up(language: str) -> None:
    names = [re.findall(r"`(\w+)`", row[0]) for row in rows("how_it_works/overview.md", language)]
    floors = [[FLOORS[name] for name in row] for row in names if row]
    assert {*FLOORS} >= {name for row in names for name in row}
    assert all(max(below) <= min(above) for below, above in itertools.pairwise(floors)), floors
    assert sum(map(len, floors)) > 15
