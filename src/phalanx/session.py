"""`phalanx.init`: finds this process's place in the job and its device, and makes the process group."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from phalanx import _env, _torch
from phalanx._errors import CollectiveTimeout
from phalanx._last_words import tell_when_ended
from phalanx._loop import LoopTools
from phalanx._network import NetworkError, host_identity, outside_address
from phalanx._sockets import keep_paths_short
from phalanx._store import JsonStore, wait_until
from phalanx.launch.schedulers import Placement, detect

if TYPE_CHECKING:
    import torch

_LOCAL_ADDRESS = "127.0.0.1"
_HOSTS_S = 300.0  # for ranks that have met to say where they are; one may be stopped in a debugger


@dataclasses.dataclass(frozen=True)
class Session(LoopTools):
    """This process's place in the job. It ends with `shutdown`, or at the end of a ``with`` block.

    Attributes:
        rank: Rank of this process in the job.
        world_size: Number of ranks in the job.
        local_rank: Rank of this process on its host.
        local_world_size: Number of ranks on this host.
        node_rank: Number of this host in the job.
        num_nodes: Number of hosts in the job.
        device: Device for this rank's model.
        backend: Backend of the process group, as ``init_process_group`` takes it.
        reason: Reason why `backend` is not phalanx for CPU tensors; empty if it is, or if the caller chose it.
        scheduler: Name of the launcher or scheduler that assigned the rank.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    reason: str
    scheduler: str

    def __enter__(self) -> Session:
        if _current is not None and _current.session is self:
            _current.num_blocks += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if _current is None or _current.session is not self:  # shut down in the block
            return
        _current.num_blocks -= 1
        if _current.num_blocks == 0:  # the outermost
            _end(error)


@dataclasses.dataclass
class _Current:
    session: Session
    arguments: tuple[Any, ...]
    owns_group: bool
    exported: tuple[str, ...]
    num_blocks: int = 0  # open ``with`` blocks


_current: _Current | None = None
_num_meetings = 0
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _naming_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make an unknown argument an error that lists the arguments that exist."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                meant = {"local_rank": "device", "nprocs": "world_size", "num_ranks": "world_size"}.get(name)
                raise _env.unknown_argument(f"phalanx.{function.__name__}", name, known, meant)
        return function(*args, **kwargs)

    return checked


@_naming_arguments
def init(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Session:
    """Join the job that this process belongs to and return its `Session`. A process without a job is a world of one.

    The place in the job comes from the arguments, or from the launcher: ``phalanx run``, torchrun, ``srun``,
    ``mpirun``, Kubeflow, or variables set by hand. Where torchrun's variables are missing, they are set until
    `shutdown`. A second call with the same arguments returns the same session.

    Args:
        backend: Backend, as ``init_process_group`` takes it; default: ``"phalanx"``, and with CUDA
            ``"cpu:phalanx,cuda:nccl"``.
        device: Device for this rank; default: the GPU with the number of the local rank, which becomes the current
            one, or the CPU if there is no GPU.
        timeout: Timeout for collectives, in seconds; default: the backend's.
        init_method: URL where the ranks meet, such as ``"file:///shared/file"``; default: the launcher's.
        rank: Rank of this process, together with `world_size`; default: the launcher's.
        world_size: Number of ranks, together with `rank`; default: the launcher's.

    Raises:
        ValueError: The environment or the arguments contradict themselves, or `timeout` is not positive.
        RuntimeError: This host has fewer GPUs than ranks, or a session with other arguments exists.
    """
    global _current
    import torch.distributed as dist

    tell_when_ended()
    limit = _as_timedelta(timeout)
    arguments = (backend, device, timeout, init_method, rank, world_size)
    if _current is not None and not dist.is_initialized():
        _end(None)  # the script has ended the group by itself
    if _current is not None:
        if arguments not in (_current.arguments, (None,) * len(arguments)):
            raise RuntimeError("phalanx.init was called before with other arguments: call phalanx.shutdown() first")
        return _current.session
    keep_paths_short()  # of the workers of any loader
    owns_group = not dist.is_initialized()
    exported: tuple[str, ...] = ()
    if owns_group:
        place = _place(rank, world_size)
        chosen, reason = (backend, "") if backend else _choose_backend()
        store = _meet(place, init_method, limit, chosen)
        place = place if place.knows_hosts else _place_by_hosts(place, store)
        on = _choose_device(device, chosen, place)
        exported = _env.export(_contract(place, store))
        try:
            dist.init_process_group(
                chosen,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=limit,
            )
        except BaseException:
            _env.withdraw(exported)
            raise
    else:
        place = _place(dist.get_rank(), dist.get_world_size())
        if not place.knows_hosts:
            place = _place_by_hosts(place, _torch.get_default_store())
        chosen, reason = str(dist.get_backend_config()), ""
        on = _choose_device(device, chosen, place)
    numbers = {name: getattr(place, name) for name in ("rank", "world_size", "local_rank", "local_world_size")}
    session = Session(
        **numbers,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        device=on,
        backend=chosen,
        reason=reason,
        scheduler=place.scheduler,
    )
    _current = _Current(session, arguments, owns_group, exported)
    if reason and place.rank == 0:
        print(f"phalanx.init: backend {chosen}: {reason}", file=sys.stderr)
    return session


def shutdown() -> None:
    """Leave the job: destroy the process group that `init` made, and unset the variables that it set.

    A process group that existed before `init` stays. Without a session, nothing happens.
    """
    _end(None)


def _end(error: BaseException | None) -> None:
    """End the session, and tell an error to the ranks that wait for this one."""
    global _current
    if _current is None:
        return
    ended, _current = _current, None
    _env.withdraw(ended.exported)
    if not ended.owns_group:
        return
    import torch.distributed as dist

    if not dist.is_initialized():  # the script has ended it
        return
    if error is not None and "phalanx" in ended.session.backend:
        from phalanx.backend import leave_groups

        leave_groups(error)
    if error is not None and "nccl" in ended.session.backend:
        _torch.abort_process_group()  # its peers may never come: destroying would wait for them
    else:
        dist.destroy_process_group()


# ---------------------------------------------------------------- which rank


def _place(rank: int | None, world_size: int | None) -> Placement:
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together: phalanx.init(rank=0, world_size=2), or neither")
    environ = _env.environment()
    if rank is not None:
        given = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        if any(environ.get(name) != value for name, value in given.items()):
            # The environment speaks of another world, except for where to meet.
            environ = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
        found = detect({**environ, **given})
        assert found is not None
        return dataclasses.replace(found, scheduler="the arguments")
    return detect(environ) or Placement(scheduler="nobody", rank=0, world_size=1, local_rank=0, local_world_size=1)


def _contract(place: Placement, store: Any) -> dict[str, str]:
    """Return torchrun's variables for this place."""
    contract = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "NODE_RANK": place.node_rank,
        "MASTER_ADDR": place.master_addr or getattr(store, "host", _LOCAL_ADDRESS),
        "MASTER_PORT": place.master_port or getattr(store, "port", None),
    }
    return {name: str(value) for name, value in contract.items() if value is not None}


# ---------------------------------------------------------------- how ranks meet


def _meet(place: Placement, init_method: str | None, timeout: timedelta | None, backend: str = "") -> Any:
    """Wait for all ranks and return the store in which they met."""
    import torch.distributed as dist

    from phalanx.rendezvous import meet

    if init_method or (place.master_addr and place.master_port):
        url = init_method or f"tcp://{place.master_addr}:{place.master_port}"
        return meet(url, place.rank, place.world_size, timeout, backend=backend)
    if place.world_size == 1:
        return dist.HashStore()
    if not place.knows_hosts:
        raise ValueError(
            f"{place.scheduler} gives rank and world size, but not both MASTER_ADDR and MASTER_PORT: set them on every "
            "rank, or pass an init_method"
        )
    if place.local_world_size < place.world_size:
        if _env.read_settings().bridge == "mpi":
            return _meet_by_mpi(place)
        raise ValueError(
            f"{place.scheduler} started {place.world_size} ranks on {place.num_nodes} hosts and does not say where "
            "rank 0 listens: set MASTER_ADDR to its host and MASTER_PORT to a free port there, on every rank; or, with "
            "mpi4py, PHALANX_BRIDGE=mpi"
        )
    return _meet_on_this_host(place)


def _place_by_hosts(place: Placement, store: Any) -> Placement:
    """Return the place with its host and local rank, which the ranks exchange through `store`."""
    mine = host_identity(_env.read_settings().host)
    told, deadline = JsonStore(store), time.monotonic() + _HOSTS_S
    told.set(f"phalanx/host/{place.rank}", mine, _HOSTS_S)
    hosts = []
    for rank in range(place.world_size):
        host = wait_until(functools.partial(told.get, f"phalanx/host/{rank}", str), deadline)
        if host is None:
            raise CollectiveTimeout(
                f"rank {place.rank}: phalanx.init: rank {rank} did not say within {_HOSTS_S:g} s on which host it is: "
                "every rank must call phalanx.init, and the process that serves the store, most often rank 0, must run",
                op="join",
                ranks=(rank,),
            )
        hosts.append(host)
    told.close()
    nodes = list(dict.fromkeys(hosts))
    return dataclasses.replace(
        place,
        local_rank=hosts[: place.rank].count(mine),
        local_world_size=hosts.count(mine),
        node_rank=nodes.index(mine),
        num_nodes=len(nodes),
    )


def _meet_on_this_host(place: Placement) -> Any:
    """Return a store on a free port, which rank 0 passes to the others in a file that belongs to this job."""
    import torch.distributed as dist

    global _num_meetings
    _num_meetings += 1
    folder = os.path.join(tempfile.gettempdir(), f"phalanx-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of yours alone: set TMPDIR to one, on every rank")
    job = re.sub(r"\W", "_", _env.environment().get("PMIX_NAMESPACE", ""))  # where one launcher serves many jobs
    path = os.path.join(folder, f"{_launcher_of(place.rank_variable)}-{job}-{_num_meetings}")
    meeting = dist.FileStore(path, place.world_size)  # the last rank to leave it removes it
    served = None
    if place.rank == 0:
        served = dist.TCPStore(_LOCAL_ADDRESS, 0, place.world_size, is_master=True, wait_for_workers=False)
        meeting.set("port", str(served.port))
    return served or dist.TCPStore(_LOCAL_ADDRESS, int(meeting.get("port")), place.world_size, is_master=False)


def _meet_by_mpi(place: Placement) -> Any:
    """Return a store on a free port of rank 0's host, which MPI passes to the others."""
    import torch.distributed as dist

    from phalanx.backend._mpi import tell_all, world_rank

    world_rank()  # says what is missing
    _check_mpis_world(place)
    served, told = None, None
    if place.rank == 0:
        try:
            address = outside_address()
        except NetworkError:
            address = _LOCAL_ADDRESS
        served = dist.TCPStore(address, 0, place.world_size, is_master=True, wait_for_workers=False)
        told = (address, served.port)
    address, port = tell_all(told)
    return served or dist.TCPStore(address, port, place.world_size, is_master=False)


def _check_mpis_world(place: Placement) -> None:
    """Raise if mpi4py uses another MPI than the one that started the ranks: each rank would be alone in its world."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() == place.world_size:
        return
    engine = MPI.Get_library_version().splitlines()[0].split(",")[0]
    raise ValueError(
        f"rank {place.rank}: {place.scheduler} started {place.world_size} ranks, and mpi4py's {engine} sees a world of "
        f"{MPI.COMM_WORLD.Get_size()}: they are two MPIs. Start the ranks with the mpirun of mpi4py's, or have mpi4py "
        "take the other (MPI4PY_MPIABI=mpich or openmpi, or build it with that MPI's mpicc)"
    )


def meet_under_scheduler() -> tuple[Any, int, int] | None:
    """Return store, rank and world size for ``env://`` where mpirun or the like started this process without RANK.

    None means that torch's own handler is right.
    """
    environ = _env.environment()
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return None
    place = detect(environ)
    if place is None:
        return None
    return _meet(place, None, None), place.rank, place.world_size


def _launcher_of(rank_variable: str) -> str:
    """Return a name for the process that started the ranks of this host; no other process ever has that name.

    It is the nearest ancestor without a rank, because a rank may run under a shell or another wrapper.
    """
    pid = os.getpid()
    while True:
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rsplit(")", 1)[1].split()[1])
        pid = parent or pid  # a rank may be the first process of its container
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_rank = any(entry.startswith(f"{rank_variable}=".encode()) for entry in file.read().split(b"\0"))
        except OSError:  # another user's
            is_rank = False
        if not is_rank or not parent:
            with open(f"/proc/{pid}/stat") as file:
                started = file.read().rsplit(")", 1)[1].split()[19]
            return f"{pid}-{started}"


# ---------------------------------------------------------------- on what


def _choose_backend() -> tuple[str, str]:
    """Return the backend, and the reason why its part for CPU tensors is not phalanx; empty if it is."""
    import torch
    import torch.distributed as dist

    on_cpu, reason = "phalanx", ""
    try:
        importlib.import_module("phalanx.backend")
    except (ImportError, OSError) as error:
        on_cpu, reason = "gloo", f"phalanx can't be loaded here: {error}"
    if not torch.cuda.is_available():
        return on_cpu, reason
    return f"cpu:{on_cpu},cuda:{'nccl' if dist.is_nccl_available() else 'gloo'}", reason


def _choose_device(given: str | torch.device | None, backend: str, place: Placement) -> torch.device:
    import torch

    if given is not None:
        device = torch.device(given)
    else:
        has_gpu = torch.cuda.is_available() and ("cuda" in backend or "nccl" in backend)
        device = torch.device("cuda" if has_gpu else "cpu")
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if place.local_rank >= count > 1:
            raise RuntimeError(
                f"rank {place.rank} is local rank {place.local_rank} and this host has {count} GPUs: start "
                f"--nproc-per-node {count}, or call phalanx.init(device='cpu')"
            )
        # A scheduler may show each rank its own GPU alone.
        device = torch.device("cuda", 0 if count == 1 else place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _as_timedelta(timeout: float | timedelta | None) -> timedelta | None:
    return None if timeout is None else timedelta(seconds=_env.seconds("timeout", timeout))
