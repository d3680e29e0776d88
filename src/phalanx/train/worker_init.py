"""How a loader's worker begins."""

from __future__ import annotations

import os
from collections.abc import Callable


class WorkerInit:
    """Lets a worker not hear the signals that ask its rank to make room: torch takes a worker's end for a failure.

    A class, so that it can be pickled for workers that are spawned.

    Args:
        init: The user's own ``worker_init_fn``, called afterwards.
    """

    def __init__(self, init: Callable[[int], object] | None = None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        if self._init is not None:
            self._init(worker_id)
