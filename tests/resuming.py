"""Runs that stop after every batch and go on, against the same run without a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

NUM_EPOCHS = 2
Run = Callable[[Any], Iterator[tuple[Any, Any]]]
"""Function that begins anew, or at a state, and yields each batch with the state behind it."""


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


def check_every_stop(run: Run) -> None:
    """Assert that a run which stops behind any batch goes on with the batches that follow it in the whole run."""
    whole = list(run(None))
    batches = [batch for batch, _ in whole]
    for number, (_, state) in enumerate(whole, 1):
        assert [batch for batch, _ in run(state)] == batches[number:], f"stopped after batch {number} of {len(batches)}"


def loop(loader: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate as a script of one's own does that resumes: of a loader, or of a sampler alone."""
    if state is not None:
        loader.load_state_dict(state)
    for epoch in range(loader.state_dict()["epoch"], NUM_EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            yield (epoch, _plain(batch)), loader.state_dict()


def train(feed: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """Take steps as a Trainer does that saves behind each."""
    feed_state, epoch = (None, 0) if state is None else state
    if feed_state is not None:
        feed.load_state_dict(feed_state)
    num_left = feed.num_left
    while epoch < NUM_EPOCHS:
        feed.begin_epoch(epoch)
        num_steps = 0
        for parts, num_samples in feed.steps():
            feed.advance()
            num_steps += 1
            yield (epoch, num_samples, [(_plain(part), size) for part, size in parts]), (feed.state_dict(), epoch)
        assert num_left in (None, num_steps)
        epoch += 1
        feed.begin_epoch(epoch)
        num_left = feed.num_left


def _plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch
