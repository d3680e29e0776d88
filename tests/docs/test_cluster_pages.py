"""Every command that a page of docs/*/guides/clusters shows is understood, and every file that it names is there."""

from __future__ import annotations

import re

import pytest

from phalanx import _settings
from phalanx.launch.command.flag_parser import read_flags
from tests.docs.blocks import REPOSITORY

FOLDERS = [REPOSITORY / "docs" / language / "guides" / "clusters" for language in ("en", "zh")]
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]


def name(page):
    return f"{page.parents[2].name}/{page.stem}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_launch_is_understood(page):
    shown = re.findall(r"^[^`\n]*?phalanx run ((?:-\S+ \S+ )*train\.py)$", page.read_text(), re.MULTILINE)
    for line in shown:
        _, target = read_flags(line.split(), {}, {}, "")
        assert target == ["train.py"]
    assert shown or page.stem in ("index", "mpi", "kubernetes", "ray")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_it_names_is_there(page):
    links = re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", page.read_text())
    shown = re.findall(r"^```\{literalinclude\} (\S+)$", page.read_text(), re.MULTILINE)
    files = re.findall(r"(?:`|console\n\$ \w+ )((?:tests|examples)/[\w./]+)", page.read_text())
    missing = [link for link in links + shown if not (page.parent / link).exists()]
    assert missing + [file for file in files if not (REPOSITORY / file).exists()] == []


def test_every_variable_of_ours_exists():
    for page in PAGES:
        for variable in set(re.findall(r"PHALANX_[A-Z_]+\b(?=[=`])", page.read_text())) - {"PHALANX_PORT"}:
            _settings.read_settings({variable: "mpi" if variable == "PHALANX_BRIDGE" else "1"})


@pytest.mark.parametrize("folder", FOLDERS, ids=["en", "zh"])
def test_every_page_is_in_the_index(folder):
    index = (folder / "index.md").read_text()
    pages = [page for page in PAGES if page.parent == folder and page.stem != "index"]
    assert len(pages) == 8
    assert [page.name for page in pages if f"({page.name})" not in index] == []
