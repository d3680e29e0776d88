"""The fixture of warm starts."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest

from phalanx.launch.warm import places
from tests.launch.test_orphans import ends
from tests.launch.warm_jobs import Warm, servers


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """``warm(source, *args)`` runs a warm job in a folder with no other warm processes, which are ended at the end."""
    runtime = tempfile.mkdtemp(prefix="warm-", dir="/tmp")  # short enough for a socket
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.delenv("PHALANX_WARM", raising=False)
    monkeypatch.chdir(tmp_path)
    yield Warm(tmp_path)
    for pid in servers():
        os.kill(pid, signal.SIGKILL)
        assert ends(pid)
    for path in places.sockets():  # those that they have left elsewhere
        if (connection := places.connect(path)) is not None:
            connection.close()
    shutil.rmtree(runtime)
