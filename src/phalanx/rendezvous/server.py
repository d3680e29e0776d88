"""The store in which ranks meet: rank 0 serves it or creates its file, and the other ranks wait for the store."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx._errors import CollectiveTimeout, PhalanxError, RankFailed
from phalanx.host.network import unresolved
from phalanx.rendezvous.asked import Asked
from phalanx.rendezvous.deadlines import CONNECT_S, FOLDER_S, NOTE_S, RIVAL_S
from phalanx.rendezvous.launched import Launch
from phalanx.rendezvous.patience import Patience
from phalanx.wire.store import connect_within
from phalanx.wire.waiting import StoreSilentError, wait_until

_FIRST_PAUSE_S, _PAUSE_S = 0.002, 0.1


def open_store(asked: Asked, patience: Patience) -> dist.Store:
    """Return the store that this rank asked for.

    Raises:
        CollectiveTimeout: Rank 0 did not serve the store within the timeout.
        RankFailed: So many ranks of the launch have ended that too few are left for this world.
        PhalanxError: The host's name does not resolve although all ranks are on this host, another program has rank 0's
            port, or the file can't be used.
    """
    if asked.path:
        return _open_file(asked, patience)
    _await_name(asked, patience)
    serves = asked.rank == 0 and not asked.is_served
    if serves:
        _refuse_stranger(asked)
    else:
        _await_server(asked, patience)
    patience.awaits_ranks = False
    patience.awaits = (
        f"the store at {asked.point} to answer",
        "Check that MASTER_ADDR is rank 0's own host, and that nothing else listens on MASTER_PORT",
    )

    def connect() -> dist.Store:
        return dist.TCPStore(
            asked.host,
            asked.port,
            asked.world_size,
            is_master=serves,
            timeout=timedelta(seconds=patience.left_s),
            wait_for_workers=False,
            multi_tenant=not asked.is_served,
            use_libuv=asked.use_libuv,
        )

    if serves:
        return connect()
    try:  # torch's timeout does not end the wait for a listener that accepts and never answers
        return connect_within(patience.left_s, connect, lambda: _check_patience(asked, patience))
    except StoreSilentError:
        _check_patience(asked, patience)
        raise


def _refuse_stranger(asked: Asked) -> None:
    """Raise if something other than a store listens on rank 0's port; torch would wait for it to answer as a store."""
    try:
        with socket.create_connection((asked.host, asked.port), CONNECT_S) as found:
            is_there = found.getsockname() != found.getpeername()
    except OSError:
        return
    if is_there and not _listens(asked.port) and store_of_another(asked) is None:
        raise PhalanxError(
            f"{asked.name}: port {asked.port} is taken by another program. Set MASTER_PORT to a free one, the same on "
            "every rank",
            op="join",
            ranks=(0,),
            entry="port-in-use",
        )


def _listens(port: int) -> bool:
    """Whether this process itself listens on `port`, as it does if it serves the store of an earlier group.

    Such a store may answer too slowly for `store_of_another`.
    """
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            fd = os.dup(int(number))
            try:
                own = socket.socket(fileno=fd)
            except OSError:  # this descriptor is no socket
                os.close(fd)
                continue
            with own:
                is_server = own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                )
                if is_server and own.getsockname()[1] == port:
                    return True
    return False


def store_of_another(asked: Asked) -> dist.Store | None:
    """Return the store that is already served on rank 0's port; None if no store answers there."""

    def connect() -> dist.Store:
        timeout = timedelta(seconds=RIVAL_S)
        return dist.TCPStore(asked.host, asked.port, is_master=False, timeout=timeout, wait_for_workers=False)

    with contextlib.suppress(dist.DistError, StoreSilentError):
        return connect_within(RIVAL_S, connect)
    return None


def _open_file(asked: Asked, patience: Patience) -> dist.Store:
    """Return a file store, after a check that its folder exists: without the folder, torch would try for minutes."""
    folder = os.path.dirname(asked.path) or "/"
    has_come = wait_until(lambda: os.path.isdir(folder) or None, time.monotonic() + FOLDER_S, most_s=_PAUSE_S)
    why = ""
    if not has_come:
        why = f"there is no folder {folder} here: make it on every rank's host, or name one that all share"
    elif os.path.isdir(asked.path):
        why = "that is a folder: name a file in it that does not exist yet"
    else:
        try:
            os.close(os.open(asked.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        except OSError as error:
            why = f"it can't be written to ({error.strerror}): name a file that every rank can read and write"
    if why:
        raise PhalanxError(f"{asked.name}: {asked.point}: {why}", op="join", ranks=(asked.rank,), entry="init-file")
    patience.awaits = (f"{asked.point} to be locked", "Another process may hold it")
    return dist.FileStore(asked.path, asked.world_size)


def _await_name(asked: Asked, patience: Patience) -> None:
    """Return once the host's name resolves; in a cluster, a pod's name may appear after the pod."""

    def look() -> bool | None:
        try:
            socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)
            return True
        except (socket.gaierror, UnicodeError) as error:
            text = unresolved(asked.host, error)
        advice = "Correct MASTER_ADDR (or init_method), or add the name to DNS or /etc/hosts"
        if asked.launch is not None:  # all ranks are on this host, so waiting for a name would be in vain
            raise PhalanxError(
                f"{asked.name}: {text}. {advice}", op="join", ranks=(asked.rank,), entry="name-not-found"
            )
        patience.awaits = (f"rank 0 at {asked.point}: {text}", advice)
        _check_patience(asked, patience)
        return None

    wait_until(look, math.inf, least_s=_PAUSE_S, most_s=_PAUSE_S)


def _await_server(asked: Asked, patience: Patience) -> None:
    launch, still_waits = asked.own_launch, False
    try:
        _try_to_connect(asked, patience)
    except PhalanxError as error:
        still_waits = type(error) is PhalanxError  # raised if no rank is rank 0: ranks that check later need this note
        raise
    finally:
        if launch is not None and not still_waits and launch.rank in launch.waiting():
            launch.note_wait(-1, "")


def _try_to_connect(asked: Asked, patience: Patience) -> None:
    began_s, said = time.monotonic(), False

    def look() -> bool | None:
        nonlocal said
        try:
            _connect(asked, min(CONNECT_S, patience.left_s))
            return True
        except OSError as error:
            # This is the error of the last address that was tried, often an IPv6 one.
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        who = "the launcher's agent" if asked.is_served else "rank 0"
        patience.awaits_ranks = not asked.is_served
        patience.awaits = (
            f"{who} to listen at {asked.point} ({why.lower()})",
            "Start rank 0, check that it is still running, or correct MASTER_ADDR and MASTER_PORT",
        )
        if asked.own_launch is not None and time.monotonic() - began_s > NOTE_S:
            if not said:
                asked.own_launch.note_wait(asked.rank, asked.where)
                said = True
            _require_rank_0(asked, asked.own_launch)
        _check_patience(asked, patience)
        return None

    wait_until(look, math.inf, least_s=_FIRST_PAUSE_S, most_s=_PAUSE_S)


def _connect(asked: Asked, timeout_s: float) -> None:
    """Raise OSError if nothing listens where the store should be."""
    socket.create_connection((asked.host, asked.port), timeout_s).close()


def is_listening(asked: Asked) -> bool:
    """Whether something listens where the store should be."""
    with contextlib.suppress(OSError):
        _connect(asked, CONNECT_S)
        return True
    return False


def _require_rank_0(asked: Asked, launch: Launch) -> None:
    """Raise if all ranks of the launch are waiting for rank 0, so that none of them can be rank 0."""
    waiting = launch.waiting()
    if waiting.keys() >= set(range(launch.world_size)):
        said = ", ".join(
            f"that of rank {given} says rank={rank} (at {where})" for given, (rank, where) in sorted(waiting.items())
        )
        raise PhalanxError(
            f"{asked.name}: no process is rank 0, and all wait for it: {said}. Leave rank and world_size "
            f"out: {asked.call} takes them from {launch.launcher}",
            op="join",
            ranks=tuple(sorted(waiting)),
            entry="no-rank-0",
        )


def _check_patience(asked: Asked, patience: Patience) -> None:
    """Raise if too few ranks of the launch are left for this world, or the time is up."""
    if (left := who_left(asked)) is not None:
        raise RankFailed(f"{asked.name}: {left[0]}", op="join", entry="rank-failed-early", **left[1])
    if patience.left_s <= 0.001:
        whom, advice = patience.awaits
        raise CollectiveTimeout(
            f"{asked.name} timed out after {asked.timeout_s:g} s waiting for {whom}. {advice}.",
            op="join",
            ranks=(0,),
            entry="no-rank-0",
        )


def who_left(asked: Asked) -> tuple[str, dict[str, Any]] | None:
    """Return the message and the arguments of a RankFailed if too few ranks of the launch are left for this world."""
    launch = asked.launch_here
    ended = launch.ended() if launch is not None else []
    if launch is None or launch.world_size - len(ended) >= asked.world_size:
        return None
    # The first end that left too few ranks is to blame; it may have caused the later ones.
    end = ended[launch.world_size - asked.world_size]
    text = (
        f"rank {end.rank} (pid {end.pid}) {end.exit_words} before all ranks had joined\n"
        f"All {asked.world_size} must come to {asked.call}: look at what rank {end.rank} printed last."
    )
    return text, {"ranks": (end.rank,), "pid": end.pid, "exit_code": end.code, "signal": end.signal}


def is_taken(error: Exception) -> bool:
    """Whether a store could not be served because the port is in use."""
    return "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE
