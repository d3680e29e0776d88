"""Every library that is tested has a page, and the pages name the versions that it is tested with."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import REPOSITORY
from tests.libraries.foreign import VERSIONS

FOLDERS = [REPOSITORY / "docs" / language / "guides" / "libraries" for language in ("en", "zh")]
PINNED = dict(
    line.split("==") for line in (REPOSITORY / "requirements-integrations.txt").read_text().splitlines() if "==" in line
)

# The runner of mmengine imports the first; of the second, the tests are run.
ONLY_NEEDED = ("opencv-python-headless", "dask")


@pytest.mark.parametrize("folder", FOLDERS, ids=["en", "zh"])
def test_the_index_has_every_library_with_its_page_and_version(folder):
    index = (folder / "index.md").read_text()
    rows = re.findall(r"^\|.*\| ([\d.]+) \| \[[^]]+\]\((\w+)\.md\) \|$", index, re.MULTILINE)
    without_page = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", index, re.MULTILINE))
    assert {page: version for version, page in rows} | without_page == {
        name.removeprefix("pytorch-"): version for name, version in PINNED.items() if name not in ONLY_NEEDED
    }
    assert sorted(page.stem for page in folder.glob("*.md")) == sorted([*(page for _, page in rows), "index"])


@pytest.mark.parametrize("folder", FOLDERS, ids=["en", "zh"])
def test_the_programs_that_ran_in_the_place_of_gloo_are_of_the_releases_that_the_page_names(folder):
    page = (folder.parent / "replacing_gloo.md").read_text()
    named = {(name.lower(), version) for name, version in re.findall(r"(\w+) (\d+\.\d+\.\d+)", page)}
    assert named >= VERSIONS.items()
