"""Every command that a page of docs/clusters shows is understood, and every file that it names is there."""

from __future__ import annotations

import re

import pytest

from phalanx import _settings
from phalanx.launch.flags import read_flags
from tests.clusters._machines import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "clusters").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_launch_is_understood(page):
    shown = re.findall(r"^[^`\n]*?phalanx run ((?:-\S+ \S+ )*train\.py)$", page.read_text(), re.MULTILINE)
    for line in shown:
        _, target = read_flags(line.split(), {}, {}, "")
        assert target == ["train.py"]
    assert shown or page.stem in ("README", "mpi", "kubernetes", "ray")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    files = re.findall(r"`((?:tests|examples)/[\w./]+)`", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing + [name for name in files if not (REPOSITORY / name).exists()] == []


def test_every_variable_of_ours_exists():
    for page in PAGES:
        for name in set(re.findall(r"PHALANX_[A-Z_]+\b(?=[=`])", page.read_text())) - {"PHALANX_PORT"}:
            _settings.read_settings({name: "mpi" if name == "PHALANX_BRIDGE" else "1"})


def test_every_page_is_in_the_index():
    index = (REPOSITORY / "docs" / "clusters" / "README.md").read_text()
    assert [page.name for page in PAGES if page.stem != "README" and f"({page.name})" not in index] == []
