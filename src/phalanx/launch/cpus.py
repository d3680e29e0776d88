"""Which CPUs, cores and GPUs this machine gives us, and how the ranks share them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of the machine.

    Attributes:
        num_threads: For OMP_NUM_THREADS and its like, at least 1.
        cpus: Numbers of the CPUs that the rank is pinned to; empty: not pinned.
    """

    num_threads: int = 1
    cpus: tuple[int, ...] = ()
