"""Checks of a call's arguments (tensors, ranks, reduce operations), and the errors that explain mistakes."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from phalanx import _core
from phalanx._errors import ArgumentError, UnsupportedLayout
from phalanx._text import plural
from phalanx._torch.tensors import is_dense, is_stored, unusual_keys
from phalanx.backend.calls.memory import Buffers, NotPlain, OtherDevice, Tensors
from phalanx.backend.failures.wording import root_name
from phalanx.backend.types import DTYPE_CODES, REDUCE_CODES, SUM_CODES, RedOpType, is_inexact, premul_factor

_core.set_tensor_types([torch.Tensor, torch.nn.Parameter], torch.strided)


class Arguments(Buffers):
    """The arguments of one call of a group, and the memory on which the core works."""

    _factor: float | torch.Tensor | None = None

    def check(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Check that the core can access the tensor; return the code and element size of its dtype."""
        codes = DTYPE_CODES.get(self._tensor(tensor).dtype)
        if codes is not None:
            if _core.is_plain(tensor):
                return codes
            if is_dense(tensor) and is_stored(tensor):
                self.are_simple = False
                return codes
        raise self._refusal(tensor)

    def _refusal(self, tensor: torch.Tensor) -> Exception:
        """Return the error for a tensor that the core can't access."""
        where = self.where()
        if is_dense(tensor):
            if tensor.dtype not in DTYPE_CODES:
                return ArgumentError(
                    f"{where} can't take {tensor.dtype}, which packs several elements into a byte; pass "
                    "tensor.int_repr(), and the scale and zero point with it"
                )
            return ArgumentError(
                f"{where}: the tensor's storage holds {tensor.untyped_storage().nbytes()} bytes, too few for "
                f"{describe(tensor)} from element {tensor.storage_offset()} on; it was resized or freed under the "
                "tensor, as FSDP does with parameters that are not in use. Pass a tensor that has its storage"
            )
        if "Python" not in unusual_keys(tensor):
            if tensor.is_meta:
                return ArgumentError(
                    f"{where} takes CPU tensors with data, got one on meta, which has none; give it memory first "
                    'with torch.empty_like(tensor, device="cpu") or module.to_empty(device="cpu")'
                )
            if not tensor.is_cpu:
                return OtherDevice(
                    f"{where} takes CPU tensors, got one on {tensor.device}. For tensors on a GPU use "
                    f'init_process_group("cpu:phalanx,cuda:nccl"), or call {self.op} with tensor.cpu()',
                    tensor.device.type,
                )
            if tensor.layout is not torch.strided:
                return UnsupportedLayout(
                    f"{where} takes dense tensors, got layout {tensor.layout}; call {self.op} with tensor.to_dense()"
                )
        kind = type(tensor).__name__
        local = "its local part, tensor.to_local()" if kind == "DTensor" else "a plain tensor"
        keys = ", ".join(sorted(unusual_keys(tensor) - {"PythonTLSSnapshot"}))
        return NotPlain(f"{where} takes tensors with memory of their own, got a {kind} ({keys}); pass {local}")

    def one(self, tensors: Tensors) -> torch.Tensor:
        if len(tensors) != 1:
            raise ArgumentError(f"{self.where()} takes one tensor per rank, got {len(tensors)}; call it once for each")
        return self._tensor(tensors[0])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):  # torch's front end checks this itself, a `Communicator` does not
            raise TypeError(f"{self.where()} takes tensors, got {type(tensor).__name__}")
        return tensor

    def root(self, root: int) -> int:
        """Check the call's root, a rank of the group; the error names the caller's argument."""
        if 0 <= root < self.ranks.size:
            return root
        # In a group of all ranks, torch passes `src` on unchecked. In a smaller group, torch itself checks `src` and
        # translates it into the rank in the group, so only `group_src` can be wrong here.
        is_world = not dist.is_initialized() or self.ranks.size == dist.get_world_size()
        name = root_name(self.op) if is_world else f"group_{root_name(self.op)}"
        raise ArgumentError(f"{self.where()}: {name} must lie in [0, {self.ranks.size}), got {root}")

    def each(self, name: str, tensors: Tensors, like: torch.Tensor, *, may_differ: bool = False) -> Tensors:
        """Check that a list has one tensor per rank, with the dtype and size of `like`; return it.

        If `may_differ` is true, only this rank's own tensor must have the size of `like`.
        """
        self.require_length(name, tensors)
        for i, tensor in enumerate(tensors):
            self.check(tensor)
            is_bound = i == self.ranks.rank or not may_differ
            if tensor.dtype != like.dtype or (is_bound and tensor.numel() != like.numel()):
                raise ArgumentError(
                    f"{self.where()}: {name}[{i}] is {describe(tensor)}, expected {describe(like)} "
                    "as on the other side of the operation"
                )
        return tensors

    def of_root(self, lists: list[Tensors], like: torch.Tensor, *, is_root: bool) -> Tensors:
        """Check the list that only the root of a gather or scatter passes; return it, or [] on other ranks."""
        name = f"{self.op}_list"
        is_given = len(lists) == 1 and (is_root or bool(lists[0]))  # under torchcomms, other ranks pass [[]]
        if is_root != is_given:
            argument = root_name(self.op)
            role = {"dst": "destination", "src": "source"}[argument]
            raise ArgumentError(
                f"{self.where()}: {name} must be given on the {role} rank only; call dist.{self.op}(tensor, {name} if "
                f"rank == {argument} else None, {argument}={argument})"
            )
        return self.each(name, lists[0], like) if is_root else []

    def require_length(self, name: str, tensors: Tensors) -> None:
        if len(tensors) != self.ranks.size:
            raise ArgumentError(
                f"{self.where()}: {name} must hold one tensor for each of the {self.ranks.size} ranks, "
                f"got {len(tensors)}"
            )

    def blocks(self, whole: torch.Tensor, block: torch.Tensor, name: str) -> int:
        """Check that `whole` holds one `block` per rank; return the number of elements in a block."""
        self.check(whole)
        if whole.dtype != block.dtype or whole.numel() != block.numel() * self.ranks.size:
            raise ArgumentError(
                f"{self.where()}: {name} must hold {self.ranks.size} x {block.numel()} elements of {block.dtype}, "
                f"got {describe(whole)}"
            )
        return block.numel()

    def reduction(self, reduce_op: Any, dtype: torch.dtype) -> dict[str, int]:
        """Check that the reduce operation is defined for the dtype; return its `kernel` and its `code`, see `types`."""
        kernel, code = codes_of(reduce_op)
        is_premul = code != kernel
        if not _has_kernel(dtype, kernel) or (is_premul and not is_inexact(dtype)):
            raise ArgumentError(f"{self.where()}: {_reduction_problem(reduce_op.op, dtype)}")
        self._factor = premul_factor(reduce_op) if is_premul else None
        return {"kernel": kernel, "code": code}

    def premultiplied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous input of the reduction, multiplied by the factor of a PREMUL_SUM."""
        if self._factor is None:
            return self.read(tensor)
        return torch.mul(tensor, self._factor).to(tensor.dtype).contiguous()

    def even(self, tensor: torch.Tensor) -> int:
        """Divide dimension 0 evenly among the ranks; return the number of elements per rank."""
        first = tensor.shape[0] if tensor.dim() else 1
        if first % self.ranks.size != 0:
            raise ArgumentError(
                f"{self.where()}: dimension 0 ({first}) must be divisible by the {self.ranks.size} ranks; "
                "else pass input_split_sizes and output_split_sizes"
            )
        return tensor.numel() // self.ranks.size

    def splits(self, name: str, tensor: torch.Tensor, sizes: list[int]) -> list[int]:
        """Return each rank's number of elements. `sizes` are rows of dimension 0; if empty, ranks get equally many."""
        if not sizes:
            return [self.even(tensor)] * self.ranks.size
        rows = tensor.shape[0] if tensor.dim() else 1
        if len(sizes) != self.ranks.size or sum(sizes) != rows or min(sizes) < 0:
            raise ArgumentError(
                f"{self.where()}: {name} must hold {self.ranks.size} sizes that add up to dimension 0 ({rows}), "
                f"got {list(sizes)}"
            )
        row = tensor.numel() // rows if rows else 0
        return [size * row for size in sizes]


def codes_of(reduce_op: Any) -> tuple[int, int]:
    """Return the kernel and the code of a reduce operation, without a check of the dtype."""
    # SUM skips the look-up, because reading `reduce_op.op` takes as long as a small message.
    return SUM_CODES if reduce_op == RedOpType.SUM else REDUCE_CODES[reduce_op.op]


def _reduction_problem(kind: Any, dtype: torch.dtype) -> str:
    """Return why the reduction is undefined for this dtype, and what to do instead."""
    if not any(_has_kernel(dtype, code) for code, _ in REDUCE_CODES.values()):
        if "q" in str(dtype):
            other = "tensor.dequantize()"
        else:
            other = "tensor.float()" if is_inexact(dtype) else "tensor.view(torch.uint8), if that has a meaning"
        what = f"elements of {dtype} can't be reduced (ReduceOp.{kind.name}), only sent and copied"
        return f"{what}; convert the tensor: {other}"
    if kind == RedOpType.PREMUL_SUM:
        return f"ReduceOp.PREMUL_SUM multiplies by a factor and needs a floating-point or complex dtype, got {dtype}"
    whole = f"ReduceOp.{kind.name} is not supported for {dtype}; "
    if dtype.is_complex:
        return whole + "reduce the real and imaginary parts, torch.view_as_real(tensor)"
    if is_inexact(dtype):
        return whole + "it works on bits of whole numbers and bool: convert the tensor, such as tensor.int()"
    return whole + "convert the tensor, such as tensor.float()"


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} {plural(tensor.numel(), 'element')} of {tensor.dtype}"


def different_counts(tensors: Tensors) -> list[int] | None:
    """Return the number of elements in each tensor; None if all numbers are equal."""
    counts = [tensor.numel() for tensor in tensors]
    return counts if counts.count(counts[0]) < len(counts) else None


def steps(first: int, step: int, num: int) -> list[int]:
    """Return the addresses of `num` adjacent blocks, each of `step` bytes."""
    return [first + i * step for i in range(num)]


def offsets(first: int, counts: list[int], item: int) -> list[int]:
    """Return the addresses of adjacent blocks that hold `counts` elements, each of `item` bytes."""
    return [first + offset * item for offset in accumulate(counts[:-1], initial=0)]


@functools.cache
def _has_kernel(dtype: torch.dtype, kernel: int) -> bool:
    return _core.reduces(DTYPE_CODES[dtype][0], kernel)
