"""A rank's part of a checkpoint as one safetensors file, which is made in memory, and kept there or written to disk.

The file is laid out here because the safetensors library can't write into existing memory; any reader of the format can
open the file. The state's tree and the place of each part are in the header's metadata. The data begins at a multiple
of 4096 bytes, and larger elements come first, because torch crashes on complex numbers that are not aligned. Complex
numbers are stored as pairs, and dtypes that the format lacks as bytes.

**Why not torch's distributed checkpoint.** Its ``.metadata`` is a pickle, so anybody who can write to the folder can
run code in the job; it has no hashes; and its writer can't leave an image in memory.

Source: the format in https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 4096  # data begins at a multiple of this, and so at the same place after headers of similar length
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of one tensor of the state.

    Attributes:
        name: Name of the whole tensor.
        offset: Position of the block in the tensor, one number for each dimension.
        block: View of the rank's own memory.
    """

    name: str
    offset: tuple[int, ...]
    block: Tensor

    @property
    def key(self) -> str:
        """The name in the file: the tensor's name, followed by the block's offset unless the offset is 0."""
        return f"{self.name}@{','.join(map(str, self.offset))}" if any(self.offset) else self.name


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of an image: the `header`, then the parts, whose offsets in bytes are `places`."""

    header: bytes
    places: tuple[int, ...]
    size_bytes: int


def as_stored(block: Tensor) -> Tensor:
    """View a tensor in a dtype that the format knows: complex numbers as pairs, exotic dtypes as bytes."""
    if block.dtype in _NAMES:
        return block
    if block.is_complex():
        return torch.view_as_real(block.resolve_conj())
    block = block.contiguous()
    return block.unsqueeze(-1).view(torch.uint8) if block.dim() else block.reshape(1).view(torch.uint8)


def is_storable(dtype: torch.dtype) -> bool:
    """Return whether the format knows a dtype."""
    return dtype in _NAMES


def lay_out(parts: Sequence[Part], metadata: Mapping[str, Any] | None) -> Layout:
    """Return the layout of an image of `parts`; `metadata`, if any, is JSON for its header."""
    entries: dict[str, Any] = {}
    blocks: dict[str, list[Any]] = {}
    places = [0] * len(parts)
    end = 0
    # Large elements first, so that each is aligned to its size: torch crashes on misaligned complex numbers.
    for i in sorted(range(len(parts)), key=lambda i: -parts[i].block.element_size()):
        part, stored = parts[i], as_stored(parts[i].block)
        key = part.key
        while key in entries:  # a block's key may equal another tensor's name
            key += "'"
        places[i], end = end, end + stored.numel() * stored.element_size()
        entries[key] = {
            "dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [places[i], end],
        }  # fmt: skip
        blocks[key] = [part.name, list(part.offset), list(part.block.shape)]
    ours = {} if metadata is None else {"phalanx": json.dumps({**metadata, "blocks": blocks})}
    entries["__metadata__"] = {"format": "pt", **ours}
    text = json.dumps(entries).encode()
    text = text.ljust(math.ceil((len(text) + 8) / _ALIGNMENT) * _ALIGNMENT - 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, tuple(len(header) + place for place in places), len(header) + end)


@torch.no_grad()
def fill(memory: Any, layout: Layout, parts: Sequence[Part]) -> None:
    """Copy the parts into `memory`, a writable buffer of at least the layout's size."""
    view = memoryview(memory)
    for part, place in zip(parts, layout.places, strict=True):
        stored = as_stored(part.block)
        if stored.numel():
            target = torch.frombuffer(view, dtype=stored.dtype, count=stored.numel(), offset=place)
            target.view(stored.shape).copy_(stored)
    view[: len(layout.header)] = layout.header


class Image:
    """An image to read.

    Args:
        memory: Writable buffer, which is not modified; the blocks are views of this buffer.

    Raises:
        ValueError: The memory holds no image. A header that no save wrote may raise other errors as well.
    """

    def __init__(self, memory: Any) -> None:
        view = memoryview(memory)
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 + length:
            raise ValueError("it ends before its header does")
        entries = json.loads(bytes(view[8 : 8 + length]))
        self.metadata: dict[str, Any] = json.loads(entries.pop("__metadata__")["phalanx"])
        self._view, self._begin, self._entries = view, 8 + length, entries
        _check_entries(entries, len(view) - 8 - length)
        blocks = self.metadata.pop("blocks")
        if blocks.keys() != entries.keys():
            raise ValueError("its header does not say where in the state each tensor belongs")
        self.blocks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], str]]] = {}
        for key, (name, offset, shape) in blocks.items():
            if len(offset) != len(shape) or not _are_counts([*offset, *shape]):
                raise ValueError(f"{key!r} has no valid place in the state")
            self.blocks.setdefault(name, []).append((tuple(offset), tuple(shape), key))

    def extent(self, key: str, first: int, num_rows: int, of_rows: int) -> tuple[int, int]:
        """Return the half-open range of bytes of the image that holds `num_rows` of a block's `of_rows` rows."""
        start, end = (self._begin + place for place in self._entries[key]["data_offsets"])
        row_bytes = (end - start) // of_rows
        return start + first * row_bytes, start + (first + num_rows) * row_bytes

    def block(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the block that `blocks` lists under `key`.

        Raises:
            ValueError: The block has a different shape or dtype, or is not aligned to its elements.
        """
        entry = self._entries[key]
        start, end = entry["data_offsets"]
        stored, extent = _stored_form(shape, dtype)
        if (_DTYPES[entry["dtype"]], entry["shape"]) != (stored, extent):
            raise ValueError(f"{key!r} is {entry['dtype']} {entry['shape']}, not {dtype} {list(shape)}")
        if start == end:  # torch refuses empty buffers
            return torch.empty(shape, dtype=dtype)
        offset = self._begin + start
        if offset % dtype.itemsize:  # torch crashes on misaligned complex numbers
            raise ValueError(f"{key!r} is not aligned to its elements")
        flat = torch.frombuffer(self._view, dtype=stored, count=(end - start) // stored.itemsize, offset=offset)
        if dtype.is_complex:
            return torch.view_as_complex(flat.view(extent))
        return flat.view(dtype).view(shape)


def _stored_form(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.dtype, list[int]]:
    """Return the dtype and shape that `as_stored` gives a tensor of this form."""
    if dtype in _NAMES:
        return dtype, [*shape]
    return (dtype.to_real(), [*shape, 2]) if dtype.is_complex else (torch.uint8, [*shape, dtype.itemsize])


def _check_entries(entries: Mapping[str, Any], size_bytes: int) -> None:
    """Raise ValueError unless the entries of a header tile the data, each with as many bytes as its shape takes."""
    at = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if not _are_counts([begin, end, *entry["shape"]]) or begin != at or end < begin or end > size_bytes:
            raise ValueError(f"{key!r} has no valid place in the data")
        if math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize != end - begin:
            raise ValueError(f"{key!r} does not have the size that its shape implies")
        at = end
    if at != size_bytes:
        raise ValueError("it has more data than its header describes")


def _are_counts(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)
