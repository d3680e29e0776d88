"""Finds this process's launcher and rank in the variables of torchrun, MPI, Slurm or Kubeflow.

One small class per environment has one method, `place`. The methods are called in order, from the innermost launcher to
the outermost, and the first result counts: a rank that ``phalanx run`` starts inside a Slurm job has the variables of
both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Protocol

from phalanx._text import counted

_LOCAL_ADDRESS = "127.0.0.1"
_MOST_HOSTS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One process among those that were started together.

    Attributes:
        scheduler: Name of the scheduler or launcher, for messages.
        rank: Rank of this process among `world_size`.
        local_rank: Rank of this process among the `local_world_size` on this host.
        node_rank: Number of this host among `num_nodes`.
        master_addr: Host of rank 0; None if unknown.
        hosts: All hosts, rank 0's host first; empty if unknown.
        master_port: Port on rank 0's host, the same on every rank and used by no other job; None if unknown.
        rank_variable: Environment variable that the launcher sets in each process that it starts, but does not have
            itself.
        knows_hosts: Whether the environment says which ranks share a host; otherwise `local_rank`, `node_rank` and the
            fields that go with them have no meaning.
    """

    scheduler: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    hosts: tuple[str, ...] = ()
    master_port: int | None = None
    rank_variable: str = "RANK"
    knows_hosts: bool = True

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
            ("node rank", self.node_rank, self.num_nodes),
        ):
            if not 0 <= value < limit:
                raise ValueError(f"{self.scheduler} gives {name} {value}, which must lie in [0, {limit})")


class Scheduler(Protocol):
    """A launcher or scheduler, recognized by the environment of the processes that it starts."""

    name: str

    def place(self, environ: Mapping[str, str]) -> Placement | None:
        """Return this process's place; None if another launcher started the process.

        Raises:
            ValueError: The environment contradicts itself.
        """
        ...


class Contract:
    """torchrun's variables, set by any launcher; if they were set by hand, the variables about hosts may be missing."""

    name = "the environment"

    def place(self, environ: Mapping[str, str]) -> Placement | None:
        given = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
        if len(given) == 1:
            missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
            raise ValueError(f"{given[0]} is set and {missing} is not: set both, or neither to run alone")
        if not given:
            return None
        rank, size = _int(environ, "RANK"), _int(environ, "WORLD_SIZE")
        # Facts that only this rank knows must not be used here, because all ranks must find the same number of hosts.
        knows_hosts = "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ
        local_rank = _int(environ, "LOCAL_RANK") if knows_hosts else 0
        local_size = max(1, _int(environ, "LOCAL_WORLD_SIZE")) if knows_hosts else 1
        return Placement(
            scheduler=self.name,
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            node_rank=_int(environ, "GROUP_RANK", rank // local_size),
            num_nodes=_int(environ, "GROUP_WORLD_SIZE", max(1, -(-size // local_size))),
            master_addr=environ.get("MASTER_ADDR") or None,
            master_port=_int(environ, "MASTER_PORT", 0) or None,
            knows_hosts=knows_hosts,
        )


class OpenMpi:
    """``mpirun`` of Open MPI. Ranks are assumed to be mapped to hosts in order, which is the default of ``mpirun``."""

    name = "Open MPI"

    def place(self, environ: Mapping[str, str]) -> Placement | None:
        return _mpi_place(
            self.name,
            environ,
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )


class Hydra:
    """``mpiexec`` of MPICH and Intel MPI. Slurm's own PMI sets PMI_RANK as well, but no local rank."""

    name = "MPICH or Intel MPI"

    def place(self, environ: Mapping[str, str]) -> Placement | None:
        if "MPI_LOCALRANKID" not in environ and _in_slurm_step(environ):
            return None
        return _mpi_place(self.name, environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


class Slurm:
    """A task that ``srun`` started. A batch script, or a shell in an allocation, is not a task, and has no place."""

    name = "Slurm"

    def place(self, environ: Mapping[str, str]) -> Placement | None:
        if not _in_slurm_step(environ):
            return None
        size = _int(environ, "SLURM_STEP_NUM_TASKS", _int(environ, "SLURM_NTASKS", 1))
        num_nodes = _int(environ, "SLURM_STEP_NUM_NODES", _int(environ, "SLURM_NNODES", 1))
        node_rank = _int(environ, "SLURM_NODEID", 0)
        local_rank = _int(environ, "SLURM_LOCALID", 0)
        per_node = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        counts = expand_counts(per_node) if per_node else [size // num_nodes] * num_nodes
        hosts = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        # Every task of a step computes the same port. Other steps and jobs, which may share the host, compute different
        # ports.
        job, step = _int(environ, "SLURM_JOB_ID", 0), _int(environ, "SLURM_STEP_ID", 0)
        return Placement(
            scheduler=self.name,
            rank=_int(environ, "SLURM_PROCID", 0),
            world_size=size,
            local_rank=local_rank,
            local_world_size=counts[node_rank] if node_rank < len(counts) else max(counts),
            node_rank=node_rank,
            num_nodes=num_nodes,
            master_addr=_LOCAL_ADDRESS if num_nodes == 1 else first_host(hosts) if hosts else None,
            hosts=expand_hosts(hosts) if num_nodes > 1 else (),
            master_port=20000 + (job * 31 + step) % 10000,
            rank_variable="SLURM_PROCID",
        )


class Kubeflow:
    """A pod of a PyTorchJob or TrainJob: its PET_* variables describe nodes, and are meant for a launcher."""

    name = "Kubeflow"

    def place(self, environ: Mapping[str, str]) -> Placement | None:
        if not environ.get("PET_NNODES") or "PET_NODE_RANK" not in environ:
            return None
        per_node = environ.get("PET_NPROC_PER_NODE", "1")
        if per_node.isdigit() and int(per_node) > 1:
            raise ValueError(
                f"PET_NPROC_PER_NODE={per_node} asks for {per_node} ranks in this pod, and the script was started "
                "once: let the pod's command be phalanx run train.py"
            )
        nodes = environ["PET_NNODES"].split(":")
        if not all(part.isdigit() for part in nodes):
            raise ValueError(f"PET_NNODES must be N or MIN:MAX, got {environ['PET_NNODES']!r}")
        size = int(nodes[-1])
        rank = _int(environ, "PET_NODE_RANK", 0)
        return Placement(
            scheduler=self.name,
            rank=rank,
            world_size=size,
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            num_nodes=size,
            master_addr=environ.get("PET_MASTER_ADDR") or None,
            master_port=_int(environ, "PET_MASTER_PORT", 0) or None,
            rank_variable="PET_NODE_RANK",
        )


_STARTERS: tuple[Scheduler, ...] = (OpenMpi(), Hydra(), Slurm())
_ALL: tuple[Scheduler, ...] = (Contract(), *_STARTERS, Kubeflow())


def detect(environ: Mapping[str, str]) -> Placement | None:
    """Return the place of the process with this environment; None if it was started alone.

    Raises:
        ValueError: The environment contradicts itself; the message says how.
    """
    return next((place for scheduler in _ALL if (place := scheduler.place(environ))), None)


def detect_node(environ: Mapping[str, str]) -> Placement | None:
    """Return the place of a launcher with this environment among the tasks that a scheduler started.

    Return None for the environment of a rank, because a launcher that a rank starts runs a separate job. The PET_*
    variables are ignored here, because the launcher reads them as flags.
    """
    if "LOCAL_RANK" in environ and "RANK" in environ:
        return None
    return next((place for scheduler in _STARTERS if (place := scheduler.place(environ))), None)


def contradiction(place: Placement, num_local_ranks: int) -> str:
    """Return, in one line, what is wrong with a launcher in this place; empty if nothing is wrong."""
    if place.local_world_size == 1:
        return ""
    right = {
        "Slurm": ("srun --ntasks-per-node=1 phalanx run", "srun python train.py"),
        "Open MPI": ("mpirun --map-by ppr:1:node phalanx run", "mpirun python train.py"),
    }.get(place.scheduler, ("mpiexec -ppn 1 phalanx run", "mpiexec python train.py"))
    return (
        f"{place.scheduler} started phalanx run {place.local_world_size} times on this node, and each would start "
        f"{counted(num_local_ranks, 'rank')}: use {right[0]} --nproc-per-node "
        f"{place.local_world_size} train.py, or {right[1]} with phalanx.init()"
    )


def unused_nodes(environ: Mapping[str, str]) -> int:
    """Return how many nodes Slurm has allocated, if there are several and no ``srun`` uses them yet; otherwise 0."""
    if _in_slurm_step(environ) or "LOCAL_RANK" in environ:
        return 0
    num_nodes = _int(environ, "SLURM_JOB_NUM_NODES", 1) if "SLURM_JOB_ID" in environ else 1
    return num_nodes if num_nodes > 1 else 0


def _mpi_place(
    name: str, environ: Mapping[str, str], rank_name: str, size_name: str, local_rank_name: str, local_size_name: str
) -> Placement | None:
    if rank_name not in environ or size_name not in environ:
        return None
    rank, size = _int(environ, rank_name), _int(environ, size_name)
    local_size = max(1, _int(environ, local_size_name, size))
    return Placement(
        scheduler=name,
        rank=rank,
        world_size=size,
        local_rank=_int(environ, local_rank_name, rank),
        local_world_size=local_size,
        node_rank=rank // local_size,
        num_nodes=-(-size // local_size),
        master_addr=environ.get("MASTER_ADDR") or (_LOCAL_ADDRESS if local_size == size else None),
        master_port=_int(environ, "MASTER_PORT", 0) or None,
        rank_variable=rank_name,
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    # SLURM_PROCID alone does not show that srun started this process: a batch script has it, too, but no step number.
    # The shell that salloc opens may run in a step, but Slurm reserves numbers near 2**32 for such steps.
    step = _first(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < 0xFFFFFFF0


def expand_counts(text: str) -> list[int]:
    """Return ``[2, 2, 2, 1]`` for ``2(x3),1``, Slurm's notation for tasks per node.

    Raises:
        ValueError: The text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ValueError(f"Slurm's tasks per node must be like 2(x3),1, got {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Return ``gpu03`` for ``gpu[03-05,9],login1``, Slurm's notation for hosts."""
    host, position = "", 0
    while position < len(nodelist) and nodelist[position] != ",":
        if nodelist[position] == "[":
            end = nodelist.index("]", position)
            host += re.split("[-,]", nodelist[position + 1 : end])[0]
            position = end
        else:
            host += nodelist[position]
        position += 1
    return host


def expand_hosts(nodelist: str) -> tuple[str, ...]:
    """Return ``gpu03``, ``gpu04``, ``gpu05`` and ``login1`` for ``gpu[03-05],login1``, Slurm's notation for hosts."""
    hosts = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())
        choices = [_expand_ranges(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(filter(None, hosts))


def _expand_ranges(text: str) -> list[str]:
    """Return ``03``, ``04`` and ``9`` for ``03-04,9``."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        is_range = first.isdigit() and last.isdigit() and int(last) - int(first) < _MOST_HOSTS
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)] if is_range else [part]
    return numbers


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    with contextlib.suppress(ValueError):
        return int(text)
    raise ValueError(f"{name} must be a whole number, got {text!r}")
