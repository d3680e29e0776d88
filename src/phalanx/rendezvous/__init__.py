"""How ranks find each other before there is a group: nobody waits in silence, nor for one who can't come.

Stands in the place of torch's own rendezvous, which waits for its timeout inside native code, for ``phalanx run``,
`phalanx.spawn`, `phalanx.init` and the phalanx backend; every other use of torch is left alone. A line tells who is
waited for; an error comes only when it is certain that the ranks can't meet: their numbers contradict each other, or
one has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx import _env
from phalanx.rendezvous.asked import Asked, caller, launch_of, read_url
from phalanx.rendezvous.deadlines import RIVAL_S
from phalanx.rendezvous.patience import Patience
from phalanx.rendezvous.roll import RollCall
from phalanx.rendezvous.server import is_taken, open_store

__all__ = ["meet", "rendezvous"]

Meeting = tuple[Any, int, int]


def rendezvous(url: str, timeout: Any, torchs: Callable[[], Iterator[Meeting]]) -> Iterator[Meeting]:
    """Meet for ``init_process_group`` if it concerns us, else as torch does.

    Args:
        torchs: torch's own handler of such a URL.
    """
    backend, where = caller()
    if backend is None:
        return torchs()
    _check_backend(backend, where)
    if "phalanx" not in backend.lower() and launch_of(_env.environment()) is None:
        return torchs()
    asked = read_url(url, timeout, where)
    if asked is None:
        return torchs()
    asked = dataclasses.replace(asked, backend=backend)
    asked.check(backend or "phalanx")
    return iter([(_meet(asked), asked.rank, asked.world_size)])


def meet(url: str, rank: int, world_size: int, timeout: timedelta | None = None) -> Any:
    """Return the store in which the ranks have met at `url`, ``tcp://`` or ``file://``, once all have come.

    Raises:
        CollectiveTimeout: Ranks did not come within the timeout.
        RankFailed: A rank has ended before all had come.
        PhalanxError: The ranks contradict each other, or the place can't be used.
        ValueError: `rank` or `world_size` is out of its range.
    """
    backend, where = caller()
    call = "phalanx.init" if backend is None else "init_process_group"
    asked = read_url(f"{url}?rank={rank}&world_size={world_size}", timeout, where, call)
    if asked is None:
        return next(dist.rendezvous(url, rank=rank, world_size=world_size))[0]
    asked = dataclasses.replace(asked, backend=backend)
    asked.check()
    return _meet(asked)


def _meet(asked: Asked) -> Any:
    with Patience(asked) as patience:
        try:
            store = open_store(asked, patience)
        except dist.DistNetworkError as error:
            if asked.rank == 0 and is_taken(error):
                _name_rival(asked, patience)
            raise
        if asked.world_size == 1:
            return store
        return dist.PrefixStore(RollCall(store, asked, patience).answer(), store)


def _name_rival(asked: Asked, patience: Patience) -> None:
    """Raise if what listens on rank 0's port is a rank 0 of this job; return if it is a stranger."""
    try:
        store = dist.TCPStore(
            asked.host,
            asked.port,
            is_master=False,
            timeout=timedelta(seconds=RIVAL_S),
            wait_for_workers=False,
        )
    except dist.DistError:  # it is no store
        return
    RollCall(store, asked, patience).raise_rival()


def _check_backend(backend: str, where: str) -> None:
    """Raise ValueError for a name that misspells ours; torch would first wait for all ranks, and then not know it."""
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        guess = _env.did_you_mean(name, ["phalanx"])
        if name and guess and name not in dist.Backend.backend_list:
            raise ValueError(f"init_process_group at {where}: unknown backend {backend!r}{guess}")
