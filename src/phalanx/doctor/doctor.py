"""The command line of ``phalanx doctor``, which accepts every flag of ``phalanx run``."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import _env
from phalanx._command_line import Parser, UsageError
from phalanx.doctor.examination import HostRole, examine
from phalanx.doctor.report import as_json, exit_code, print_report
from phalanx.host.cpus import read_machine
from phalanx.host.network import interfaces
from phalanx.launch.command.flag_parser import add_flags
from phalanx.launch.command.flag_values import number
from phalanx.launch.command.flags import GROUPS, Flag, Setting
from phalanx.launch.command.node_flags import check_nodes, rendezvous
from phalanx.launch.command.plan import count_local_ranks, read_command


def _switch(text: str) -> bool:
    return text == "1"


_timeout = number(float, 1e-9, "seconds, more than 0 and at most 3600", most=3600)


FLAGS = (
    Flag("json", "print the result as JSON", _switch),
    Flag("no-engines", "skip the all_reduce of each engine on local ranks", _switch),
    Flag("timeout", "seconds that the hosts wait for each other", _timeout, "SECONDS", "30"),
)


def main(args: Sequence[str]) -> int:
    """Examine this host alone or within a job; return 1 if there is a problem, 2 for a mistake in the command line."""
    environ = _env.environment()
    try:
        role, is_json = read_role(args, environ)
    except UsageError as error:
        return make_parser().refuse(error, args)
    if role is None:
        return 0
    diagnosis = examine(role, environ, _say)
    if is_json:
        print(as_json(diagnosis))
    else:
        print_report(diagnosis)
    return exit_code(diagnosis)


def read_role(args: Sequence[str], environ: Mapping[str, str]) -> tuple[HostRole | None, bool]:
    """Return this host's role, and whether to print JSON.

    The role is None if a scheduler started one doctor per rank and this doctor is not the first on its host.

    Raises:
        UsageError: An argument is wrong, or arguments contradict each other.
    """
    parser = make_parser()
    settings, rest, found = read_command(args, environ, parser=parser, also=FLAGS)
    takes_any = settings["module"].value or settings["no-python"].value
    if rest and not (takes_any or rest[0].endswith(".py") or os.path.exists(rest[0])):  # a job's script may follow
        raise parser.unknown(rest[0])
    if found is not None and found.local_rank > 0:
        return None, False
    check_nodes(settings, found)
    return _role_of(settings, environ), settings["json"].value


def _role_of(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> HostRole:
    met = rendezvous(settings)
    _, num_ranks, _ = count_local_ranks(settings["nproc-per-node"], read_machine(), environ)
    num_hosts = met.get("max_nodes", 1)
    role = HostRole(
        num_hosts=num_hosts,
        num_local_ranks=num_ranks,
        timeout_s=settings["timeout"].value,
        tries_engines=not settings["no-engines"].value,
    )
    if num_hosts == 1:
        return role
    host, _, port = met["rdzv_endpoint"].split(",")[0].rpartition(":")
    is_counted = met["rdzv_backend"] == "c10d"
    return dataclasses.replace(
        role,
        least_hosts=met["min_nodes"],
        node_rank=met["node_rank"],
        is_counted=is_counted,
        serves=_is_own(host) if is_counted else met["node_rank"] == 0,
        master_addr=host.strip("[]"),
        master_port=int(port),
    )


def _is_own(host: str) -> bool:
    """Whether a name or address belongs to this host; if so, this host serves the c10d rendezvous, as in torch."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found: list[Any] = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return bool({entry[4][0] for entry in found} & {one.address for one in interfaces()})


def _say(line: str) -> None:
    print(f"phalanx doctor: {line}", file=sys.stderr, flush=True)


def make_parser() -> Parser:
    """Return the parser of ``phalanx doctor``."""
    parser = Parser(
        "phalanx doctor",
        "phalanx doctor [flags]",
        "Check in a few seconds whether this host can train, and print what is wrong and what to do. Start it on each "
        "host of a job, with the flags of phalanx run or under srun or mpirun, to check also whether the hosts reach "
        "each other; host 0 then prints the table for all. The exit code is 1 if there is a problem. Every flag of "
        "phalanx run is accepted, and these matter:",
    )
    add_flags(parser, {"Examination": FLAGS, "Hosts": (GROUPS["Ranks"][0], *GROUPS["Several nodes"][:4])})
    return parser
