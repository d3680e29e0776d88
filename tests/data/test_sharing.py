"""`phalanx.share`: what it gives back, what it takes, and what it says when it can't."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import functools
import gc
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx.data.sharing import cached_items, packing
from phalanx.data.sharing.cached_items import Items
from phalanx.data.sharing.inputs import digest_of_inputs
from phalanx.data.sharing.kept import KeptData
from phalanx.data.sharing.marks import marks
from phalanx.data.sharing.shared_list import SharedList
from phalanx.host.shared_blocks import path_of, unnamed_file
from phalanx.testing import run_ranks
from phalanx.wire.rank_group import RankGroup

Pair = collections.namedtuple("Pair", "first second")
SIZE = 32 << 20


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor


class Augmented(Dataset[Any]):
    """A dataset with a list, a tensor and code of its own."""

    def __init__(self, length: int) -> None:
        self.names = [f"sample {number}" for number in range(length)]
        self.values = torch.arange(float(length * 3)).view(length, 3)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return self.names[index], self.values[index] + torch.rand(()) * 0


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types and content."""
    if isinstance(one, SharedList):
        one, other = [*one], [*other]
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_alike = (one.dtype, one.shape, one.layout, one.requires_grad) == (
            other.dtype, other.shape, other.layout, other.requires_grad,
        )  # fmt: skip
        return is_alike and vars(one) == vars(other) and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (Record, TensorDataset)):
        return same(vars(one), vars(other))
    return bool(one == other)


def records(length: int) -> list[Any]:
    return [{"number": number, "text": f"record {number}"} for number in range(length)]


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


BUFFER = np.arange(100.0)
KINDS = {
    "a tensor": torch.arange(12.0).view(3, 4),
    "a transposed tensor": torch.arange(12).view(3, 4).t(),
    "a part of a tensor": torch.arange(1000)[10:20:2],
    "no elements": torch.empty(0, 3),
    "a number": torch.tensor(3),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a conjugate": torch.tensor([1 + 2j]).conj(),
    "an array": np.arange(6).reshape(2, 3),
    "every second element": np.arange(10)[::2],
    "columns first": np.asfortranarray(np.ones((2, 3))),
    "an array of objects": np.array([{"a": 1}, None], dtype=object),
    "structured": np.zeros(3, dtype=[("a", "f4"), ("b", "i8")]),
    "a dict of arrays": {"x": np.ones(3), "y": torch.ones(2, dtype=torch.bfloat16), "z": {"deep": [1, 2]}},
    "records": records(1500),
    "records with tensors": [Record(f"{number}", torch.full((number % 4,), 1.0)) for number in range(1500)],
    "pairs": [Pair(number, np.arange(number % 3)) for number in range(1200)],
    "a short list": [1, "two", None],
    "no list": [],
    "a dataset": TensorDataset(torch.randn(20, 3), torch.arange(20)),
    "bytes": b"abc",
    "a tensor with an attribute": with_attribute(torch.ones(3)),
    "many objects": np.array(["a", {"b": 1}] * 1000, dtype=object),
    "structured objects": np.array([(1, "a")] * 1000, dtype=[("x", "i4"), ("y", object)]),
    "one buffer, the smaller first": (torch.from_numpy(BUFFER[:5]), torch.from_numpy(BUFFER)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_comes_back(kind):
    value = KINDS[kind]
    assert same(phalanx.share(value), value)


@pytest.mark.parametrize("dtype", [one for one in vars(torch).values() if isinstance(one, torch.dtype)], ids=str)
def test_every_dtype(dtype):
    if "quint" in str(dtype) or "qint" in str(dtype) or (dtype.is_floating_point and dtype.itemsize == 0):
        pytest.skip("torch can't make a plain tensor of it")
    try:
        value = torch.zeros(16 * 8, dtype=torch.uint8).view(dtype)
    except RuntimeError as error:
        pytest.skip(f"torch can't make a tensor of it: {error}")
    value.view(torch.uint8).copy_(torch.arange(128, dtype=torch.uint8) % 2)
    shared = phalanx.share([value] * 2 + [[value]])
    assert shared[0].dtype is dtype
    assert torch.equal(shared[0].view(torch.uint8), value.view(torch.uint8))
    assert shared[0].data_ptr() == shared[2][0].data_ptr()


def test_what_is_shared_already_is_shared_again():
    items = records(1100)
    again = phalanx.share({"items": phalanx.share(items)})["items"]
    assert isinstance(again, SharedList)
    assert again == items
    assert copy.deepcopy(again) is copy.copy(again) is again


def share_again(rank, world_size):
    phalanx.init()
    again = phalanx.share(phalanx.share(Augmented(1500)))
    cached = phalanx.share({"data": phalanx.share(Augmented(20), cache="1 MiB")})["data"]
    return again[1400][0], cached[7][0]


def test_several_ranks_share_again_what_is_shared():
    assert run_ranks(share_again, 2) == [("sample 1400", "sample 7")] * 2


def test_tensors_that_share_memory_share_it_afterwards():
    whole = torch.arange(10.0)
    shared = phalanx.share({"whole": whole, "most": whole[1:], "few": whole[:2]})
    shared["whole"].fill_(7)
    assert shared["most"].tolist() == [7] * 9
    assert shared["few"].tolist() == [0, 1], "a small view does not keep something large"


def test_a_shared_list_is_a_list_to_read():
    items = records(1000)
    shared = phalanx.share(items)
    assert isinstance(shared, SharedList)
    assert (len(shared), shared[-1], shared[5:8], [*shared][3]) == (1000, items[-1], items[5:8], items[3])
    assert shared == items
    assert shared != items[1:]
    assert shared.__add__([1]) == [*items, 1]
    assert items[10] in shared
    assert shared.index(items[10]) == 10
    assert repr(shared) == "<SharedList of 1,000 items>"
    for beyond in (1000, -1001):
        with pytest.raises(IndexError, match=f"list index {beyond} is out of range: there are 1000 items"):
            shared[beyond]
    shared[0]["number"] = 99
    assert shared[0]["number"] == 0
    with pytest.raises(TypeError, match="can't be changed: make a list of it"):
        shared[0] = 1
    with pytest.raises(AttributeError, match="no attribute 'append': a SharedList can't be changed"):
        shared.append(1)
    assert not hasattr(shared, "columns")
    assert type(packing.pickle.loads(packing.pickle.dumps(shared))) is list


def test_a_memmap_stays_one(tmp_path):
    file = np.memmap(tmp_path / "file", dtype="f4", mode="w+", shape=(50, 2))
    file[:] = 3
    file.flush()
    shared = phalanx.share({"whole": np.memmap(tmp_path / "file", dtype="f4", mode="r", offset=8, shape=(49, 2))})
    assert type(shared["whole"]) is np.memmap
    assert (shared["whole"] == 3).all()
    assert shared["whole"].shape == (49, 2)
    copied = np.memmap(tmp_path / "file", dtype="f4", mode="c", shape=(100,))
    copied[0] = 7
    assert phalanx.share(copied)[0] == 7
    assert (phalanx.share(file[20:]) == 3).all()


# ---- ranks ---------------------------------------------------------------------------------------------------------


def memory_of(pid: int) -> tuple[int, int]:
    """Return the proportional share of shared data that a process holds, and its private anonymous memory, in bytes."""
    shared = private = 0
    is_ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = "memfd:phalanx-dataset" in line
        elif line.startswith("Pss:") and is_ours:
            shared += int(line.split()[1]) << 10
        elif line.startswith("Anonymous:"):
            private += int(line.split()[1]) << 10
    return shared, private


def read_all(dataset: Any, worker: int = 0) -> None:
    for index in range(len(dataset)):
        dataset[index][0].sum()


def holds_one_copy(rank: int, world_size: int) -> Any:
    phalanx.init()
    _, before = memory_of(os.getpid())
    dataset = phalanx.share(lambda: TensorDataset(torch.ones(SIZE // 4096, 1024)))
    own = sum(dataset[index][0].sum() for index in range(len(dataset)))
    loader = phalanx.DataLoader(
        dataset, batch_size=512, num_workers=2, persistent_workers=True, sampler=range(len(dataset))
    )
    total = sum(batch.sum() for (batch,) in loader)
    workers = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    RankGroup().barrier(60)  # what the others have not mapped yet would be this rank's share
    measured = [memory_of(pid) for pid in (os.getpid(), *workers)]
    RankGroup().barrier(60)
    grown = memory_of(os.getpid())[1] - before
    return float(own), float(total), len(workers), sum(shared for shared, _ in measured), grown


def test_two_ranks_with_two_workers_each_hold_one_copy():
    results = run_ranks(holds_one_copy, 2)
    assert [result[:3] for result in results] == [(SIZE / 4, SIZE / 4, 2)] * 2
    assert sum(shared for *_, shared, _ in results) < 1.1 * SIZE
    # What the builder has freed, the memory policy of ranks may keep for some seconds.
    assert results[1][-1] < SIZE / 4


def build_once(rank: int, world_size: int, folder: str) -> Any:
    phalanx.init()

    def build() -> list[Any]:
        (Path(folder) / f"built by {rank}").touch()
        return records(2000)

    shared = phalanx.share(build)
    return shared == records(2000)


@pytest.mark.parametrize("hosts", [[3], [2, 1]])
def test_one_rank_of_each_host_builds(tmp_path, hosts):
    assert all(run_ranks(build_once, 3, str(tmp_path), hosts=hosts))
    assert sorted(os.listdir(tmp_path)) == [f"built by {first}" for first in ([0] if hosts == [3] else [0, 2])]


def write_to_items(rank: int, world_size: int) -> Any:
    phalanx.init()
    shared = phalanx.share({"tensor": torch.zeros(4096), "array": np.zeros(4096), "records": [np.zeros(8)] * 1000})
    ranks = RankGroup()
    shared["tensor"] += rank
    shared["array"] += rank
    shared["records"][0][:] = rank
    ranks.barrier(60)
    return [float(shared[name].max()) for name in ("tensor", "array")], float(shared["records"][0].max())


def test_what_a_process_writes_only_this_process_sees():
    assert run_ranks(write_to_items, 2) == [([0, 0], 0), ([1, 1], 1)]


def take_different(rank: int, world_size: int, kind: str) -> str:
    phalanx.init()
    data: Any = {
        "type": [1] if rank else (1,),
        "length": records(5000 + rank),
        "item": [[1, 2]] * 30 + [[rank]] * 30,
        "shape": torch.zeros(3, 2 + rank),
        "row": {"x": torch.cat([torch.zeros(7), torch.full((1,), float(rank))])},
        "array": np.arange(20) + rank,
        "dataset": Augmented(10 + rank),
        "part of a dataset": with_values(Augmented(10), rank),
        "number": {"offset": rank},
        "key": build_nothing,
        "form": records(5) if rank else build_nothing,
    }[kind]
    with pytest.raises(ValueError, match="the ranks' data differs") as caught:
        phalanx.share(data, key="" if kind != "key" else f"{rank}")
    return str(caught.value)


def with_values(dataset: Augmented, value: int) -> Augmented:
    dataset.values += value
    return dataset


def build_nothing() -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("type", "the type of the data is list on rank 1 and tuple on rank 0"),
        ("length", "the length of the data is 5001 on rank 1 and 5000 on rank 0"),
        ("item", "item 30 of the data is "),
        ("shape", "the shape of the data is torch.float32 [3, 3] on rank 1 and torch.float32 [3, 2] on rank 0"),
        ("row", "row 7 of the data['x'] is "),
        ("array", "row 0 of the data is "),
        ("part of a dataset", "row 0 of values of the data is "),
        ("number", "the data['offset'] is 1 on rank 1 and 0 on rank 0"),
        ("key", "the key is '1' on rank 1 and '0' on rank 0"),
        ("dataset", "the length of the data is 11 on rank 1 and 10 on rank 0"),
        ("form", "the kind of argument is data on rank 1 and a function on rank 0"),
    ],
)
def test_data_that_differs_is_refused_on_every_rank(kind, words):
    messages = run_ranks(take_different, 2, kind)
    assert len({*messages}) == 1
    assert words in messages[0]


def fail_to_build(rank: int, world_size: int, kind: str) -> tuple[str, str]:
    phalanx.init()
    data: Any = {
        "raises": functools.partial(raise_error, "no such bucket"),
        "item": lambda: [*range(1200), lambda: None, 3],
        "lock": lambda: {"a": with_attribute("lock", threading.Lock())},
        "lambda": lambda: with_attribute("transform", lambda item: item),
        "generator": lambda: {"a": (1, (item for item in ()))},
        "nothing": return_nothing,
        "own error": Unwilling,
    }[kind]
    with pytest.raises(RuntimeError) as caught:
        phalanx.share(data)
    assert getattr(caught.value, "is_victim", False) == (rank > 0)
    return str(caught.value), type(caught.value.__cause__).__name__


def with_attribute(name: str, value: Any) -> Augmented:
    dataset = Augmented(10)
    setattr(dataset, name, value)
    return dataset


class Unwilling:
    def __getstate__(self) -> Any:
        raise OSError(2, "no such disk")


def raise_error(text: str) -> None:
    raise KeyError(text)


def return_nothing() -> None:
    pass


LINE_OF_ERROR = raise_error.__code__.co_firstlineno + 1


@pytest.mark.parametrize("value", [None, "text", 3, True])
def test_what_holds_no_data_is_refused(value):
    with pytest.raises(TypeError, match="there is nothing to share in "):
        phalanx.share(value)


def test_a_key_is_text():
    with pytest.raises(TypeError, match=r"the key must be a str, got int: pass key='3'"):
        phalanx.share(lambda: [1], key=3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raises", f"rank 0 has raised KeyError: 'no such bucket', at {__file__}:{LINE_OF_ERROR} in raise_error"),
        ("item", "rank 0 can't share the data: item 1200 of a list can't be pickled: "),
        ("own error", "rank 0 can't share the data: it can't be pickled: [Errno 2] no such disk; share the data "),
        ("lock", "rank 0 can't share the data: attribute 'lock' of item 'a' can't be pickled: cannot pickle "),
        ("lambda", "rank 0 can't share the data: attribute 'transform' can't be pickled: "),
        ("generator", "rank 0 can't share the data: item 1 of item 'a' can't be pickled: cannot pickle 'generator' "),
        (
            "nothing",
            "rank 0 can't share the data: return_nothing has returned NoneType: there is nothing to share in None",
        ),
    ],
)
def test_a_failure_of_the_builder_is_told_on_every_rank(kind, words):
    for rank, (message, cause) in enumerate(run_ranks(fail_to_build, 2, kind)):
        assert message.startswith(f"rank {rank}: phalanx.share: {words}")
        assert (cause == "NoneType") == (rank > 0)


def test_without_memory_it_is_said_how_much_is_missing(monkeypatch):
    def refuse(size_bytes: int) -> None:
        raise OSError(12, f"1 MiB of 2 MiB of memory are left, and {size_bytes >> 20} MiB are needed")

    monkeypatch.setattr(packing, "require_room", refuse)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match=r"has no memory for the data: 1 MiB of 2 MiB .* 16 MiB are needed; share l"):
        phalanx.share(torch.zeros(4 << 20))
    assert os.listdir("/proc/self/fd") == descriptors


def test_what_stays_private_is_said(capsys):
    phalanx.share({number: f"{number:0100}" for number in range(200_000)})
    assert "MiB of the data stay private to each process: dicts, short lists and objects" in capsys.readouterr().err


def load_epoch(rank: int, world_size: int) -> Any:
    phalanx.init()
    plain = Augmented(1001)
    shared = phalanx.share(plain)
    assert isinstance(shared, Augmented)
    assert isinstance(shared.names, SharedList)
    epochs = []
    for dataset in (plain, shared):
        loader = phalanx.DataLoader(dataset, batch_size=7, shuffle=True, num_workers=2)
        loader.set_epoch(3)
        epochs.append([(list(names), values.tolist()) for names, values in loader])
    return epochs[0] == epochs[1], len(epochs[0])


def test_a_shared_dataset_gives_the_same_epoch():
    assert run_ranks(load_epoch, 2) == [(True, 72)] * 2


def test_nothing_is_left_when_the_data_is_gone():
    def blocks() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:phalanx-dataset")

    gc.collect()
    descriptors, before = len(os.listdir("/proc/self/fd")), blocks()
    for _ in range(20):
        shared = phalanx.share({"x": torch.zeros(1000), "l": records(1000)})
        loader = DataLoader(shared["l"], batch_size=None, num_workers=1)
        assert next(iter(loader)) == {"number": 0, "text": "record 0"}
    assert blocks() == before + 1
    del shared, loader
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), blocks()) == (descriptors, before)


# ---- restarts ------------------------------------------------------------------------------------------------------


def run_and_restart(folder: Path, script: str, num_ranks: int) -> str:
    """Run a script that kills itself once, and return what it has printed."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    run = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", f"{num_ranks}", "--max-restarts", "1"]
    done = subprocess.run([*run, "train.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


IN_A_LOOP = """
    import os, pathlib, sys, torch, phalanx
    session = phalanx.init()
    first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) * 3

    def held():
        (path,) = [os.environ["PHALANX_SHARED"]]
        return os.stat(path).st_blocks * 512 >> 20

    largest = 0
    for number in range(first, 6):
        data = phalanx.share(lambda: torch.full((4 << 20,), float(number)), key=f"{number}")
        assert data.unique().tolist() == [number]
        largest = max(largest, held())
        torch.distributed.barrier()
        if number == 3 and not first and session.rank == 0:
            os.kill(os.getpid(), 9)
    print("at most", largest, "MiB")
"""


@pytest.mark.usefixtures("warm_jobs")
def test_what_nobody_has_any_more_is_freed(tmp_path):
    printed = run_and_restart(tmp_path, IN_A_LOOP, num_ranks=2)
    assert int(re.findall("at most ([0-9]+) MiB", printed)[-1]) <= 64  # two, and two of the attempt before


EDITED = """
    import os, sys, torch, phalanx
    session = phalanx.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def build():
        import values
        return [phalanx.share(lambda: [values.VALUE], key="inner"), values.VALUE]

    print("got", attempt, phalanx.share(build, key="outer"), flush=True)
    if attempt == 0:
        with open("values.py", "w") as file:
            file.write("VALUE = 'new'")
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def kept():
    """The memory of a supervisor."""
    fd = unnamed_file("phalanx-dataset")
    with KeptData(path_of(fd)) as opened:
        yield opened
    os.close(fd)


def test_what_the_same_call_has_built_for_another_script_is_freed(kept):
    for version in range(3):
        kept.find_or_build(f"version {version}", 0, lambda: torch.zeros(1 << 20))
    assert len(kept._entries()) == 1


def test_a_cache_that_was_full_is_not_so_after_a_restart(kept):
    first = Items(kept.find_or_build("key", 0, lambda: [1, 2], "1 MiB")[1])
    first.get(0, lambda: "one")
    assert "full" in first._why_full(1, OSError())
    first._words[cached_items._IS_FULL] = 1
    again = Items(kept.find_or_build("key", 0, lambda: pytest.fail("built again"), "1 MiB")[1])
    assert again.get(0, lambda: pytest.fail("computed again")) == "one"
    again.get(1, lambda: "two")
    assert again.get(1, lambda: pytest.fail("computed again")) == "two"


def test_a_file_that_is_edited_while_the_data_is_built_is_not_taken_for_what_was_imported(kept, tmp_path, monkeypatch):
    (tmp_path / "edited_meanwhile.py").write_text("VALUE = 1")
    os.utime(tmp_path / "edited_meanwhile.py", (0, 0))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("edited_meanwhile")
    built = []

    def build():
        built.append(len(built))
        if len(built) == 1:
            (tmp_path / "edited_meanwhile.py").write_text("VALUE = 2")
        return [1]

    for _ in range(2):
        kept.find_or_build("key", 0, build)
    assert built == [0, 1]
    monkeypatch.delitem(sys.modules, "edited_meanwhile")


@pytest.mark.usefixtures("warm_jobs")
def test_after_an_edit_the_data_is_built_anew(tmp_path):
    """Even of a module that is imported by the function alone; and a function may share, too."""
    (tmp_path / "values.py").write_text("VALUE = 'old'")
    printed = run_and_restart(tmp_path, EDITED, num_ranks=1)
    assert re.findall("got .*", printed) == ["got 0 [['old'], 'old']", "got 1 [['new'], 'new']"]


SCRIPT = """
    import functools, os, torch, phalanx
    session = phalanx.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def build(name, length):
        print("built", os.environ["TORCHELASTIC_RESTART_COUNT"], name, flush=True)
        return [{"name": name, "number": number} for number in range(length)]

    def load(split):
        return build(split, 1500)

    class Squares:
        def __len__(self):
            return 10

        def __getitem__(self, number):
            print("computed", number, flush=True)
            return torch.tensor(number**2)

    squares = phalanx.share(lambda: Squares(), key="squares", cache="1 MiB")
    shared = [
        *(phalanx.share(lambda: build(split, 1500), key=split) for split in ("train", "test")),
        phalanx.share(functools.partial(build, "part", 2000), key="part"),
        phalanx.share(lambda: build(f"of {attempt}", 1000), key=f"of {attempt}"),
        phalanx.share(lambda: build("no key", 1000)),
    ]
    print("got", attempt, session.rank, [items[-1]["name"] for items in shared], flush=True)
    print("sum", attempt, session.rank, int(sum(squares[number] for number in range(8 + 2 * attempt))), flush=True)
    torch.distributed.barrier()
    if attempt == 0 and session.rank == 0:
        os.kill(os.getpid(), 9)
    torch.distributed.barrier()
"""


@pytest.mark.usefixtures("warm_jobs")
def test_after_a_restart_the_data_is_there(tmp_path):
    printed = run_and_restart(tmp_path, SCRIPT, num_ranks=2)
    lines = [line.partition("built ")[2] for line in printed.splitlines() if "built " in line]
    assert lines == ["0 train", "0 test", "0 part", "0 of 0", "0 no key", "1 of 1", "1 no key"]
    for attempt in range(2):
        for rank in range(2):
            assert f"got {attempt} {rank} ['train', 'test', 'part', 'of {attempt}', 'no key']" in printed
            assert f"sum {attempt} {rank} {[140, 285][attempt]}" in printed
    assert sorted(re.findall(r"computed (\d)", printed)) == [*"0123456789"]


OF_ONE_KEY = """
    import argparse, functools, os, torch, phalanx
    from dataclasses import dataclass
    from pathlib import Path
    session = phalanx.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def build(value):
        print("built", os.environ["TORCHELASTIC_RESTART_COUNT"], value, flush=True)
        return [value] * 1000

    class Reader:
        def __init__(self, name):
            self.name, self.session = name, session

        def read(self):
            return build(self.name)

    @dataclass
    class Config:
        name: str

    def read_global():
        return [build(part) for part in [which]][0]

    def read_through():
        return read_global()

    def other(value):
        return build(f"other {value}")

    config = argparse.Namespace(split="of arguments")
    calls = [
        lambda: [build("short, so that nobody maps it")[0]],
        lambda: build("one line"), lambda: build("another"), functools.partial(build, "partial"),
        functools.partial(other, "partial"), Reader("of one").read, Reader("of another").read,
        lambda name="by default": build(name), lambda name="by another": build(name),
        lambda: build(config.split), functools.partial(lambda config: build(config.name), Config("a")),
        functools.partial(lambda path, rows: build(path.name), Path("path"), torch.arange(3)),
    ]
    calls += [functools.partial(lambda rows: build(str(len(rows))), torch.arange(number)) for number in (3, 4)]
    got = [phalanx.share(call, key="data") for call in calls]
    for split in ("train", "test"):
        got.append(phalanx.share(lambda: build(split), key="data"))
        which = f"global {split}"
        got.append(phalanx.share(read_global, key="data"))
        which = f"through {split}"
        got.append(phalanx.share(read_through, key="data"))
    print("got", *(data[0] for data in got), sep="|", flush=True)
    if attempt == 0:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.usefixtures("warm_jobs")
def test_of_one_key_each_function_gets_its_own_data(tmp_path):
    printed = run_and_restart(tmp_path, OF_ONE_KEY, num_ranks=1)
    built = re.findall(r"built 0 (.*)", printed)
    assert len(built) == len({*built}) == 20
    assert re.findall(r"got\|(.*)", printed) == ["|".join(built)] * 2
    assert "built 1" not in printed


class Sizes:
    size = 1


def build_of_class() -> torch.Tensor:
    return torch.zeros(Sizes.size)


@functools.lru_cache
def build_cached() -> torch.Tensor:
    return build_of_class()


@torch.no_grad()
def build_without_gradients() -> torch.Tensor:
    return build_of_class()


BUILDERS = (build_of_class, build_cached, build_without_gradients)


def test_what_tells_functions_apart_is_complete():
    """Of values that are not known to be the same, the digest differs: to build anew is better than other data."""
    deep: Any = {"size": 1}
    for _ in range(6):
        deep = {"inner": deep}
    other = copy.deepcopy(deep)
    other["inner"]["inner"]["inner"]["inner"]["inner"]["inner"]["size"] = 2
    long, longer = [0] * 500, [0] * 500
    longer[77] = 1
    pairs = [
        (deep, other), (long, longer), ({1}, {2}), (range(3), range(4)), (slice(1), slice(2)),
        (torch.float32, torch.float16), (torch.device("cpu"), torch.device("meta")), (bytearray(b"a"), bytearray(b"b")),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)), (Decimal(1), Decimal(2)), (int, float),
    ]  # fmt: skip
    digests = [tuple(digest_of_inputs(functools.partial(list, value)) for value in pair) for pair in pairs]
    assert [pair for pair, (one, two) in zip(pairs, digests, strict=True) if one == two] == []
    assert [digest_of_inputs(functools.partial(list, one)) for one, _ in pairs] == [one for one, _ in digests]
    before = [digest_of_inputs(function) for function in BUILDERS]
    assert before == [digest_of_inputs(function) for function in BUILDERS]
    Sizes.size = 2
    try:
        after = [digest_of_inputs(function) for function in BUILDERS]
    finally:
        Sizes.size = 1
    assert not {*before} & {*after}
    endless = functools.partial(list, [*range(30_000)])
    assert digest_of_inputs(endless) != digest_of_inputs(endless), "too long to be looked at in whole"


BUILDER_FAILS = """
    import os, phalanx
    session = phalanx.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def build():
        if attempt == 0:
            raise OSError("the bucket is not there yet")
        return [attempt]

    print("got", phalanx.share(build, key="data"))
"""


@pytest.mark.usefixtures("warm_jobs")
def test_a_job_whose_builder_has_failed_is_started_again(tmp_path):
    """The others are its victims: not every rank has raised the same."""
    assert run_and_restart(tmp_path, BUILDER_FAILS, num_ranks=2).count("got [1]") == 2


def share_before_and_outside(rank: int, world_size: int) -> Any:
    with pytest.raises(RuntimeError) as before:
        phalanx.share([1])
    phalanx.init()
    first = torch.distributed.new_group([0])
    if rank == 0:
        return str(before.value), phalanx.share([1], group=first)
    with pytest.raises(ValueError, match="phalanx") as outside:
        phalanx.share([1], group=first)
    return str(before.value), str(outside.value)


def test_a_rank_that_would_share_with_nobody_is_refused():
    (before, shared), (_, outside) = run_ranks(share_before_and_outside, 2, init=False)
    assert before.startswith("phalanx.share: there is no process group yet, so each rank would hold a copy of its own")
    assert shared == [1]
    assert outside == "rank 1: phalanx.share: this rank is not in the group"


def test_what_is_compared_is_bounded():
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    circle: list[Any] = [large, (large,)]
    circle += [circle] * 5
    assert len(marks(circle)) < 20_000
    assert marks({"a": 1, "b": 2}) == marks({"b": 2, "a": 1})
    assert marks({number: object() for number in range(100)}) == marks(
        {number: object() for number in range(100, 0, -1)}
    )


def read_in_a_process(items: Any, results: Any) -> None:
    results.put((type(items).__name__, len(items), items[7]["x"].tolist()))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_not_forked_maps_the_list(method):
    items = phalanx.share([{"x": torch.full((3,), float(number))} for number in range(1000)])
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=read_in_a_process, args=(items, results))
    child.start()
    assert results.get() == ("SharedList", 1000, [7.0] * 3)
    child.join()
    assert child.exitcode == 0
