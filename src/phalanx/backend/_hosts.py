"""How ranks of one host meet: they say hello in the store, map one segment, join the group in it."""

from __future__ import annotations

import json
import os
import time
import weakref
from datetime import timedelta

import torch
from torch.distributed import Store

from phalanx import _core
from phalanx._env import read_settings
from phalanx._errors import CollectiveTimeout, OutOfSharedMemory, PhalanxError

# Segments that this process maps, by nonce: groups made later live in the one that their members already share.
_segments: weakref.WeakValueDictionary[str, _core.Segment] = weakref.WeakValueDictionary()


def _hello() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "torch": torch.__version__,
        "segments": sorted(_segments),
    }


def _absent(store: Store, global_ranks: list[int]) -> tuple[int, ...]:
    """Return the ranks that have not said hello, none if the store cannot tell."""
    try:
        return tuple(other for r, other in enumerate(global_ranks) if not store.check([f"hello/{r}"]))
    except Exception:  # it may have gone with the rank that served it
        return ()


def _get(store: Store, key: str, deadline: float, what: str, rank: int, global_ranks: list[int]) -> bytes:
    """Return `key` of the store; a missing one is a timeout that names the ranks that did not come."""
    try:
        store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        return store.get(key)
    except Exception as error:
        ranks = _absent(store, global_ranks)
        if ranks:
            what = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come"
        raise CollectiveTimeout(
            f"rank {rank}: init_process_group: {what} within the timeout. "
            "Start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE (or init_method).",
            op="join",
            ranks=ranks,
        ) from error


def join_group(
    store: Store, rank: int, size: int, name: str, global_ranks: list[int], timeout_s: float
) -> tuple[_core.Group, _core.Segment]:
    """Return the core group of `rank`, after all `size` ranks have joined it.

    Args:
        store: Key-value store of this group alone.
        rank: Rank in the group.
        size: Ranks in the group.
        name: Name of the group in messages.
        global_ranks: Number of each rank in the world, for messages.
        timeout_s: Seconds for the meeting, and the default of the group's operations.

    Raises:
        CollectiveTimeout: A rank did not come; `ranks` names it.
        PhalanxError: The ranks cannot share memory.
    """
    settings = read_settings()
    deadline = time.monotonic() + timeout_s
    me = global_ranks[rank]
    store.set(f"hello/{rank}", json.dumps(_hello()))
    if rank == 0:
        hellos = [
            json.loads(_get(store, f"hello/{r}", deadline, f"rank {other} did not answer", me, global_ranks))
            for r, other in enumerate(global_ranks)
        ]
        try:
            segment, offer, server = _offer(hellos)
        except (MemoryError, PhalanxError) as error:
            offer = {"no_memory": isinstance(error, MemoryError), "refused": str(error)}
            store.set("offer", json.dumps(offer))  # the peers wait for it: they must fail now, not at the timeout
            raise _refusal(offer, me, global_ranks) from error
        store.set("offer", json.dumps(offer))
        if server is not None:
            served = server.serve(size - 1, max(deadline - time.monotonic(), 0))
            if served < size - 1:
                raise CollectiveTimeout(
                    f"rank {me}: init_process_group: only {served} of {size - 1} peers mapped the shared segment",
                    op="join",
                )
    else:
        what = f"rank {global_ranks[0]} offered no shared segment"
        offer = json.loads(_get(store, "offer", deadline, what, me, global_ranks))
        if "refused" in offer:
            raise _refusal(offer, me, global_ranks)
        segment = _accept(offer, me, max(deadline - time.monotonic(), 0))
    group = _core.Group.make(
        segment,
        offer["offset"],
        rank,
        size,
        name,
        global_ranks,
        timeout_s=timeout_s,
        stall_s=settings.stall_s,
        spin_us=settings.spin_us,
    )
    group.tune(settings.one_shot_bytes, settings.chunk_bytes)
    group.join(max(deadline - time.monotonic(), 0.001))
    return group, segment


def _refusal(offer: dict, rank: int, global_ranks: list[int]) -> PhalanxError:
    """Return the error of a group that rank 0 could not make; the same on every rank."""
    if not offer["no_memory"]:
        return PhalanxError(f"rank {rank}: init_process_group: {offer['refused']}", op="join")
    return OutOfSharedMemory(
        f"rank {rank}: init_process_group: rank {global_ranks[0]} found no shared memory for a group of "
        f"{len(global_ranks)} ranks; raise the memory limit of the job or container",
        op="join",
        ranks=(global_ranks[0],),
    )


def _offer(hellos: list[dict]) -> tuple[_core.Segment, dict, _core.SegmentServer | None]:
    """Choose a segment that every rank maps already, else make one; allocate the group in it."""
    size = len(hellos)
    shared = set(hellos[0]["segments"]).intersection(*(hello["segments"] for hello in hellos))
    if shared:
        nonce = min(shared)
        segment = _segments[nonce]
        return segment, {"nonce": nonce, "offset": segment.create_group(size)}, None
    versions = {hello["torch"] for hello in hellos}
    if len(versions) > 1:
        raise PhalanxError(f"the ranks run different versions of torch: {', '.join(sorted(versions))}", op="join")
    segment = _core.Segment.create()
    _segments[segment.nonce] = segment
    server = _core.SegmentServer(segment)
    offer = {
        "nonce": segment.nonce,
        "offset": segment.create_group(size),
        "socket": server.name,
        "host": hellos[0]["host"],
    }
    return segment, offer, server


def _accept(offer: dict, rank: int, timeout_s: float) -> _core.Segment:
    """Return the segment that rank 0 chose, mapping it if this process does not yet."""
    nonce = offer["nonce"]
    if nonce in _segments:
        return _segments[nonce]
    try:
        segment = _core.Segment.attach(offer["socket"], nonce, timeout_s)
    except (OSError, RuntimeError) as error:
        raise PhalanxError(
            f"rank {rank}: init_process_group: cannot map the shared segment that rank 0 serves on host "
            f"{offer['host']!r} (this rank is on {os.uname().nodename!r}): {error}. "
            "All ranks of a phalanx group must run on one host, as one user, in one network namespace; "
            "between hosts use the gloo or nccl backend.",
            op="join",
        ) from error
    _segments[nonce] = segment
    return segment
