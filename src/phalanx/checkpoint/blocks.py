"""Which rank saves which block of a tensor, and how blocks come together again on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.image import Image, Part, as_stored
from phalanx.checkpoint.tree import Json, Leaf, as_dtype

_SMALL_BYTES = 64 * 1024
_NUM_SAMPLED = 64  # elements of a tensor

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in the whole tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_shared(leaf: Leaf) -> bool:
    """Whether all ranks have it alike, so that each need only save a part: what is large and no rank's own."""
    size = leaf.tensor.numel() * leaf.tensor.element_size()
    return not leaf.is_local and not is_sharded(leaf.tensor) and size >= _SMALL_BYTES


def parts_of_rank(leaves: Sequence[Leaf], rank: int, world_size: int) -> list[Part]:
    """Return what `rank` saves: its shards, its own small tensors, and its part of what all ranks have alike.

    That part is one of `world_size` of about equal size, cut between rows.
    """
    total_bytes = sum(_size(leaf.tensor) for leaf in leaves if is_shared(leaf))
    begin, end = (total_bytes * r // world_size for r in (rank, rank + 1))
    at = 0
    parts = []
    for leaf in leaves:
        tensor = leaf.tensor
        if is_sharded(tensor):
            parts += _shard(leaf)
        elif not is_shared(leaf):
            parts.append(Part(leaf.name, (0,) * tensor.dim(), tensor))
        else:
            row_bytes = _size(tensor) // len(tensor)
            first, last = (min(max(-(-(edge - at) // row_bytes), 0), len(tensor)) for edge in (begin, end))
            if first < last:
                parts.append(Part(leaf.name, (first, *(0,) * (tensor.dim() - 1)), tensor[first:last]))
            at += _size(tensor)
    return parts


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shard(leaf: Leaf) -> list[Part]:
    """Return this rank's shard of a DTensor, unless an earlier rank has it too."""
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
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


class Reader:
    """Fills tensors from the images of all ranks that saved.

    Args:
        images: In rank order.
        own: The image whose own tensors (small ones, buffers) are this rank's.
    """

    def __init__(self, images: Sequence[Image], own: int) -> None:
        self._images = [images[own], *images[:own], *images[own + 1 :]]

    @torch.no_grad()
    def __call__(self, node: Json, into: Tensor | None) -> Tensor:
        """Return the tensor of a node, in `into` if that is given.

        Raises:
            ValueError: The images do not hold all of what `into` needs.
        """
        dtype = as_dtype(node["dtype"])
        tensor = torch.empty(node["shape"], dtype=dtype) if into is None else into
        target: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        wanted = _place_of_shard(tensor) if is_sharded(tensor) else ((0,) * tensor.dim(), tuple(tensor.shape))
        missing = target.numel()
        done: list[Block] = []
        for image in self._images:
            for offset, shape, key in image.blocks.get(node["tensor"], ()):
                common = _overlap(wanted, (offset, shape))
                if missing == 0 or common is None or common in done:
                    continue
                source = image.block(key, shape, dtype)
                _window(target, common, wanted[0]).copy_(_window(source, common, offset))
                done.append(common)
                missing -= _count(common)
        if missing:
            raise ValueError(f"{missing} elements of {node['tensor']} are in no file of the checkpoint")
        return tensor


def _count(block: Block) -> int:
    return int(torch.Size(block[1]).numel())


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


def fingerprint(leaves: Sequence[Leaf]) -> int:
    """Return a number of 62 bits by which ranks find out whether they have the same tensors.

    It is of names, shapes and dtypes, and of a few elements of each tensor of which a rank would save only a part:
    ranks that hold different stages of a model may well call them the same.
    """
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if not leaf.is_local:
            digest.update(f"{leaf.name} {list(leaf.tensor.shape)} {leaf.tensor.dtype}".encode())
        if is_shared(leaf):
            digest.update(_sample(leaf.tensor))
    return int.from_bytes(digest.digest(), "little") >> 2


def _sample(tensor: Tensor) -> bytes:
    per_dim = max(int(_NUM_SAMPLED ** (1 / tensor.dim())), 2)
    some = tensor[tuple(slice(None, None, -(-size // per_dim)) for size in tensor.shape)]
    return as_stored(some).contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
