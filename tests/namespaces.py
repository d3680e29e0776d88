"""Hosts on one machine: Linux namespaces, joined by a switch with links of a chosen rate and delay.

    with hosts(2, rate="1gbit", delay_ms=0.1) as (a, b):
        server = a.start([sys.executable, "server.py", a.address])
        client = b.start([sys.executable, "client.py", a.address])
        b.cut()  # what it sends and what is sent to it vanishes

A host has a name, a network and a loopback of its own; memory, files and processes are shared with the machine. It
needs root. Nothing is left behind, even if this process is killed: the namespaces live as long as their processes,
and those end when this one does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests import wire

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_END_S = 10.0
_QUEUE_BYTES = 64 << 20  # of a host's own interface, which holds its senders back before that
_NOBODY = "02:00:00:00:00:00"  # a hardware address of no host: the switch sends it to all, and none takes it
_SLOW_BIT_S = 1e8  # below, a queue takes seconds: urgent packets go first, as is usual on Linux
_BURST_BYTES = 256 << 10  # the wire itself is exact; this is at least four of the largest packets


class Host:
    """Simulated host, made by `hosts`.

    Attributes:
        name: Hostname: ``host-a``, ``host-b``, ...
        address: IPv4 address of the host.
        interface: Network interface with this address, for GLOO_SOCKET_IFNAME.
        pid: Process that holds the host's namespaces.
    """

    interface = "eth0"

    def __init__(self, name: str, address: str, rate_bit_s: float, delay_s: float) -> None:
        self.name: str = name
        self.address: str = address
        self._started: list[subprocess.Popen[Any]] = []
        holder = [sys.executable, "-I", "-S", wire.__file__, name, repr(rate_bit_s), repr(delay_s)]
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", *holder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends this
        )
        self.pid: int = self._holder.pid
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self.close()  # says why

    def _inside(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", f"--uts=/proc/{self.pid}/ns/uts"]

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on this host. It is killed at the end of the `hosts` block.

        Args:
            command: Program and its arguments.
            env: Variables to add to this process's environment.
            options: Further arguments of `subprocess.Popen`, whose ``pid`` is the program's.
        """
        environ = {**os.environ, **(env or {})}
        # Whoever sees the host open from inside is there when the holder, which closes it first, kills all.
        checked = ["sh", "-c", f'read word < {wire.ENTRY_FLAG} && [ "$word" = open ] && exec "$@"', "sh", *command]
        self._started.append(subprocess.Popen([*self._inside(), *checked], env=environ, **options))
        return self._started[-1]

    def run(self, *command: str) -> str:
        """Run a program on this host and return what it prints.

        Raises:
            OSError: The program failed; the error has its message.
        """
        done = subprocess.run([*self._inside(), *command], capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)} on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def kill(self) -> None:
        """Kill every process on this host. Its system stays up, so peers see their connections end."""
        for process in self._started:  # one that has only just started may not be inside yet
            process.kill()
        wire.kill_all(self.pid)

    def cut(self) -> None:
        """Unplug the host's cable: packets vanish in both directions, and nobody is notified."""
        self._plug("nomaster")

    def mend(self) -> None:
        """Plug the cable in again."""
        self._plug("master", "switch")

    def mute(self, peer: Host) -> None:
        """Let what this host sends to `peer` vanish, and nothing else: half of a cut, and nobody is notified."""
        neighbour = ["ip", "neighbour", "replace", peer.address, "dev", self.interface]
        self.run(*neighbour, "lladdr", _NOBODY, "nud", "permanent")

    def unmute(self, peer: Host) -> None:
        """Undo `mute`."""
        self.run("ip", "neighbour", "del", peer.address, "dev", self.interface)

    def stall(self) -> None:
        """Hold back what is sent to this host, of which nothing is lost, until `resume`; only with a rate or delay."""
        self._holder.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Deliver what `stall` has held back."""
        self._holder.send_signal(signal.SIGCONT)

    def _plug(self, *how: str) -> None:
        self._switch.run("ip", "link", "set", self.name, *how)

    def _connect(self, switch: Host, rate_bit_s: float) -> None:
        """Connect this host's interface to a port of the switch, which gets the host's name."""
        self._switch = switch
        ends = ["link", "add", self.name, "type", "veth", "peer", "name", self.interface, "netns", str(self.pid)]
        switch.run("ip", *ends)
        switch.run("ip", "link", "set", self.name, "master", "switch", "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", self.interface)
        self.run("ip", "link", "set", self.interface, "up")
        if rate_bit_s:
            shape = ["rate", f"{rate_bit_s:.0f}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
            self.run("tc", "qdisc", "add", "dev", self.interface, "root", "handle", "1:", "tbf", *shape)
            if rate_bit_s < _SLOW_BIT_S:
                self.run("tc", "qdisc", "add", "dev", self.interface, "parent", "1:1", "pfifo_fast")

    def close(self) -> None:
        """Kill all its processes and remove the host.

        Raises:
            OSError: The namespaces or the wire failed.
        """
        for process in self._started:
            process.kill()
        try:
            _, said = self._holder.communicate(timeout=_END_S)  # standard input ends
        finally:
            self._holder.kill()
            for process in (self._holder, *self._started):
                process.wait()
        if self._holder.returncode != 0:
            raise OSError(
                f"the namespaces or the wire of {self.name} failed: {said.strip() or self._holder.returncode}"
            )

    def show(self) -> None:
        """Kill all its processes and print what they said and nobody has read, which pytest shows of a failed test."""
        self.kill()
        for process in self._started:
            for name in ("stdout", "stderr"):
                pipe = getattr(process, name)
                if pipe is not None and not pipe.closed:
                    print(f"--- unread {name} of process {process.pid} on {self.name}:\n{pipe.read()}")


def node_command(nnodes: str, first: Host, port: int) -> list[str]:
    """Return what starts one rank on a host, of a job that meets at the first one; more flags and the script follow."""
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--nnodes", nnodes]
    return [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{port}"]


@contextlib.contextmanager
def hosts(num_hosts: int, rate: str | None = None, delay_ms: float = 0.0) -> Iterator[tuple[Host, ...]]:
    """Make simulated hosts on one switch; at the end of the block, remove them and everything that runs on them.

    Args:
        num_hosts: Number of hosts, 1 to 26.
        rate: Bandwidth of each host's link in each direction, such as "10gbit" or "100mbit"; None: unlimited.
        delay_ms: Milliseconds that a packet takes in one direction, in addition to its time at the rate. With a rate or
            a delay it is at least 0.05, and accurate to about 0.1. IPv4 only.

    Raises:
        ValueError: An argument is out of range.
        OSError: This machine can't do it; `why_no_hosts` tells why.
    """
    if not 1 <= num_hosts <= 26:
        raise ValueError(f"num_hosts must lie in [1, 26], got {num_hosts}")
    rate_bit_s = _parse_rate(rate)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(contextlib.closing(Host("switch", "", 0.0, 0.0)))
        switch.run("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        switch.run("ip", "link", "set", "switch", "up")
        made = []
        for i in range(num_hosts):
            host = Host(f"host-{chr(ord('a') + i)}", f"10.77.0.{i + 1}", rate_bit_s, delay_ms / 1e3)
            made.append(stack.enter_context(contextlib.closing(host)))
            host._connect(switch, rate_bit_s)
        try:
            yield tuple(made)
        except BaseException:
            for host in made:
                host.show()
            raise


def _parse_rate(rate: str | None) -> float:
    if rate is None:
        return 0.0
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        return float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(f"rate must be a number with kbit, mbit or gbit, as '10gbit', got {rate!r}") from None


def why_no_hosts() -> str:
    """Return the reason why `hosts` can't work here; empty if it can. It tries, which takes a moment."""
    if not sys.platform.startswith("linux"):
        return "hosts are Linux namespaces"
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        return f"not installed: {', '.join(missing)} (packages {', '.join(sorted(set(missing.values())))})"
    try:
        with hosts(2, rate="1gbit", delay_ms=0.1):
            return ""
    except OSError as error:
        return f"{error} (root with CAP_NET_ADMIN and CAP_SYS_ADMIN, tbf and NFQUEUE are needed)"
