"""The differences between two checkpoints, tensor by tensor and value by value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch

from phalanx._text import shortened
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.loading import images_of
from phalanx.checkpoint.state.blocks import Reader
from phalanx.checkpoint.state.unpacking import form_of, unpack


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Attributes:
        name: Position in the state, such as ``model.0.weight``, with the rank if each rank has its own values.
        first: Value in one checkpoint, shortened.
        second: Value in the other checkpoint, shortened.
        largest: Largest absolute difference between two tensors of numbers; None for anything else.
    """

    name: str
    first: str
    second: str
    largest: float | None = None

    def __str__(self) -> str:
        by = "" if self.largest is None else f" (by at most {self.largest:g})"
        return f"{self.name}: {self.first} and {self.second}{by}"


def compare(first: tuple[str | os.PathLike[str], int], second: tuple[str | os.PathLike[str], int]) -> list[Difference]:
    """Return the differences between two checkpoints, each given by folder and step; empty if every bit is the same.

    If different numbers of ranks saved the two checkpoints, only the states of rank 0 are compared.

    Raises:
        Damaged: A manifest is damaged.
    """
    states = [_states(os.fspath(folder), step) for folder, step in (first, second)]
    if len(states[0]) != len(states[1]):
        states = [of_ranks[:1] for of_ranks in states]
    found: dict[str, Difference] = {}
    for rank, (one, other) in enumerate(zip(*states, strict=True)):
        for difference in _differences("", one, other):
            found.setdefault(difference.name, dataclasses.replace(difference, name=f"{difference.name} (rank {rank})"))
    return list(found.values())


def _states(folder: str, step: int) -> list[Any]:
    """Return each rank's state as plain values and tensors."""
    checkpoint = folders.read_manifest(folder, step)
    images = images_of(checkpoint)
    return [unpack(image.metadata["tree"], Reader(images, rank)) for rank, image in enumerate(images)]


def _differences(name: str, one: Any, other: Any) -> Iterator[Difference]:
    if type(one) is not type(other):
        yield Difference(name, _short(one), _short(other))
    elif isinstance(one, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            path = f"{name}.{key}" if name else str(key)
            if key in one and key in other:
                yield from _differences(path, one[key], other[key])
            else:
                yield Difference(path, "there" if key in one else "missing", "there" if key in other else "missing")
    elif isinstance(one, list | tuple) and len(one) == len(other):
        for index, (item, another) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{name}.{index}", item, another)
    elif isinstance(one, torch.Tensor):
        yield from _tensor_difference(name, one, other)
    elif type(one).__module__ == "numpy":  # compared by bytes: the repr of a large array leaves out most of it
        if (one.dtype, one.shape, one.tobytes()) != (other.dtype, other.shape, other.tobytes()):
            yield Difference(name, _short(one), _short(other))
    elif repr(one) != repr(other):  # compared as text, in which NaN equals itself
        yield Difference(name, _short(one), _short(other))


def _tensor_difference(name: str, one: torch.Tensor, other: torch.Tensor) -> Iterator[Difference]:
    if one.shape != other.shape or one.dtype != other.dtype:
        yield Difference(name, _short(one), _short(other))
    elif not torch.equal(_bits(one), _bits(other)):
        wide = torch.complex128 if one.is_complex() else torch.float64
        gap = (one.to(wide) - other.to(wide)).abs().max()
        yield Difference(name, _short(one), _short(other), float(gap))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return form_of(value)
    if type(value).__module__ == "numpy" and value.shape:
        return f"numpy {value.dtype}{list(value.shape)}"
    return shortened(repr(value))
