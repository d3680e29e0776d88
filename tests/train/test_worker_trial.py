"""`num_workers="auto"`: as many loading processes as the first batches call for, and the samples of any number."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import mmap
import multiprocessing
import os
import random
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, random_split

import phalanx
from phalanx.data.batches import GlobalBatches
from phalanx.train.feed import worker_trial
from phalanx.train.feed.dataset_feed import DatasetFeed
from phalanx.train.feed.shareable import unshareable
from phalanx.train.feed.worker_trial import WorkerTrial, never_draws, untouched
from phalanx.train.settings import Settings
from phalanx.wire.rank_group import RankGroup
from tests.train._programs import mean_squares, quietly

_STEP_S = 0.02
elapsed_s = [0.0]  # see `by_own_clock`


def by_own_clock():
    """Have trials of workers in this process go by a clock that only loading a sample and taking a step moves on."""
    worker_trial.time = SimpleNamespace(perf_counter=lambda: elapsed_s[0])
    worker_trial._computing_s = lambda: 0.0


class Augmented(Dataset):
    """Every fifth sample draws random numbers, of all three kinds; each takes as long to load."""

    def __init__(self, seconds=0.0):
        self._seconds = seconds

    def __len__(self):
        return 96

    def __getitem__(self, index):
        elapsed_s[0] += 1e-6 + self._seconds
        noise = [0.0, 0.0, 0.0]
        if index % 5 == 0:
            noise = [random.random(), float(torch.rand(())), float(numpy.random.rand())]
        return torch.tensor([float(index), *noise]), torch.tensor([float(index)])


class Seen:
    """A model that notes what it is given."""

    def __init__(self):
        self.model = nn.Linear(4, 1)
        self.inputs = []
        self.model.register_forward_pre_hook(self._note)

    def _note(self, _, inputs):
        self.inputs.append(inputs[0].clone())
        elapsed_s[0] += _STEP_S


def fit(folder, num_workers, seconds=0.0):
    phalanx.seed_everything(0)
    seen = Seen()
    optimizer = torch.optim.SGD(seen.model.parameters(), lr=1e-6)
    trainer = phalanx.Trainer(
        seen.model, optimizer, mean_squares, max_epochs=2, global_batch_size=8, folder=folder, num_workers=num_workers,
        snapshot_every=0,
    )  # fmt: skip
    quietly(trainer.fit, Augmented(seconds))
    return torch.cat(seen.inputs), trainer._feed.num_workers


def load_in_each_way(rank, world_size, folder):
    multiprocessing.set_start_method("fork", force=True)
    by_own_clock()
    loaded = {number: fit(f"{folder}/{number}", number)[0] for number in ("auto", 1, 2)}
    slowly, num_workers = fit(f"{folder}/slowly", "auto", 0.005)
    return torch.equal(loaded["auto"], loaded[1]) and torch.equal(loaded[1], loaded[2]), (
        torch.equal(slowly, loaded[1]),
        num_workers,
    )


def test_the_samples_are_the_same_with_any_number_and_slow_ones_get_workers(run_ranks, tmp_path):
    results = run_ranks(load_in_each_way, 2, str(tmp_path), timeout_s=120)
    numbers = [num_workers for _, (_, num_workers) in results]
    assert [are_alike for are_alike, _ in results] == [True, True]
    assert [is_alike for _, (is_alike, _) in results] == [True, True]
    assert numbers == [2, 2]


def load_here(rank, world_size, folder):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = nn.Linear(4, 1)
    after_model = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, max_epochs=1, num_workers="auto", folder=folder, snapshot_every=0
    )
    quietly(trainer.fit, Augmented())
    return torch.equal(torch.get_rng_state(), after_model), torch.equal(before, after_model)


def test_loading_without_workers_leaves_the_ranks_own_random_numbers_alone(run_ranks, tmp_path):
    assert run_ranks(load_here, 1, str(tmp_path), timeout_s=60) == [(True, False)]


class TellsSeed(Dataset):
    """Each sample is the seed that it finds."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.initial_seed()


@pytest.mark.parametrize(("is_chosen", "want"), [(True, 1), (False, 24)])
def test_chosen_processes_seed_no_sample_of_a_batch_that_draws_nothing(is_chosen, want):
    feed = DatasetFeed(TellsSeed(), GlobalBatches(24, 8), "auto", 0)
    batches = [*feed._with_workers(1, is_chosen=is_chosen)]
    assert len(batches) == 3
    assert len(set(torch.cat(batches).tolist())) == want


class OpensLate(Dataset):
    """Opens its file with the first sample, as datasets of HDF5 and LMDB do; sample `index` is the number `index`."""

    def __init__(self, path, numbers=range(300)):
        self._path, self._numbers = path, numbers
        self._file = None

    def __len__(self):
        return len(self._numbers)

    def __getitem__(self, index):
        if self._file is None:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
        number = self._numbers[index]
        self._file.seek(8 * number)
        elapsed_s[0] += 0.001
        value = float(int.from_bytes(self._file.read(8), "little"))
        return torch.tensor([value, 0.0, 0.0, 0.0]), torch.tensor([float(number)])


class Wrapped(Dataset):
    """What torch's own wrappers do not know, with a `__getattr__` that copy.copy can't live with."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


def load_what_opens_late(rank, world_size, folder, kind):
    multiprocessing.set_start_method("fork", force=True)
    by_own_clock()
    with open(f"{folder}/numbers_{rank}", "wb") as file:
        file.write(b"".join(number.to_bytes(8, "little") for number in range(300)))
    both = OpensLate(f"{folder}/numbers_{rank}")
    if kind == "concatenated":
        both = torch.utils.data.ConcatDataset([torch.utils.data.Subset(both, range(150)), OpensLate(both._path)])
    data, held_back = torch.utils.data.Subset(both, range(280)), torch.utils.data.Subset(both, range(280, 300))
    wrong, steps = [], 0

    def compare(model, batch):
        nonlocal steps
        steps += model.training
        elapsed_s[0] += 2 * _STEP_S
        wrong.extend((batch[0][:, 0] != batch[1][:, 0]).tolist())
        return model(batch[0]).mean()

    model = nn.Linear(4, 1)
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), training_step=compare, max_epochs=3, global_batch_size=56,
        num_workers="auto", folder=f"{folder}/{kind}", snapshot_every=0,
    )  # fmt: skip
    quietly(trainer.fit, data, held_back)
    return sum(wrong), trainer._feed.num_workers, both._file if kind == "plain" else None


@pytest.mark.parametrize("kind", ["plain", "concatenated"])
def test_processes_that_load_do_not_share_a_file_that_was_opened_before_them(run_ranks, tmp_path, kind):
    (result,) = run_ranks(load_what_opens_late, 1, str(tmp_path), kind, timeout_s=60)
    wrong, num_workers, opened = result
    assert num_workers == 2  # after an epoch of five steps, and an evaluation
    assert wrong == 0
    assert opened is None


class Slotted(Dataset):
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)


def test_what_can_not_be_copied_is_loaded_from_as_it_is():
    samples = Augmented()
    whole = samples, Wrapped(samples), Slotted(samples), torch.utils.data.TensorDataset(torch.zeros(3))
    for data in ([1, 2], *whole):
        twin = untouched(data)
        assert len(twin) == len(data)
        assert (twin is data) == isinstance(data, list)
    assert untouched(whole[1]).dataset is not samples


def test_a_dataset_that_drops_something_when_it_is_pickled_has_it_in_this_process():
    assert untouched(Holding(samples := Augmented()))._held["by"][0] is samples


class Holding(Dataset):
    """Holds something from the beginning, and loads slowly."""

    def __init__(self, held):
        self._held = {"by": [held]}

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(4), torch.zeros(1)

    def __getstate__(self):
        return {}  # what a pickle lacks, a fork has


@contextlib.contextmanager
def working_thread():
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait, args=(60,))
    thread.start()
    yield thread
    has_ended.set()
    thread.join()


@pytest.mark.parametrize(
    ("opened", "within", "want"),
    [
        (partial(open, __file__, "rb"), list, "_io.BufferedReader"),
        (socket.socket, list, "socket.socket"),
        (lambda: contextlib.closing(sqlite3.connect(":memory:")), list, "sqlite3.Connection"),
        (working_thread, list, "threading.Thread"),
        (partial(open, __file__), lambda held: Wrapped(Holding(held[0])), "_io.TextIOWrapper"),
        (partial(open, __file__), lambda held: lambda index: held[0].read(index), "_io.TextIOWrapper"),
    ],
    ids=["file", "socket", "database", "thread", "wrapped", "closure"],
)
def test_what_processes_can_not_share_is_found(opened, within, want):
    with opened() as held:
        assert unshareable(Holding(within([held]))) == want


@pytest.mark.parametrize(
    "hold",
    [
        threading.Lock, threading.RLock, threading.Event, torch.Generator, numpy.random.default_rng, io.BytesIO,
        lambda: numpy.zeros((3, 1 << 20)), lambda: lambda sample: sample, lambda: (n for n in range(3)),
        lambda: threading.Thread(target=print), multiprocessing.Lock, lambda: nn.Linear(2, 2), lambda: {}.keys(),
        lambda: weakref.ref(nn.Linear(2, 2)), lambda: mmap.mmap(-1, 64), lambda: [str(n) for n in range(100_000)],
        object, lambda: re.compile("a"), partial(logging.getLogger, "phalanx"), multiprocessing.Queue,
    ],
)  # fmt: skip
def test_what_processes_can_have_twice_is_no_obstacle(hold):
    assert unshareable(Holding(hold())) == ""


def load_what_is_held(rank, world_size, folder):
    multiprocessing.set_start_method("fork", force=True)
    with open(__file__, "rb") as file:
        model = nn.Linear(4, 1)
        trainer = phalanx.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.0), mean_squares, max_epochs=1, global_batch_size=8,
            num_workers="auto", folder=folder, snapshot_every=0,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(Holding(file if rank == 0 else None))
    return trainer._feed.num_workers, [str(one.message) for one in told if "num_workers" in str(one.message)]


def test_no_rank_has_loading_processes_where_one_holds_an_open_file(run_ranks, tmp_path):
    (number, told), (other, nothing) = run_ranks(load_what_is_held, 2, str(tmp_path), timeout_s=60)
    assert (number, other, nothing) == (0, 0, [])
    assert "the dataset holds a _io.BufferedReader, which they can't share. Open it when the first" in told[0]


def trial(load_s, computing, step_s):
    """Return the number of workers after steps that took so long, of which loading so much."""
    found = WorkerTrial(RankGroup())
    found._loads = [(load_s, load_s * computing)] * 7
    found._ends_s = [number * (load_s + step_s) for number in range(7)]
    assert found.is_over
    return found.num_workers([])


@pytest.mark.parametrize(
    ("load_s", "step_s", "want"),
    [
        (0.001, 0.1, 0),
        (0.0015, 0.005, 0),
        (0.0025, 0.005, 1),
        (0.01, 0.1, 1),
        (0.1, 0.1, 2),
        (0.39, 0.1, 5),
        (9, 0.1, 16),
    ],
)
def test_loading_that_waits_gets_as_many_workers_as_keep_up_with_the_steps(load_s, step_s, want):
    assert trial(load_s, 0.1, step_s) == want


def test_the_first_steps_which_are_slow_do_not_count():
    found = WorkerTrial(RankGroup())
    loads_s = [9, 9, 9, 9, 0.1, 0.1, 0.1]  # a step before the last five would make of 0.1 another median
    found._loads = [(load_s, load_s * 0.1) for load_s in loads_s]
    found._ends_s = list(itertools.accumulate(2 * load_s for load_s in loads_s))
    assert found.num_workers([]) == trial(0.1, 0.1, 0.1)


def test_loading_that_computes_gets_no_more_workers_than_there_are_free_processors(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert trial(0.4, 0.9, 0.1) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert trial(0.4, 0.9, 0.1) == 2


def test_loading_that_computes_on_a_crowded_cpu_is_not_taken_for_one_that_waits_for_a_disk():
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        found = WorkerTrial(RankGroup())
        while not found.is_over:
            with found.loading():
                end_s = time.process_time() + 0.02
                while time.process_time() < end_s:
                    pass
        assert max(wall_s for wall_s, _ in found._loads) > 0.03  # the hogs had their share
        assert found.num_workers([]) <= 1
    finally:
        os.sched_setaffinity(0, mine)
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_no_other_word_than_auto_is_a_number_of_workers():
    with pytest.raises(TypeError, match="num_workers must be a whole number, or \"auto\", got 'many'"):
        Settings(max_steps=1, num_workers="many")


class Noisy(TensorDataset):
    """Tensors that get noise when they are loaded."""

    def __getitem__(self, index):
        return tuple(tensor + torch.rand(()) for tensor in super().__getitem__(index))


class Mislaid(list):
    """Indices that are drawn anew each time."""

    def __getitem__(self, index):
        return random.randrange(len(self))


def test_only_plain_tensors_are_known_not_to_draw_random_numbers():
    plain = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    known = [plain, Subset(plain, range(3)), *random_split(plain, [1, 3])]
    assert all(never_draws(dataset, default_collate) for dataset in known)
    unknown = [Noisy(torch.zeros(4)), Subset(Noisy(torch.zeros(4)), [0]), Subset(plain, Mislaid([0, 1])), Augmented()]
    unknown.append(TensorDataset(nn.Parameter(torch.zeros(4))))
    assert not any(never_draws(dataset, default_collate) for dataset in unknown)
    assert not never_draws(plain, lambda samples: default_collate(samples) + torch.rand(()))
