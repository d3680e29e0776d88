"""How tensors are divided into blocks that the ranks save, and joined again on any number of ranks.

- Tensors of 64 KiB and more that have the same bits on all ranks are cut between rows and divided among the ranks: each
  rank copies and writes its share.
- Each rank saves its shard of a DTensor, and replicas are saved once. torch says where the shards lie.
- Buffers of modules, NumPy arrays, tensors below 64 KiB and plain values are saved by every rank, because they may
  differ (batch norm, random numbers, positions in the data). If a different number of ranks loads the checkpoint, all
  of them get rank 0's values.
- If names, shapes or bits of tensors differ between ranks (in a hand-written pipeline, or with experts), each rank
  saves its own tensors, and only the same number of ranks can load the checkpoint.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import _torch
from phalanx._ranges import share
from phalanx._text import counted
from phalanx._torch.tensors import is_dtensor
from phalanx.checkpoint.state.digest import bytes_of, digests
from phalanx.checkpoint.state.image import Image, Part
from phalanx.checkpoint.state.tree import Leaf
from phalanx.checkpoint.state.unpacking import Json, as_dtype

_SMALL_BYTES = 64 * 1024
_MAX_CUT_DIMS = 8  # dimensions along which blocks may be cut; no mesh has as many
_PIECE_BYTES = 4 << 20  # bytes of a tensor that one thread digests at a time

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in the whole tensor


def _can_be_divided(leaf: Leaf) -> bool:
    """Return whether the ranks divide this tensor among themselves, provided that it is the same on all ranks."""
    return not leaf.is_local and not is_dtensor(leaf.tensor) and _size(leaf.tensor) >= _SMALL_BYTES


def parts_of_rank(leaves: Sequence[Leaf], rank: int, world_size: int, alike: Collection[str]) -> list[Part]:
    """Return what `rank` saves: its shards, its own tensors, and its share of the tensors that the ranks divide.

    These shares have about equal sizes, and are cut between rows.

    Args:
        leaves: Tensors of this rank's state.
        rank: Rank that saves.
        world_size: Number of ranks that save.
        alike: Names of the tensors that are the same on all ranks; every rank passes the same names.
    """
    leaves = sorted(leaves, key=lambda leaf: leaf.name)  # the order may differ between ranks with different states
    divided = {leaf.name for leaf in leaves if _can_be_divided(leaf) and leaf.name in alike}
    total_bytes = sum(_size(leaf.tensor) for leaf in leaves if leaf.name in divided)
    own = share(total_bytes, rank, world_size)
    at = 0
    parts = []
    for leaf in leaves:
        tensor = leaf.tensor
        if is_dtensor(tensor):
            parts += _shard(leaf)
        elif leaf.name not in divided:
            parts.append(Part(leaf.name, (0,) * tensor.dim(), tensor))
        else:
            row_bytes = _size(tensor) // len(tensor)
            first, last = (min(max(-(-(edge - at) // row_bytes), 0), len(tensor)) for edge in (own.start, own.stop))
            if first < last:
                parts.append(Part(leaf.name, (first, *(0,) * (tensor.dim() - 1)), tensor[first:last]))
            at += _size(tensor)
    return parts


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shard(leaf: Leaf) -> list[Part]:
    """Return this rank's shard of a DTensor, unless an earlier rank has the same one."""
    tensor: Any = leaf.tensor
    offset, shape = _place_of_shard(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    is_first = coordinate is not None and all(
        place == 0 for place, how in zip(coordinate, tensor.placements, strict=True) if how.is_replicate()
    )
    local = tensor.to_local()
    if not is_first or 0 in shape:
        return []
    return [Part(leaf.name, offset, local.view(shape))]


def _place_of_shard(tensor: Any) -> Block:
    shape, offset = _torch.place_of_shard(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


class Reader:
    """Fills tensors from the images of all ranks that saved.

    Args:
        images: Images of all ranks, in rank order.
        own: Rank whose small tensors, buffers and other own values this rank gets.

    Attributes:
        needed: Ranges of bytes that are needed according to `survey`, by the rank whose image holds them.
    """

    def __init__(self, images: Sequence[Image], own: int) -> None:
        self._images = [images[own], *images[:own], *images[own + 1 :]]
        self._checked: set[str] = set()
        self.needed: dict[int, list[tuple[int, int]]] = {}

    @torch.no_grad()
    def __call__(self, node: Json, into: Tensor | None) -> Tensor:
        """Return a node's tensor: a new one, or `into` after filling it.

        Raises:
            ValueError: The images lack something that `into` needs.
        """
        with torch.inference_mode(into is not None and into.is_inference()):  # so that inference tensors can be written
            dtype = as_dtype(node["dtype"])
            tensor = torch.empty(node["shape"], dtype=dtype) if into is None else into
            target: Tensor = (tensor.to_local() if is_dtensor(tensor) else tensor).detach()  # type: ignore[attr-defined]
            wanted = _wanted(tensor)
            for common, (image, offset, shape, key) in self._sources(node["tensor"], wanted).items():
                source = image.block(key, shape, dtype)
                _window(target, common, wanted[0]).copy_(_window(source, common, offset))
            return tensor

    def check(self, node: Json, _: Tensor | None = None) -> Tensor:
        """Check that the images hold a node's tensor; return a tensor of the same form that takes no memory.

        Raises:
            ValueError: The images do not hold it, or another node names the same tensor, which no save would write.
        """
        if node["tensor"] in self._checked:
            raise ValueError(f"{node['tensor']!r} is there more than once")
        self._checked.add(node["tensor"])
        form = torch.empty(node["shape"], dtype=as_dtype(node["dtype"]), device="meta")
        for image, _offset, shape, key in self._sources(node["tensor"], _whole(form.shape)).values():
            image.block(key, shape, form.dtype)
        return torch.zeros((), dtype=form.dtype).expand(form.shape)

    def survey(self, node: Json, into: Tensor | None) -> Tensor:
        """Add the bytes that a call would read to `needed`; return a tensor of the same form that takes no memory.

        Raises:
            ValueError: The images lack something that `into` needs.
        """
        wanted = _whole(node["shape"]) if into is None else _wanted(into)
        for common, (image, offset, shape, key) in self._sources(node["tensor"], wanted).items():
            rows = (common[0][0] - offset[0], common[1][0], shape[0]) if shape else (0, 1, 1)
            self.needed.setdefault(image.metadata["rank"], []).append(image.extent(key, *rows))
        return torch.zeros((), dtype=as_dtype(node["dtype"])).expand(node["shape"])

    def _sources(self, name: str, wanted: Block) -> dict[Block, tuple[Image, tuple[int, ...], tuple[int, ...], str]]:
        """Return blocks that cover `wanted`, each element once, and the source of each."""
        missing = _count(wanted)
        found: dict[Block, tuple[Image, tuple[int, ...], tuple[int, ...], str]] = {}
        for image in self._images:
            if missing <= 0:  # enough: later ranks may have saved other tensors under this name
                break
            for offset, shape, key in image.blocks.get(name, ()):
                common = _overlap(wanted, (offset, shape))
                if common is not None and common not in found:
                    found[common] = image, offset, shape, key
                    missing -= _count(common)
        if missing > 0:
            raise ValueError(f"no file of the checkpoint has {counted(missing, 'element')} of {name!r}")
        if not _do_tile(found, wanted):
            raise ValueError(f"some elements of {name!r} are there more than once")
        return found


def _do_tile(blocks: Iterable[Block], whole: Block) -> bool:
    """Return whether blocks within `whole` cover each of its elements exactly once, in time linear in their number.

    Give each corner of a block a sign: + if an even number of its coordinates are upper ends, - otherwise. The blocks
    cover each element of `whole` once if and only if the signed corners of all blocks add up to those of `whole`: all
    inner corners cancel out.

    Raises:
        ValueError: The blocks are cut along more dimensions than any mesh has.
    """
    blocks = [*blocks]
    if not _count(whole):
        return not blocks
    cut = [
        dim
        for dim, edges in enumerate(zip(*whole, strict=True))
        if any((offset[dim], shape[dim]) != edges for offset, shape in blocks)
    ]
    if len(cut) > _MAX_CUT_DIMS:
        raise ValueError(f"a tensor is cut along {len(cut)} dimensions, more than {_MAX_CUT_DIMS}")
    corners: collections.Counter[tuple[int, ...]] = collections.Counter()
    for sign, (offset, shape) in ((1, whole), *((-1, block) for block in blocks)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offset[dim] + end * shape[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _wanted(tensor: Tensor) -> Block:
    """Return the block of a tensor that this rank has."""
    return _place_of_shard(tensor) if is_dtensor(tensor) else _whole(tensor.shape)


def _whole(shape: Sequence[int]) -> Block:
    return (0,) * len(shape), tuple(shape)


def _count(block: Block) -> int:
    return math.prod(block[1])


def _overlap(a: Block, b: Block) -> Block | None:
    offset, shape = [], []
    for a_first, a_len, b_first, b_len in zip(a[0], a[1], b[0], b[1], strict=True):
        first, last = max(a_first, b_first), min(a_first + a_len, b_first + b_len)
        if first >= last:
            return None
        offset.append(first)
        shape.append(last - first)
    return tuple(offset), tuple(shape)


def _window(tensor: Tensor, block: Block, origin: Iterable[int]) -> Tensor:
    for dim, (first, start, length) in enumerate(zip(block[0], origin, block[1], strict=True)):
        tensor = tensor.narrow(dim, first - start, length)
    return tensor


Description = dict[str, bytes]


def describe(leaves: Sequence[Leaf], world_size: int) -> Description:
    """Return, by name, a description of each tensor: shape, dtype and, for large tensors, a digest of the bits.

    All bits are digested, because different tensors may have the same name and differ in few bits: stages of a model on
    different ranks, or experts that have hardly been trained. A single rank has nothing to compare, so its digests are
    left out.
    """
    described = {}
    for leaf in leaves:
        if not leaf.is_local:
            kind = f"{list(leaf.tensor.shape)} {leaf.tensor.dtype}".encode()
            is_compared = world_size > 1 and _can_be_divided(leaf)
            described[leaf.name] = kind + _digest(leaf.tensor) if is_compared else kind
    return described


def fingerprint(described: Description) -> tuple[int, int]:
    """Return two numbers of 62 bits; equal descriptions give equal pairs."""
    digest = hashlib.blake2b(repr(sorted(described.items())).encode(), digest_size=16).digest()
    low, high = (int.from_bytes(half, "little") >> 2 for half in (digest[:8], digest[8:]))
    return low, high


def names_alike(descriptions: Sequence[Description]) -> frozenset[str]:
    """Return the names of the tensors that have the same description on every rank."""
    return frozenset(dict(set.intersection(*(set(described.items()) for described in descriptions))))


@torch.no_grad()
def _digest(tensor: Tensor) -> bytes:
    """Return 128 bits for every few MiB of a tensor, computed by as many threads as torch would use to copy it."""
    bits = bytes_of(tensor.cpu())
    num_pieces = max(len(bits) // _PIECE_BYTES, 1)
    pieces = (share(len(bits), piece, num_pieces) for piece in range(num_pieces))
    return digests([bits[piece.start : piece.stop] for piece in pieces], torch.get_num_threads())
