"""The memory of a call's tensors: views of every kind, with guard bytes around them.

A tensor lies inside a block whose bytes all have one unusual value, so an out-of-bounds write is detected. After the
call, the tensor itself is filled with that value, so a rank that reads a peer's input too late reads wrong values. An
output holds that value from the start, so a call that does not write its output returns wrong values.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

LAYOUTS = ("plain", "offset", "strided", "transposed", "misaligned")
_FILL = 0xA5
_MARGIN = 64  # guard bytes before a tensor and after it
_AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Block:
    """A tensor with a given layout, in memory of its own.

    Args:
        values: Contents of the tensor; None to leave it filled with `_FILL`.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        layout: One of `LAYOUTS`; a plain layout is used if the dtype or the shape does not allow this one.

    Attributes:
        tensor: The tensor.
    """

    def __init__(
        self,
        values: Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: str = "plain",
    ) -> None:
        self._values = values
        num = torch.Size(shape).numel()
        item = dtype.itemsize
        if layout == "misaligned" and num > 0 and item > 1:
            self._base = bytearray([_FILL]) * (num * item + 2 * _MARGIN)
            self._bytes = torch.frombuffer(self._base, dtype=torch.uint8)
            self.tensor = torch.frombuffer(self._base, dtype=dtype, count=num, offset=_MARGIN + 1).view(tuple(shape))
        else:
            step = 2 if layout == "strided" else 1
            before = _MARGIN + (3 * item if layout == "offset" else 0)
            before = -(-before // item) * item
            self._bytes = torch.full((before + step * num * item + _MARGIN,), _FILL, dtype=torch.uint8)
            room = self._bytes[before : before + step * num * item].view(dtype)
            if layout == "transposed" and len(shape) > 1:
                self.tensor = room.view(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
            else:
                self.tensor = room[::step].view(tuple(shape))
        if values is not None:
            copy_bits(self.tensor, values)

    def taken(self) -> Tensor:
        """Return a contiguous copy of the tensor, bit by bit."""
        return taken(self.tensor)

    def give_up(self, *, is_input: bool) -> str:
        """Fill the tensor with `_FILL`; return a description of memory errors, empty if there were none.

        Args:
            is_input: Whether the tensor must still hold the values with which it was made.
        """
        wrong = ""
        if is_input and self._values is not None and not _same_bits(self.taken(), self._values):
            wrong = "the call has changed its input"
        size = self.tensor.itemsize
        filled = torch.full((self.tensor.numel() * size,), _FILL, dtype=torch.uint8).view(self.tensor.dtype)
        copy_bits(self.tensor, filled.view(self.tensor.shape))
        if not wrong and not bool((self._bytes == _FILL).all()):
            wrong = "the call has written beside its tensor"
        return wrong


def _as_whole(tensor: Tensor) -> Tensor:
    return tensor.view(_AS_WHOLE[tensor.itemsize])


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor. The strides of a tensor with a single element may be anything."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_bits(to: Tensor, values: Tensor) -> None:
    """Copy elements bit by bit, even to or from a misaligned tensor, with which torch's own loops would crash."""
    if to.is_contiguous() and values.is_contiguous():
        to, values = _as_bytes(to), _as_bytes(values)
    elif to.itemsize in _AS_WHOLE:  # torch would turn any byte of a bool into 0 or 1
        to, values = _as_whole(to), _as_whole(values)
    to.copy_(values)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_as_bytes(one), _as_bytes(other))


def taken(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor, bit by bit."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_bits(copy, tensor)
    return copy


class Room:
    """Allocates the tensors of one call, each in a `Block`, and checks and overwrites them afterwards.

    Args:
        source_layout: Layout of tensors that the call only reads.
        target_layout: Layout of tensors that the call writes.
    """

    def __init__(self, source_layout: str = "plain", target_layout: str = "plain") -> None:
        self._layouts = source_layout, target_layout
        self._sources: list[Block] = []
        self._targets: list[Block] = []

    def source(self, values: Tensor) -> Tensor:
        """Return a tensor that the call only reads."""
        self._sources.append(Block(values, values.shape, values.dtype, self._layouts[0]))
        return self._sources[-1].tensor

    def update(self, values: Tensor) -> Tensor:
        """Return a tensor that the call reads and writes."""
        self._targets.append(Block(values, values.shape, values.dtype, self._layouts[1]))
        return self._targets[-1].tensor

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that the call writes."""
        self._targets.append(Block(None, shape, dtype, self._layouts[1]))
        return self._targets[-1].tensor

    def give_up(self) -> str:
        """Fill all tensors with `_FILL`; describe the first memory error, or return "" if there is none."""
        wrong = [block.give_up(is_input=True) for block in self._sources]
        wrong += [block.give_up(is_input=False) for block in self._targets]
        self._sources, self._targets = [], []
        return next(filter(None, wrong), "")


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool)


def small_numbers(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return whole numbers from -4 or 0 to 4: sums and products of a few such numbers are exact in every dtype."""
    made = torch.Generator().manual_seed(seed)
    low = 0 if dtype in _UNSIGNED else -4
    whole = torch.randint(low, 5, tuple(shape), generator=made)
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double() if len(shape) else whole.double()).to(dtype)
    return (whole > 2).contiguous() if dtype is torch.bool else whole.to(dtype)


def real_numbers(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return floats whose sums are rounded, with one random scale for the whole tensor; for other dtypes, any bits."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return any_bits(seed, shape, dtype)
    made = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = real_numbers(seed, (*shape, 2), dtype.to_real())
        return torch.view_as_complex(parts)
    scale = 2.0 ** random.Random(seed).randint(-6, 6)
    return (torch.randn(tuple(shape), generator=made) * scale).to(dtype)


def rare_numbers(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return numbers that include infinities, NaN, zeros of both signs, and the largest and smallest numbers."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return real_numbers(seed, shape, dtype)
    info = torch.finfo(dtype)
    rare = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, info.max, info.min, info.tiny, -info.smallest_normal / 4, 1.0]
    made = torch.Generator().manual_seed(seed + 1)
    which = torch.randint(0, 8 * len(rare), tuple(shape), generator=made)
    picked = torch.tensor(rare, dtype=dtype)[which % len(rare)]
    return torch.where(which < len(rare), picked, real_numbers(seed, shape, dtype))


def any_bits(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return elements with random bits; for bool, 0 and 1."""
    made = torch.Generator().manual_seed(seed)
    num = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=made, dtype=torch.uint8).view(torch.bool)
    raw = torch.randint(0, 256, (num * dtype.itemsize,), generator=made, dtype=torch.uint8)
    return raw.view(dtype).view(tuple(shape))


VALUES = {"small": small_numbers, "real": real_numbers, "rare": rare_numbers, "bits": any_bits}
