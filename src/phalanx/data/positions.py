"""Positions of a loader in its epochs: how they are saved, and how an epoch continues at one.

What a position is depends on what decides the order:

- **Samples** of a `phalanx.DistributedSampler`: the sampler's own state, a place in an order that is known in advance.
- **Items** of a stream that the loader divides, see `Shard`: all ranks and workers take them in one order, so a place
  is one number, for any number of ranks and workers and any batch size. A stream with ``skip(n)``, as in Hugging Face
  ``datasets``, is asked to skip; any other one is read up to the place. ``state_dict`` of a stream is not used: Hugging
  Face's loses what its shuffle buffer holds, and each worker would have to send the state with each batch.
- **A sampler's state**, if a sampler has ``state_dict`` and ``load_state_dict``. Workers are given indices before the
  rank asks for their batch, so the state is copied after each batch of indices and kept until that batch is yielded.
- **Batches**, for one of torch's other samplers and for a stream that divides itself: the epoch begins again with the
  random numbers that it began with, and passes over the batches that were yielded. Indices are passed over without
  loading their samples; batches of a stream are loaded and thrown away. The number of ranks must be the same, and of a
  stream the number of workers too.

Any other sampler may draw its order from anywhere, so a position is refused.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx.data.indices import Noting, Rest, pass_over
from phalanx.data.random_state import random_state_kept
from phalanx.data.sampler import DistributedSampler
from phalanx.data.shards import Shard

OF_ONE_PROCESS = (
    torch_data.RandomSampler, torch_data.SequentialSampler, torch_data.WeightedRandomSampler,
    torch_data.SubsetRandomSampler, list, tuple, range, torch.Tensor,
)  # fmt: skip
_REPRODUCIBLE = (*OF_ONE_PROCESS, torch_data.DistributedSampler, torch_data.BatchSampler)
_KINDS = {
    "samples": "a loader with a phalanx.DistributedSampler",
    "items": "a loader that divides a stream",
    "sampler": "a loader whose sampler has a state_dict",
    "batches": "a loader that does not divide its data",
}
_DAMAGED = "the state is damaged: take another one"
_FACTS = {"world_size": "the number of ranks", "length": "the number of batches"}
Make = Callable[[], Iterator[Any]]


class Position:
    """Position of a loader in epochs that it counts itself.

    Attributes:
        epoch: Number of the epoch; it advances when an iteration begins, unless `set_epoch` was called.
        is_behind: Whether persistent workers were started before the position was set, so they don't know it.
    """

    kind = ""
    numbers: tuple[str, ...] = ()  # names of further integers in a state
    others: tuple[str, ...] = ()

    def __init__(self, rank: int, num_replicas: int) -> None:
        self._rank, self._num_replicas = rank, num_replicas
        self.epoch = 0
        self.is_behind = False
        self._start = 0  # place where the next iteration begins
        self._is_running = False  # whether an iteration has begun since the epoch was set
        self._told: int | None = None  # epoch of the last `set_epoch`, by which a stream may choose its order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; an epoch that was loaded continues at its place."""
        if epoch != self.epoch or self._is_running:
            self._start = 0
        self.epoch = self._told = epoch
        self._is_running = False

    def begin(self, loader: Any, make: Make) -> Iterator[Any]:
        """Return torch's iterator of the next epoch, or of the rest of a loaded one.

        Args:
            loader: Loader that is iterated.
            make: Function that makes torch's iterator of the loader.
        """
        if self._is_running:
            self.epoch, self._start, self._is_running = self.epoch + 1, 0, False
        batches = self._begin(loader, make)  # may read up to the position; if it is interrupted, the position stays
        self._is_running, self.is_behind = True, False
        return batches

    def count_batch(self) -> None:
        """Note that the rank has got a batch."""

    def state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        """Return the position after a number of batches.

        Args:
            loader: Loader that is iterated.
            num_batches: Number of batches that this rank has got since the last iteration began.
            is_over: Whether this rank has asked for a further batch and got none.
        """
        if not self._is_running:  # the counts belong to an earlier epoch
            num_batches, is_over = 0, False
        place = self._start + num_batches * self._unit(loader)
        own = self._own_state(loader, num_batches, is_over)
        is_over = is_over or (self._is_running and self._is_at_end(loader, place))
        return {"kind": self.kind, "epoch": self.epoch + is_over, "place": 0 if is_over else place, **own}

    def load(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Args:
            loader: Loader that is to continue.
            state: State that `state` returned.

        Raises:
            ValueError: The state belongs to a loader of another kind, or to other data; or it is damaged.
        """
        self._check(state)
        self._load(loader, state)
        self.epoch, self._start = state["epoch"], state["place"]
        self._is_running, self.is_behind = False, True

    def _check(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise self._refusal(
                f"a state must be a dict, got a {type(state).__name__}", "pass what state_dict returned"
            )
        kind = state.get("kind", "samples")  # a DistributedSampler's own state has none
        is_known = {"epoch", "place"} <= state.keys() and isinstance(kind, str)
        if not is_known or kind != self.kind:
            whose = _KINDS.get(kind, "another loader") if is_known else "another loader"
            raise self._refusal(f"the state was saved by {whose}, and this is {_KINDS[self.kind]}", "make the same one")
        for name in self.others:
            if name not in state:
                raise self._refusal(f"the state has no {name}", _DAMAGED)
        for name in ("epoch", "place", *self.numbers, *(["order"] if state.get("order") is not None else [])):
            value = state.get(name)
            if type(value) is not int or value < 0:
                raise self._refusal(f"{name} must be an integer of at least 0, got {value!r}", _DAMAGED)

    def _check_place(self, state: Mapping[str, Any], unit: str) -> None:
        if state["place"] > state["length"]:
            what = f"the place {state['place']:,} lies behind all {state['length']:,} {unit} of an epoch"
            raise self._refusal(what, "pass the state of this data")

    def _refusal(self, what: str, do: str) -> ValueError:
        return ValueError(f"rank {self._rank}: DataLoader.load_state_dict: {what}: {do}")

    def _unit(self, loader: Any) -> int:
        return 1

    def _is_at_end(self, loader: Any, place: int) -> bool:
        return False  # a stream shows its end only when it is asked for more

    def _begin(self, loader: Any, make: Make) -> Iterator[Any]:
        return make()

    def _told_after(self, is_over: bool) -> int | None:
        """Return the epoch that a stream is told, assuming that a script which tells each epoch goes on doing so."""
        return self._told if self._told is None else self._told + (is_over and self._told == self.epoch)

    def _tell(self, loader: Any, epoch: int | None) -> None:
        if epoch is not None:
            self._told = epoch
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(epoch)

    def _own_state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        return {}

    def _load(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Load what `_own_state` has returned, or refuse it before anything has changed."""


class OfSamples(Position):
    """Position that a `DistributedSampler` keeps."""

    kind = "samples"
    numbers = ("length",)
    others = ("seed", "shuffle")

    def __init__(self, sampler: DistributedSampler, batch_size: int) -> None:
        super().__init__(sampler.rank, sampler.num_replicas)
        self._sampler, self._batch_size = sampler, batch_size

    def state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        return self._sampler.state_dict(num_batches * self._batch_size, is_over)

    def load(self, loader: Any, state: Mapping[str, Any]) -> None:
        super().load(loader, state)
        self.is_behind = False  # workers are told their samples

    def _load(self, loader: Any, state: Mapping[str, Any]) -> None:
        self._check_place(state, "samples")
        self._sampler.load_state_dict(state)


class OfItems(Position):
    """Place in a stream that the loader divides; the items before the place have been taken by all ranks together."""

    kind = "items"
    numbers = ("num_last",)

    def __init__(self, rank: int, num_replicas: int) -> None:
        super().__init__(rank, num_replicas)
        self._num_last = 0  # items of the batch that ends at `_start`, on all ranks

    def _unit(self, loader: Any) -> int:
        return (loader.batch_size or 1) * self._num_replicas

    def _begin(self, loader: Any, make: Make) -> Iterator[Any]:
        stream = loader.dataset
        if not isinstance(stream, Shard):
            if not self._start:
                return make()
            stream = Shard(stream, 0, 1, over_workers=False)
        placed = stream.placed(self._start, self._num_last, loader.batch_size or 1)
        with _replaced(loader, "dataset", placed):
            return make()

    def _own_state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        num_last = self._unit(loader) if num_batches else self._num_last
        return {"num_last": num_last, "order": self._told_after(is_over)}

    def _load(self, loader: Any, state: Mapping[str, Any]) -> None:
        self._num_last = state["num_last"]
        self._tell(loader, state.get("order"))


class OfSampler(Position):
    """Position that a sampler of the user keeps, by ``state_dict`` and ``load_state_dict``."""

    kind = "sampler"
    others = ("sampler",)

    def __init__(self, rank: int, num_replicas: int, sampler: Any) -> None:
        super().__init__(rank, num_replicas)
        self._sampler = sampler
        self._states: collections.deque[Any] = collections.deque()  # after each batch that the rank has not got yet
        self._state: Any = None

    def _begin(self, loader: Any, make: Make) -> Iterator[Any]:
        self._states.clear()
        self._state = copy.deepcopy(self._sampler.state_dict())
        name = _name_of_indices(loader)
        with _replaced(loader, name, Noting(getattr(loader, name), self._sampler, self._states)):
            return make()

    def count_batch(self) -> None:
        if self._states:  # empty if an older iterator goes on beside the newest
            self._state = self._states.popleft()

    def _is_at_end(self, loader: Any, place: int) -> bool:
        try:  # not by asking for more, because the sampler would move on
            return place == len(loader)
        except (TypeError, NotImplementedError):
            return False  # the state resumes into a rest without batches

    def _own_state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        return {"sampler": self._state if self._is_running and not is_over else self._sampler.state_dict()}

    def _load(self, loader: Any, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))
        # At the end of an epoch, some samplers save an epoch of which nothing is left, others the next one.
        with random_state_kept():
            is_begun = state["place"] > 0 or next(iter(self._sampler), None) is None
        if not is_begun:
            self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))


class OfBatches(Position):
    """Number of batches that this rank has got; the epoch is begun again, and passes over these."""

    kind = "batches"
    numbers = ("world_size", "num_workers", "batch_size", "length")
    others = ("order", "generators")

    def __init__(self, rank: int, num_replicas: int, sampler: Any) -> None:
        super().__init__(rank, num_replicas)
        self._sampler = sampler  # None: a stream
        self._rest = Rest((), 0)
        self._generators: torch.Tensor | None = None  # states at the beginning of this epoch

    def _is_at_end(self, loader: Any, place: int) -> bool:
        return self._sampler is not None and place >= len(loader)

    def _begin(self, loader: Any, make: Make) -> Iterator[Any]:
        if not self._start:
            self._generators = self._states_of_generators(loader)
        else:
            for number, generator in enumerate(self._drawn_from(loader)):
                self._restore(generator, number)
        if self._sampler is None:
            batches = make()
            pass_over(batches, self._start)
            return batches
        name = _name_of_indices(loader)
        self._rest = rest = Rest(getattr(loader, name), self._start)
        with _replaced(loader, name, rest):
            batches = make()
        rest.pass_over()
        return batches

    def _own_state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        if self._is_running and self._is_at_end(loader, self._start + num_batches):
            is_over = True
            self._rest.end()
        generators = self._generators
        if generators is None or is_over or not (self._start or self._is_running):
            generators = self._states_of_generators(loader)
        order = (
            self._told_after(is_over) if self._sampler is None else operator.index(getattr(self._sampler, "epoch", 0))
        )
        return {**self._facts(loader), "order": order, "generators": generators.clone()}

    def _load(self, loader: Any, state: Mapping[str, Any]) -> None:
        do = "make the same loader; phalanx.DistributedSampler and phalanx.shard_iterable resume on any number of ranks"
        for name, own in self._facts(loader).items():
            if state[name] != own:
                words = _FACTS.get(name, name)
                raise self._refusal(f"{words} was {state[name]} when the state was saved, and is {own} here", do)
        if self._sampler is not None:
            self._check_place(state, "batches")
        self._check_generators(loader, state["generators"])
        self._generators = state["generators"].cpu()
        if isinstance(self._sampler, torch_data.DistributedSampler):
            self._sampler.set_epoch(state["order"])
        elif self._sampler is None:
            self._tell(loader, state["order"])
        if state["place"] == 0:  # the default generator is the script's, which may restore a RandomState
            for number, generator in enumerate(self._drawn_from(loader)):
                if generator is not torch.default_generator:
                    self._restore(generator, number)

    def _check_generators(self, loader: Any, states: Any) -> None:
        own = self._states_of_generators(loader)
        what = f"generators must be the states of {len(own)} random number generators"
        if not isinstance(states, torch.Tensor) or (states.shape, states.dtype) != (own.shape, own.dtype):
            raise self._refusal(what, _DAMAGED)
        for generator, state in zip(self._drawn_from(loader), states, strict=True):
            try:
                torch.Generator(generator.device).set_state(state.cpu().clone())
            except RuntimeError as error:
                raise self._refusal(f"{what}: {error}", _DAMAGED) from None

    def _restore(self, generator: torch.Generator, number: int) -> None:
        assert self._generators is not None
        generator.set_state(self._generators[number].clone())  # torch crashes of a view that begins within its storage

    def _facts(self, loader: Any) -> dict[str, Any]:
        is_stream = self._sampler is None
        return {
            "world_size": getattr(self._sampler, "num_replicas", self._num_replicas),
            "num_workers": loader.num_workers if is_stream else 0,
            "batch_size": loader.batch_size or 0,
            "length": 0 if is_stream else len(loader),
        }

    def _drawn_from(self, loader: Any) -> list[torch.Generator]:
        given = getattr(loader, "generator", None), getattr(self._sampler, "generator", None)
        return [torch.default_generator, *(one or torch.default_generator for one in given)]

    def _states_of_generators(self, loader: Any) -> torch.Tensor:
        return torch.stack([generator.get_state() for generator in self._drawn_from(loader)])


class Unknown(Position):
    """Position that can't be known; epochs are counted all the same.

    Args:
        reason: Message of the TypeError.
    """

    def __init__(self, rank: int, num_replicas: int, reason: str) -> None:
        super().__init__(rank, num_replicas)
        self._reason = reason

    def state(self, loader: Any, num_batches: int, is_over: bool) -> dict[str, Any]:
        raise TypeError(self._reason)

    def load(self, loader: Any, state: Mapping[str, Any]) -> None:
        raise TypeError(self._reason)


def position_of(loader: Any, rank: int, num_replicas: int) -> Position:
    """Return the position of a loader that has just been made."""
    where = rank, num_replicas
    if loader.num_workers > 1 and not loader.in_order:
        return Unknown(*where, _cant_resume(rank, "with in_order=False, nobody knows which batches are left"))
    stream = loader.dataset
    if isinstance(stream, Shard):
        where = stream.rank, stream.num_replicas
    if isinstance(stream, torch_data.IterableDataset):
        return OfItems(*where) if _divides(loader, num_replicas) else OfBatches(*where, None)
    size = 1
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
            return OfSamples(sampler, size)
        if _keeps_state(sampler):
            return OfSampler(*where, sampler)
        if not _is_reproducible(sampler):
            return Unknown(*where, _cant_resume(rank, f"nobody knows the order of {type(sampler).__name__}"))
        size *= getattr(sampler, "batch_size", 1)
    return OfBatches(*where, sampler)


def samplers_of(loader: Any) -> list[Any]:
    """Return what chooses the samples of a loader: the sampler that torch asks, the one that this one asks, and so on.

    A sampler inside one that is not torch's ``BatchSampler`` does not decide the order alone.
    """
    samplers = [getattr(loader, _name_of_indices(loader))]
    while hasattr(samplers[-1], "sampler"):
        samplers.append(samplers[-1].sampler)
    return samplers


def _keeps_state(sampler: Any) -> bool:
    """Return whether a sampler has a state of its own order; a `DistributedSampler` has one of phalanx's order."""
    names = "state_dict", "load_state_dict"
    if isinstance(sampler, DistributedSampler):
        return all(getattr(type(sampler), name) is not getattr(DistributedSampler, name) for name in names)
    return all(hasattr(sampler, name) for name in names)


def _is_reproducible(sampler: Any) -> bool:
    """Return whether an order depends on the generator and the epoch alone, as of torch's and torchdata's samplers."""
    package = type(sampler).__module__.partition(".")[0]
    return package == "torchdata" or (isinstance(sampler, _REPRODUCIBLE) and package in ("builtins", "torch"))


def _cant_resume(rank: int, why: str) -> str:
    return (
        f"rank {rank}: this DataLoader can't be resumed: {why}: pass sampler=phalanx.DistributedSampler(dataset), or "
        "give the sampler a state_dict and a load_state_dict; in_order must be True"
    )


def _divides(loader: Any, num_replicas: int) -> bool:
    """Return whether the items of a stream come in one order to all ranks and workers together."""
    if isinstance(loader.dataset, Shard):
        return loader.dataset.over_workers or loader.num_workers <= 1
    return not loader.is_own_part and num_replicas == 1 and loader.num_workers <= 1


def _name_of_indices(loader: Any) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


@contextlib.contextmanager
def _replaced(loader: Any, name: str, value: Any) -> Iterator[None]:
    """Let torch make an iterator with another attribute of the loader, which can't be set, only replaced."""
    kept = vars(loader)[name]
    vars(loader)[name] = value
    try:
        yield
    finally:
        vars(loader)[name] = kept
