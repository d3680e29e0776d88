"""`save`: copy the state, let training go on, write and publish in the background."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import mmap
import os
import sys
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint import blocks
from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.image import Part, fill, lay_out
from phalanx.checkpoint.meeting import gather, place, raise_problems
from phalanx.checkpoint.retention import prune
from phalanx.checkpoint.tree import Leaf, pack

_HUGE_PAGE_BYTES = 2 << 20


def save(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int,
    *,
    metric: float | None = None,
    keep: Mapping[str, Any] | None = None,
    wait: bool = False,
) -> None:
    """Save `state` as the checkpoint of `step`; every rank calls it.

    Returns when the state is copied: the next step may change it. Files are written in the background and get their
    name when those of all ranks are safe on disk; a save that is cut short leaves the checkpoints before it as they
    were. The last one is completed before the interpreter ends.

    Args:
        folder: Holds the checkpoints; on a file system that all ranks share.
        state: Any nesting of dicts, lists, tensors, modules, optimizers, whatever has ``state_dict`` and
            ``load_state_dict``, and plain values. Parameters and other tensors of 64 KiB and more are taken to be the
            same on all ranks, unless they are DTensors or the ranks' names and shapes differ; buffers and smaller
            values are saved for each rank.
        step: Of the training, at least 0; a checkpoint of the same step is replaced.
        metric: Ranks the checkpoint for ``prune(keep_best=...)``; larger is better.
        keep: Arguments of `prune`, called when this checkpoint is published.
        wait: Return only when the checkpoint is published.

    Raises:
        CheckpointError: A rank can't save, an earlier save has failed in the background, or not all ranks call this;
            on every rank.
    """
    _saver.save(os.path.abspath(folder), state, step, metric, dict(keep or {}), wait)


def wait() -> None:
    """Return when the last save is published; every rank calls it.

    Raises:
        CheckpointError: A rank could not write; on every rank.
    """
    raise_problems("wait", gather("wait", _saver.settle()))


class Saver:
    """The saves of this process, one at a time."""

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="phalanx-checkpoint")
        self._pending: concurrent.futures.Future[str] | None = None
        self._staging = mmap.mmap(-1, 1)
        self._swept: set[str] = set()

    def save(self, folder: str, state: Any, step: int, metric: float | None, keep: dict[str, Any], wait: bool) -> None:
        rank, world_size = place()
        problem, draft = self.settle(), None
        leaves: list[Leaf] = []
        try:
            if step < 0:
                raise ValueError(f"step must be at least 0, got {step}")
            tree, leaves = pack(state)
            if rank == 0 and not problem:
                draft = self._begin(folder, step, world_size, metric, leaves)
        except (TypeError, ValueError) as error:
            problem = problem or str(error)
        except OSError as error:
            problem = problem or f"can't save to {folder}: {error.strerror or error}"
        names = hashlib.sha256(json.dumps(blocks.describe(leaves)).encode()).hexdigest()
        answers = gather("save", (problem, step, folder, names, draft))
        self._check(answers, draft)
        draft = answers[0][4]
        is_alike = len({answer[3] for answer in answers}) == 1
        parts = blocks.parts_of_rank(leaves, *((rank, world_size) if is_alike else (0, 1)))
        metadata = {"step": step, "rank": rank, "world_size": world_size, "is_alike": is_alike, "tree": tree}
        image = self._stage(parts, metadata)
        self._pending = self._threads.submit(_write, draft, rank, image, keep)
        if wait:
            raise_problems("save", gather("save", self.settle()))

    def settle(self) -> str:
        """Wait for the save in the background; return why it failed, once, or nothing."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else ""

    def _begin(self, folder: str, step: int, world_size: int, metric: float | None, leaves: list[Leaf]) -> Any:
        if folder not in self._swept:
            folders.sweep(folder)
            self._swept.add(folder)
        draft = folders.begin(folder, step, world_size, metric)
        needed = sum(leaf.tensor.numel() * leaf.tensor.element_size() for leaf in leaves)
        disk = os.statvfs(draft.path)
        if disk.f_bavail * disk.f_frsize < needed:
            draft.remove()
            free_mib, needed_mib = (n >> 20 for n in (disk.f_bavail * disk.f_frsize, needed))
            raise ValueError(f"{folder} has {free_mib} MiB left and the checkpoint needs {needed_mib}")
        return draft

    @staticmethod
    def _check(answers: list[Any], draft: Any) -> None:
        problems = [answer[0] for answer in answers]
        calls = [answer[1:3] for answer in answers]
        if not any(problems) and any(call != calls[0] for call in calls):
            problems = [f"saves step {step} to {folder}" for step, folder in calls]
        if any(problems) and draft is not None:
            draft.remove()
        raise_problems("save", problems)

    def _stage(self, parts: list[Part], metadata: dict[str, Any]) -> memoryview:
        """Return a copy of the parts, laid out as their file."""
        layout = lay_out(parts, metadata)
        if len(self._staging) < layout.size_bytes:
            size = -(-layout.size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            self._staging = mmap.mmap(-1, size)
            self._staging.madvise(mmap.MADV_HUGEPAGE)
        fill(self._staging, layout, parts)
        return memoryview(self._staging)[: layout.size_bytes]


def _write(draft: folders.Draft, rank: int, image: memoryview, keep: dict[str, Any]) -> str:
    """Write this rank's file, publish if it is the last; return what went wrong, or nothing."""
    try:
        draft.write(rank, image)
        if draft.publish() and keep:
            prune(draft.folder, **keep)
    except OSError as error:
        gone = not os.path.isdir(draft.path)
        draft.remove()
        why = "another rank could not write, or the folder is not on a shared file system" if gone else error.strerror
        problem = (
            f"the checkpoint of step {draft.step} was not saved to {draft.folder}: {why}. "
            "Those before it are as they were; make room or choose another folder"
        )
        print(f"phalanx: rank {rank}: {problem}", file=sys.stderr, flush=True)  # it may be the last that is called
        return problem
    return ""


_saver = Saver()


def _forget_parents_saves() -> None:
    global _saver
    _saver = Saver()


os.register_at_fork(after_in_child=_forget_parents_saves)
