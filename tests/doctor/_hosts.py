"""Two hosts on one machine: network namespaces with names and an /etc/hosts of their own, joined by a cable.

Nothing has a name outside, and all of it goes with the processes that hold it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PHALANX = [sys.executable, "-m", "phalanx"]
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_INTERFACE = "eth0"


class Host:
    """One host; its `address`, its `name`, and how to run something there."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = f"node{number}", _ADDRESSES[number]
        self._etc_hosts = folder / f"hosts-{number}"
        self.write_names({self.name: self.address})
        setup = (
            f"mount --bind {self._etc_hosts} /etc/hosts && hostname {self.name} && ip link set lo up && echo up && cat"
        )
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._holder.pid
        assert self._holder.stdout.readline() == b"up\n"

    def write_names(self, names: dict[str, str]) -> None:
        """Replace this host's /etc/hosts; ``localhost`` stays."""
        self._etc_hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in names.items()))

    def start(self, command, env=None, **options):
        inside = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", f"--wd={os.getcwd()}"]
        return subprocess.Popen(
            [*inside, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            **options,
        )

    def run(self, *command):
        out, err = (process := self.start(command)).communicate(timeout=20)
        assert process.returncode == 0, f"{command}: {err}"
        return out

    def close(self) -> None:
        self._holder.stdin.close()
        self._holder.wait(5)
        self._holder.stdout.close()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Host(number, folder))) for number in (0, 1))
        first.run("ip", "link", "add", _INTERFACE, "type", "veth", "peer", _INTERFACE, "netns", str(second.pid))
        for host in (first, second):
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", _INTERFACE)
            host.run("ip", "link", "set", _INTERFACE, "up")
        for host in (first, second):
            while " UP " not in host.run("ip", "-brief", "link", "show", _INTERFACE):
                time.sleep(0.02)  # the kernel takes up to a second to say so
        yield first, second


def why_no_hosts() -> str:
    """Return why `two_hosts` can't work here; empty if it can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "mount") if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "one", "type", "veth"],
        capture_output=True,
        text=True,
    )
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""
