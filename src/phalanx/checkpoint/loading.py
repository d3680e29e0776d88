"""`load`: the newest checkpoint that is whole, from memory or from disk, on any number of ranks."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

from phalanx._errors import CheckpointError
from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.blocks import Reader
from phalanx.checkpoint.folder import Checkpoint, Damaged
from phalanx.checkpoint.image import Image
from phalanx.checkpoint.meeting import gather, place, raise_problems
from phalanx.checkpoint.memory import memory
from phalanx.checkpoint.tree import assign


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What `load` has loaded: the checkpoint of `step`, from ``"memory"`` or ``"disk"``."""

    step: int
    source: str


def load(
    folder: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int | str = "latest",
    *,
    strict: bool = True,
) -> Loaded | None:
    """Restore `state` from a checkpoint and return which; None if there is none yet. Every rank calls it.

    Modules, optimizers, tensors and whatever has ``load_state_dict`` are restored in place, plain values replaced. The
    number of ranks may be another than that which saved. Every file is compared with its hash before anything is
    loaded, and nothing is unpickled. Under ``phalanx run`` a snapshot in memory that is newer is taken.

    Args:
        folder: As of `save`.
        state: Of the form that was saved; entries that it lacks are not loaded.
        step: Of a checkpoint, or "latest": the newest that is whole; newer ones that are not are named in a warning.
        strict: Refuse a checkpoint that lacks an entry of `state`.

    Raises:
        CheckpointError: None that was asked for is whole, or not all ranks call this; on every rank.
    """
    rank, world_size = place()
    path = os.path.abspath(folder)
    [(problem, candidates), *_] = gather("load", _candidates(path, step) if rank == 0 else ("", []))
    raise_problems("load", [problem])
    damage: list[str] = []
    for source, number in candidates:
        found, problems = _check(path, source, number, rank, world_size)
        if not problems:
            _restore(found, state, rank, world_size, strict)
            if damage and rank == 0:
                warnings.warn(f"{'; '.join(damage)}. The checkpoint of step {number} is loaded instead", stacklevel=2)
            return Loaded(number, source)
        damage += problems
    if damage:
        raise CheckpointError(f"rank {rank}: checkpoint.load: no whole checkpoint: {'; '.join(damage)}", op="load")
    return None


def _candidates(path: str, step: int | str) -> tuple[str, list[tuple[str, int]]]:
    """Return what may be loaded, best first."""
    published = folders.steps(path)
    if step != "latest":
        if step not in published:
            return f"{path} has no checkpoint of step {step}, but of {published or 'none'}", []
        return "", [("disk", int(step))]
    on_disk = [("disk", number) for number in reversed(published)]
    in_memory = memory.newest(path)
    if in_memory is not None:
        older = [entry for entry in on_disk if entry[1] <= in_memory]
        on_disk = [*(entry for entry in on_disk if entry[1] > in_memory), ("memory", in_memory), *older]
    return "", on_disk


def _check(path: str, source: str, step: int, rank: int, world_size: int) -> tuple[Any, list[str]]:
    """Return the checkpoint's images or files, and what any rank has found wrong with them."""
    if source == "memory":
        return memory.read(path, step), []
    problem, found = "", None
    try:
        found = folders.read_manifest(path, step)
    except Damaged as error:
        problem = str(error)
    else:
        mine = [name for i, name in enumerate(sorted(found.files)) if i % world_size == rank]
        problem = "; ".join(filter(None, (folders.check_file(found, name) for name in mine)))
    return found, list(dict.fromkeys(filter(None, gather("load", problem))))


def _images(found: Checkpoint | list[Image]) -> Iterator[Image]:
    if isinstance(found, Checkpoint):
        for rank in range(found.world_size):
            yield Image(folders.map_file(found, folders.file_of(rank)))
    else:
        yield from found


def _restore(found: Any, state: Any, rank: int, world_size: int, strict: bool) -> None:
    images = list(_images(found))
    if not images[0].metadata["is_alike"] and len(images) != world_size:
        raise CheckpointError(
            f"rank {rank}: checkpoint.load: each of {len(images)} ranks has saved tensors of its own, so that many "
            f"must load them, and this is one of {world_size}",
            op="load",
        )
    own = rank if len(images) == world_size else 0
    try:
        assign(state, images[own].metadata["tree"], Reader(images, own), strict=strict)
    except (KeyError, ValueError, RuntimeError) as error:
        what = error.args[0] if error.args else error
        raise CheckpointError(f"rank {rank}: checkpoint.load: {what}", op="load") from error
