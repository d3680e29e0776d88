"""Programs that begin with torch and phalanx imported, for a tenth of the time that a start of Python takes.

They are forked from one process of the session. Each is a ``python -c``, ``python -m`` or ``python train.py``:
``__main__``, its args, environment and folder are its own, and its interpreter ends as any other. Not for tests of what
happens while torch is imported, or of variables that are read then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

LIMIT_S = 300
TORCHRUN = ("-m", "torch.distributed.run", "--run-path", "--start-method", "fork")
"""torchrun for `Nursery.run`: its agent forks the ranks, instead of executing one interpreter for each."""


class Nursery:
    """The process that programs are forked from."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__).with_name("_nursery.py")), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self._codes: dict[int, int] = {}
        self._hear(LIMIT_S)  # it runs, by its own name

    def close(self) -> None:
        self._channel.close()
        self._process.wait()

    @contextlib.contextmanager
    def start(
        self,
        *args: object,
        cwd: object = "/",
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> Iterator[Program]:
        """Start ``python *args``, a script, or ``-c`` or ``-m`` and its word; at the end of the block it is killed."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
            environ = dict(os.environ if env is None else env)
            asked = {"args": list(map(str, args)), "folder": str(cwd), "environ": environ}
            fds = [
                nothing.fileno() if stdin is None else stdin,
                out.fileno() if stdout is None else stdout,
                err.fileno(),
            ]
            socket.send_fds(self._channel, [json.dumps(asked).encode()], fds)
            while (news := self._hear(LIMIT_S))[1] is not None:
                pass
            program = Program(self, news[0], out, err)
            try:
                yield program
            finally:
                with contextlib.suppress(ProcessLookupError):
                    if news[0] not in self._codes:
                        os.kill(news[0], signal.SIGKILL)  # its number stays its own until it is waited for
                self.code_of(news[0], LIMIT_S)
                del self._codes[news[0]]

    def run(self, *args: object, timeout: float = LIMIT_S, **options: object) -> subprocess.CompletedProcess[str]:
        """Do what ``subprocess.run`` does that captures text."""
        with self.start(*args, **options) as program:
            out, err = program.communicate(timeout)
            return subprocess.CompletedProcess(args, program.returncode, out, err)

    def _hear(self, timeout_s: float) -> tuple[int, int | None]:
        self._channel.settimeout(max(timeout_s, 0.001))
        pid, code = json.loads(self._channel.recv(1 << 16))
        if code is not None:
            self._codes[pid] = code
        return pid, code

    def code_of(self, pid: int, timeout_s: float) -> int:
        """Return the exit code of a program once it has ended.

        Raises:
            TimeoutError: It has not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while pid not in self._codes:
            self._hear(deadline - time.monotonic())
        return self._codes[pid]


class Program:
    """A running program; `returncode` is there once `wait` or `communicate` has returned."""

    def __init__(self, nursery: Nursery, pid: int, *outputs: object) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._outputs = outputs

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Return its exit code, once it has ended."""
        self.returncode = self._nursery.code_of(self.pid, timeout)
        return self.returncode

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """Return what it has written to stdout and to stderr, once it has ended."""
        self.wait(timeout)
        for output in self._outputs:
            output.seek(0)
        out, err = (output.read() for output in self._outputs)
        return out, err
