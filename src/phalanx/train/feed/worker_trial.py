"""How many processes of each rank load a dataset, found out while the first batches are loaded without any.

As many as load a batch in the time of a step; none where loading takes less than 3 % of a step or less than the 2 ms
that a batch takes from one process to another; and where loading computes rather than waits, no more than the rank has
CPUs beside its threads. Time in which it waits for a CPU counts as computing. All ranks decide from the same numbers.

With a given number of processes each sample is seeded by itself, so the samples must be the same here. A batch that is
seen to draw random numbers is loaded once more with seeds, and so are all after it, in this process and in those that
are chosen. Seeding every sample instead took 0.24 ms each with a torch for GPUs, and the digits trained at a sixth of
the speed. Looking copies all generators' states twice a batch, 0.12 ms with NumPy's, so a `TensorDataset` and its
subsets, which can't draw, are not looked at.

A rank that may fork such processes later loads from a copy of the dataset, and of the datasets within, that shares
everything else: many datasets open a file when they are first asked for a sample, and processes that inherit an open
file move one position together and read each other's samples. Where the dataset itself holds one (see `shareable`), no
processes are started.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from phalanx._errors import warn_caller
from phalanx.data.random_state import random_state_kept
from phalanx.host.cgroups import usable_cpus
from phalanx.launch import rank_trial
from phalanx.train.feed.shareable import unshareable
from phalanx.wire.rank_group import RankGroup

_NUM_SETTLING, _NUM_COUNTED = 2, 5  # steps
_NEGLIGIBLE = 0.03  # of a step
_HANDED_OVER_S = 2e-3  # that a batch takes from another process to this one; 1.6 ms for two small tensors, on 2 cores
_HEADROOM = 1.25  # workers share CPUs, and do not all take equally long
_MOST = 16


class WorkerTrial:
    """Times loading and training in the first steps; every rank has one, and comes to the same number of workers.

    Attributes:
        is_over: Whether there were enough steps; the same on every rank.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._loads: list[tuple[float, float]] = []  # seconds, and those in which it computed or waited for a CPU
        self._ends_s: list[float] = []

    @property
    def is_over(self) -> bool:
        return len(self._loads) >= _NUM_SETTLING + _NUM_COUNTED

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Time what loads the parts of one step."""
        begin_s, computing_s = time.perf_counter(), _computing_s()
        yield
        self._ends_s.append(time.perf_counter())
        self._loads.append((self._ends_s[-1] - begin_s, _computing_s() - computing_s))

    def num_workers(self, dataset: Any) -> int:
        """Return how many processes of each rank keep the steps from waiting; every rank calls it once it is over.

        Processes that compute need CPUs that the rank leaves free, and those that wait for a disk or a network do not.
        There are none where a rank's dataset holds what they can't share.
        """
        load_s, computing_s = (statistics.median(column) for column in zip(*self._loads[_NUM_SETTLING:], strict=True))
        ends_s = self._ends_s[_NUM_SETTLING - 1 :]
        step_s = statistics.median(b - a for a, b in itertools.pairwise(ends_s)) - load_s
        num_free = len(usable_cpus()) - torch.get_num_threads()
        table = self._ranks.gather_numbers([load_s, computing_s / load_s, max(step_s, 1e-6), num_free])
        load_s, computing, step_s = max(row[0] for row in table), max(row[1] for row in table), min(r[2] for r in table)
        if load_s < max(_NEGLIGIBLE * step_s, _HANDED_OVER_S):
            return 0
        num = math.ceil(_HEADROOM * load_s / step_s)
        num = min(num, _MOST if computing < 0.5 else max(0, int(min(row[3] for row in table))))
        held = unshareable(dataset) if num else ""
        if held:
            warn_caller(
                f'Trainer: num_workers="auto" starts no processes: the dataset holds a {held}, which they can\'t share.'
                " Open it when the first sample is asked for, or pass a number"
            )
        return 0 if num and self._ranks.largest(bool(held)) else num


def _computing_s() -> float:
    """Return the time on CPUs that this process has had and, as far as the kernel tells, that it has waited for one.

    On a busy machine a process that waits for a CPU would else look like one that waits for a disk.
    """
    waited_ns = 0
    with contextlib.suppress(OSError), open("/proc/thread-self/schedstat") as file:
        waited_ns = int(file.read().split()[1])
    return time.process_time() + waited_ns * 1e-9


class WholeBatches(Dataset[Any]):
    """Batches with the samples that any number of loading processes gives: to iterate over here, or to load from there.

    Those processes seed each sample by itself. To seed takes longer than to load many a sample, so here it is done once
    a batch is seen to draw random numbers, that batch included; the process's own numbers stay as they are.

    Args:
        batches: Keys of the samples in each batch.
        plain: Function that loads the sample of a key.
        seeded: Function that does so after it has seeded the process for this sample.
        collate: Function that makes a batch of samples.
        never_draws: Whether loading surely draws no random numbers, so that nobody needs to look.
    """

    def __init__(
        self,
        batches: Iterable[list[Any]],
        plain: Callable[[Any], Any],
        seeded: Callable[[Any], Any],
        collate: Callable[[list[Any]], Any],
        *,
        never_draws: bool = False,
    ) -> None:
        self._batches, self._plain, self._seeded, self._collate = batches, plain, seeded, collate
        self._draws, self._never_draws = False, never_draws

    def __iter__(self) -> Iterator[Any]:
        return rank_trial.counted(map(self.__getitems__, self._batches))

    def __getitems__(self, keys: list[Any]) -> Any:
        """Return the batch of these samples, collated."""
        if self._never_draws:
            return self._collate([self._plain(key) for key in keys])
        if not self._draws:
            before = _Numbers()
            batch = self._collate([self._plain(key) for key in keys])
            if _Numbers().state == before.state:
                return batch
            self._draws = True
            before.restore()
        with random_state_kept():
            return self._collate([self._seeded(key) for key in keys])


def never_draws(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether loading surely draws no random numbers: from tensors, or a subset of them, in torch's batches.

    To look costs two copies of all generators' states a batch, 0.1 ms.
    """
    while type(dataset) is Subset and type(dataset.indices) in (list, range):
        dataset = dataset.dataset
    are_tensors = type(dataset) is TensorDataset and all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    return are_tensors and collate is default_collate


def untouched(dataset: Any) -> Any:
    """Return a dataset to load from here, before processes are forked that load from the given one.

    Many datasets open a file when they are first asked for a sample. Forked processes would share that file's position
    and read each other's samples, so it must not be open in what they inherit. Everything but the datasets themselves
    is shared.
    """
    return _apart(dataset, {})


def _apart(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        try:
            twin = known[id(value)] = _twin(value)
        except Exception:  # of a class that is more than Python's own
            return value
        for name, held in [*getattr(twin, "__dict__", {}).items()]:
            twin.__dict__[name] = _apart(held, known)
        return twin
    if type(value) is dict and any(isinstance(held, Dataset) for held in itertools.islice(value.values(), 1)):
        return {key: _apart(held, known) for key, held in value.items()}
    if type(value) in (list, tuple) and any(isinstance(held, Dataset) for held in value[:1]):
        return type(value)(_apart(held, known) for held in value)
    return value


def _twin(value: Any) -> Any:
    """Return another object with the same attributes: not a copy as by pickling, for which a class may drop some."""
    kind = type(value)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return copy.copy(value)
    twin = object.__new__(kind)
    twin.__dict__.update(value.__dict__)
    return twin


class _Numbers:
    """The state of this process's random number generators on the CPU, in a form that is quickly compared."""

    def __init__(self) -> None:
        numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._of_torch, self._of_numpy = torch.get_rng_state(), numpy
        plain = () if numpy is None else (numpy[1].tobytes(), *numpy[2:])
        self.state: tuple[Any, ...] = random.getstate(), self._of_torch.numpy().tobytes(), plain

    def restore(self) -> None:
        """Let the generators go on from here again."""
        random.setstate(self.state[0])
        torch.set_rng_state(self._of_torch)
        if self._of_numpy is not None:
            sys.modules["numpy"].random.set_state(self._of_numpy)
