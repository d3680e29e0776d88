"""Python programs on hosts, forked from one process that has imported torch: a start of each takes two seconds.

with contextlib.closing(Forks()) as forks:
    rank = forks.start(host, "print(1)", {"RANK": "0"})
    rank.communicate()
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from tests.namespaces import Host

_MAX_BYTES = 1 << 16


class Fork:
    """A program that was forked, with what `subprocess.Popen` has and the tests need."""

    def __init__(self, forks: Forks, pid: int, stdout: int, stderr: int) -> None:
        self.pid, self._forks = pid, forks
        self.stdout, self.stderr = os.fdopen(stdout), os.fdopen(stderr)
        self.returncode: int | None = None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it still says until it has ended; it says too little to fill a pipe."""
        said = self.stdout.read(), self.stderr.read()
        self.wait()
        return said

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._forks.ask({"wait": self.pid})
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)  # nobody else has its pid before somebody waits for it

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


class Forks:
    """The process that forks them."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read when torch is imported
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, host: Host, code: str, environ: Mapping[str, str], *arguments: str) -> Fork:
        """Run code on a host as ``python -c CODE ARGUMENTS`` would."""
        (stdout, its_stdout), (stderr, its_stderr) = os.pipe(), os.pipe()
        request = {"host": host.pid, "code": code, "environ": dict(environ), "arguments": arguments}
        pid = self.ask(request, its_stdout, its_stderr)
        os.close(its_stdout)
        os.close(its_stderr)
        return Fork(self, pid, stdout, stderr)

    def ask(self, request: Mapping[str, object], *fds: int) -> int:
        socket.send_fds(self._ours, [json.dumps(request).encode()], fds)
        answer = self._ours.recv(_MAX_BYTES)
        assert answer, "the process that forks has ended"
        return int(answer)

    def close(self) -> None:
        self._ours.close()
        self._process.wait(60)


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    import torch.distributed  # noqa: F401 what the programs need

    while True:
        data, fds, *_ = socket.recv_fds(asked, _MAX_BYTES, 2)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                asked.close()
                _enter(request["host"])
                for number, fd in enumerate(fds, 1):
                    os.dup2(fd, number)
                    os.close(fd)
                os.environ.update(request["environ"])
                sys.argv[:] = ["-c", *request["arguments"]]
                exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
                return
        for fd in fds:
            os.close(fd)
        asked.send(b"%d" % answer)


if __name__ == "__main__":
    main()
