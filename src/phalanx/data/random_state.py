"""`RandomState`: the state of this rank's random number generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from phalanx.data.replica import rank_and_size
from phalanx.data.seeds import derive_seed, seed_process


class RandomState:
    """Python's, NumPy's and torch's random number generators, as an entry for a checkpoint's state.

    Each rank gets its own state back. If the number of ranks has changed, each rank's generators are seeded anew, from
    the saved state and the rank's number.

    Example:
        >>> random = phalanx.RandomState()
        >>> saved = random.state_dict()
        >>> numbers = torch.rand(3)
        >>> random.load_state_dict(saved)
        >>> torch.equal(torch.rand(3), numbers)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        version, numbers, gauss = random.getstate()
        state: dict[str, Any] = {
            "place": rank_and_size(),
            "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
            "torch": torch.get_rng_state(),
        }
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to a saved state.

        Args:
            state: State that `state_dict` returned.
        """
        rank, _ = place = rank_and_size()
        if state["place"] != place:
            digest = hashlib.blake2b(bytes(state["torch"].tolist()), digest_size=8).digest()
            seed_process(derive_seed(int.from_bytes(digest, "big"), "rank", rank))
            return
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore this rank's random number generators after the block."""
    generators = RandomState()
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)
