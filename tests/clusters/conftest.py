"""Clusters are made of namespaces."""

from __future__ import annotations

import pytest

from tests.clusters._machines import machines


@pytest.fixture
def two(needs_hosts, tmp_path):
    """Two machines that know each other by name and share `tmp_path`."""
    with machines(tmp_path) as made:
        yield made
