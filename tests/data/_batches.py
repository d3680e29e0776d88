"""Batches of every kind, which workers hand to a rank, and the datasets that give them."""

from __future__ import annotations

import collections
import dataclasses
import os
import signal
import warnings

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

LARGE = 300_000
"""Elements of a tensor that travels in a block."""
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)

Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str
    extra: dict


def count(length, dtype):
    return torch.arange(length).remainder(2 if dtype is torch.bool else 100).to(torch.float32).to(dtype)


def every_kind(length):
    """Return a batch with every kind of content; its tensors have up to `length` elements."""
    whole = torch.arange(2 * length)
    array = numpy.arange(length, dtype=numpy.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse tensors are new in torch, and quantized ones are about to leave it
        sparse = torch.sparse_coo_tensor(torch.arange(length).repeat(2, 1), torch.ones(length), (length, length))
        rows = torch.eye(40).to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(float(length))])
        quantized = torch.quantize_per_tensor(torch.linspace(0, 9, length), 0.1, 3, torch.qint8)
    return {
        "dtypes": {str(dtype): count(length, dtype) for dtype in DTYPES},
        "pair": Pair(torch.full((length,), 1.5), 7),
        "sample": Sample(torch.ones(2, length // 2), "name", {"tensors": [torch.zeros(3), (whole[:3],)]}),
        "views": [whole[5 : length + 5], whole[length:], whole[1::2], whole[:length].view(2, -1).t()],
        "expanded": torch.ones(1).expand(length),
        "of another dtype": whole.view(torch.uint8)[8 : 8 * length].view(torch.int32),
        "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.int8), whole[:0], whole[7:7].view(0, 1)],
        "scalar": [torch.tensor(3.0), whole[9], 4, None, "text", b"bytes"],
        "arrays": [array, array[::2], numpy.asfortranarray(array.reshape(2, -1)), numpy.array(["a", "b"]), array[:0]],
        "numpy's memory": [torch.from_numpy(array), torch.from_numpy(array[3:])],
        "sparse": sparse,
        "sparse rows": rows,
        "nested": nested,
        "quantized": quantized,
        "parameter": torch.nn.Parameter(torch.ones(length)),
        "with gradient": torch.ones(length, requires_grad=True),
        "conjugate": torch.full((length,), 1 + 2j).conj(),
        "storage": whole.untyped_storage(),
        "meta": torch.empty(length, device="meta"),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(length), torch.ones(2)]),
    }


def same(one, other):
    """Whether two batches are the same: content, types, dtypes, shapes, strides."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensor(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    if isinstance(one, torch.UntypedStorage):
        return torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (one, other)))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    return one == other


def _same_tensor(one, other):
    form = (one.dtype, one.shape, one.layout, one.requires_grad, one.device) == (
        *(other.dtype, other.shape, other.layout, other.requires_grad, other.device),
    ) if not one.is_nested else one.size(0) == other.size(0)  # fmt: skip
    if not form or one.device.type == "meta":
        return form
    if one.is_nested:
        return all(map(_same_tensor, one.unbind(), other.unbind()))
    if one.is_quantized:
        return torch.equal(one.int_repr(), other.int_repr()) and one.q_scale() == other.q_scale()
    if one.layout is torch.sparse_coo:
        return torch.equal(one.coalesce().values(), other.coalesce().values())
    if one.layout is torch.sparse_csr:
        return torch.equal(one.to_dense(), other.to_dense())
    if one.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return one.stride() == other.stride() and torch.equal(one, other)


def only(samples):
    return samples[0]


def seed(worker):
    torch.manual_seed(worker)


class Kinds(Dataset):
    """Each item has every kind of content."""

    def __init__(self, length, num_items=3, without=()):
        self._length, self._num_items, self._without = length, num_items, without

    def __len__(self):
        return self._num_items

    def __getitem__(self, index):
        return {key: value for key, value in every_kind(self._length).items() if key not in self._without}


class Records(Dataset):
    """Item i is a tensor of bytes that all are i % 251; see what happens at the item `fatal`."""

    def __init__(self, num_bytes, num_items, fatal=-1, how=signal.SIGKILL):
        self._num_bytes, self._num_items, self._fatal, self._how = num_bytes, num_items, fatal, how

    def __len__(self):
        return self._num_items

    def __getitem__(self, index):
        if index == self._fatal:
            os.kill(os.getpid(), self._how)
        return torch.full((self._num_bytes,), index % 251, dtype=torch.uint8)


class Lengths(Records):
    """Items of different lengths."""

    def __getitem__(self, index):
        return torch.full((self._num_bytes + 1009 * (index * 7 % 50),), index % 251, dtype=torch.uint8)


class Rows(Dataset):
    """Items are views of one large tensor."""

    def __init__(self, num_items, length):
        self.rows = torch.arange(num_items * length, dtype=torch.float64).view(num_items, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for item in range(info.id, 20, info.num_workers):
            yield torch.full((LARGE,), item)


class OwnMemory(Dataset):
    """Returns how many bytes of memory without a name its worker has mapped, beside a tensor of some length."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        with open("/proc/self/maps") as maps:
            blocks = {line.split()[4] for line in maps if "memfd:phalanx-batch" in line}
        return len(blocks), torch.full((LARGE,), index)
