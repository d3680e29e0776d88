"""Every operation of ``torch.distributed`` as a `Call`, which runs on phalanx and on Gloo in the same way.

A `Call` is the same on all ranks of its group, except for the rank. Its inputs are derived from its seed, the rank and
the index of the tensor. So each rank knows the inputs of all ranks, and `wanted` returns the expected results, or the
inputs whose reduction is the expected result.
"""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from phalanx.testing.fuzz.memory import VALUES, Room, copy_bits
from phalanx.testing.fuzz.messages import messages_of

ReduceOp = dist.ReduceOp


@dataclass(frozen=True)
class Call:
    """One operation of a group.

    Attributes:
        name: Name in `CALLS` or `MORE_CALLS`.
        group: Process group.
        shape: Shape of one rank's block.
        dtype: Dtype of all tensors.
        reduce_op: Reduction, if the operation has one.
        root: Rank, in the group, of the source or destination, if the operation has one.
        seed: Seed of the inputs.
        async_op: Whether the call is asynchronous.
        in_place: Whether this rank's input shares memory with the output, if the operation has both.
        factor: Factor of a ``PREMUL_SUM``.
        values: Kind of the inputs' values, a key of `VALUES`.
        room: Allocator of this call's tensors: it gives the tensors their layouts and puts guard bytes around them, see
            `memory.Room`.
    """

    name: str
    group: dist.ProcessGroup
    shape: tuple[int, ...] = (7,)
    dtype: torch.dtype = torch.float32
    reduce_op: Any = ReduceOp.SUM
    root: int = 0
    seed: int = 0
    async_op: bool = False
    in_place: bool = False
    factor: float | None = None
    values: str = "small"
    room: Room = field(default_factory=Room, compare=False, repr=False)

    def on(self, group: dist.ProcessGroup) -> Call:
        """Return the same call on another group, with memory of its own."""
        return replace(self, group=group, room=Room())

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def op(self) -> Any:
        """The reduction in the form that torch accepts."""
        return self.reduce_op if self.factor is None else _torch.make_premul_sum(self.factor)

    def peer(self, rank: int) -> int:
        """Return the global rank of a rank in the group."""
        return dist.get_global_rank(self.group, rank)

    def of_rank(self, rank: int, block: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the input of a rank; `block` is the index of the input if each rank has several."""
        seed = (self.seed * 1009 + rank) * 1009 + block
        return VALUES[self.values](seed, self.shape if shape is None else shape, self.dtype)

    def input(self, block: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor with this rank's input, for a call that only reads it."""
        return self.room.source(self.of_rank(self.rank, block, shape))

    def updated(self, block: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor with this rank's input, for a call that reads it and writes the result to it."""
        return self.room.update(self.of_rank(self.rank, block, shape))

    def whole(self) -> Tensor:
        """Return all input blocks of this rank as one tensor, for a call that only reads it."""
        return self.room.source(torch.cat([self.of_rank(self.rank, i) for i in range(self.size)]))

    def blocks(self) -> list[Tensor]:
        return [self.input(i) for i in range(self.size)]

    def empty(self, num: int | None = None) -> Tensor:
        """Return a tensor for a result of one block, or of `num` blocks that are joined in the first dimension."""
        shape = self.shape if num is None else (num * self.shape[0], *self.shape[1:])
        return self.room.target(shape, self.dtype)

    def start(self) -> Started:
        """Begin the operation; return the works to wait for and the tensors that will hold its results."""
        kinds = CALLS | MORE_CALLS
        works, results = kinds[self.name].start(self, {"group": self.group, "async_op": self.async_op})
        return [work for work in works if work is not None], results

    def run(self) -> list[Tensor]:
        works, results = self.start()
        for work in works:
            work.wait()
        return results

    def wanted(self) -> list[Wanted]:
        """Return the expected results of this rank, in order."""
        return (CALLS | MORE_CALLS)[self.name].wanted(self)


Started = tuple[list[Any], list[Tensor]]


@dataclass(frozen=True)
class Wanted:
    """An expected result: the tensor `moved`, if data is only moved, or the reduction of `parts`, all ranks' inputs."""

    moved: Tensor | None = None
    parts: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Kind:
    """The functions that start one kind of call and return its expected results."""

    start: Callable[[Call, dict[str, Any]], Started]
    wanted: Callable[[Call], list[Wanted]]


CALLS: dict[str, Kind] = {}
"""Calls that Gloo also has, with blocks of equal sizes."""
MORE_CALLS: dict[str, Kind] = {}
"""Other calls, some of which Gloo lacks."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def _kind(wanted: Callable[[Call], list[Wanted]], kinds: dict[str, Kind] = CALLS) -> Callable[[Any], Any]:
    def add(start: Any) -> Any:
        kinds[start.__name__] = Kind(start, wanted)
        return start

    return add


# ---- expected results -----------------------------------------------------------------------------------------------


def _nothing(call: Call) -> list[Wanted]:
    return []


def _of_root(call: Call) -> list[Wanted]:
    return [Wanted(call.of_rank(call.root))]


def _reduced(call: Call, block: int = 0, shape: tuple[int, ...] | None = None) -> Wanted:
    return Wanted(parts=[call.of_rank(r, block, shape) for r in range(call.size)])


def _reduced_everywhere(call: Call) -> list[Wanted]:
    return [_reduced(call)]


def _reduced_at_root(call: Call) -> list[Wanted]:
    return [_reduced(call)] if call.rank == call.root else []


def _reduced_own(call: Call) -> list[Wanted]:
    return [_reduced(call, call.rank)]


def _everyones(call: Call) -> list[Wanted]:
    return [Wanted(call.of_rank(r)) for r in range(call.size)]


def _joined(wanted: Callable[[Call], list[Wanted]]) -> Callable[[Call], list[Wanted]]:
    def as_one(call: Call) -> list[Wanted]:
        moved = [one.moved for one in wanted(call) if one.moved is not None]
        return [Wanted(torch.cat(moved))]

    return as_one


def _everyones_at_root(call: Call) -> list[Wanted]:
    return _everyones(call) if call.rank == call.root else []


def _own_of_root(call: Call) -> list[Wanted]:
    return [Wanted(call.of_rank(call.root, call.rank))]


def _own_of_everyone(call: Call) -> list[Wanted]:
    return [Wanted(call.of_rank(r, call.rank)) for r in range(call.size)]


# ---- calls that Gloo has --------------------------------------------------------------------------------------------


@_kind(_of_root)
def broadcast(call: Call, how: dict[str, Any]) -> Started:
    tensor = call.updated()
    return [dist.broadcast(tensor, call.peer(call.root), **how)], [tensor]


@_kind(_reduced_everywhere)
def all_reduce(call: Call, how: dict[str, Any]) -> Started:
    tensor = call.updated()
    return [dist.all_reduce(tensor, call.op, **how)], [tensor]


@_kind(_reduced_at_root)
def reduce(call: Call, how: dict[str, Any]) -> Started:
    tensor = call.updated()
    work = dist.reduce(tensor, call.peer(call.root), call.op, **how)
    return [work], [tensor] if call.rank == call.root else []  # torch leaves the output of other ranks undefined


@_kind(_reduced_own)
def reduce_scatter(call: Call, how: dict[str, Any]) -> Started:
    if call.in_place:
        blocks = [call.updated(i) for i in range(call.size)]
        output = blocks[call.rank]
    else:
        output, blocks = call.empty(), call.blocks()
    return [dist.reduce_scatter(output, blocks, call.op, **how)], [output]


@_kind(_reduced_own)
def reduce_scatter_tensor(call: Call, how: dict[str, Any]) -> Started:
    if call.in_place:
        whole = call.room.update(torch.cat([call.of_rank(call.rank, i) for i in range(call.size)]))
        output = whole.chunk(call.size)[call.rank] if whole.shape[0] else whole
    else:
        output, whole = call.empty(), call.whole()
    return [dist.reduce_scatter_tensor(output, whole, call.op, **how)], [output]


@_kind(_everyones)
def all_gather(call: Call, how: dict[str, Any]) -> Started:
    outputs = [call.empty() for _ in range(call.size)]
    if call.in_place:
        outputs[call.rank] = call.updated()
        return [dist.all_gather(outputs, outputs[call.rank], **how)], outputs
    return [dist.all_gather(outputs, call.input(), **how)], outputs


@_kind(_joined(_everyones))
def all_gather_into_tensor(call: Call, how: dict[str, Any]) -> Started:
    output = call.empty(call.size)
    if call.in_place and call.shape[0]:
        source = output.chunk(call.size)[call.rank]
        copy_bits(source, call.of_rank(call.rank))
    else:
        source = call.input()
    return [dist.all_gather_into_tensor(output, source, **how)], [output]


@_kind(_everyones_at_root)
def gather(call: Call, how: dict[str, Any]) -> Started:
    outputs = [call.empty() for _ in range(call.size)] if call.rank == call.root else None
    return [dist.gather(call.input(), outputs, call.peer(call.root), **how)], outputs or []


@_kind(_own_of_root)
def scatter(call: Call, how: dict[str, Any]) -> Started:
    output, inputs = call.empty(), call.blocks() if call.rank == call.root else None
    return [dist.scatter(output, inputs, call.peer(call.root), **how)], [output]


@_kind(_own_of_everyone)
def all_to_all(call: Call, how: dict[str, Any]) -> Started:
    outputs = [call.empty() for _ in range(call.size)]
    return [dist.all_to_all(outputs, call.blocks(), **how)], outputs


@_kind(_joined(_own_of_everyone))
def all_to_all_single(call: Call, how: dict[str, Any]) -> Started:
    output, whole = call.empty(call.size), call.whole()
    return [dist.all_to_all_single(output, whole, **how)], [output]


def splits(call: Call, rank: int | None = None) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that `rank` sends to each rank and receives from each rank; some are 0."""
    rank = call.rank if rank is None else rank
    rows = [[(src * 3 + dst * 5 + call.seed) % 4 for dst in range(call.size)] for src in range(call.size)]
    return rows[rank], [row[rank] for row in rows]


def _split(call: Call, rank: int) -> Sequence[Tensor]:
    """Return the rows that a rank sends, one tensor for each receiver."""
    sent, _ = splits(call, rank)
    return call.of_rank(rank, shape=(sum(sent), *(call.shape[1:] or call.shape))).split(sent)


@_kind(lambda call: [Wanted(torch.cat([_split(call, r)[call.rank] for r in range(call.size)]))])
def all_to_all_single_split(call: Call, how: dict[str, Any]) -> Started:
    sent, received = splits(call)
    row = call.shape[1:] or call.shape
    whole = call.input(shape=(sum(sent), *row))
    output = call.room.target((sum(received), *row), call.dtype)
    return [dist.all_to_all_single(output, whole, received, sent, **how)], [output]


def _three(call: Call) -> list[tuple[int, ...]]:
    return [call.shape, (3,), call.shape]


@_kind(lambda call: [_reduced(call, i, shape) for i, shape in enumerate(_three(call))])
def all_reduce_coalesced(call: Call, how: dict[str, Any]) -> Started:
    tensors = [call.updated(i, shape) for i, shape in enumerate(_three(call))]
    if call.async_op:
        with _torch.coalescing_manager(call.group, async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor, call.op, group=call.group)
        return [works], tensors
    opts = c10d.AllreduceCoalescedOptions()
    opts.reduceOp = call.op
    return [call.group.allreduce_coalesced(tensors, opts)], tensors


@_kind(_nothing)
def barrier(call: Call, how: dict[str, Any]) -> Started:
    return [dist.barrier(**how)], []


@_kind(lambda call: [Wanted(call.of_rank((call.rank - 1) % call.size))] if call.size > 1 else [])
def ring(call: Call, how: dict[str, Any]) -> Started:
    """Pass a tensor on to the next rank. If calls block, rank 0 sends first and the other ranks receive first."""
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


@_kind(_nothing, MORE_CALLS)
def monitored_barrier(call: Call, how: dict[str, Any]) -> Started:
    dist.monitored_barrier(call.group)
    return [], []


# ---- blocks of different sizes --------------------------------------------------------------------------------------


def uneven(call: Call) -> list[tuple[int, ...]]:
    """Return the shape of each rank's block: the call's shape, but some blocks have fewer rows, or none."""
    draw = random.Random(call.seed)
    first = max(call.shape[0], 1)
    rows = [draw.choice((0, 1, first // 2, first, first)) for _ in range(call.size)]
    return [(num, *call.shape[1:]) for num in rows]


@_kind(lambda call: [Wanted(call.of_rank(r, 0, shape)) for r, shape in enumerate(uneven(call))], MORE_CALLS)
def all_gather_uneven(call: Call, how: dict[str, Any]) -> Started:
    shapes = uneven(call)
    outputs = [call.room.target(shape, call.dtype) for shape in shapes]
    return [dist.all_gather(outputs, call.input(0, shapes[call.rank]), **how)], outputs


@_kind(lambda call: [_reduced(call, call.rank, uneven(call)[call.rank])], MORE_CALLS)
def reduce_scatter_uneven(call: Call, how: dict[str, Any]) -> Started:
    shapes = uneven(call)
    output = call.room.target(shapes[call.rank], call.dtype)
    blocks = [call.input(r, shape) for r, shape in enumerate(shapes)]
    return [dist.reduce_scatter(output, blocks, call.op, **how)], [output]


def _from_to(call: Call, src: int, dst: int) -> tuple[int, ...]:
    rows = random.Random(f"{call.seed} {src} {dst}").choice((0, 1, call.shape[0] // 2, call.shape[0]))
    return (rows, *call.shape[1:])


@_kind(
    lambda call: [Wanted(call.of_rank(r, call.rank, _from_to(call, r, call.rank))) for r in range(call.size)],
    MORE_CALLS,
)
def all_to_all_uneven(call: Call, how: dict[str, Any]) -> Started:
    outputs = [call.room.target(_from_to(call, r, call.rank), call.dtype) for r in range(call.size)]
    inputs = [call.input(r, _from_to(call, call.rank, r)) for r in range(call.size)]
    return [dist.all_to_all(outputs, inputs, **how)], outputs


# ---- several calls as one -------------------------------------------------------------------------------------------


@_kind(lambda call: [Wanted(torch.cat([call.of_rank(r, i) for r in range(call.size)])) for i in (0, 1)], MORE_CALLS)
def all_gather_coalesced(call: Call, how: dict[str, Any]) -> Started:
    outputs, inputs = [call.empty(call.size) for _ in (0, 1)], [call.input(i) for i in (0, 1)]
    with _torch.coalescing_manager(call.group, async_ops=call.async_op) as works:
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor, group=call.group)
    return [works] if call.async_op else [], outputs


@_kind(lambda call: [_reduced(call, call.rank), _reduced(call, call.rank + call.size)], MORE_CALLS)
def reduce_scatter_coalesced(call: Call, how: dict[str, Any]) -> Started:
    outputs = [call.empty() for _ in (0, 1)]
    wholes = [
        call.room.source(torch.cat([call.of_rank(call.rank, i + first) for i in range(call.size)]))
        for first in (0, call.size)
    ]
    with _torch.coalescing_manager(call.group, async_ops=call.async_op) as works:
        for output, whole in zip(outputs, wholes, strict=True):
            dist.reduce_scatter_tensor(output, whole, call.op, group=call.group)
    return [works] if call.async_op else [], outputs


@_kind(
    lambda call: [Wanted(call.of_rank(r, i, shape)) for r in range(call.size) for i, shape in enumerate(_three(call))],
    MORE_CALLS,
)
def all_gather_lists(call: Call, how: dict[str, Any]) -> Started:
    """Call ``dist.all_gather_coalesced``, whose output is a list of tensors for each rank."""
    shapes = _three(call)
    outputs = [[call.room.target(shape, call.dtype) for shape in shapes] for _ in range(call.size)]
    inputs = [call.input(i, shape) for i, shape in enumerate(shapes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers its coalescing manager
        future = dist.all_gather_coalesced(outputs, inputs, **how)
    return [future], [tensor for row in outputs for tensor in row]


# ---- functional collectives, which torch's dispatcher calls ----------------------------------------------------------


def _functional() -> Any:
    importlib.import_module("torch.distributed.tensor")  # imported first, because torch's modules have an import cycle
    return importlib.import_module("torch.distributed._functional_collectives")


class _Awaited:
    """The work of a functional collective, which returns its result as a new tensor."""

    def __init__(self, call: Call, made: Tensor, result: Tensor) -> None:
        self._call, self._made, self._result = call, made, result

    def wait(self) -> None:
        copy_bits(self._result, _functional().wait_tensor(self._made))


def _later(call: Call, made: Tensor) -> Started:
    result = call.room.target(made.shape, call.dtype)
    return [_Awaited(call, made, result)], [result]


def _op_name(call: Call) -> str:
    return str(call.reduce_op.name).lower()


@_kind(_reduced_everywhere, MORE_CALLS)
def functional_all_reduce(call: Call, how: dict[str, Any]) -> Started:
    return _later(call, _functional().all_reduce(call.input(), _op_name(call), call.group))


@_kind(_of_root, MORE_CALLS)
def functional_broadcast(call: Call, how: dict[str, Any]) -> Started:
    return _later(call, _functional().broadcast(call.input(), call.root, call.group))


@_kind(_joined(_everyones), MORE_CALLS)
def functional_all_gather(call: Call, how: dict[str, Any]) -> Started:
    return _later(call, _functional().all_gather_tensor(call.input(), 0, call.group))


@_kind(_reduced_own, MORE_CALLS)
def functional_reduce_scatter(call: Call, how: dict[str, Any]) -> Started:
    return _later(call, _functional().reduce_scatter_tensor(call.whole(), _op_name(call), 0, call.group))


@_kind(lambda call: [Wanted(torch.cat([_split(call, r)[call.rank] for r in range(call.size)]))], MORE_CALLS)
def functional_all_to_all(call: Call, how: dict[str, Any]) -> Started:
    sent, received = splits(call)
    whole = call.input(shape=(sum(sent), *(call.shape[1:] or call.shape)))
    return _later(call, _functional().all_to_all_single(whole, received, sent, call.group))


# ---- objects --------------------------------------------------------------------------------------------------------


def thing(seed: int) -> Any:
    """Return an object whose pickled size depends on the seed."""
    draw = random.Random(seed)
    return {"seed": seed, "text": "x" * draw.choice((0, 1, 30, 70_000)), "nested": [(draw.random(), None), b"\x00" * 3]}


def _as_tensor(value: Any) -> Tensor:
    return torch.tensor([*repr(value).encode()[-4000:], len(repr(value)) % 251], dtype=torch.uint8)


def _things(call: Call) -> list[Any]:
    return [thing(call.seed * 1009 + r) for r in range(call.size)]


def _objects(values: Sequence[Any]) -> list[Wanted]:
    return [Wanted(_as_tensor(value)) for value in values]


@_kind(lambda call: _objects(_things(call)), MORE_CALLS)
def all_gather_object(call: Call, how: dict[str, Any]) -> Started:
    got: list[Any] = [None] * call.size
    dist.all_gather_object(got, _things(call)[call.rank], group=call.group)
    return [], [_as_tensor(one) for one in got]


@_kind(lambda call: _objects(_things(call)), MORE_CALLS)
def broadcast_object_list(call: Call, how: dict[str, Any]) -> Started:
    got = _things(call) if call.rank == call.root else [None] * call.size
    dist.broadcast_object_list(got, call.peer(call.root), group=call.group)
    return [], [_as_tensor(one) for one in got]


@_kind(lambda call: _objects(_things(call)) if call.rank == call.root else [], MORE_CALLS)
def gather_object(call: Call, how: dict[str, Any]) -> Started:
    got: list[Any] | None = [None] * call.size if call.rank == call.root else None
    dist.gather_object(_things(call)[call.rank], got, call.peer(call.root), group=call.group)
    return [], [_as_tensor(one) for one in got or []]


@_kind(lambda call: _objects(_things(call)[call.rank : call.rank + 1]), MORE_CALLS)
def scatter_object_list(call: Call, how: dict[str, Any]) -> Started:
    got: list[Any] = [None]
    given = _things(call) if call.rank == call.root else None
    dist.scatter_object_list(got, given, call.peer(call.root), group=call.group)
    return [], [_as_tensor(one) for one in got]


# ---- messages -------------------------------------------------------------------------------------------------------


def _received(call: Call) -> list[Wanted]:
    got = [(i, one) for i, one in enumerate(messages_of(call)) if one.dst == call.rank]
    return [Wanted(call.of_rank(one.src, i, (one.num,))) for i, one in got]


class _FromAnybody:
    """The receives from any source, which all have one tag. Their results are put into the order of the messages."""

    def __init__(self, call: Call, works: list[Any], buffers: list[Tensor], results: dict[int, Tensor]) -> None:
        self._call, self._works, self._buffers, self._results = call, works, buffers, results

    def wait(self) -> None:
        sources = []
        for work, buffer in zip(self._works, self._buffers, strict=True):
            work.wait()
            sources.append(work._source_rank())
            assert sources[-1] in self._results, f"a receive from any source names rank {sources[-1]} of the group"
            copy_bits(self._results[sources[-1]], buffer)
        assert len({*sources}) == len(sources), f"receives from any source name ranks {sources} of the group"


def _posted(call: Call, *, by_name: bool) -> tuple[list[Any], list[Tensor]]:
    """Start the messages of a call one by one. With `by_name`, every receive names its source explicitly."""
    works: list[Any] = []
    results: list[Tensor] = []
    anybody: dict[int, Tensor] = {}
    for i, one in enumerate(messages_of(call)):
        if one.src == call.rank:
            tensor = call.input(i, (one.num,))
            works.append(dist.isend(tensor, call.peer(one.dst), group=call.group, tag=one.tag))
        if one.dst == call.rank:
            result = call.room.target((one.num,), call.dtype)
            results.append(result)
            if one.any_source and not by_name:
                anybody[one.src] = result
            else:
                works.append(dist.irecv(result, call.peer(one.src), group=call.group, tag=one.tag))
    if anybody:
        (tag,) = {one.tag for one in messages_of(call) if one.any_source}
        buffers = [call.room.target(result.shape, call.dtype) for result in anybody.values()]
        receives = [dist.irecv(buffer, None, group=call.group, tag=tag) for buffer in buffers]
        works.append(_FromAnybody(call, receives, buffers, anybody))
    return works, results


@_kind(_received, MORE_CALLS)
def messages(call: Call, how: dict[str, Any]) -> Started:
    works, results = _posted(call, by_name=not _has_sources(call.group))
    random.Random(call.seed).shuffle(works)
    return works, results


def _has_sources(group: Any) -> bool:
    """Whether the works of a group can name a message's sender; Gloo's works can't, once they are wrapped."""
    return type(group).__name__ == "PhalanxGroup"


@_kind(_received, MORE_CALLS)
def batched_messages(call: Call, how: dict[str, Any]) -> Started:
    ops, results = [], []
    for i, one in enumerate(messages_of(call)):
        if one.src == call.rank:
            tensor = call.input(i, (one.num,))
            ops.append(dist.P2POp(dist.isend, tensor, call.peer(one.dst), call.group, one.tag))
        if one.dst == call.rank:
            results.append(call.room.target((one.num,), call.dtype))
            ops.append(dist.P2POp(dist.irecv, results[-1], call.peer(one.src), call.group, one.tag))
    return dist.batch_isend_irecv(ops) if ops else [], results


@_kind(_received, MORE_CALLS)
def blocking_messages(call: Call, how: dict[str, Any]) -> Started:
    results = []
    for i, one in enumerate(messages_of(call)):
        if one.src == call.rank:
            dist.send(call.input(i, (one.num,)), call.peer(one.dst), group=call.group, tag=one.tag)
        if one.dst == call.rank:
            results.append(call.room.target((one.num,), call.dtype))
            dist.recv(results[-1], call.peer(one.src), group=call.group, tag=one.tag)
    return [], results


@_kind(_received, MORE_CALLS)
def reordered_messages(call: Call, how: dict[str, Any]) -> Started:
    """Receive messages in descending order of their tags, so that most messages arrive before they are received."""
    planned = list(enumerate(messages_of(call)))
    works = [
        dist.isend(call.input(i, (one.num,)), call.peer(one.dst), group=call.group, tag=one.tag)
        for i, one in planned
        if one.src == call.rank
    ]
    got = {i: call.room.target((one.num,), call.dtype) for i, one in planned if one.dst == call.rank}
    for i, one in sorted(planned, key=lambda entry: -entry[1].tag):
        if one.dst == call.rank:
            dist.recv(got[i], call.peer(one.src), group=call.group, tag=one.tag)
    return works, list(got.values())


def _flood_size(call: Call) -> int:
    return 140 + call.seed % 200


@_kind(
    lambda call: (
        [Wanted(call.of_rank(call.root, i, (i % 11,))) for i in range(_flood_size(call))]
        if call.size > 1 and call.rank == (call.root + 1) % call.size
        else []
    ),
    MORE_CALLS,
)
def flood(call: Call, how: dict[str, Any]) -> Started:
    """Send more small messages than the rings between two ranks can hold, before the first message is received."""
    to, works, results = (call.root + 1) % call.size, [], []
    numbers = range(_flood_size(call)) if call.size > 1 else ()
    for i in numbers if call.rank == call.root else ():
        works.append(dist.isend(call.input(i, (i % 11,)), call.peer(to), group=call.group, tag=7))
    dist.barrier(call.group)
    for i in numbers if call.rank == to else ():
        results.append(call.room.target((i % 11,), call.dtype))
        works.append(dist.irecv(results[-1], call.peer(call.root), group=call.group, tag=7))
    return works, results


@_kind(lambda call: _objects(_things(call)) if call.rank == 1 else [], MORE_CALLS)
def send_object_list(call: Call, how: dict[str, Any]) -> Started:
    got: list[Any] = [None] * call.size
    if call.rank == 0 and call.size > 1:
        dist.send_object_list(_things(call), call.peer(1), group=call.group)
    if call.rank == 1:
        dist.recv_object_list(got, call.peer(0), group=call.group)
    return [], [_as_tensor(one) for one in got] if call.rank == 1 else []
