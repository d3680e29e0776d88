"""The fixture of warm starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile

import pytest

from phalanx.launch.warm import places
from tests.launch.test_orphans import ends
from tests.launch.warm_jobs import HELLO, Warm, servers


@contextlib.contextmanager
def _no_other_warm_processes(folder):
    with pytest.MonkeyPatch.context() as patch:
        runtime = tempfile.mkdtemp(prefix="warm-", dir="/tmp")  # short enough for a socket
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        patch.delenv("PHALANX_WARM", raising=False)
        patch.chdir(folder)
        yield Warm(folder)
        for pid in servers():
            os.kill(pid, signal.SIGKILL)
            assert ends(pid)
        for path in places.sockets():  # those that they have left elsewhere
            if (connection := places.connect(path)) is not None:
                connection.close()
        shutil.rmtree(runtime)


@pytest.fixture
def warm(tmp_path):
    """``warm(source, *args)`` runs a warm job in a folder with no other warm processes, which are ended at the end."""
    with _no_other_warm_processes(tmp_path) as warm:
        yield warm


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """As `warm`, for all tests of a module that leave the one warm process there as it is, and with it running."""
    with _no_other_warm_processes(tmp_path_factory.mktemp("warmed")) as warm:
        warm(HELLO)
        yield warm
