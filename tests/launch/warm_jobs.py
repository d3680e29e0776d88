"""Warm jobs for the tests of this folder: in a folder with no other warm processes, which are ended at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

from phalanx.wire import places
from tests.launch.jobs import LIMIT_S, PHALANX_RUN
from tests.launch.test_orphans import ends, parent_of

PHALANX = PHALANX_RUN[:-1]
HELLO = "import os; print('hello', os.environ['RANK'])"


class Warm:
    def __init__(self, folder):
        self.folder = folder

    def write(self, source, name="train.py"):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    def command(self, source, *flags, num_ranks=1):
        return [*PHALANX_RUN, "--nproc-per-node", str(num_ranks), "--warm", *flags, self.write(source)]

    def __call__(self, source, *flags, num_ranks=1, **options):
        command = self.command(source, *flags, num_ranks=num_ranks)
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)

    def start(self, source, *flags, num_ranks=1, **options):
        """Start a job and return it once it has printed a line."""
        command = self.command(source, *flags, num_ranks=num_ranks)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        job = subprocess.Popen(command, **options)
        job.first_line = job.stdout.readline()
        return job

    def phalanx(self, *args, **options):
        return subprocess.run([*PHALANX, *args], capture_output=True, text=True, timeout=LIMIT_S, **options)


def sockets():
    return sorted(Path(os.environ["XDG_RUNTIME_DIR"]).glob("phalanx/*.sock"))


def servers():
    """Return the pids of this test's warm processes: those that hold a socket in its folder."""
    mine = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_server = b"\0phalanx-warm\0" in (folder / "cmdline").read_bytes()
            if is_server and mine in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    with_parents = {}
    for pid in found:
        with contextlib.suppress(OSError):  # it has ended
            with_parents[pid] = parent_of(pid)
    return [pid for pid, parent in with_parents.items() if parent not in found]  # not the parents of its jobs


@contextlib.contextmanager
def own_folder():
    """Let warm processes meet in a folder that has no others, and end them at the end."""
    runtime = tempfile.mkdtemp(prefix="warm-", dir="/tmp")  # short enough for a socket
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        patch.delenv("PHALANX_WARM", raising=False)
        yield
        for pid in servers():
            os.kill(pid, signal.SIGKILL)
            assert ends(pid)
        for path in places.sockets():  # those that they have left elsewhere
            if (connection := places.connect(path)) is not None:
                connection.close()
    shutil.rmtree(runtime)
