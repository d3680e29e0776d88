"""Joins the parts that all ranks have saved, and writes the whole as one file for other programs."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch import Tensor

from phalanx.checkpoint.disk.folder import Checkpoint
from phalanx.checkpoint.loading import images_of
from phalanx.checkpoint.state.blocks import Reader
from phalanx.checkpoint.state.image import Part, fill, is_storable, lay_out
from phalanx.checkpoint.state.unpacking import pairs_of, unpack


def read(checkpoint: Checkpoint, key: str, rank: int | None = None) -> Any:
    """Return the whole value under `key`.

    Args:
        checkpoint: Checkpoint to read.
        key: Position in the state, such as ``model`` or ``model.encoder``; empty for all of it.
        rank: Rank whose values to return; may be None only if no rank has saved tensors of its own.

    Raises:
        ValueError: The key does not exist, or `rank` is needed.
    """
    images = images_of(checkpoint)
    if rank is None and not images[0].metadata["is_alike"]:
        raise ValueError(f"each of {len(images)} ranks has saved tensors of its own: choose one with --rank")
    node = images[rank or 0].metadata["tree"]
    for part in key.split(".") if key else ():
        entries = {str(name): value for name, value in pairs_of(node)}
        if part not in entries:
            raise ValueError(f"the checkpoint has no {part!r}; it has {', '.join(map(repr, entries))}")
        node = entries[part]
    return unpack(node, Reader(images, rank or 0))


def export(value: Any, path: str) -> int:
    """Write `value` as safetensors or with ``torch.save``, depending on the file's name; return the number of tensors.

    Raises:
        ValueError: The name ends in neither .pt nor .safetensors, or the format can't hold a tensor.
    """
    tensors = dict(_tensors("", value))
    is_safetensors = path.endswith(".safetensors")
    if not is_safetensors and not path.endswith((".pt", ".pth")):
        raise ValueError(f"{path!r} must end in .safetensors or .pt")
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w+b") as file:
            if is_safetensors:
                _write_safetensors(tensors, file)
            else:
                torch.save(value, file)
        os.rename(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return len(tensors)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{name}.{key}" if name else str(key), item)


def _write_safetensors(tensors: dict[str, Tensor], file: IO[bytes]) -> None:
    for name, tensor in tensors.items():
        if not is_storable(tensor.dtype):
            raise ValueError(f"{name!r} is {tensor.dtype}, which safetensors does not support; export to a .pt file")
    parts = [Part(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()]
    layout = lay_out(parts, None)
    file.truncate(layout.size_bytes)
    with mmap.mmap(file.fileno(), layout.size_bytes) as memory:
        fill(memory, layout, parts)
