"""List, verify and prune the checkpoints in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable

from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.folder import Checkpoint, Damaged
from phalanx.checkpoint.disk.pending import pending


@dataclasses.dataclass(frozen=True)
class Retention:
    """Rules for the checkpoints that a folder keeps; `prune` documents the fields.

    Attributes:
        best_is_least: Whether the smallest metric is the best. With None, the largest is the best, and the checkpoint
            records this only if `keep_best` is set.

    Raises:
        ValueError: A number is less than 1.
    """

    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int | None = None
    best_is_least: bool | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def direction(self) -> bool | None:
        """Whether the smallest metric is the best; None if these settings do not imply it."""
        return False if self.best_is_least is None and self.keep_best is not None else self.best_is_least

    def apply(self, folder: str | os.PathLike[str]) -> list[int]:
        """Remove the checkpoints that no rule keeps, and return their steps. Does not wait for saves in progress."""
        found = _published(folder)
        kept = {checkpoint.step for checkpoint in found[-self.keep_last :]}
        if self.keep_every is not None:
            kept |= {checkpoint.step for checkpoint in found if checkpoint.step % self.keep_every == 0}
        if self.keep_best is not None:
            kept |= {*_best_first(found, bool(self.best_is_least))[: self.keep_best]}
        doomed = [checkpoint.step for checkpoint in found if checkpoint.step not in kept]
        folders.remove(folders.find(folder), doomed)
        return doomed


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoints in a folder, oldest first, except those with a damaged manifest.

    Like `verify` and `prune`, this function first waits until all ranks have written the saves that this process has
    begun.

    Args:
        folder: Folder of the checkpoints, as passed to `save`, or folder of a run that has them in ``checkpoints``.

    Example:
        >>> phalanx.checkpoint.save("runs/linear", {"weight": torch.ones(3)}, step=1, wait=True)
        >>> [checkpoint.step for checkpoint in phalanx.checkpoint.list_checkpoints("runs/linear")]
        [1]
    """
    pending.await_every_rank()
    return _published(folder)


def _published(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    path, found = folders.find(folder), []
    for step in folders.steps(path):
        with contextlib.suppress(Damaged):
            found.append(folders.read_manifest(path, step))
    return found


def verify(folder: str | os.PathLike[str], step: int | str = "latest") -> list[str]:
    """Return the problems of a checkpoint, one sentence for each damaged file; empty if every bit is as it was saved.

    Args:
        folder: Folder of the checkpoints, as passed to `save`, or folder of a run that has them in ``checkpoints``.
        step: Step of the checkpoint, or "latest".

    Raises:
        FileNotFoundError: There is no such checkpoint.

    Example:
        >>> phalanx.checkpoint.save("runs/linear", {"weight": torch.ones(3)}, step=1, wait=True)
        >>> phalanx.checkpoint.verify("runs/linear")
        []
    """
    pending.await_every_rank()
    path = folders.find(folder)
    published = folders.steps(path)
    wanted = published[-1] if published and step == "latest" else step
    if wanted not in published:
        raise FileNotFoundError(f"{path!r} has no checkpoint of step {wanted}")
    try:
        return folders.problems_of(folders.read_manifest(path, int(wanted)))
    except Damaged as error:
        return [str(error)]


def prune(
    folder: str | os.PathLike[str],
    keep_last: int = 3,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best_is_least: bool = False,
) -> list[int]:
    """Remove old checkpoints and return their steps. One rank or all may call it.

    Args:
        folder: Folder of the checkpoints, as passed to `save`, or folder of a run that has them in ``checkpoints``.
        keep_last: Number of newest checkpoints to keep, at least 1.
        keep_every: Interval in steps: checkpoints whose step is a multiple of it are kept as well; None: no others.
        keep_best: Number of checkpoints with the best metric to keep as well, the earliest among equals; None: no
            others.
        best_is_least: Whether the smallest metric is the best, as with a loss; otherwise the largest is.

    Raises:
        ValueError: A number is less than 1.

    Example:
        >>> for step in range(5):
        ...     phalanx.checkpoint.save("runs/linear", {"weight": torch.ones(3)}, step, wait=True)
        >>> phalanx.checkpoint.prune("runs/linear", keep_last=2)
        [0, 1, 2]
    """
    retention = Retention(keep_last, keep_every, keep_best, best_is_least)
    pending.await_every_rank()
    return retention.apply(folder)


def find_best(folder: str) -> int:
    """Return the step of the checkpoint with the best metric, the earliest among equals.

    Raises:
        ValueError: No checkpoint has a metric, or none records whether the smallest metric is the best.
    """
    scored = [checkpoint for checkpoint in _published(folder) if checkpoint.metric is not None]
    told = [checkpoint.best_is_least for checkpoint in scored if checkpoint.best_is_least is not None]
    best = _best_first(scored, told[-1]) if told else []
    if not best:
        raise ValueError(
            f"{folder!r} does not tell which checkpoint is the best. A Trainer with validation data records it, and so "
            'does save(..., metric=loss, keep={"keep_best": 1, "best_is_least": True})'
        )
    return best[0]


def _best_first(found: Iterable[Checkpoint], best_is_least: bool) -> list[int]:
    sign = 1 if best_is_least else -1
    ranked = sorted(
        (sign * checkpoint.metric, checkpoint.step)
        for checkpoint in found
        if checkpoint.metric is not None and checkpoint.metric == checkpoint.metric  # leaves out NaN
    )
    return [step for _, step in ranked]
