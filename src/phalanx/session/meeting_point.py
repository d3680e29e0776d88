"""Finds this process's rank and the store in which it meets the other ranks, the first steps of `phalanx.init`.

torch's ``env://`` reads only RANK and WORLD_SIZE. Phalanx's plugin calls `meet_under_scheduler` first, so jobs started
by mpirun and srun work even without `phalanx.init`.

- **mpirun on one host:** ranks meet through a file named after their launcher (pid and start time of the nearest
  ancestor that is not a rank). A port derived from the job's number is not used: another program might have it.
- **mpirun across hosts:** ranks meet at MASTER_ADDR, because mpirun does not say on which host rank 0 is. If mpi4py is
  the bridge, rank 0 broadcasts its address over MPI instead.
- **Slurm:** the port is derived from the numbers of the job and the step, because the tasks might have no common folder
  in which to exchange a free port.
- **Ranks set by hand** tell each other their hosts (boot id, namespaces) through the store before `phalanx.init`
  chooses a backend. An earlier version guessed the hosts from MASTER_ADDR: ranks then found different numbers of hosts,
  and so chose different backends.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import stat
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx import _env, _settings
from phalanx._errors import CollectiveTimeout
from phalanx.host.network import NetworkError, host_identity, outside_address
from phalanx.host.proc_stat import stat_fields
from phalanx.host.processes import environment_of
from phalanx.host.schedulers import Placement, detect
from phalanx.rendezvous import handler
from phalanx.wire.store import JsonStore
from phalanx.wire.waiting import wait_until

_LOCAL_ADDRESS = "127.0.0.1"
_HOSTS_S = 300.0  # time for each rank to report its host after the ranks have met; a rank may be paused in a debugger
_num_meetings = 0


def find_place(rank: int | None, world_size: int | None) -> Placement:
    """Return this process's place in the job: given by the arguments or the launcher, else that of a lone rank."""
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together: phalanx.init(rank=0, world_size=2), or neither")
    environ = _env.environment()
    if rank is not None:
        given = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        if any(environ.get(name) != value for name, value in given.items()):
            # The environment describes another world; only the address where the ranks meet still applies.
            environ = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
        found = detect({**environ, **given})
        assert found is not None
        return dataclasses.replace(found, scheduler="the arguments")
    return detect(environ) or Placement(scheduler="nobody", rank=0, world_size=1, local_rank=0, local_world_size=1)


def contract(place: Placement, store: Any) -> dict[str, str]:
    """Return the environment variables that torchrun would set for this place."""
    variables = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "NODE_RANK": place.node_rank,
        "MASTER_ADDR": place.master_addr or getattr(store, "host", _LOCAL_ADDRESS),
        "MASTER_PORT": place.master_port or getattr(store, "port", None),
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def meet(place: Placement, init_method: str | None, timeout: timedelta | None, backend: str = "") -> Any:
    """Wait for all ranks, and return the store through which they met."""
    if init_method or (place.master_addr and place.master_port):
        url = init_method or f"tcp://{place.master_addr}:{place.master_port}"
        return handler.meet(url, place.rank, place.world_size, timeout, backend=backend)
    if place.world_size == 1:
        return dist.HashStore()
    if not place.knows_hosts:
        raise ValueError(
            f"{place.scheduler} gives rank and world size, but not both MASTER_ADDR and MASTER_PORT: set them on every "
            "rank, or pass an init_method"
        )
    if place.local_world_size < place.world_size:
        if _settings.read_settings().bridge == "mpi":
            return _meet_by_mpi(place)
        raise ValueError(
            f"{place.scheduler} started {place.world_size} ranks on {place.num_nodes} hosts and does not say where "
            "rank 0 listens: set MASTER_ADDR to its host and MASTER_PORT to a free port there, on every rank; or, with "
            "mpi4py, PHALANX_BRIDGE=mpi"
        )
    return _meet_on_this_host(place)


def place_by_hosts(place: Placement, store: Any) -> Placement:
    """Return the place with its host and local rank, determined from the hosts that all ranks report in `store`."""
    mine = host_identity(_settings.read_settings().host)
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
                entry="not-met",
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
    """Return a store on a free port, whose number rank 0 passes to the other ranks in a file of this job."""
    global _num_meetings
    _num_meetings += 1
    folder = os.path.join(tempfile.gettempdir(), f"phalanx-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of yours alone: set TMPDIR to one, on every rank")
    job = re.sub(r"\W", "_", _env.environment().get("PMIX_NAMESPACE", ""))  # one launcher may serve several jobs
    path = os.path.join(folder, f"{_launcher_of(place.rank_variable)}-{job}-{_num_meetings}")
    meeting = dist.FileStore(path, place.world_size)  # removed by the last rank that closes it
    served = None
    if place.rank == 0:
        served = dist.TCPStore(_LOCAL_ADDRESS, 0, place.world_size, is_master=True, wait_for_workers=False)
        meeting.set("port", str(served.port))
    return served or dist.TCPStore(_LOCAL_ADDRESS, int(meeting.get("port")), place.world_size, is_master=False)


def _meet_by_mpi(place: Placement) -> Any:
    """Return a store on a free port of rank 0's host, whose address and port MPI broadcasts to the other ranks."""
    from phalanx.backend.hosts.mpi import tell_all, world_rank

    world_rank()  # raises if mpi4py is missing
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
    """Raise if mpi4py uses a different MPI than mpirun, because each rank then sees a world of only one rank."""
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
    """Return store, rank and world size for ``env://`` if a scheduler such as mpirun started this process without RANK.

    If it returns None, torch's own handler applies.
    """
    environ = _env.environment()
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return None
    place = detect(environ)
    if place is None:
        return None
    return meet(place, None, None), place.rank, place.world_size


def _launcher_of(rank_variable: str) -> str:
    """Return a name that identifies the process that started the ranks of this host.

    That process is the nearest ancestor whose environment has no rank. The parent has one if it is a wrapper, such as a
    shell, that the launcher started for this rank.
    """
    pid = os.getpid()
    while True:
        parent = int(stat_fields(pid)[4])
        pid = parent or pid  # a process without a parent is the first of its container
        if rank_variable not in environment_of(pid) or not parent:  # another user's environment is read as empty
            return f"{pid}-{stat_fields(pid)[22]}"
