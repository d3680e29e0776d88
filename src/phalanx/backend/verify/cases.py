"""The inputs and the expected results of an operation: the part of the verification that knows torch's arguments.

`Parts` copies the inputs of a call before it runs, into contiguous memory, and names the tensors that will hold the
results. A part is a transfer of data or a reduction; a coalesced call has several parts, one for each dtype or pair.
The result is read where the user sees it, so strided tensors, overlaps and everything else between torch and the core
are verified, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from phalanx._torch.replace import say_once
from phalanx._torch.tensors import is_dense, is_stored
from phalanx.backend.calls.memory import Tensors, copied, do_overlap, plain
from phalanx.backend.failures.members import Ranks
from phalanx.backend.types import DTYPE_CODES, RedOpType, is_inexact, premul_factor
from phalanx.backend.verify.bounds import exact, wrong
from phalanx.backend.verify.oracle import Oracle, as_bytes


class Unverifiable(Exception):
    """A call that can't be repeated on Gloo; the text names the tensor that prevents it."""


@dataclass(frozen=True)
class Finding:
    """The first element of one rank's result that differs.

    Attributes:
        tensor: Index of the result's tensor, if it has several.
        index: Indices of the element in that tensor.
        got: Value on phalanx.
        want: Expected value.
        num_wrong: Number of elements that differ.
        num_elems: Number of elements of the result.
        dtype: Name of the elements' dtype.
    """

    tensor: int
    index: tuple[int, ...]
    got: str
    want: str
    num_wrong: int
    num_elems: int
    dtype: str


@dataclass
class Part:
    """One transfer or reduction of a call.

    Attributes:
        given: Flat copy of this rank's input: its elements for a reduction, its bytes for a transfer.
        outputs: Tensors that hold this rank's result, in order.
        is_agreed: Whether `find` has established, on all ranks, that no rank's result is wrong.
    """

    given: torch.Tensor
    outputs: Tensors
    is_agreed: bool = field(default=False, init=False)

    def find(self, oracle: Oracle) -> Finding | None:
        """Repeat the part on Gloo, on every rank; return the first element of this rank's result that is wrong."""
        raise NotImplementedError

    def _result(self) -> torch.Tensor:
        return _flat(self.outputs)

    def _finding(self, at: torch.Tensor, want: torch.Tensor) -> Finding | None:
        """Return the finding for the ascending indices of wrong elements; `want` is the right value of the first."""
        if not at.numel():
            return None
        first = int(at[0])
        number = 0
        while first >= self.outputs[number].numel():
            first -= self.outputs[number].numel()
            number += 1
        tensor = self.outputs[number]
        got = copied(plain(tensor.detach()).reshape(-1)[first : first + 1])
        index = torch.unravel_index(torch.tensor(first, device="cpu"), tensor.shape)
        shown = _shown(got), _shown(want)
        # In hex if both values read alike, as NaNs with different bits do, or if the right value is only known as
        # bytes, as for a quantized dtype.
        if shown[0] == shown[1] or got.dtype != want.dtype:
            shown = _hex(got), _hex(want)
        num_elems = sum(t.numel() for t in self.outputs)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Finding(number, tuple(map(int, index)), *shown, at.numel(), num_elems, dtype)


@dataclass
class Moved(Part):
    """A transfer, which only copies data: `carry` returns the expected bytes of the result."""

    carry: Callable[[Oracle, torch.Tensor], torch.Tensor]

    def find(self, oracle: Oracle) -> Finding | None:
        want = self.carry(oracle, self.given)
        got = _bytes_of(self.outputs)
        if not self.outputs or torch.equal(got, want):
            return None
        item = self.outputs[0].itemsize
        at = (got != want).reshape(-1, item).any(1).nonzero().flatten()
        right = want[int(at[0]) * item :][:item].clone()
        return self._finding(at, right if self.outputs[0].is_quantized else right.view(self.outputs[0].dtype))


@dataclass
class Reduced(Part):
    """A reduction of all ranks' inputs.

    Attributes:
        kind: torch's reduce operation.
        start: Index of this rank's first element in the whole result.
    """

    kind: Any
    start: int = 0

    def find(self, oracle: Oracle) -> Finding | None:
        total = oracle.all_reduce(self.given, self.kind)
        got = self._result() if self.outputs else self.given[:0]
        end = self.start + got.numel()
        is_same = total is not None and _have_same_bits(got, total[self.start : end])
        if is_inexact(self.given.dtype):
            self.is_agreed = not oracle.most(int(not is_same))
            return None if self.is_agreed else self._judge(oracle, got, total)
        if is_same:
            return None
        assert total is not None  # None only for products of complex numbers, which are inexact
        at = differ(got, total[self.start : end]).nonzero().flatten()
        first = self.start + int(at[0])
        return self._finding(at, total[first : first + 1].clone())

    def _judge(self, oracle: Oracle, got: torch.Tensor, total: torch.Tensor | None) -> Finding | None:
        """Check the elements whose bits differ on any rank against the bounds, using the inputs of all ranks."""
        differs = torch.zeros(self.given.numel(), dtype=torch.bool, device="cpu")
        mine = differs[self.start : self.start + got.numel()]
        if got.numel():
            mine[:] = True if total is None else differ(got, total[self.start : self.start + got.numel()])
        at = oracle.union(differs)
        found, want = [], None
        for indices, inputs in oracle.pieces_of(self.given, at):
            is_mine = (indices >= self.start) & (indices < self.start + got.numel())
            mine, inputs = indices[is_mine] - self.start, inputs[:, is_mine]
            bad = wrong(got[mine], inputs, self.kind)
            if bad.any():
                found.append(mine[bad])
                if want is None:
                    want = exact(inputs[:, bad][:, :1], self.kind)
        return None if want is None else self._finding(torch.cat(found), want)


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by size in bytes


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bits. Integers are compared ten times as fast as bytes."""
    whole = _WHOLE[one.itemsize]
    return torch.equal(one.view(whole), other.view(whole))


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements of two contiguous tensors have different bits, shape ``(num_elems,)``."""
    item = one.itemsize
    return (as_bytes(one).reshape(-1, item) != as_bytes(other).reshape(-1, item)).any(1)


def _shown(one: torch.Tensor) -> str:
    try:
        return str(one.item())
    except (RuntimeError, NotImplementedError, TypeError):  # a dtype without arithmetic
        return _hex(one)


def _hex(one: torch.Tensor) -> str:
    return "0x" + bytes(reversed(as_bytes(one).tolist())).hex()


def _bytes_of(tensors: Tensors) -> torch.Tensor:
    """Return the concatenated bytes of tensors; a single contiguous tensor is not copied."""
    parts = [as_bytes(plain(t.detach())) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat([*parts, torch.empty(0, dtype=torch.uint8, device="cpu")])


def _flat(tensors: Tensors) -> torch.Tensor:
    """Return a new tensor with the concatenated elements of tensors of one dtype."""
    if len(tensors) == 1:
        return copied(tensors[0]).reshape(-1)
    return torch.cat([plain(t.detach()).reshape(-1) for t in tensors])


# ---- torch's operations --------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """The parts of one call, made from its arguments, and the copies of its inputs.

    Args:
        ranks: Ranks of the group.

    Attributes:
        parts: Transfers and reductions of the call, in order.
        copies: Copy of each tensor that the call reads, by the tensor's identity.
    """

    ranks: Ranks
    parts: list[Part] = field(default_factory=list)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)

    def _check(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not is_dense(tensor) or not is_stored(tensor):
                layout = getattr(tensor, "layout", None)
                raise Unverifiable("a sparse tensor" if layout is torch.sparse_coo else "a tensor without memory")
            if tensor.dtype not in DTYPE_CODES:
                raise Unverifiable(f"elements of {tensor.dtype}")

    def _move(self, sources: Tensors, targets: Tensors, carry: Callable[[Oracle, torch.Tensor], torch.Tensor]) -> None:
        self._check(*sources, *targets)
        copies = [copied(tensor) for tensor in sources]
        self.copies.update(zip(map(id, sources), copies, strict=True))
        self.parts.append(Moved(_bytes_of(copies), self._readable(targets), carry))

    def _reduce(self, sources: Tensors, targets: Tensors, opts: Any, start: int = 0) -> None:
        self._check(*sources, *targets)
        given, kind = _flat(sources), opts.reduceOp.op
        ends = accumulate(tensor.numel() for tensor in sources)
        for tensor, end in zip(sources, ends, strict=True):
            self.copies[id(tensor)] = given[end - tensor.numel() : end].view(tensor.shape)
        if kind == RedOpType.PREMUL_SUM:
            given = torch.mul(given, premul_factor(opts.reduceOp)).to(given.dtype)
        self.parts.append(Reduced(given, self._readable(targets), kind, start))

    def _readable(self, targets: Tensors) -> Tensors:
        """Return the outputs, or an empty list if they overlap; the other ranks still compare their results."""
        if len(targets) > 1 and do_overlap(targets, []):
            say_once("PHALANX_VERIFY: outputs that overlap each other are not verified")
            return []
        return list(targets)

    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        root = opts.rootRank
        sources = tensors if self.ranks.rank == root else []
        self._move(sources, tensors, lambda oracle, data: oracle.broadcast(data, tensors[0].nbytes, root))

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        self._reduce(tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> None:
        by_dtype: dict[torch.dtype, Tensors] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_dtype.values():
            self._reduce(alike, alike, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> None:
        self._reduce(tensors, tensors if self.ranks.rank == opts.rootRank else [], opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
        sizes = [t.nbytes for t in outputs[0]]
        self._move(inputs, outputs[0], lambda oracle, data: oracle.all_gather(data, sizes))

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
        for i, source in enumerate(inputs):
            self.allgather([[by_rank[i] for by_rank in outputs]], [source], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> None:
        sizes = [source.nbytes] * self.ranks.size
        self._move([source], [output], lambda oracle, data: oracle.all_gather(data, sizes))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, source, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
        root = opts.rootRank
        targets = outputs[0] if self.ranks.rank == root else []
        self._move(inputs, targets, lambda oracle, data: oracle.gather(data, root))

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> None:
        self.gather([[output]], [source], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> None:
        root, size = opts.rootRank, outputs[0].nbytes
        sources = inputs[0] if self.ranks.rank == root else []
        self._move(sources, outputs, lambda oracle, data: oracle.scatter(data, size, root))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> None:
        self._reduce(inputs[0], outputs, opts, sum(t.numel() for t in inputs[0][: self.ranks.rank]))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> None:
        self._reduce([source], [output], opts, self.ranks.rank * output.numel())

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, source, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        sizes = [t.nbytes for t in inputs], [t.nbytes for t in outputs]
        self._move(inputs, outputs, lambda oracle, data: oracle.all_to_all(data, *sizes))

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, out_splits: list[int], in_splits: list[int], opts: Any
    ) -> None:
        sizes = self._split(source, in_splits), self._split(output, out_splits)
        self._move([source], [output], lambda oracle, data: oracle.all_to_all(data, *sizes))

    def _split(self, tensor: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """Return each rank's number of bytes. `rows` are rows of dimension 0; if empty, ranks get equally many."""
        if not rows:
            return [tensor.nbytes // self.ranks.size] * self.ranks.size
        num_rows = tensor.shape[0] if tensor.dim() else 1
        row_bytes = tensor.nbytes // num_rows if num_rows else 0
        return [num * row_bytes for num in rows]

    def average_coalesced(self, tensors: Tensors, marks: torch.Tensor, opts: Any) -> None:
        self.allreduce_coalesced([*tensors, marks], opts)

    def send(self, tensors: Tensors) -> None:
        self._move(tensors, [], lambda _, data: data)

    def barrier(self, opts: Any) -> None:
        """Add no parts: a barrier has no data, and the ranks' agreement on the call is all there is to verify."""
