"""The READMEs are short, say the same in both languages, and everything that they show runs and is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.command.flag_parser import read_flags
from tools.book import Page

_REPOSITORY = Path(__file__).parents[1]
_ENGLISH, _CHINESE = ((_REPOSITORY / name).read_text() for name in ("README.md", "README.zh-CN.md"))
_BOOK = sorted((_REPOSITORY / "docs" / "en").rglob("*.md"))
_MOST_WORDS = 900


def blocks(text, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for kind, body in found if kind == language]


def without_comments(text):
    return [re.sub(r" +#.*", "", body) for kind in ("python", "") for body in blocks(text, kind)]


@pytest.mark.parametrize("example", blocks(_ENGLISH, "python"))
def test_an_example_runs(tmp_path, example):
    (tmp_path / "hello.py").write_text(example)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "hello.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] rank {r} of 2: [3.0, 3.0, 3.0]" for r in range(2)]
    assert "Warning" not in done.stderr


def _launches(page):
    """Return what follows ``phalanx run`` in blocks that no other test runs."""
    for block in Page(page).blocks:
        if block.info in ("", "bash") or (
            block.info == "console" and any("shown only" in mark for mark in block.marks)
        ):
            shown = block.body.replace("\\\n", "")
            yield from re.findall(r"^(?:\$ )?(?:srun [^#\n]*?)?phalanx run (.*?)(?: +#.*)?$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    "page", [_REPOSITORY / "README.md", *_BOOK], ids=lambda page: str(page.relative_to(_REPOSITORY))
)
def test_every_launch_that_is_shown_is_understood(page):
    for line in _launches(page):
        arguments = re.split(r" [|>&]|[;)]", line)[0].split()
        if {"--help", "-h", "..."} & set(arguments):
            continue
        _, target = read_flags(arguments, {}, {}, "")
        assert target, line


@pytest.mark.parametrize("readme", [_ENGLISH, _CHINESE], ids=["English", "Chinese"])
def test_it_is_short(readme):
    assert len(readme.split()) <= _MOST_WORDS


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md", "examples/README.md", "examples/README.zh-CN.md"])
def test_no_link_is_dead(readme):
    path = _REPOSITORY / readme
    for address in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        assert ":" in address or (path.parent / address).exists(), address


def test_both_languages_show_the_same_code():
    assert without_comments(_CHINESE) == without_comments(_ENGLISH)


def outline(text):
    """Return headings, code blocks, rows of tables, pictures and items of lists, each as its kind, in their order."""
    prose = re.sub(r"^```.*?^```$", "```", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(#+ |```|\||!|- )", prose, re.MULTILINE)


def test_both_languages_have_the_same_sections_lists_and_tables():
    assert outline(_CHINESE) == outline(_ENGLISH)


def test_rows_of_tables_name_the_same_code_in_both_languages():
    def codes(text):
        return [re.findall("`[^`]+`", row) for row in re.findall(r"^\|.*", text, re.MULTILINE)]

    assert codes(_CHINESE) == codes(_ENGLISH)


@pytest.mark.parametrize("text", [_ENGLISH, _CHINESE], ids=["English", "Chinese"])
def test_what_ends_in_a_colon_is_followed_by_what_it_announces(text):
    announced = re.findall(r"^(?!- |  |\|).*[:\uff1a]\n\n(.*)$", text, re.MULTILINE)
    assert len(announced) > 4
    assert all(line.startswith(("```", "|", "-")) for line in announced), announced
