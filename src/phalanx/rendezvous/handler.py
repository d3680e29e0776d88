"""The rendezvous of ranks before there is a group: no rank waits silently, or for a rank that can't arrive.

torch's own rendezvous waits inside native code until its timeout of half an hour, and prints nothing. So the plugin
registers this handler in front of torch's for ``env://``, ``tcp://`` and ``file://``. It serves ranks of ``phalanx
run``, `phalanx.spawn` and `phalanx.init` whatever their backend, and any rank that asks for the phalanx backend. torch
passes a handler neither the backend nor the line of the script, so both are read from the frames of the call. Every
other use of torch, RPC included, is left alone, with one exception: if a call with ``env://`` lacks a launcher's
variables, a hint on how to start ranks is added to the error.

**A line while in doubt, an error only when certain.** Several cases look alike from outside: a rank 0 that imports for
minutes, a pod whose name is not in DNS yet, ranks that train alone while others meet, and ranks that ended with exit
code 0 under torchrun, which keeps no notes of its ranks. In these cases, a printed line names the missing ranks after
5, 15 and 45 s (see `patience`). Other cases are certain, and raise an error: contradictory numbers, a rank that has
ended (see `launched`), and a program on rank 0's port that is not a store (see `server`).
"""

from __future__ import annotations

import dataclasses
import encodings.idna  # noqa: F401 a socket needs it for its first address; imported here, before ranks are forked
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx import _env
from phalanx._errors import require_linux
from phalanx.rendezvous.asked import Asked, caller, launch_of, read_url
from phalanx.rendezvous.launched import note_meeting
from phalanx.rendezvous.patience import Patience
from phalanx.rendezvous.reimported import refuse_to_meet_again
from phalanx.rendezvous.roll_call import RollCall
from phalanx.rendezvous.server import is_taken, open_store, store_of_another
from phalanx.rendezvous.solo import exchanges_uncounted, wants_others

__all__ = ["meet", "rendezvous"]

Rendezvous = tuple[Any, int, int]
"""The store, this process's rank and the world size."""


def rendezvous(url: str, timeout: Any, torchs: Callable[[], Iterator[Rendezvous]]) -> Iterator[Rendezvous]:
    """Return an iterator over one `Rendezvous`: from our rendezvous if we serve the call, otherwise from torch's.

    Args:
        url: URL at which the ranks meet.
        timeout: Timeout passed to torch.
        torchs: Function that calls torch's own handler of the URL.
    """
    wants_others()
    backend, where = caller()
    if backend is None:  # the call is not from init_process_group, but from RPC or the like
        exchanges_uncounted()
        return torchs()
    refuse_to_meet_again("init_process_group")
    _check_backend(backend, where, is_launched=launch_of(_env.environment()) is not None)
    if "phalanx" in backend.lower():
        require_linux()  # here, before ranks wait for one another in the rendezvous
    is_ours = "phalanx" in backend.lower() or launch_of(_env.environment()) is not None
    asked = read_url(url, timeout, where) if is_ours else None
    if asked is None:
        return _naming_launchers(torchs)
    asked = dataclasses.replace(asked, backend=backend)
    asked.check(backend or "phalanx")
    return iter([(_meet(asked), asked.rank, asked.world_size)])


def _naming_launchers(torchs: Callable[[], Iterator[Rendezvous]]) -> Iterator[Rendezvous]:
    """Meet in torch's rendezvous; if a launcher's variable is missing, add to the error how to start ranks."""
    try:
        yield from torchs()
    except ValueError as error:
        if "expected, but not set" not in str(error):
            raise
        script = os.path.basename(sys.argv[0])
        right = f"phalanx run --nproc-per-node 2 {script if script.endswith('.py') else 'train.py'}"
        raise ValueError(
            f"{error}. A launcher sets it: {right} (or torchrun); without one, phalanx.init() is a world of one"
        ) from None


def meet(url: str, rank: int, world_size: int, timeout: timedelta | None = None, *, backend: str = "") -> Any:
    """Return the store in which all ranks have met at `url`.

    Args:
        url: URL of the scheme ``tcp`` or ``file``.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Time limit for the meeting; None: torch's default.
        backend: Backend of the group to be created, which the ranks compare.

    Raises:
        CollectiveTimeout: Ranks did not arrive within the timeout.
        RankFailed: A rank ended before all had arrived.
        PhalanxError: The ranks contradict each other, or the address can't be used.
        ValueError: `rank` or `world_size` is out of its range.
    """
    wants_others()
    asked_for, where = caller()
    call = "phalanx.init" if asked_for is None else "init_process_group"
    asked = read_url(f"{url}?rank={rank}&world_size={world_size}", timeout, where, call)
    if asked is None:
        return next(dist.rendezvous(url, rank=rank, world_size=world_size))[0]
    asked = dataclasses.replace(asked, backend=backend or asked_for)
    asked.check()
    return _meet(asked)


def _meet(asked: Asked) -> Any:
    with Patience(asked) as patience:
        while True:
            try:
                store = open_store(asked, patience)
            except dist.DistNetworkError as error:
                if asked.rank == 0 and is_taken(error) and (rivals := store_of_another(asked)) is not None:
                    RollCall(rivals, asked, patience).raise_rival()
                raise
            if asked.world_size == 1:
                return store
            roll_call = RollCall(store, asked, patience)
            if (prefix := roll_call.answer()) is not None:
                store = dist.PrefixStore(prefix, store)
                note_meeting(store, roll_call.pids)
                return store


def _check_backend(backend: str, where: str, *, is_launched: bool) -> None:
    """Raise ValueError for an unknown backend, which torch would reject only after waiting for all ranks.

    Args:
        is_launched: Whether phalanx started this process; otherwise only a misspelling of ``phalanx`` is refused.
    """
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    others = ", ".join(f'"{name}"' for name in known if name != "phalanx")
    listed = f'torch knows no backend of that name: init_process_group("phalanx"), or {others}'
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if not name or name in dist.Backend.backend_list:
            continue
        near = _env.nearest(name, known)
        if near == "phalanx" or is_launched:
            advice = f", did you mean {near}?" if near else f"; {listed}"
            at = f" at {where}" if where else ""
            raise ValueError(f"init_process_group{at}: unknown backend {backend!r}{advice}")
