"""Machines of a cluster on one: hosts in namespaces that know each other by name, and a remote shell between them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.namespaces import Host, hosts

LIMIT_S = 120
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "clusters"
PHALANX = [sys.executable, "-m", "phalanx"]
_SCHEDULERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "PET_",
    "GROUP_",
    "NODE_RANK",
    "MPI_",
)

SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
os.write(1, f"rank {dist.get_rank()} on {os.uname().nodename}: {tensor.item():g}\\n".encode())
dist.destroy_process_group()
"""
"""A script that sums rank + 1 over all ranks."""


class Machines:
    """Hosts that find each other by name.

    Attributes:
        hosts: In order; their names are ``host-a``, ``host-b``, ...
    """

    def __init__(self, folder: Path, made: Sequence[Host]) -> None:
        self.hosts, self._folder = list(made), folder
        for number in range(len(made)):
            self.know(number, {host.name: host.address for host in made})

    def know(self, number: int, names: Mapping[str, str]) -> None:
        """Let host `number` know these names alone."""
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        self.etc_hosts(number).write_text("127.0.0.1 localhost\n" + lines)

    def etc_hosts(self, number: int) -> Path:
        return self._folder / f"etc-hosts-{number}"

    def start(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        setup: str = "true",
        stderr: int = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a program on host `number`, in an environment that no scheduler has touched.

        Args:
            env: Added to it.
            setup: Shell commands before the program, in its own mount namespace.
        """
        inside = f'mount --bind {self.etc_hosts(number)} /etc/hosts && {setup} && exec env "$@"'
        unset = [part for name in os.environ if name.startswith(_SCHEDULERS) for part in ("-u", name)]
        environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **(env or {})}  # phalanx by its name
        settings = [*unset, *(f"{name}={value}" for name, value in environ.items())]
        return self.hosts[number].start(
            ["unshare", "--mount", "sh", "-c", inside, "sh", *settings, *command],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self._folder,
        )

    def run(self, *commands: Sequence[str] | None, env: Mapping[str, str] | None = None, **options: Any) -> list[str]:
        """Run one command on each host, together; return what each printed, and fail where one fails."""
        started = [self.start(i, command, env, **options) for i, command in enumerate(commands) if command]
        said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
        assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
        return said

    def remote_shell(self) -> str:
        """Return a program that runs a command on a host, as ``ssh HOST COMMAND`` does."""
        cases = "\n".join(f"{host.name}|{host.address}) pid={host.pid} ;;" for host in self.hosts)
        path = self._folder / "remote-shell"
        path.write_text(
            textwrap.dedent("""\
            #!/bin/sh
            while [ "${1#-}" != "$1" ]; do shift; done
            case "$1" in
            CASES
            *) echo "no host $1" >&2; exit 1 ;;
            esac
            shift
            exec nsenter --net=/proc/$pid/ns/net --uts=/proc/$pid/ns/uts sh -c "$*"
            """).replace("CASES", cases)
        )
        path.chmod(0o755)
        return str(path)


@contextlib.contextmanager
def machines(folder: Path, num_hosts: int = 2, **links: Any) -> Iterator[Machines]:
    """Make hosts with a folder that they share, and remove them."""
    with hosts(num_hosts, **links) as made:
        yield Machines(folder, made)


def script(folder: Path, source: str = SUM, name: str = "train.py") -> str:
    """Write a script into the shared folder; return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def sums(outputs: Sequence[str]) -> dict[int, tuple[str, float]]:
    """Return host and sum of each rank that ran `SUM`."""
    found = re.findall(r"rank (\d+) on (\S+): ([\d.]+)$", "\n".join(outputs), re.MULTILINE)
    return {int(rank): (host, float(value)) for rank, host, value in found}


FOUR = {0: ("host-a", 10.0), 1: ("host-a", 10.0), 2: ("host-b", 10.0), 3: ("host-b", 10.0)}
"""What `SUM` says on two hosts of two ranks."""
