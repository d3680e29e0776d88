"""`load`: the newest checkpoint that is whole, from memory or from disk, on any number of ranks."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import MutableMapping
from typing import Any

from phalanx._errors import CheckpointError
from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.blocks import Reader
from phalanx.checkpoint.folder import Checkpoint, Damaged
from phalanx.checkpoint.image import Image
from phalanx.checkpoint.meeting import gather, place, raise_problems
from phalanx.checkpoint.memory import memory
from phalanx.checkpoint.tree import restore


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
        CheckpointError: None that was asked for is whole, it does not fit `state`, or not all ranks call this; on every
            rank.
    """
    rank, world_size = place()
    path = os.path.abspath(folder)
    answers = gather("load", (path, step, *(_candidates(path, step) if rank == 0 else ("", []))))
    if any(answer[:2] != answers[0][:2] for answer in answers):
        raise_problems("load", [f"loads step {answer[1]} from {answer[0]}" for answer in answers])
    problem, candidates = answers[0][2:]
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
    try:
        published = folders.steps(path)
    except OSError as error:
        return f"can't read {path}: {error.strerror}", []
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
    """Return the checkpoint's images, and what any rank has found wrong with them."""
    problem, images = "", []
    try:
        if source == "memory":
            images = memory.read(path, step)
        else:
            found = folders.read_manifest(path, step)
            mine = [name for i, name in enumerate(sorted(found.files)) if i % world_size == rank]
            problem = "; ".join(filter(None, (folders.check_file(found, name) for name in mine)))
            images = images_of(found) if not problem else []
    except Damaged as error:
        problem = str(error)
    except (OSError, ValueError, LookupError) as error:
        problem = f"the checkpoint of step {step} {'on' if source == 'disk' else 'in'} {source} can't be read: {error}"
    return images, list(dict.fromkeys(filter(None, gather("load", problem))))


def images_of(checkpoint: Checkpoint) -> list[Image]:
    """Return what each rank has saved, in rank order."""
    return [Image(folders.map_file(checkpoint, folders.file_of(rank))) for rank in range(checkpoint.world_size)]


def _restore(images: list[Image], state: MutableMapping[str, Any], rank: int, world_size: int, strict: bool) -> None:
    problem, cause = "", None
    own = rank if len(images) == world_size else 0
    try:
        if not images[own].metadata["is_alike"] and len(images) != world_size:
            raise ValueError(
                f"each of {len(images)} ranks has saved tensors of its own, so that many must load them, and these are "
                f"{world_size}"
            )
        restore(state, images[own].metadata["tree"], Reader(images, own), strict=strict)
    except Exception as error:  # whatever a load_state_dict() raises, the others must know
        is_ours = isinstance(error, KeyError | ValueError | RuntimeError) and error.args
        problem, cause = str(error.args[0]) if is_ours else f"{type(error).__name__}: {error}", error
    raise_problems("load", gather("load", problem), cause)
