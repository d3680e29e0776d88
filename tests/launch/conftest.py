"""The fixtures of warm starts."""

from __future__ import annotations

import pytest

from tests.launch.warm_jobs import Warm, own_folder


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """``warm(source, *args)`` runs a warm job in a folder with no other warm processes, which are ended at the end."""
    monkeypatch.chdir(tmp_path)
    with own_folder():
        yield Warm(tmp_path)


@pytest.fixture(scope="module")
def folder_of_the_module():
    with own_folder():
        yield


@pytest.fixture
def kept_warm(tmp_path, monkeypatch, folder_of_the_module):
    """As `warm`, with what the tests before it in its module have kept warm, for one that leaves it so."""
    monkeypatch.chdir(tmp_path)
    return Warm(tmp_path)
