"""The process that answers Prometheus for ``phalanx run --metrics``, beside the supervisor.

It is a process of its own, so that a scrape never delays the supervisor, and a supervisor without ``--metrics`` needs
no further package. It looks at the job from outside, as ``phalanx top`` does, so it survives the ranks. It ends with
the supervisor; if it ends before, the job goes on without metrics.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.host.ports import open_listener, port_problem
from phalanx.launch.processes.descendants import start_helper
from phalanx.wire.web_server import is_loopback, missing_packages, split_address, url_of

if TYPE_CHECKING:
    from phalanx.launch.run.supervisor import Supervisor

# Not started with -m, which would let a json.py in the current folder shadow the standard library's.
_RUN = "import sys; sys.path[:] = filter(None, sys.path); from phalanx.diagnose.metrics.metrics import main; main()"


@contextlib.contextmanager
def serving_metrics(supervisor: Supervisor, address: str) -> Iterator[None]:
    """Serve the metrics of the supervisor's job at an address in the body; do nothing if the address is empty."""
    if not address:
        yield
        return
    with listen(address) as listener:
        pid = start_helper(_RUN, [listener.fileno()], str(os.getpid()))
        supervisor.say(words_of_metrics(listener))
    supervisor.keep_list.append(pid)
    try:
        yield
    finally:
        supervisor.keep_list.remove(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def words_of_metrics(listener: socket.socket) -> str:
    """Return the line that says where metrics are served, and who can read them if not only users of this host."""
    others = "" if is_loopback(listener.getsockname()[0]) else "; whoever reaches this address can read them"
    return f"metrics at {url_of(listener, '/metrics')}{others}"


def listening_problem(flag: str, address: str) -> str:
    """Return why the server of a flag can't listen at an address, and what to do about it; "" if it can."""
    host, port = split_address(address)
    if problem := missing_packages():
        return f"{flag}: {problem}"
    return f"{flag}: {problem}; use another port" if (problem := port_problem(port, host) or "") else ""


def listen(address: str) -> socket.socket:
    """Return the listener at an address without a `listening_problem`."""
    host, port = split_address(address)
    return open_listener(port, host)
