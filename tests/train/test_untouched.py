"""A batch to go along with is loaded from a copy of the dataset, which leaves the dataset itself as it was."""

from __future__ import annotations

import contextlib

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from phalanx.train.feed.untouched import untouched


class OpensLate(Dataset):
    """Opens its file with the first sample, as datasets of HDF5 and LMDB do; sample `index` is the number `index`."""

    def __init__(self, path, files):
        self._path, self._files = path, files
        self.file = None

    def __len__(self):
        return 300

    def __getitem__(self, index):
        if self.file is None:
            self.file = self._files.enter_context(open(self._path, "rb"))  # noqa: SIM115
        self.file.seek(8 * index)
        return int.from_bytes(self.file.read(8), "little")


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


def test_a_file_that_is_opened_late_stays_closed_in_the_dataset(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(number.to_bytes(8, "little") for number in range(300)))
    with contextlib.ExitStack() as files:
        inner = OpensLate(path, files)
        for data in (
            inner,
            Subset(inner, range(280)),
            ConcatDataset([Subset(inner, range(9)), OpensLate(path, files)]),
        ):
            assert untouched(data)[7] == 7
            assert inner.file is None


class Slotted(Dataset):
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)


def test_what_can_not_be_copied_is_loaded_from_as_it_is():
    samples = TensorDataset(torch.arange(96.0))
    whole = samples, Wrapped(samples), Slotted(samples), TensorDataset(torch.zeros(3))
    for data in ([1, 2], *whole):
        twin = untouched(data)
        assert len(twin) == len(data)
        assert (twin is data) == isinstance(data, list)
    assert untouched(whole[1]).dataset is not samples


class Holding(Dataset):
    """Holds something that it drops when it is pickled."""

    def __init__(self, held):
        self._held = {"by": [held]}

    def __getstate__(self):
        return {}


def test_a_dataset_that_drops_something_when_it_is_pickled_has_it_in_this_process():
    assert untouched(Holding(samples := TensorDataset(torch.zeros(3))))._held["by"][0] is samples
