"""Clusters are made of namespaces."""

from __future__ import annotations

import pytest

from phalanx.testing import why_no_hosts
from tests.clusters._machines import machines


@pytest.fixture(scope="session")
def needs_hosts():
    if why_not := why_no_hosts():
        pytest.skip(f"no hosts here: {why_not}")


@pytest.fixture
def two(needs_hosts, tmp_path):
    """Two machines that know each other by name and share `tmp_path`."""
    with machines(tmp_path) as made:
        yield made
