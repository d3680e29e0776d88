"""Jobs of ``phalanx run`` for tests: started, read, and killed if they still live at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time

LIMIT_S = 120
PHALANX_RUN = [sys.executable, "-m", "phalanx", "run"]


def await_line(stream, what):
    """Return the next line with `what` in it, and all before it."""
    said = []
    while not said or what not in said[-1]:
        said.append(stream.readline())
        assert said[-1], "".join(said)
    return said


def write_script(folder, source, name="train.py"):
    """Write a script whose first lines import the usual and set RANK; return its path."""
    path = folder / name
    path.write_text("import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n" + textwrap.dedent(source))
    return str(path)


def run_job(folder, source, *flags, num_ranks=2, **options):
    """Run a job to its end and return it with its output as text."""
    command = [*PHALANX_RUN, "--nproc-per-node", str(num_ranks), *flags, write_script(folder, source)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, **options)


class Terminal:
    """A job on a terminal of its own, as a person would see it."""

    def __init__(self, command, folder, lines=24, columns=80):
        self._fd, theirs = os.openpty()
        self.resize(lines, columns)

        def take_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.job = subprocess.Popen(
            command,
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)
        self.shown = ""

    def resize(self, lines, columns):
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text):
        os.write(self._fd, text.encode())

    def read_until(self, text, count=1):
        """Read until `text` has been shown so often; fail at the limit."""
        deadline = time.monotonic() + LIMIT_S
        while self.shown.count(text) < count:
            assert self._read(deadline - time.monotonic()), f"{text!r} never came: {self.shown}"

    def finish(self):
        """Return the exit code once the job has ended and all it wrote is in `shown`."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline - time.monotonic()):
            pass
        return self.job.wait(LIMIT_S)

    def _read(self, timeout_s):
        with contextlib.suppress(OSError):  # EIO: nobody holds the other side any more
            if select.select([self._fd], [], [], max(0.0, timeout_s))[0]:
                data = os.read(self._fd, 4096)
                self.shown += data.decode()
                return bool(data)
        return False

    def close(self):
        self.job.kill()
        self.job.wait()
        os.close(self._fd)
