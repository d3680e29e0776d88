"""``phalanx.share(..., cache=True)``: each item is computed once on a host, whoever dies, and read by all."""

from __future__ import annotations

import collections
import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import phalanx
from phalanx.data.sharing import cached_items
from phalanx.testing import run_ranks
from phalanx.wire.waiting import wait_until
from tests.data.test_sharing import KINDS, Pair, same

LIMIT_S = 30.0


class Images(Dataset[Any]):
    """A dataset that notes each computation in a file."""

    scale = 10

    def __init__(self, log: Path | str, length: int = 40, pause_s: float = 0.0) -> None:
        self.log, self.length, self.pause_s = log, length, pause_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        with open(self.log, "a") as log:
            log.write(f"{index}\n")
        time.sleep(self.pause_s)
        return {"image": torch.full((30, 10), float(index * self.scale)), "name": f"image {index}"}

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Items(Dataset[Any]):
    """A dataset of given items; functions are called."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        return item() if callable(item) else item


def computed(log: Path | str) -> list[int]:
    return sorted(map(int, Path(log).read_text().split())) if os.path.exists(log) else []


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "computed"


def run_epochs(rank: int, world_size: int, log: str) -> Any:
    phalanx.init()
    dataset = phalanx.share(Images(log, 41, pause_s=0.005), cache=True)
    loader = phalanx.DataLoader(dataset, batch_size=3, shuffle=True, num_workers=2)
    seen = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            assert all((image == int(name.split()[1]) * 10).all() for image, name in zip(*batch.values(), strict=True))
            seen.append(len(batch["name"]))
    return sum(seen)


def test_each_item_is_computed_once_for_all_ranks_workers_and_epochs(log):
    assert run_ranks(run_epochs, 2, str(log)) == [63, 63]
    assert computed(log) == [*range(41)]


def evaluate(rank: int, world_size: int, log: str) -> int:
    phalanx.init()
    dataset = phalanx.share(lambda: Images(log, 20, pause_s=0.005), cache=1 << 20)
    return sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=1))


@pytest.mark.parametrize("hosts", [[3], [2, 1]])
def test_ranks_that_read_the_same_items_at_once_share_the_work(log, hosts):
    assert run_ranks(evaluate, 3, str(log), hosts=hosts) == [20] * 3
    assert computed(log) == sorted([*range(20)] * len(hosts))


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_is_what_the_dataset_gives(kind):
    dataset = phalanx.share(Items([[KINDS[kind]], 1]), cache=True)
    assert same(dataset[0], [KINDS[kind]])
    assert same(dataset[0], [KINDS[kind]])


@pytest.mark.parametrize("dtype", [one for one in vars(torch).values() if isinstance(one, torch.dtype)], ids=str)
def test_every_dtype(dtype):
    try:
        value = torch.arange(128, dtype=torch.uint8).remainder(2).view(dtype)
    except RuntimeError as error:
        pytest.skip(f"torch can't make a tensor of it: {error}")
    dataset = phalanx.share(Items([value]), cache=True)
    for _ in range(2):
        assert dataset[0].dtype is dtype
        assert torch.equal(dataset[0].view(torch.uint8), value.view(torch.uint8))


class Picture:
    """An object that pickles itself as images of PIL do."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __getstate__(self) -> list[Any]:
        return ["RGB", (len(self.data), 1), self.data]

    def __setstate__(self, state: list[Any]) -> None:
        self.data = state[2]


def test_other_objects():
    dataset = phalanx.share(Items([Picture(b"abc" * 99), ("text", 1.5, None, b"x", {1}), Pair(1, [2])]), cache=True)
    for _ in range(2):
        assert dataset[0].data == b"abc" * 99
        assert dataset[1] == ("text", 1.5, None, b"x", {1})
        assert dataset[2] == Pair(1, [2])


def test_a_change_in_place_is_never_seen_again(log):
    dataset = phalanx.share(
        Items([{"tensor": torch.zeros(5000), "array": np.zeros(5000), "list": [1]}, torch.zeros(3)]), cache=True
    )
    for _ in range(3):
        item = dataset[0]
        assert (item["tensor"].sum(), item["array"].sum(), item["list"]) == (0, 0, [1])
        item["tensor"] += 1
        item["array"] += 1
        item["list"].append(2)
        assert dataset[1].add_(1).tolist() == [1, 1, 1]


def test_the_dataset_keeps_its_interface(log):
    original = Images(log)
    dataset = phalanx.share(original, cache=True)
    assert isinstance(dataset, Images)
    assert isinstance(dataset, Dataset)
    assert not hasattr(dataset, "__getitems__")
    assert (len(dataset), dataset.length, dataset.scale, dataset.log) == (40, 40, 10, log)
    dataset.scale = 3
    assert dataset[2]["image"].unique().tolist() == [6], "attributes are those of the dataset itself"
    assert dataset[np.int64(2)]["name"] == "image 2"
    assert computed(log) == [2]
    for beyond in (40, -1):
        with pytest.raises(IndexError, match=f"{beyond}"):
            dataset[beyond]
    assert [item["name"] for item in dataset] == [f"image {number}" for number in range(40)]
    batch = next(iter(DataLoader(Subset(dataset, [5, 6]), batch_size=2)))
    assert batch["name"] == ["image 5", "image 6"]
    assert len(dataset + dataset) == 80
    assert computed(log) == [*range(40)]
    assert type(copy.deepcopy(dataset)) is type(pickle.loads(pickle.dumps(dataset))) is Images
    del dataset.scale
    assert dataset.scale == 10


def test_indices_that_are_no_numbers_are_the_datasets_own():
    dataset = phalanx.share(TensorDataset(torch.arange(10)), cache=True)
    assert dataset[-1][0] == 9
    assert dataset[2:4][0].tolist() == [2, 3]
    assert dataset[torch.tensor([3])][0].tolist() == [3]
    assert dataset[3][0] == 3


def test_an_error_passes_and_is_not_kept(log):
    dataset = phalanx.share(Images(log), cache=True)
    dataset.scale = "a word"
    for _ in range(2):
        with pytest.raises(ValueError, match="could not convert string to float"):
            dataset[0]
    dataset.scale = 1
    assert dataset[0]["name"] == dataset[0]["name"] == "image 0"
    assert computed(log) == [0, 0, 0]


def test_an_item_that_cant_be_pickled_is_computed_each_time_and_named_once(capsys):
    dataset = phalanx.share(Items([1, threading.Lock, threading.Lock]), cache=True)
    assert len({id(one) for one in [dataset[1], dataset[1], dataset[2]]}) == 3
    assert dataset[0] == 1
    assert capsys.readouterr().err.replace("\n", " ") == (
        "phalanx.share: item 1 of the dataset can't be cached, because lock can't be pickled: cannot pickle "
        "'_thread.lock' object. Such items are computed on each access "
    )


def test_a_full_cache_keeps_what_it_has(log, capsys):
    dataset = phalanx.share(Images(log), cache="10 KiB")
    for _ in range(2):
        assert [item["image"][0, 0] for item in dataset] == [*range(0, 400, 10)]
    counts = collections.Counter(computed(log))
    held = [number for number in range(40) if counts[number] == 1]
    assert held == [*range(len(held))]
    assert len(held) in range(5, 9)
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.startswith(f"phalanx.share: the cache is full: it holds {len(held)} of 40 items in 9")
    assert ", and all would take about 5" in said
    assert said.count("full") == 1


def test_without_memory_the_cache_is_full(log, monkeypatch, capsys):
    dataset = phalanx.share(Images(log), cache=True)
    assert dataset[0]["name"] == "image 0"

    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    assert dataset[1]["name"] == dataset[1]["name"] == "image 1"
    assert dataset[0]["name"] == "image 0"
    assert computed(log) == [0, 1, 1]
    assert "the cache is full (No space left on device): it holds 1 of 40 items" in capsys.readouterr().err


def test_a_full_host_is_not_filled_further(log, monkeypatch, capsys):
    def refuse(size_bytes: int) -> None:
        raise OSError(12, "1 MiB of 2 MiB of memory are left")

    monkeypatch.setattr(cached_items, "require_room", refuse)
    dataset = phalanx.share(Images(log), cache=True)
    assert dataset[1]["name"] == dataset[1]["name"] == "image 1"
    assert "is full (1 MiB of 2 MiB of memory are left): it holds 0 of 40 items" in capsys.readouterr().err


# ---- processes -----------------------------------------------------------------------------------------------------


def read_and_die(dataset: Any, place: str) -> None:
    if place == "computing":
        vars(dataset)["_dataset"] = Items([lambda: os.kill(os.getpid(), signal.SIGKILL)])
    if place == "writing":
        write = os.pwrite

        def write_a_part(fd: int, data: Any, at: int) -> int:
            write(fd, data[: len(data) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        os.pwrite = write_a_part
    dataset[0]


@pytest.mark.parametrize("place", ["computing", "writing"])
def test_a_killed_process_stops_nobody(log, place):
    dataset = phalanx.share(Images(log), cache=True)
    child = multiprocessing.get_context("fork").Process(target=read_and_die, args=(dataset, place))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == -signal.SIGKILL
    before_s = time.monotonic()
    for number in (0, 1, 0, 1):
        assert (dataset[number]["image"] == 10 * number).all()
    assert time.monotonic() - before_s < LIMIT_S
    assert computed(log) == ([0, 1] if place == "computing" else [0, 0, 1])


def test_who_waits_for_an_item_goes_on_when_its_process_is_killed(log):
    dataset = phalanx.share(Images(log, pause_s=1000), cache=True)
    child = multiprocessing.get_context("fork").Process(target=dataset.__getitem__, args=(7,))
    child.start()
    assert wait_until(lambda: computed(log) or None, time.monotonic() + LIMIT_S)
    dataset.pause_s = 0.0
    found: list[Any] = []
    waits = threading.Thread(target=lambda: found.append(dataset[7]), daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    assert not found
    child.kill()
    child.join(LIMIT_S)
    waits.join(LIMIT_S)
    assert found[0]["name"] == "image 7"
    assert computed(log) == [7, 7]


def test_who_is_suspended_is_not_waited_for_without_end(log, monkeypatch):
    monkeypatch.setattr(cached_items, "_PATIENCE_S", 0.1)
    dataset = phalanx.share(Images(log, pause_s=1000), cache=True)
    child = multiprocessing.get_context("fork").Process(target=dataset.__getitem__, args=(7,))
    child.start()
    assert wait_until(lambda: computed(log) or None, time.monotonic() + LIMIT_S)
    os.kill(child.pid, signal.SIGSTOP)
    dataset.pause_s = 0.0
    assert dataset[7]["name"] == "image 7"
    child.kill()
    child.join(LIMIT_S)


def read_some(dataset: Any, numbers: list[int], results: Any) -> None:
    results.put([dataset[number]["name"] for number in numbers])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_not_forked_reads_and_adds(log, method):
    dataset = phalanx.share(Images(log), cache=True)
    assert dataset[3]["name"] == "image 3"
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=read_some, args=(dataset, [3, 4], results))
    child.start()
    assert results.get() == ["image 3", "image 4"]
    child.join(LIMIT_S)
    assert dataset[4]["name"] == "image 4"
    assert computed(log) == [3, 4]


def test_a_dataset_that_has_grown_keeps_its_items(log):
    images = Images(log, 3)
    cached = phalanx.share(images, cache="1 MiB")
    assert cached[0]["name"] == "image 0"
    cached.length = 500
    assert [cached[index]["name"] for index in (200, 499, 0)] == ["image 200", "image 499", "image 0"]
    assert torch.equal(cached[0]["image"], torch.zeros(30, 10))
    assert computed(log) == [0, 200, 499]


def test_threads_share_the_work(log):
    dataset = phalanx.share(Images(log, pause_s=0.002), cache=True)
    threads = [threading.Thread(target=lambda: [*dataset]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert computed(log) == [*range(40)]


def resume(rank: int, world_size: int, log: str) -> Any:
    phalanx.init()
    taken = []
    for cache in (False, True):
        dataset = phalanx.share(Images(f"{log}{cache}"), cache=cache)
        loader = phalanx.DataLoader(dataset, batch_size=3, shuffle=True, num_workers=1)
        batches = iter(loader)
        first = [next(batches)["name"] for _ in range(3)]
        state = loader.state_dict()
        del batches
        again = phalanx.DataLoader(dataset, batch_size=3, shuffle=True, num_workers=1)
        again.load_state_dict(state)
        taken.append(first + [batch["name"] for batch in again])
    return taken[0] == taken[1], len({name for names in taken[1] for name in names})


def test_an_epoch_goes_on_from_the_middle(log):
    assert run_ranks(resume, 2, str(log)) == [(True, 20)] * 2
    assert computed(f"{log}True") == [*range(40)]


# ---- refusals ------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_what_has_no_items_is_refused():
    with pytest.raises(TypeError, match="a cache needs a dataset with __getitem__ and __len__, got Stream; without a"):
        phalanx.share(Stream(), cache=True)
    with pytest.raises(RuntimeError, match=r"rank 0 has raised TypeError: .*a cache needs a"):
        phalanx.share(lambda: 3, cache=True)
    with pytest.raises(RuntimeError, match="attribute 'log' can't be pickled"):
        phalanx.share(Images(threading.Lock()), cache=True)
    gc.collect()  # an error's frames refer to the error


@pytest.mark.parametrize("size", ["8 GB", "-1 GiB", -1, "much", 1.5])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(
        ValueError, match=r'cache must be True, a number of bytes or a size such as "8 GiB" \(or KiB, MiB, TiB\), got '
    ):
        phalanx.share(Items([]), cache=size)


def test_sizes():
    assert [cached_items.limit_bytes(size) for size in ("8 GiB", "1.5KiB", "3 B", 7)] == [8 << 30, 1536, 3, 7]
    assert cached_items.limit_bytes(True) > 1 << 20


def test_nothing_is_left_when_the_dataset_is_gone():
    descriptors = os.listdir("/proc/self/fd")
    dataset = phalanx.share(Items([torch.ones(5)]), cache=True)
    item = dataset[0]
    del dataset
    assert os.listdir("/proc/self/fd") == descriptors
    assert "phalanx-cache" not in Path("/proc/self/maps").read_text()
    assert item.sum() == 5
