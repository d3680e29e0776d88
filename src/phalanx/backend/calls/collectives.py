"""The collectives of torch.distributed on the core.

Each method has torch's name and arguments. A blocking call (``opts.asyncOp`` false) runs in the calling thread and
returns None; any other call returns a :class:`PhalanxWork`. Ranks are numbers in the group.

**Two ways into the core.** `run_plain` takes the tensors themselves: one native call checks that they are plain, alike
and disjoint, and runs the collective. If anything is unusual (a tensor that is not plain, blocks that differ, an
overlap, a PREMUL_SUM, a mistake), `run_plain` does nothing and returns False. Then `arguments` checks closely, makes
copies where needed and explains mistakes, and `run` passes a `Call` (operation, dtype, count, root, reduce operation,
split sizes) and addresses to the core. Asynchronous calls (which must keep their tensors alive), calls under a profiler
and groups that span several hosts use only this second way. If torch's front end makes a call that can go the first
way, the core notices it before any method of this class is called, see ``csrc/python/entry_points.cpp``.

**Semantics.** PREMUL_SUM multiplies in the tensor's dtype before the sum, as NCCL does. For bool, SUM and MAX are
`or`, PRODUCT and MIN are `and`. AVG of integers truncates towards zero; AVG of bool is an error. Sparse tensors are
summed by all_reduce, because torch's DistributedDataParallel needs that for embeddings; every other operation refuses
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from phalanx import _core
from phalanx._errors import ArgumentError
from phalanx._torch import is_profiling
from phalanx.backend.calls.arguments import Arguments, codes_of, different_counts, offsets, steps
from phalanx.backend.calls.flight import Flight, Joined, profiled
from phalanx.backend.calls.memory import Tensors, plain
from phalanx.backend.calls.sparse import sum_sparse
from phalanx.backend.calls.work import PhalanxWork, finished
from phalanx.backend.failures.members import Ranks
from phalanx.backend.types import RedOpType
from phalanx.record.sites import call_site

Call = _core.Call
Settle = Callable[[], None]
Options = Any
"""One of torch's options classes: `asyncOp`, `timeout`, and `rootRank` or `reduceOp` if they apply."""
UNSET = timedelta(milliseconds=-1)  # torch's value for the group's own timeout
_SUM = ReduceOp(RedOpType.SUM)

BARRIER, BROADCAST, ALL_REDUCE, REDUCE, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL = map(
    Call,
    ("barrier", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
)
"""The collectives, in the form that `run_plain` accepts."""


class Blocking:
    """Options of a blocking call; the default timeout is the group's."""

    asyncOp = False

    def __init__(self, timeout: timedelta = UNSET, *, reduce_op: ReduceOp = _SUM, root: int = 0) -> None:
        self.timeout, self.reduceOp, self.rootRank = timeout, reduce_op, root


class Collectives:
    """Collectives of one group.

    Args:
        core: Core group, already joined.
        ranks: Ranks of the group.

    Attributes:
        title: Name that programs see for the backend; ``gloo`` where phalanx replaces Gloo.
        num_barriers: Number of barriers that this rank has called in the group.
    """

    title = "phalanx"

    def __init__(self, core: _core.Group, ranks: Ranks) -> None:
        self._core = core
        self.ranks = ranks
        self._rank, self._size = ranks.rank, ranks.size
        self._flight = Flight()
        # To count the ranks that still train, torch's DDP uses all_reduces of one element. DDP keeps only the C++ half
        # of their works; this deque keeps the Python half alive.
        self._last_of_one: deque[PhalanxWork | None] = deque(maxlen=4)
        self.num_barriers: int = 0
        self._in_event = False  # inside a profiler event that covers several operations

    # ---- running ---------------------------------------------------------------------------------------------------

    def arguments(self, op: str) -> Arguments:
        return Arguments(self.ranks, op)

    def _goes_plainly(
        self, kind: _core.Call, ins: object, outs: object, opts: Options, root: int = -1, reduce_op: Any = None
    ) -> bool:
        """Run a blocking collective of plain tensors; for any other call, do nothing and return False."""
        if opts.asyncOp or is_profiling():
            return False
        kernel, code = (0, -1) if reduce_op is None else codes_of(reduce_op)
        return self._core.run_plain(kind, ins, outs, root, kernel, code, opts.timeout)

    def _profiled(self, op: str, inputs: Tensors, settle: Settle | None = None) -> Settle:
        """Open a profiler event under the backend's name; return a function that calls `settle` and ends the event."""
        return profiled(f"{self.title}:{op}", inputs, settle)

    def _run(
        self,
        call: _core.Call,
        at: Sequence[list[int]],
        opts: Options,
        result: Tensors,
        settle: Settle | None,
        keep: object = None,
        inputs: Tensors | None = None,
    ) -> PhalanxWork | None:
        """Run a collective of the core: in this thread, or on the core's own thread if the call is asynchronous.

        Args:
            call: Description of the collective.
            at: Addresses that the core reads, and addresses that it writes.
            opts: Options of the call.
            result: Tensors that receive the results, and are the value of the work.
            settle: Function that runs once the collective is over.
            keep: Tensors at the addresses, kept alive until the collective is over.
            inputs: Tensors whose shapes a profiler records; None: `result`.
        """
        if is_profiling() and not self._in_event:
            settle = self._profiled(call.op, result if inputs is None else inputs, settle)
        timeout = opts.timeout  # `self._core` is in no local variable, which a traceback would keep alive
        if not opts.asyncOp:
            self._core.run(call, *at, timeout, None)
            if settle is not None:
                settle()
            return None
        wait = self._core.wait_collective  # looked up first: another thread may leave the group during the start
        try:
            handle = self._core.run(call, *at, timeout, call_site())
            return self._flight.begin(handle, wait, result, settle, keep)
        except BaseException as error:
            self._flight.keep_after(error, (result, keep))
            raise
        finally:
            del wait

    def _done(self, opts: Options, result: Tensors) -> PhalanxWork | None:
        return finished(result) if opts.asyncOp else None

    # ---- one tensor per rank ---------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        root = opts.rootRank
        if self._goes_plainly(BROADCAST, tensors, tensors, opts, root):
            return None
        given = self.arguments("broadcast")
        tensor = given.one(tensors)
        codes = given.check(tensor)
        root = given.root(root)
        buffer = given.update(tensor)
        call = Call("broadcast", *codes, buffer.numel(), root=root)
        at = [buffer.data_ptr()]
        return self._run(call, (at, at), opts, tensors, given.settle, buffer)

    def allreduce(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        reduce_op = opts.reduceOp
        if self._goes_plainly(ALL_REDUCE, tensors, tensors, opts, reduce_op=reduce_op):
            return None
        given = self.arguments("all_reduce")
        tensor = given.one(tensors)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, opts)
        codes = given.check(tensor)
        reduction = given.reduction(reduce_op, tensor.dtype)
        buffer = given.update(tensor)
        source = given.premultiplied(buffer)
        call = Call("all_reduce", *codes, buffer.numel(), **reduction)
        at = [source.data_ptr()], [buffer.data_ptr()]
        work = self._run(call, at, opts, tensors, given.settle, (source, buffer))
        if tensor.numel() == 1:
            self._last_of_one.append(work)
        return work

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Options) -> PhalanxWork | None:
        """Sum sparse COO tensors. Blocks even if the call is asynchronous."""
        where = self.arguments("all_reduce").where
        if opts.reduceOp.op != RedOpType.SUM:
            raise ArgumentError(f"{where()}: sparse tensors can only be summed, got {opts.reduceOp.op}")
        blocking = Blocking(opts.timeout)
        if not sum_sparse(tensor, self._size, lambda outs, source: self.allgather([outs], [source], blocking)):
            raise ArgumentError(f"{where()}: sparse tensors differ in shape or sparse dimensions between ranks")
        return self._done(opts, [tensor])

    def reduce(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        reduce_op, root = opts.reduceOp, opts.rootRank
        if self._goes_plainly(REDUCE, tensors, tensors, opts, root, reduce_op):
            return None
        given = self.arguments("reduce")
        tensor = given.one(tensors)
        codes = given.check(tensor)
        root = given.root(root)
        reduction = given.reduction(reduce_op, tensor.dtype)
        buffer = given.update(tensor) if self._rank == root else plain(tensor)
        source = given.premultiplied(buffer)
        call = Call("reduce", *codes, buffer.numel(), root=root, **reduction)
        at = [source.data_ptr()], [buffer.data_ptr()]
        return self._run(call, at, opts, tensors, given.settle, (source, buffer))

    # ---- a block for each rank -------------------------------------------------------------------------------------

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> PhalanxWork | None:
        if len(outputs) == 1 and self._goes_plainly(ALL_GATHER, inputs, outputs[0], opts):
            return None
        given = self.arguments("all_gather")
        source = given.one(inputs)
        if len(outputs) != 1:
            raise ArgumentError(f"{given.where()} takes one list of outputs, got {len(outputs)}")
        codes = given.check(source)
        blocks = given.each("tensor_list", outputs[0], source, may_differ=True)
        keep, *at = given.move([source], blocks, own=(0, self._rank, 0))
        counts = different_counts(blocks)
        call = Call("all_gather", *codes, 0 if counts else source.numel(), out_counts=counts)
        return self._run(call, at, opts, blocks, given.settle, keep, [source])

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> PhalanxWork | None:
        if self._goes_plainly(ALL_GATHER, source, output, opts):
            return None
        given = self.arguments("all_gather_into_tensor")
        codes = given.check(source)
        count = given.blocks(output, source, "output_tensor")
        step = count * codes[1]
        keep, read_at, [out_at] = given.move([source], [output], own=(0, 0, self._rank * step))
        call = Call("all_gather", *codes, count)
        at = read_at, steps(out_at, step, self._size)
        return self._run(call, at, opts, [output], given.settle, keep, [source])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> PhalanxWork | None:
        root = opts.rootRank
        is_root, given_one = self._rank == root, len(outputs) == 1
        if is_root == given_one and self._goes_plainly(GATHER, inputs, outputs[0] if is_root else [], opts, root):
            return None
        given = self.arguments("gather")
        source = given.one(inputs)
        codes = given.check(source)
        root = given.root(root)
        blocks = given.of_root(outputs, source, is_root=is_root)
        keep, *at = given.move([source], blocks, own=(0, self._rank, 0) if blocks else None)
        call = Call("gather", *codes, source.numel(), root=root)
        return self._run(call, at, opts, blocks, given.settle, keep, [source])

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> PhalanxWork | None:
        if self._rank != opts.rootRank:
            return self.gather([], [source], opts)
        given = self.arguments("gather")
        given.check(source)
        given.blocks(output, source, "output")
        buffer = given.write(output)
        work = self.gather([list(buffer.reshape(self._size, -1))], [source.reshape(-1)], opts)
        if work is None:
            given.settle()
            return None
        return Joined([work], [output], given.settle)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options) -> PhalanxWork | None:
        root = opts.rootRank
        is_root, given_one = self._rank == root, len(inputs) == 1
        if is_root == given_one and self._goes_plainly(SCATTER, inputs[0] if is_root else [], outputs, opts, root):
            return None
        given = self.arguments("scatter")
        target = given.one(outputs)
        codes = given.check(target)
        root = given.root(root)
        blocks = given.of_root(inputs, target, is_root=is_root)
        keep, *at = given.move(blocks, [target], own=(self._rank, 0, 0) if blocks else None)
        call = Call("scatter", *codes, target.numel(), root=root)
        return self._run(call, at, opts, outputs, given.settle, keep, blocks)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options) -> PhalanxWork | None:
        reduce_op = opts.reduceOp
        if len(inputs) == 1 and self._goes_plainly(REDUCE_SCATTER, inputs[0], outputs, opts, reduce_op=reduce_op):
            return None
        given = self.arguments("reduce_scatter")
        target = given.one(outputs)
        if len(inputs) != 1:
            raise ArgumentError(f"{given.where()} takes one list of inputs, got {len(inputs)}")
        codes = given.check(target)
        blocks = given.each("input_list", inputs[0], target, may_differ=True)
        reduction = given.reduction(reduce_op, target.dtype)
        sources = [given.premultiplied(block) for block in blocks]
        keep, *at = given.move(sources, [target], own=(self._rank, 0, 0))
        counts = different_counts(blocks)
        call = Call("reduce_scatter", *codes, 0 if counts else target.numel(), in_counts=counts, **reduction)
        return self._run(call, at, opts, [target], given.settle, keep, blocks)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> PhalanxWork | None:
        reduce_op = opts.reduceOp
        if self._goes_plainly(REDUCE_SCATTER, source, output, opts, reduce_op=reduce_op):
            return None
        given = self.arguments("reduce_scatter_tensor")
        codes = given.check(output)
        count = given.blocks(source, output, "input")
        reduction = given.reduction(reduce_op, output.dtype)
        step = count * codes[1]
        whole = given.premultiplied(source)
        keep, [in_at], write_at = given.move([whole], [output], own=(0, 0, -self._rank * step))
        call = Call("reduce_scatter", *codes, count, **reduction)
        at = steps(in_at, step, self._size), write_at
        return self._run(call, at, opts, [output], given.settle, keep, [source])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options) -> PhalanxWork | None:
        given = self.arguments("all_to_all")
        given.require_length("output_tensor_list", outputs)
        given.require_length("input_tensor_list", inputs)
        codes = {given.check(t) for t in (*outputs, *inputs)}
        if len(codes) > 1:
            raise ArgumentError(f"{given.where()}: all tensors must have one dtype")
        keep, *at = given.move(inputs, outputs)
        counts = [t.numel() for t in inputs], [t.numel() for t in outputs]
        call = Call("all_to_all", *codes.pop(), 0, in_counts=counts[0], out_counts=counts[1])
        return self._run(call, at, opts, outputs, given.settle, keep, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Options,
    ) -> PhalanxWork | None:
        is_even = not output_split_sizes and not input_split_sizes
        if is_even and self._goes_plainly(ALL_TO_ALL, source, output, opts):
            return None
        given = self.arguments("all_to_all_single")
        codes = given.check(source)
        given.check(output)
        if output.dtype != source.dtype:
            raise ArgumentError(f"{given.where()}: input is {source.dtype}, output is {output.dtype}")
        keep, [in_at], [out_at] = given.move([source], [output])
        if is_even and source.numel() == output.numel():
            count = given.even(source)
            call = Call("all_to_all", *codes, count)
            at = tuple(steps(first, count * codes[1], self._size) for first in (in_at, out_at))
        else:
            ins = given.splits("input_split_sizes", source, input_split_sizes)
            outs = given.splits("output_split_sizes", output, output_split_sizes)
            call = Call("all_to_all", *codes, 0, in_counts=ins, out_counts=outs)
            at = offsets(in_at, ins, codes[1]), offsets(out_at, outs, codes[1])
        return self._run(call, at, opts, [output], given.settle, keep, [source])

    def barrier(self, opts: Options) -> PhalanxWork | None:
        work = None
        if not self._goes_plainly(BARRIER, (), (), opts):
            work = self._run(BARRIER, ([], []), opts, [], None)
        self.num_barriers += 1
        return work
