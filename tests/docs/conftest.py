"""Fixture of the tests that look at the built site: `site`; whoever asks for it has the mark of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker("site")


@pytest.fixture(scope="session")
def site() -> Path:
    """Folder of the site in both languages, as ``make docs`` has built it before it runs these tests."""
    html = REPOSITORY / "build" / "docs"
    assert (html / "index.html").exists(), "the site has not been built: make docs builds it and runs these tests"
    return html
