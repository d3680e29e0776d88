"""Fixture of the tests that look at the built site: `site`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY
from tools.book import build


@pytest.fixture(scope="session")
def site() -> Path:
    """Folder of the site in both languages, as ``make docs`` builds it."""
    html = REPOSITORY / "build" / "docs"
    html.parent.mkdir(exist_ok=True)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    with open(html.parent / "docs.lock", "a+") as lock:  # another process of the run may have another file's tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not run or lock.read() != run:
            assert build(REPOSITORY / "docs", html)
            lock.truncate(0)
            lock.write(run)
    return html
