"""Plans the job from the flags, the scheduler and the machine: works out every number and rejects contradictions.

``--nproc-per-node`` is ``auto`` by default, whereas torchrun starts one rank. ``cpu`` means every usable CPU, as in
torchrun; ``auto`` counts physical cores, since two ranks on one core gain nothing, and counts GPUs only if the
installed torch is built for GPUs.

On one node, the rendezvous flags set only the master's address and port, and the run's id: ranks do not need an agent's
store there.

Ranks are not pinned if a cgroup quota pays for fewer CPUs than there are: other processes then run on those CPUs, too,
and a pinned rank could not move away. Nor are they pinned if the user asks for more threads than a rank has CPUs.

The numbers of inter-op threads and malloc arenas keep their defaults. torch starts inter-op threads only when they are
first used, and lets a process set their number only once: if the launcher set it, the script's own call would fail.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
from collections.abc import Mapping, Sequence

from phalanx import _settings
from phalanx._command_line import Parser, UsageError
from phalanx._env import REPLACE_VARIABLE, VERIFY_VARIABLE
from phalanx._text import counted, format_ranges
from phalanx.host.block_pool import choose
from phalanx.host.cpus import Machine, count_gpus, divide, read_machine, torch_uses_gpus
from phalanx.host.schedulers import Placement, contradiction, detect_node, unused_nodes
from phalanx.launch.command.flag_parser import read_flags
from phalanx.launch.command.flags import Flag, Setting
from phalanx.launch.command.node_flags import STATIC_PORT, check_nodes, rendezvous, scheduled_flags, with_spares
from phalanx.launch.command.target import command_of, flags_after_the_script
from phalanx.launch.command.tuned import Tuned, recall
from phalanx.launch.environment import binds_threads, shared_environment
from phalanx.launch.job import Job
from phalanx.launch.script_head import Head, read_head
from phalanx.record.run_folder import base_of

_TUNED = "auto: phalanx tune"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The meaning of a command line: a job, and how to start it.

    Attributes:
        settings: Settings from which the plan was made, by flag.
        nproc_origin: Origin of the number of ranks.
        is_dry: Whether to show the plan and run nothing (``--dry-run``).
        is_warm: Whether to fork the job from a process that has already imported torch.
        variables: Environment variables that flags set; the ranks inherit them.
        shared: Environment in which torch is imported for all ranks.
    """

    job: Job
    settings: Mapping[str, Setting]
    nproc_origin: str
    is_dry: bool
    is_warm: bool
    variables: Mapping[str, str]
    shared: Mapping[str, str]

    def describe(self) -> str:
        """Return a table of name, value and origin; its last rows are the threads and CPUs of each rank."""
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
            rows.append((f"local rank {rank}", counted(share.used_threads, "thread"), where))
        widths = [max(len(str(row[column])) for row in rows if row[2]) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {value!s:<{widths[1]}}  {origin}".rstrip() for name, value, origin in rows]
        lines += [f"phalanx run: {line}" for line in job.opening()]
        if least < most:
            lines.append(f"phalanx run: with the least: {job.divide(least).note}")
        return "\n".join(lines)


def make_plan(argv: Sequence[str], environ: Mapping[str, str], parser: Parser | None = None) -> Plan:
    """Return the plan of ``phalanx run`` with these arguments.

    Args:
        parser: Parser of another command that accepts these flags, too; default: the parser of ``phalanx run``.

    Raises:
        UsageError: A flag is wrong, or flags contradict each other.
    """
    settings, target, place = read_command(argv, environ, parser=parser)
    value = {name: setting.value for name, setting in settings.items()}
    machine = read_machine()
    min_ranks, num_ranks, why = count_local_ranks(settings["nproc-per-node"], machine, environ)
    _check(settings, place, num_ranks, environ)
    command = command_of(target, module=settings["module"].origin * value["module"], no_python=value["no-python"])
    tuned = _tuned(settings, command, machine, environ)
    if tuned is not None:
        min_ranks, num_ranks, why = tuned.ranks, tuned.ranks, _TUNED
    head = Head() if value["no-python"] or value["no-preload"] else read_head(command, environ)
    foreseen = {**environ, **head.settings}
    job = Job(
        command=command,
        remark=flags_after_the_script(target),
        typed=shlex.join(["phalanx", "run", *argv]),
        preload=not (value["no-python"] or value["no-preload"] or head.doubt or binds_threads(foreseen)),
        head=head,
        local_rank_argument=value["no-use-env"],
        num_local_ranks=num_ranks,
        min_local_ranks=min_ranks,
        regrow_after_s=value["regrow-after"],
        divide=functools.partial(
            divide,
            machine=machine,
            pin=not value["no-pin"],
            omp_num_threads=foreseen.get("OMP_NUM_THREADS", ""),
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
        metrics=value["metrics"],
        log_dir=value["log-dir"],
        redirects=_by_rank("redirects", value["redirects"], num_ranks),
        tees=_by_rank("tee", value["tee"], num_ranks),
        shown_ranks=_shown_ranks(value["local-ranks-filter"], num_ranks),
        **rendezvous(settings),
    )
    variables = {REPLACE_VARIABLE: "gloo"} if value["replace-gloo"] else {}
    if value["verify"]:
        variables[VERIFY_VARIABLE] = value["verify"]
    share = job.divide(num_ranks).shares[0]
    shared = shared_environment({**environ, **variables}, share)
    return Plan(job, settings, why, value["dry-run"], value["warm"], variables, shared)


def _tuned(
    settings: Mapping[str, Setting], command: Sequence[str], machine: Machine, environ: Mapping[str, str]
) -> Tuned | None:
    """Return the settings that ``phalanx tune`` has found for this command.

    Return None if there are no such settings, if the user chose the number of ranks or nodes, or if the ranks use GPUs.
    """
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
    """Return every flag's setting, the script with its arguments, and this process's place under a scheduler.

    Args:
        parser: Parser of another command that accepts these flags, too; default: the parser of ``phalanx run``.
        also: Further flags of that command.

    Raises:
        UsageError: A flag or a variable is wrong.
    """
    try:
        _settings.read_settings(environ)
        place = detect_node(environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    who = place.scheduler if place else ""
    settings, target = read_flags(argv, environ, scheduled_flags(place), who, parser=parser, also=also)
    return with_spares(settings, place), target, place


def count_local_ranks(asked: Setting, machine: Machine, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return the smallest and the largest number of ranks on this node, and the origin of these numbers."""
    if not isinstance(asked.value, tuple):
        number, why = _count_ranks(asked.value, asked.origin, machine, environ)
        return number, number, why
    least, most = asked.value
    number, why = _count_ranks(most, asked.origin, machine, environ)
    if least > number:
        raise UsageError(f"{asked.origin} {least}:{most}, but {most} means {number} here")
    return least, number, why


def _count_ranks(asked: int | str, origin: str, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    if isinstance(asked, int):
        return asked, origin
    num_gpus = count_gpus(environ) if asked == "gpu" or (asked == "auto" and torch_uses_gpus()) else 0
    if asked == "gpu" and not num_gpus:
        raise UsageError(f"{origin} gpu, but no GPU is visible here: use a number or auto")
    if num_gpus:
        return num_gpus, f"{origin}: {counted(num_gpus, 'GPU')}"
    if asked == "cpu":
        return machine.num_cpus, f"{origin}: {machine.num_cpus} CPUs"
    return machine.num_cores, f"{origin}: {machine.describe()}"


def _check(
    settings: Mapping[str, Setting], place: Placement | None, num_ranks: int, environ: Mapping[str, str]
) -> None:
    """Reject flags that are valid on their own but not together."""
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


def _shown(name: str, setting: Setting, job: Job) -> str:
    value = setting.value
    if name == "master-port" and not value:
        return "a free one" if job.max_nodes == 1 else str(STATIC_PORT) if job.rdzv_backend == "static" else "-"
    if name == "rdzv-endpoint" and not value:
        return job.rdzv_endpoint or "-"
    if name == "memory":
        return f"{value}: {job.memory}"
    if name == "log-dir" and not value:
        return base_of("", job.command)
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
