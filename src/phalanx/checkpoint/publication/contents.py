"""The layout of a version in its block: a head, the tensors, and a manifest that gives the place of each tensor.

Tensors are contiguous, and each begins at a multiple of 64 bytes. Because the manifest comes after the tensors, their
places depend only on their shapes and dtypes: if only plain values change between versions, no tensor moves.
Tensors that share the same memory, such as tied weights, have one place. The version number in the head is invalidated
before anything is overwritten, and written last. The lock of the block (`phalanx.host.shared_blocks.Block.hold`)
decides who may read and who may write, and orders their accesses to the memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from phalanx._torch.tensors import is_dtensor
from phalanx.checkpoint.state.tree import Leaf, pack
from phalanx.checkpoint.state.unpacking import Json, as_dtype, unpack
from phalanx.wire.messages import GarbledError, between, read_value

_HEAD = struct.Struct("=8s16sQQQ")  # magic, token, version or 0, begin and size of the manifest
_MAGIC = b"phalanx1"
_ALIGNMENT, _PAGE = 64, 4096
_SLACK = 4096  # bytes by which a manifest may grow before a block is too small
_VERSION_AT = 24
_MOST = 2**62


@dataclass(frozen=True)
class _Manifest:
    tree: Any
    places: dict[str, Annotated[int, between(0, _MOST)]]


@dataclass(frozen=True)
class Content:
    """The layout of a state.

    Attributes:
        parts: Each tensor and its place in bytes; tensors that share the same memory appear once.
        manifest: JSON of a `_Manifest`.
        manifest_at: Place of the manifest, after the tensors.
    """

    parts: Sequence[tuple[int, Tensor]]
    manifest: bytes
    manifest_at: int

    @property
    def size_bytes(self) -> int:
        """Size of a block for this content and slightly larger ones."""
        return -(-(self.manifest_at + len(self.manifest) + _SLACK) // _PAGE) * _PAGE

    def fits(self, size_bytes: int) -> bool:
        """Whether a block of this size holds the content without wasting more than half of it."""
        return self.manifest_at + len(self.manifest) <= size_bytes <= 2 * self.size_bytes

    def is_drafted(self, memory: memoryview) -> bool:
        """Whether some tensors already lie in this memory, each at its own place, and the whole content fits there."""
        start = _address(memory)
        lying = [(at, one) for at, one in self.parts if one.is_cpu and 0 <= one.data_ptr() - start < len(memory)]
        is_so = all(part.data_ptr() == start + place and _is_packed(part) for place, part in lying)
        return bool(lying) and is_so and self.fits(len(memory))

    def write(self, memory: Any, token: bytes) -> None:
        """Copy the content into `memory`, without a version number. Tensors that lie there already are not copied."""
        _HEAD.pack_into(memory, 0, _MAGIC, token, 0, self.manifest_at, len(self.manifest))
        base = _address(memory)
        for place, part in self.parts:
            if part.data_ptr() != base + place or not _is_packed(part):
                _fill(_view(memory, place, part.dtype, part.shape), part)
        memory[self.manifest_at : self.manifest_at + len(self.manifest)] = self.manifest


def lay_out(state: Any) -> Content:
    """Return the layout of a state.

    Raises:
        TypeError: The state has a value that can't be published; the message says where.
        ValueError: A number is too large, or the state is nested too deeply.
    """
    tree, leaves = pack(state, "published")
    places: dict[str, int] = {}
    parts: dict[Any, tuple[int, Tensor]] = {}
    end = _PAGE
    for leaf in leaves:
        _refuse_divided(leaf)
        same = _memory_of(leaf.tensor)
        if same not in parts:
            parts[same] = (end, leaf.tensor)
            end += -(-leaf.tensor.numel() * leaf.tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        places[leaf.name] = parts[same][0]
    manifest = json.dumps({"tree": tree, "places": places}).encode()
    return Content([part for part in parts.values() if part[1].numel()], manifest, end)


def _refuse_divided(leaf: Leaf) -> None:
    if is_dtensor(leaf.tensor):
        raise TypeError(
            f"{leaf.name} is a DTensor, of which this rank has a part: gather it first, as get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict does"
        )


def _memory_of(tensor: Tensor) -> Any:
    """Return a key that two tensors share only if they have the same elements in the same memory."""
    if tensor.numel() == 0:
        return id(tensor)
    where = tensor.data_ptr(), tensor.device, tensor.dtype
    return *where, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _is_packed(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _address(memory: Any) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


def _view(memory: Any, place: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(tuple(shape))


def _fill(target: Tensor, source: Tensor) -> None:
    if _is_packed(source):  # copied as bytes, because torch can't copy every dtype
        target, source = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
        if _are_words(target) and _are_words(source):  # words of 8 bytes are copied a tenth faster
            target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _are_words(flat: Tensor) -> bool:
    """Whether `flat` consists of whole, aligned words of 8 bytes."""
    return not any(number % 8 for number in (flat.numel(), flat.storage_offset(), flat.data_ptr()))


def stamp(memory: Any, version: int) -> None:
    """Write the number of the version that `memory` holds now; 0 marks that it holds no complete version."""
    struct.pack_into("=Q", memory, _VERSION_AT, version)


def version_in(memory: Any, token: bytes) -> int:
    """Return the version that a publication's block holds in full; 0 if there is none."""
    magic, found, version, _, _ = _HEAD.unpack_from(memory, 0)
    return int(version) if (magic, found) == (_MAGIC, token) else 0


def read(memory: Any) -> Any:
    """Return the state in a block; its tensors are views of the block.

    Raises:
        GarbledError: The block holds no state that this version of the library wrote.
    """
    try:
        *_, begin, size = _HEAD.unpack_from(memory, 0)
        return _read(memory, begin, size, memory)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise GarbledError(f"it was not written by this version of phalanx: {error}") from error


def _read_tensor(memory: Any, places: dict[str, int], node: Json) -> Tensor:
    shape = node["shape"]
    if not all(type(length) is int and 0 <= length < _MOST for length in shape):
        raise GarbledError(f"a tensor has the shape {shape}")
    return _view(memory, places[node["tensor"]], as_dtype(node["dtype"]), shape)


def read_over(memory: Any, other: Any) -> Any:
    """Return the state in a block, but with tensors that are views of `other`, memory of the same size."""
    *_, begin, size = _HEAD.unpack_from(memory, 0)
    return _read(memory, begin, size, other)


def _read(memory: Any, begin: int, size: int, tensors: Any) -> Any:
    """Return the state that a manifest describes; its tensors are views of the buffer `tensors`."""
    # Not `understand`, which would refuse numbers beyond 64 bits: a state may have larger ones, up to `pack`'s limit.
    manifest = read_value(json.loads(memory[begin : begin + size]), _Manifest)
    with torch.inference_mode(False):  # otherwise autograd could never record these tensors
        return unpack(manifest.tree, lambda node, _: _read_tensor(tensors, manifest.places, node))
