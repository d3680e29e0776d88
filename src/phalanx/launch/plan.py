"""From the flags, the scheduler and the machine to the job: every number found, every contradiction said up front."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import _settings
from phalanx._command_line import Parser, UsageError
from phalanx._env import REPLACE_VARIABLE, did_you_mean
from phalanx._memory import choose
from phalanx._text import counted, format_ranges
from phalanx.launch.cpus import Machine, count_gpus, divide, has_module, read_machine, torch_uses_gpus
from phalanx.launch.environment import binds_threads, shared_environment
from phalanx.launch.flag_parser import read_flags
from phalanx.launch.flags import ELASTIC_CALL, STATIC_CALL, Flag, Setting
from phalanx.launch.job import Job
from phalanx.launch.run_folder import name_of
from phalanx.launch.schedulers import Placement, contradiction, detect_node, unused_nodes
from phalanx.launch.tuned import Tuned, recall

_TUNED = "auto: phalanx tune"
_STATIC_PORT, _C10D_PORT = 29500, 29400  # torchrun's
_MOST_MEETING_PLACES = 4  # of a scheduler's hosts: each node that comes connects to all of them


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job, and the flags that it came from."""

    job: Job
    settings: Mapping[str, Setting]
    nproc_origin: str

    @property
    def is_dry(self) -> bool:
        return bool(self.settings["dry-run"].value)

    @property
    def is_warm(self) -> bool:
        """Whether the job is to be forked from a process that has torch imported already."""
        return bool(self.settings["warm"].value)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which the job is run: `inherited`, and what its flags ask for in variables."""
        return {**inherited, **({REPLACE_VARIABLE: "gloo"} if self.settings["replace-gloo"].value else {})}

    def shared_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with which torch is imported for all ranks, see `environment.shared_environment`."""
        share = self.job.divide(self.job.num_local_ranks).shares[0]
        return shared_environment(self.environment(inherited), share)

    def describe(self) -> str:
        """Return a table of name, value and origin, then what each rank would run and on which CPUs."""
        job = self.job
        least, most = job.min_local_ranks, job.num_local_ranks
        num_ranks = most if least == most else f"{least}:{most}"
        rows = [("command", shlex.join(job.command), ""), ("nproc-per-node", num_ranks, self.nproc_origin)]
        rows += [
            (name, _shown(name, setting, job), setting.origin)
            for name, setting in self.settings.items()
            if name not in ("nproc-per-node", "dry-run")
        ]
        for rank, share in enumerate(job.divide(most).shares):
            where = f"CPUs {format_ranges(share.cpus)}" if share.cpus else "any CPU"
            rows.append((f"local rank {rank}", counted(share.num_threads, "thread"), where))
        widths = [max(len(str(row[column])) for row in rows if row[2]) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {value!s:<{widths[1]}}  {origin}".rstrip() for name, value, origin in rows]
        lines += [f"phalanx run: {line}" for line in job.opening()]
        if least < most:
            lines.append(f"phalanx run: with the least: {job.divide(least).note}")
        return "\n".join(lines)


def make_plan(argv: Sequence[str], environ: Mapping[str, str], parser: Parser | None = None) -> Plan:
    """Return what ``phalanx run`` with these arguments is to do.

    Args:
        parser: Parser of another command that takes these flags too; default: that of ``phalanx run``.

    Raises:
        UsageError: Something is wrong or contradicts something else.
    """
    settings, target, place = read_command(argv, environ, parser=parser)
    value = {name: setting.value for name, setting in settings.items()}
    machine = read_machine()
    min_ranks, num_ranks, why = count_local_ranks(settings["nproc-per-node"], machine, environ)
    _check(settings, place, num_ranks, environ)
    command = _command(target, module=value["module"], no_python=value["no-python"])
    tuned = _tuned(settings, command, machine, environ)
    if tuned is not None:
        min_ranks, num_ranks, why = tuned.ranks, tuned.ranks, _TUNED
    job = Job(
        command=command,
        typed=shlex.join(["phalanx", "run", *argv]),
        preload=not (value["no-python"] or value["no-preload"] or binds_threads(environ)),
        local_rank_argument=value["no-use-env"],
        num_local_ranks=num_ranks,
        min_local_ranks=min_ranks,
        regrow_after_s=value["regrow-after"],
        divide=functools.partial(
            divide,
            machine=machine,
            pin=not value["no-pin"],
            omp_num_threads=environ.get("OMP_NUM_THREADS", ""),
            num_threads=tuned.threads if tuned is not None else 0,
        ),
        is_tuned=tuned is not None,
        memory=choose(environ, wanted=_memory(settings["memory"], tuned), num_ranks=num_ranks),
        role=value["role"],
        local_addr=value["local-addr"],
        host_label=value["host-label"],
        max_restarts=value["max-restarts"],
        keeps=not value["no-keep"],
        drains=bool(value["drain"] or value["drain-file"] or value["drain-url"]),
        drain_file=os.path.abspath(value["drain-file"]) if value["drain-file"] else "",
        drain_url=value["drain-url"],
        grace_s=value["shutdown-timeout"],
        signals=value["signals-to-handle"],
        log_dir=value["log-dir"],
        redirects=_by_rank("redirects", value["redirects"], num_ranks),
        tees=_by_rank("tee", value["tee"], num_ranks),
        shown_ranks=_shown_ranks(value["local-ranks-filter"], num_ranks),
        **rendezvous(settings),
    )
    return Plan(job, settings, why)


def _tuned(
    settings: Mapping[str, Setting], command: Sequence[str], machine: Machine, environ: Mapping[str, str]
) -> Tuned | None:
    """Return what ``phalanx tune`` has found for this command, if the number of ranks is left to us."""
    is_free = settings["nproc-per-node"].value == "auto" and settings["nnodes"].value == (1, 1)
    if not is_free or (torch_uses_gpus() and count_gpus(environ)):
        return None
    return recall(settings["log-dir"].value, command, machine)


def _memory(asked: Setting, tuned: Tuned | None) -> str:
    return str(asked.value if tuned is None or asked.is_given else tuned.memory)


def read_command(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    parser: Parser | None = None,
    also: Sequence[Flag] = (),
) -> tuple[dict[str, Setting], list[str], Placement | None]:
    """Return every flag's setting, the script with its arguments, and the place that a scheduler gave us.

    Args:
        parser: Parser of another command that takes these flags too; default: that of ``phalanx run``.
        also: Further flags of that command.

    Raises:
        UsageError: A flag or a variable is wrong.
    """
    try:
        _settings.read_settings(environ)
        place = detect_node(environ)
    except ValueError as error:
        raise UsageError(str(error), right=None) from None
    who = place.scheduler if place else ""
    settings, target = read_flags(argv, environ, _scheduled(place), who, parser=parser, also=also)
    return _with_spares(settings, place), target, place


def _with_spares(settings: dict[str, Setting], place: Placement | None) -> dict[str, Setting]:
    """Return the settings as --spares changes them.

    The nodes that a scheduler has started include the spares. A node that takes another's place can't have a fixed
    number, so the backend is c10d unless one was named.
    """
    spares, nnodes, changed = settings["spares"], settings["nnodes"], {}
    if not spares.value or settings["standalone"].value:
        return settings
    if place is not None and nnodes.origin == place.scheduler:
        if spares.value >= place.num_nodes:
            started = f"{place.scheduler} started {counted(place.num_nodes, 'node')} in all"
            raise UsageError(f"{spares.origin} {spares.value}, and {started}")
        most = place.num_nodes - spares.value
        changed["nnodes"] = Setting((most, most), nnodes.origin)
    if not settings["rdzv-backend"].is_given:
        changed["rdzv-backend"] = Setting("c10d", spares.origin)
        if settings["master-addr"].is_given and not settings["rdzv-endpoint"].is_given:
            hosts, port = settings["master-addr"], settings["master-port"].value or _C10D_PORT
            places = ",".join(f"{host}:{port}" for host in hosts.value.split(","))
            changed["rdzv-endpoint"] = Setting(places, hosts.origin)
    return settings | changed


def _scheduled(place: Placement | None) -> dict[str, str]:
    """Return what the scheduler says, as texts of flags."""
    if place is None or place.num_nodes == 1:
        return {}
    found = {"nnodes": str(place.num_nodes), "node-rank": str(place.node_rank)}
    if place.master_addr:
        found["master-addr"] = ",".join(place.hosts[:_MOST_MEETING_PLACES]) or place.master_addr
    if place.master_port:
        found["master-port"] = str(place.master_port)
    return found


def count_local_ranks(asked: Setting, machine: Machine, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return the least and the largest number of ranks, and why."""
    if not isinstance(asked.value, tuple):
        number, why = _count_ranks(asked.value, asked.origin, machine, environ)
        return number, number, why
    least, most = asked.value
    number, why = _count_ranks(most, asked.origin, machine, environ)
    if least > number:
        raise UsageError(f"{asked.origin} {least}:{most}, and {most} is {number} here")
    return least, number, why


def _count_ranks(asked: int | str, origin: str, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    if isinstance(asked, int):
        return asked, origin
    num_gpus = count_gpus(environ) if asked == "gpu" or (asked == "auto" and torch_uses_gpus()) else 0
    if asked == "gpu" and not num_gpus:
        raise UsageError(f"{origin} gpu, and no GPU is visible here: name a number, or auto")
    if num_gpus:
        return num_gpus, f"{origin}: {counted(num_gpus, 'GPU')}"
    if asked == "cpu":
        return machine.num_cpus, f"{origin}: {machine.num_cpus} CPUs"
    return machine.num_cores, f"{origin}: {machine.describe()}"


def _check(
    settings: Mapping[str, Setting], place: Placement | None, num_ranks: int, environ: Mapping[str, str]
) -> None:
    """Refuse what each flag alone allows and all together do not."""
    nnodes = settings["nnodes"]
    if settings["module"].value and settings["no-python"].value:
        raise UsageError("-m and --no-python exclude each other")
    if settings["use-env"].value and settings["no-use-env"].value:
        raise UsageError("--use-env and --no-use-env exclude each other")
    is_alone = settings["standalone"].value
    if not is_alone and place is not None and (problem := contradiction(place, num_ranks)):
        raise UsageError(problem)
    check_nodes(settings, place)
    if not is_alone and not nnodes.is_given and (unused := unused_nodes(environ)):
        raise UsageError(
            f"Slurm gave this job {unused} nodes, and phalanx run was started on one of them: use srun "
            "--ntasks-per-node=1 phalanx run train.py, or --nnodes 1 for this node alone"
        )


def check_nodes(settings: Mapping[str, Setting], place: Placement | None) -> None:
    """Refuse what the flags, or they and the scheduler, say of the nodes and can't be true together."""
    nnodes, backend = settings["nnodes"], settings["rdzv-backend"].value
    least, most = nnodes.value
    replicas = settings["replicas"]
    if replicas.is_given and replicas.value and replicas.value >= most:
        how = "leave it out" if most == 1 else f"{most - 1} is the most"
        raise UsageError(
            f"{replicas.origin} {replicas.value} takes {counted(replicas.value, 'other node')}, and this job has "
            f"{counted(most, 'node')} at most (--nnodes): {how}",
            right=None,
        )
    if settings["standalone"].value:
        if most > 1 and nnodes.origin.startswith("--"):
            raise UsageError(f"--standalone is a job of one node, and --nnodes asks for {most}", STATIC_CALL)
        return
    if place is not None and most > 1 and not least <= place.num_nodes <= most + settings["spares"].value:
        started = f"{place.scheduler} started {place.num_nodes}"
        raise UsageError(f"{nnodes.origin} asks for {most} nodes, and {started}", right=None)
    if most == 1 and settings["spares"].value:
        raise UsageError(
            "--spares is for jobs of at least 2 nodes: --nnodes 2 --spares 1, and 3 nodes in all", right=None
        )
    if most == 1:
        return
    if settings["spares"].value and backend == "static":
        raise UsageError(
            "--spares needs nodes without fixed numbers, and --rdzv-backend static gives them: leave that out",
            right=None,
        )
    if backend == "static":
        if least != most:
            needs = "needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT"
            raise UsageError(f"{nnodes.origin} {least}:{most} {needs}", ELASTIC_CALL)
        node_rank = settings["node-rank"]
        if node_rank.value >= most:
            raise UsageError(f"{node_rank.origin} must lie in [0, {most}), got {node_rank.value}", STATIC_CALL)
        given = [settings[name] for name in ("master-addr", "rdzv-endpoint")]
        if not any(setting.is_given for setting in given):
            raise UsageError(
                f"{most} nodes need --master-addr HOST, the same on all, where node 0 listens", STATIC_CALL
            )
    elif not settings["rdzv-endpoint"].value:
        needs = "needs --rdzv-endpoint HOST:PORT, the same on all"
        raise UsageError(f"--rdzv-backend c10d with several nodes {needs}", ELASTIC_CALL)


def rendezvous(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the job's fields that say how nodes and ranks meet."""
    value = {name: setting.value for name, setting in settings.items()}
    least, most = (1, 1) if value["standalone"] else value["nnodes"]
    endpoint, backend = value["rdzv-endpoint"], value["rdzv-backend"]
    host, port = value["master-addr"], value["master-port"]
    run_id = value["rdzv-id"]
    if most == 1:
        host = host.split(",")[0]
        if endpoint and backend == "static" and not value["standalone"]:
            host, port = _host_and_port(endpoint.split(",")[0], 0)
        if not settings["rdzv-id"].is_given or value["standalone"]:
            run_id = os.urandom(8).hex()
        if value["standalone"]:
            host, port = "127.0.0.1", 0
        return {"master_addr": host, "master_port": port, "run_id": run_id}
    default_port = _STATIC_PORT if backend == "static" else _C10D_PORT
    texts = endpoint.split(",") if endpoint else [f"{one}:{port or _STATIC_PORT}" for one in host.split(",")]
    places = [_host_and_port(text, default_port) for text in texts]
    return {
        "min_nodes": least,
        "max_nodes": most,
        "node_rank": value["node-rank"],
        "rdzv_backend": backend,
        "rdzv_endpoint": ",".join(f"{host}:{port}" for host, port in places),
        "spares": value["spares"],
        "rdzv_conf": value["rdzv-conf"],
        "run_id": run_id,
        "num_replicas": value["replicas"],
    }


def _host_and_port(endpoint: str, default_port: int) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):  # an IPv6 address without a port
        return endpoint, default_port
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint!r}")
    return host, int(port)


def _by_rank(name: str, streams: int | dict[int, int], num_ranks: int) -> tuple[int, ...]:
    if isinstance(streams, int):
        return (streams,) * num_ranks
    _require_ranks(name, streams, num_ranks)
    return tuple(streams.get(rank, 0) for rank in range(num_ranks))


def _shown_ranks(ranks: tuple[int, ...], num_ranks: int) -> tuple[int, ...] | None:
    _require_ranks("local-ranks-filter", ranks, num_ranks)
    return ranks or None


def _require_ranks(name: str, ranks: Sequence[int] | Mapping[int, int], num_ranks: int) -> None:
    for rank in ranks:
        if rank >= num_ranks:
            raise UsageError(f"--{name} names local rank {rank}, which must lie in [0, {num_ranks})")


def _command(target: list[str], *, module: bool, no_python: bool) -> tuple[str, ...]:
    if not target:
        raise UsageError("no script given")
    if no_python:
        _check_program(target)
        return tuple(target)
    if module:
        package = target[0].split(".")[0]
        if target[0].endswith(".py") or os.sep in target[0]:
            raise UsageError(f"-m takes a module, got the file {target[0]!r}", f"phalanx run {target[0]}")
        if not has_module(package, os.getcwd()):
            raise UsageError(f"no module named {package!r}")
        return (sys.executable, "-m", *target)
    _check_script(target)
    return (sys.executable, *target)


def _check_program(target: Sequence[str]) -> None:
    program = target[0]
    folders = [""] if os.sep in program else os.get_exec_path()
    paths = [os.path.join(folder, program) for folder in folders]
    if any(os.access(path, os.X_OK) for path in paths):
        return
    there = [path for path in paths if os.path.exists(path)]
    if there:
        raise UsageError(f"{there[0]!r} may not be executed", f"chmod +x {there[0]}")
    raise UsageError(f"no program {program!r}", "phalanx run --no-python ./program [args]")


def _check_script(target: Sequence[str]) -> None:
    """Refuse here, once, what every rank would refuse."""
    script = target[0]
    if not os.path.exists(script):
        if os.path.basename(script).startswith("python") and len(target) > 1:
            raise UsageError(f"the script is named alone, without {script}", f"phalanx run {' '.join(target[1:])}")
        folder = os.path.dirname(script) or "."
        scripts = [name for name in os.listdir(folder) if name.endswith(".py")] if os.path.isdir(folder) else []
        near = did_you_mean(os.path.basename(script), scripts)
        raise UsageError(f"no script {script!r} in {os.getcwd()}{near}")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"the folder {script!r} has no __main__.py; name a script in it")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {script!r} may not be read", f"chmod +r {script}")


def _shown(name: str, setting: Setting, job: Job) -> str:
    value = setting.value
    if name == "master-port" and not value:
        return "a free one" if job.max_nodes == 1 else str(_STATIC_PORT) if job.rdzv_backend == "static" else "-"
    if name == "rdzv-endpoint" and not value:
        return job.rdzv_endpoint or "-"
    if name == "memory":
        return f"{value}: {job.memory}"
    if name == "log-dir" and not value:
        return os.path.join("runs", name_of(job.command))
    if name == "rdzv-id":
        return job.run_id
    if name == "nnodes":
        return f"{value[0]}:{value[1]}"
    if name == "signals-to-handle":
        return ",".join(sig.name for sig in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ",".join(f"{key}:{item}" for key, item in value.items()) or "-"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return str(value) if value != "" else "-"
