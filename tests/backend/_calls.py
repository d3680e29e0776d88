"""Every collective of ``torch.distributed`` as one kind of call, so that it runs on phalanx and on Gloo alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ReduceOp = dist.ReduceOp


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, from -4 to 4 or 0 to 4: their sums and products of a few are exact in every dtype."""
    made = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool) else -4
    whole = torch.randint(low, 5, shape, generator=made)
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double() if shape else whole.double()).to(dtype)
    return (whole > 2).contiguous() if dtype is torch.bool else whole.to(dtype)


def gloo_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Return a Gloo group of `ranks` (all by default), in the order given."""
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=False, sort_ranks=ranks is None)


def check_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Demand the same shape, dtype and bits."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    ours, theirs = (as_bytes(t) for t in (got, want))
    if not torch.equal(ours, theirs):
        differ = (ours != theirs).any(1).nonzero().flatten()
        first = int(differ[0])
        raise AssertionError(
            f"{what}: {len(differ)} of {got.numel()} elements differ, the first at {first}: "
            f"{got.reshape(-1)[first]} is not {want.reshape(-1)[first]}"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements as rows of bytes."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.copy_(tensor.detach().reshape(-1))
    if plain.numel() == 0:
        return torch.empty(0, plain.itemsize, dtype=torch.uint8)
    return plain.view(torch.uint8).reshape(plain.numel(), plain.itemsize)


@dataclass(frozen=True)
class Call:
    """One collective, the same on every rank of `group`; `root` is a rank of the group."""

    name: str
    group: dist.ProcessGroup
    shape: tuple[int, ...] = (7,)
    dtype: torch.dtype = torch.float32
    reduce_op: dist.ReduceOp.RedOpType = ReduceOp.SUM
    root: int = 0
    seed: int = 0
    async_op: bool = False

    def on(self, group: dist.ProcessGroup) -> Call:
        return replace(self, group=group)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def peer(self, rank: int) -> int:
        """Return the number in the world of a rank of the group."""
        return dist.get_global_rank(self.group, rank)

    def input(self, block: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return what this rank brings; `block` tells several tensors of one call apart."""
        seed = (self.seed * 1009 + self.rank) * 1009 + block
        return values(seed, self.shape if shape is None else shape, self.dtype)

    def blocks(self) -> list[torch.Tensor]:
        return [self.input(i) for i in range(self.size)]

    def empty(self, num: int | None = None) -> torch.Tensor:
        """Return memory for a result of `num` blocks, or one without a dimension of its own, filled with ones."""
        shape = self.shape if num is None else (num * self.shape[0], *self.shape[1:])
        return torch.ones(shape, dtype=self.dtype)

    def start(self) -> tuple[list[object], list[torch.Tensor]]:
        """Begin the operation; return the works to wait for and the tensors that will hold its results."""
        works, results = CALLS[self.name](self, {"group": self.group, "async_op": self.async_op})
        return [work for work in works if work is not None], results

    def run(self) -> list[torch.Tensor]:
        works, results = self.start()
        for work in works:
            work.wait()
        return results


Started = tuple[list[object], list[torch.Tensor]]
CALLS: dict[str, Callable[[Call, dict], Started]] = {}


def _call(function: Callable[[Call, dict], Started]) -> Callable[[Call, dict], Started]:
    CALLS[function.__name__] = function
    return function


@_call
def broadcast(call: Call, how: dict) -> Started:
    tensor = call.input()
    return [dist.broadcast(tensor, call.peer(call.root), **how)], [tensor]


@_call
def all_reduce(call: Call, how: dict) -> Started:
    tensor = call.input()
    return [dist.all_reduce(tensor, call.reduce_op, **how)], [tensor]


@_call
def reduce(call: Call, how: dict) -> Started:
    tensor = call.input()
    work = dist.reduce(tensor, call.peer(call.root), call.reduce_op, **how)
    return [work], [tensor] if call.rank == call.root else []  # elsewhere torch promises nothing


@_call
def reduce_scatter(call: Call, how: dict) -> Started:
    output = call.empty()
    return [dist.reduce_scatter(output, call.blocks(), call.reduce_op, **how)], [output]


@_call
def reduce_scatter_tensor(call: Call, how: dict) -> Started:
    output, whole = call.empty(), torch.cat(call.blocks())
    return [dist.reduce_scatter_tensor(output, whole, call.reduce_op, **how)], [output]


@_call
def all_gather(call: Call, how: dict) -> Started:
    outputs = [call.empty() for _ in range(call.size)]
    return [dist.all_gather(outputs, call.input(), **how)], outputs


@_call
def all_gather_into_tensor(call: Call, how: dict) -> Started:
    output = call.empty(call.size)
    return [dist.all_gather_into_tensor(output, call.input(), **how)], [output]


@_call
def gather(call: Call, how: dict) -> Started:
    outputs = [call.empty() for _ in range(call.size)] if call.rank == call.root else None
    return [dist.gather(call.input(), outputs, call.peer(call.root), **how)], outputs or []


@_call
def scatter(call: Call, how: dict) -> Started:
    output, inputs = call.empty(), call.blocks() if call.rank == call.root else None
    return [dist.scatter(output, inputs, call.peer(call.root), **how)], [output]


@_call
def all_to_all(call: Call, how: dict) -> Started:
    outputs = [call.empty() for _ in range(call.size)]
    return [dist.all_to_all(outputs, call.blocks(), **how)], outputs


@_call
def all_to_all_single(call: Call, how: dict) -> Started:
    output, whole = call.empty(call.size), torch.cat(call.blocks())
    return [dist.all_to_all_single(output, whole, **how)], [output]


def splits(call: Call) -> tuple[list[int], list[int]]:
    """Return rows to and from each rank; some are none. The diagonal is the largest, so the sum is never 0."""
    rows = [[(src * 3 + dst * 5 + call.seed) % 4 for dst in range(call.size)] for src in range(call.size)]
    return rows[call.rank], [row[call.rank] for row in rows]


@_call
def all_to_all_single_split(call: Call, how: dict) -> Started:
    sent, received = splits(call)
    row = call.shape[1:] or call.shape
    whole = call.input(shape=(sum(sent), *row))
    output = torch.ones(sum(received), *row, dtype=call.dtype)
    return [dist.all_to_all_single(output, whole, received, sent, **how)], [output]


@_call
def all_reduce_coalesced(call: Call, how: dict) -> Started:
    tensors = [call.input(0), call.input(1, (3,)), call.input(2)]
    if call.async_op:
        with c10d._coalescing_manager(call.group, async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor, call.reduce_op, group=call.group)
        return [works], tensors
    opts = c10d.AllreduceCoalescedOptions()
    opts.reduceOp = call.reduce_op
    return [call.group.allreduce_coalesced(tensors, opts)], tensors


@_call
def barrier(call: Call, how: dict) -> Started:
    return [dist.barrier(**how)], []


@_call
def ring(call: Call, how: dict) -> Started:
    """Pass a tensor on to the next rank; blocking calls alternate, else two blocking sends would face each other."""
    output, tensor, group = call.empty(), call.input(), call.group
    after, before = call.peer((call.rank + 1) % call.size), call.peer((call.rank - 1) % call.size)
    tag = call.seed % 5
    if call.size == 1:
        return [], []
    if call.async_op:
        return [
            dist.isend(tensor, after, group=group, tag=tag),
            dist.irecv(output, before, group=group, tag=tag),
        ], [output]
    if call.rank == 0:
        dist.send(tensor, after, group=group, tag=tag)
    dist.recv(output, before, group=group, tag=tag)
    if call.rank != 0:
        dist.send(tensor, after, group=group, tag=tag)
    return [], [output]


REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
