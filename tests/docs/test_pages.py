"""Every code block of every page runs, and prints what the page shows."""

from __future__ import annotations

import pytest

from tests.docs.blocks import REPOSITORY, run_page
from tools.book import Page

ENGLISH = REPOSITORY / "docs" / "en"
PAGES = [path for path in sorted(ENGLISH.rglob("*.md")) if any(block.is_code for block in Page(path).blocks)]


COLD = ("guides", "tutorials")  # whose pages are about starts and ends of processes too


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ENGLISH)))
def test_the_code_of_a_page_does_what_the_page_says(forked, path, tmp_path, monkeypatch):
    is_cold = path.relative_to(ENGLISH).parts[0] in COLD
    if not is_cold:
        monkeypatch.setenv("PHALANX_WARM", "1")
    run_page(path, tmp_path, run_script=None if is_cold else forked.run)
