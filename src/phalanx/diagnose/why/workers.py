"""The workers of a data loader: which part of their stacks is their own, and whether they have work.

A forked worker's stack contains, below the worker's loop, the frames that the rank had when it began the epoch. These
frames are cut off; otherwise every worker would seem to be in the user's code.
"""

from __future__ import annotations

import dataclasses

from phalanx.diagnose.stacks import Stacks, Thread

_LOOP = "torch/utils/data/_utils/worker.py"


def is_worker(stacks: Stacks) -> bool:
    """Whether these are the stacks of a data loader's worker."""
    return any(_loop_of(thread) is not None for thread in stacks.threads)


def own_part(stacks: Stacks) -> Stacks:
    """Return a worker's stacks without the frames below its loop, which the rank had when it forked the worker."""

    def cut(thread: Thread) -> Thread:
        loop = _loop_of(thread)
        return thread if loop is None else dataclasses.replace(thread, frames=thread.frames[: loop + 1])

    return dataclasses.replace(stacks, threads=tuple(map(cut, stacks.threads)))


def is_idle(thread: Thread) -> bool:
    """Whether a worker's main thread waits for the next batch to prepare."""
    loop = _loop_of(thread)
    if not loop:
        return False
    called = thread.frames[loop - 1]
    return called.name == "get" and called.file.endswith("multiprocessing/queues.py")


def _loop_of(thread: Thread) -> int | None:
    """Return the index of the frame that runs a worker's loop; None if there is none."""
    frames = enumerate(thread.frames)
    return next((at for at, frame in frames if frame.file.endswith(_LOOP) and frame.name == "_worker_loop"), None)
