"""Fixture of the tests that look at the built site: `site`."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY
from tools.book import build


@pytest.fixture(scope="session")
def site() -> Path:
    """Folder of the site in both languages, as ``make docs`` builds it."""
    html = REPOSITORY / "build" / "docs"
    html.parent.mkdir(exist_ok=True)
    with open(html.parent / "docs.lock", "w") as lock:  # another process may run another file's tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert build(REPOSITORY / "docs", html)
    return html
