"""`save`: copies the state, lets training continue, and writes and publishes the copy in the background.

1. **Agree.** Each rank tells the other ranks the step, the folder, any problem, and a digest of names, shapes, dtypes
   and every bit of each large tensor. A problem on one rank is an error on all, before anything is copied. By then,
   rank 0 has also checked that the disk has space, and has created the draft ``.step-00000100-1f9c03aa.part/``.
2. **Stage.** Each rank copies its part into memory that it keeps for this purpose (huge pages, each touched once), laid
   out like the file. Then `save` returns, having blocked training for about as long as a memcpy.
3. **Write,** in the background: one thread hashes; another writes past the page cache (O_DIRECT), syncs, and leaves a
   signature, ``rank_00001.safetensors.json``, with size and SHA-256.
4. **Publish.** Several ranks may find that all have signed; the rank that succeeds in renaming the first signature
   publishes. It writes ``manifest.json``, which holds the signatures and a checksum of its own, syncs, and renames the
   folder to ``step-00000100``; then it writes ``latest``. If the step was saved before, the two folders are exchanged
   atomically (RENAME_EXCHANGE). In the background no rank waits for another, so nothing can hang there.

If a rank can't write its file, it renames the draft and then removes the draft: under the new name, no other rank can
publish it. The rank prints a line, and all ranks raise at the next `save` or `wait`. The interpreter exits only once
the last save is complete. The next job's first save removes the drafts that a killed job has left.

**Why SHA-256.** A CRC detects the accidental errors of a disk; SHA-256 also detects a wrong copy, a merge or an edit by
hand, and ``sha256sum`` and every registry use SHA-256. On processors with instructions for SHA-256, hashing occupies a
thread but takes no extra time: the background work is about as fast as torch.save with fsync (``make
bench-checkpoint``).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import operator
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from phalanx import _env
from phalanx._text import class_and_message
from phalanx.checkpoint.agreement import gather, raise_problems, require_all
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.claim import OtherSide, fence_for
from phalanx.checkpoint.disk.pending import pending
from phalanx.checkpoint.disk.retention import Retention
from phalanx.checkpoint.state import blocks
from phalanx.checkpoint.state.image import Part, fill, lay_out
from phalanx.checkpoint.state.tree import Leaf, pack, refuse_no_mapping
from phalanx.record import writer
from phalanx.rendezvous.launched import note_progress
from phalanx.wire.rank_group import RankGroup

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
    """Save `state` as the checkpoint of `step`. Every rank calls it.

    `save` returns once the state is copied, so the next step may change the state. The files are written in the
    background, and the checkpoint gets its name when the files of all ranks are safe on disk. A save that is
    interrupted leaves earlier checkpoints as they were. The interpreter does not exit before the last save is complete.

    Every rank gets back what it saved, bit for bit. Tensors of 64 KiB and more are compared between the ranks. A tensor
    with the same bits on all ranks is saved once, divided among them. If a tensor differs between ranks, each rank
    saves its own values, and only the same number of ranks can load the checkpoint. Each shard of a DTensor is saved
    once; its replicas are equal by contract, and only the first is saved. Buffers of modules, NumPy arrays, smaller
    tensors and plain values are saved for each rank; if a different number of ranks loads the checkpoint, every rank
    gets the values of rank 0.

    Args:
        folder: Folder of the checkpoints, on a file system that all ranks share.
        state: Any nesting of dicts, lists, tensors, modules, optimizers, other objects with ``state_dict`` and
            ``load_state_dict``, and plain values.
        step: Step of the training, at least 0; a checkpoint of the same step is replaced.
        metric: Score of the checkpoint for ``prune(keep_best=...)`` and ``load(step="best")``.
        keep: Arguments for `prune`, which runs once this checkpoint is published; with None, it does not run.
        wait: Whether to return only once the checkpoint is published.

    Raises:
        CheckpointError: A rank can't save, an earlier save failed in the background, or not all ranks call `save`;
            raised on every rank.
        TypeError: `state` is not a dictionary.

    Example:
        >>> state = {"model": nn.Linear(2, 1), "random": phalanx.RandomState()}
        >>> phalanx.checkpoint.save("runs/linear", state, step=1)
        >>> phalanx.checkpoint.wait()
    """
    refuse_no_mapping("save", state, ", step")
    with writer.phase("checkpoint", step):
        _saver.save(os.path.abspath(folder), state, step, metric, keep, wait)


def wait() -> None:
    """Wait until the last save is published. Every rank calls it.

    Raises:
        CheckpointError: A rank could not write; raised on every rank.

    Example:
        >>> phalanx.checkpoint.save("runs/linear", {"weight": torch.ones(3)}, step=1)
        >>> phalanx.checkpoint.wait()
    """
    with writer.phase("checkpoint"):
        raise_problems("wait", gather("wait", _saver.settle()))


class Saver:
    """Saves the state of this process, one save at a time."""

    def __init__(self) -> None:
        self._pending: Future[str] | None = None
        self._staging = mmap.mmap(-1, 1)
        self._swept: set[str] = set()

    def save(
        self,
        folder: str,
        state: Any,
        step: int,
        metric: float | None,
        keep: Mapping[str, Any] | None,
        wait: bool,
    ) -> None:
        ranks = RankGroup()
        rank, world_size = ranks.rank, ranks.world_size
        problem, cause = self.settle(), None
        require_all("save")  # before state_dict(), which may call a collective and would wait for missing ranks
        tree, draft, retention = None, None, None
        leaves: list[Leaf] = []
        described: blocks.Description = {}
        try:
            step = operator.index(step)
            if step < 0:
                raise ValueError(f"step must be at least 0, got {step}")
            retention = Retention(**keep) if keep else None
            tree, leaves = pack(state)
            if rank == 0 and not problem:
                draft = self._begin(folder, step, metric, retention, leaves)
            described = blocks.describe(leaves, world_size)
        except OtherSide:  # only rank 0 raises this; the other ranks fail because rank 0 is gone
            raise
        except Exception as error:  # a state_dict() may raise anything, and the other ranks must learn of it
            problem, cause = problem or _describe(error, folder), error
        try:
            answers = gather("save", (problem, step, folder, blocks.fingerprint(described), draft))
            _raise_disagreement(answers, cause)
            is_alike = len({answer[3] for answer in answers}) == 1
            alike = described.keys() if is_alike else blocks.names_alike(gather("save", described))
        except BaseException:
            if draft is not None:
                draft.remove()
            raise
        draft = answers[0][4]
        writing = folders.Writing(draft.path)
        try:
            parts = blocks.parts_of_rank(leaves, rank, world_size, alike)
            metadata = {"step": step, "rank": rank, "world_size": world_size, "is_alike": is_alike, "tree": tree}
            image = self._stage(parts, metadata)
        except Exception as error:  # the ranks have already agreed, so this is reported like a failure to write
            self._pending = Future()
            self._pending.set_result(_give_up(draft, rank, f"it can't be copied: {_describe(error, folder)}"))
            writing.end()
        else:
            # One thread writes while the other hashes. Both start now: no thread can start once the interpreter exits.
            threads = ThreadPoolExecutor(2, thread_name_prefix="phalanx-checkpoint")
            sha256 = threads.submit(_sha256, image)
            self._pending = threads.submit(_write, draft, writing, rank, image, sha256, retention)
            pending.add(self._pending, draft, writing)
            threads.shutdown(wait=False)
        if wait:
            raise_problems("save", gather("save", self.settle()))

    def settle(self) -> str:
        """Wait for the save in the background; return why it failed, or "". A failure is returned only once."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else ""

    def is_idle(self) -> bool:
        """Return whether no save is being written; if so, forget the last save's result."""
        if self._pending is not None and not self._pending.done():
            return False
        self._pending = None
        self._swept.clear()
        return True

    def _begin(
        self, folder: str, step: int, metric: float | None, retention: Retention | None, leaves: list[Leaf]
    ) -> folders.Draft:
        folders.make(folder)
        fence = fence_for(folder)
        if folder not in self._swept:
            folders.sweep(folder)
            self._swept.add(folder)
        score = None if metric is None else float(metric)
        direction = retention.direction if retention else None
        draft = folders.begin(folder, step, RankGroup().world_size, score, fence, direction)
        needed = sum(leaf.tensor.numel() * leaf.tensor.element_size() for leaf in leaves)
        disk = os.statvfs(draft.path)
        if disk.f_bavail * disk.f_frsize < needed:
            draft.remove()
            free_mib, needed_mib = (n / 2**20 for n in (disk.f_bavail * disk.f_frsize, needed))
            raise ValueError(f"{folder} has {free_mib:,.1f} MiB left and the checkpoint needs {needed_mib:,.1f}")
        return draft

    def _stage(self, parts: list[Part], metadata: dict[str, Any]) -> memoryview:
        """Copy the parts into memory that is laid out like their file, and return this memory."""
        layout = lay_out(parts, metadata)
        if len(self._staging) < layout.size_bytes:
            size = -(-layout.size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            self._staging = mmap.mmap(-1, size)
            # A data loader's forked workers must not share these pages: the next save would have to copy each one.
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                with contextlib.suppress(OSError, AttributeError):  # this kernel or system may lack either one
                    self._staging.madvise(getattr(mmap, advice))
        fill(self._staging, layout, parts)
        return memoryview(self._staging)[: layout.size_bytes]


def _describe(error: Exception, folder: str) -> str:
    if isinstance(error, OSError):
        return f"can't save to {folder}: {error.strerror or error}"
    return str(error) if isinstance(error, TypeError | ValueError) else class_and_message(error)


def _raise_disagreement(answers: list[Any], cause: Exception | None) -> None:
    problems = [answer[0] for answer in answers]
    calls = [answer[1:3] for answer in answers]
    is_one_call = all(call == calls[0] for call in calls)
    if not any(problems) and not is_one_call:
        problems = [f"saves step {step} to {folder}" for step, folder in calls]
    raise_problems("save", problems, cause, "of step {} to {}".format(*calls[0]) if is_one_call else "")


def _sha256(image: memoryview) -> str:
    return hashlib.sha256(image).hexdigest()


def _write(
    draft: folders.Draft,
    writing: folders.Writing,
    rank: int,
    image: memoryview,
    sha256: Future[str],
    retention: Retention | None,
) -> str:
    """Write this rank's file, and publish if this rank is the last; return what went wrong, or an empty string."""
    try:
        draft.write(rank, image, sha256)
        is_published = draft.publish()
        note_progress(_env.environment().get(_env.LAUNCH_VARIABLE, ""))
    except Exception as error:
        why = str(getattr(error, "strerror", None) or error)
        if not os.path.isdir(draft.path):
            why = "another rank could not write, or the folder is not on a file system that all ranks share"
        return _give_up(draft, rank, f"{why}. Earlier checkpoints are unchanged; make room or choose another folder")
    finally:
        writing.end()
    try:
        if is_published and retention is not None:
            draft.check_fence()
            retention.apply(draft.folder)
        return ""
    except Exception as error:
        why = str(getattr(error, "strerror", None) or error)
        return _say(rank, f"older checkpoints in {draft.folder} could not be removed: {why}")


def _give_up(draft: folders.Draft, rank: int, why: str) -> str:
    """Remove the draft, so that no other rank publishes it; return what went wrong."""
    draft.remove()
    return _say(rank, f"the checkpoint of step {draft.step} was not saved to {draft.folder}: {why}")


def _say(rank: int, problem: str) -> str:
    """Print on stderr what the next call will report, because there may be no next call."""
    writer.note(problem)
    with contextlib.suppress(OSError, ValueError):  # the log may be on the disk that is full
        print(f"phalanx: rank {rank}: {problem}", file=sys.stderr, flush=True)
    return problem


_saver = Saver()


def renew() -> None:
    """Forget earlier saves, whose results no longer matter, in a process that becomes a rank of the next attempt."""
    global _saver
    if not _saver.is_idle():
        _saver = Saver()  # the last save is still being written from the old Saver's memory


def _forget_parents_saves() -> None:
    global _saver
    _saver = Saver()
    pending.forget()


os.register_at_fork(after_in_child=_forget_parents_saves)
