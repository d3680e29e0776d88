"""The operations of torch.distributed on the core: one set, shared by the adapters of all torch versions.

Each method has torch's spelling and arguments. A blocking call (``opts.asyncOp`` false) runs in the calling thread and
returns None; any other returns a :class:`PhalanxWork`. Ranks are those of the group.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch.distributed import ReduceOp

from phalanx import _core, _env, _torch
from phalanx._errors import CollectiveTimeout, GroupUnusable, PhalanxError
from phalanx._launched import note_progress
from phalanx._tensors import is_dense, is_simple, is_stored, unusual_keys
from phalanx._torch import is_profiling  # by name: finding it costs half of what asking does
from phalanx.backend._memory import NotPlain, Places, Tensors, do_overlap, plain
from phalanx.backend._types import DTYPE_CODES, REDUCE_CODES, RedOpType, premul_factor
from phalanx.backend._work import PhalanxWork, call_site, finished

Options = Any
"""One of torch's options classes: `asyncOp`, `timeout`, and `rootRank` or `reduceOp` where they apply."""
_UNSET = timedelta(milliseconds=-1)  # torch's word for the group's own timeout
_WRAPPED = timedelta(days=-100_000)  # below it nobody asks: a timeout so large that torch's integers wrap, as of max
_TO_BEGIN = 32  # collectives at most that a training needs before it takes steps: models are compared, weights are sent
_NUM_LOOKS = 4  # works that each new one looks at, whether they are over
_SUM = REDUCE_CODES[RedOpType.SUM][0]
_AVG = ReduceOp(RedOpType.AVG)
_SUMMABLE = frozenset(dtype for dtype, (code, _) in DTYPE_CODES.items() if _core.reduces(code, _SUM))


class Operations:
    """Collectives and messages of one group.

    Args:
        core: The joined group.
        segment: The memory that it lives in, kept while the group is used.
        rank: Rank in the group.
        size: Ranks in the group.
        name: Name of the group in messages.
        global_ranks: Number of each rank in the world.
    """

    def __init__(
        self, core: _core.Group, segment: _core.Segment, rank: int, size: int, name: str, global_ranks: list[int]
    ) -> None:
        self._core = core
        self._segment: _core.Segment | None = segment
        self._rank = rank
        self._size = size
        self._name = name
        self._global_ranks = global_ranks
        self._in_flight: OrderedDict[PhalanxWork, None] = OrderedDict()
        # torch's DDP counts the ranks that go on by such all_reduces, and keeps the C++ half of the work alone.
        self._last_of_one: deque[PhalanxWork | None] = deque(maxlen=4)
        self._coalescing: list[PhalanxWork] | None = None
        self._in_event = False

    # ---- arguments -------------------------------------------------------------------------------------------------

    def _check(self, places: Places, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the code and element size of the tensor's dtype, after checking that the core can touch it."""
        codes = DTYPE_CODES.get(tensor.dtype)
        if codes is not None:
            if is_simple(tensor):
                return codes
            if is_dense(tensor) and is_stored(tensor):
                places.are_simple = False
                return codes
        raise self._refusal(places.op, tensor)

    def _refusal(self, op: str, tensor: torch.Tensor) -> Exception:
        """Return the error about a tensor that the core can't touch."""
        where = self._where(op)
        if is_dense(tensor):
            if tensor.dtype not in DTYPE_CODES:
                return ValueError(
                    f"{where} can't take {tensor.dtype}, which packs several elements into a byte; pass "
                    "tensor.int_repr(), and the scale and zero point with it"
                )
            return ValueError(
                f"{where}: the tensor's storage holds {tensor.untyped_storage().nbytes()} bytes, too few for "
                f"{_describe(tensor)} from element {tensor.storage_offset()} on; it was resized or freed under the "
                "tensor, as FSDP does with parameters that are not in use. Pass a tensor that has its storage"
            )
        if "Python" not in unusual_keys(tensor):
            if tensor.is_meta:
                return ValueError(
                    f"{where} takes CPU tensors with data, got one on meta, which has none; give it memory first "
                    'with torch.empty_like(tensor, device="cpu") or module.to_empty(device="cpu")'
                )
            if not tensor.is_cpu:
                return ValueError(
                    f"{where} takes CPU tensors, got one on {tensor.device}. For tensors on a GPU use "
                    f'init_process_group("cpu:phalanx,cuda:nccl"), or call {op} with tensor.cpu()'
                )
            if tensor.layout is not torch.strided:
                return ValueError(
                    f"{where} takes dense tensors, got layout {tensor.layout}; call {op} with tensor.to_dense()"
                )
        kind = type(tensor).__name__
        local = "its local part, tensor.to_local()" if kind == "DTensor" else "a plain tensor"
        keys = ", ".join(sorted(unusual_keys(tensor) - {"PythonTLSSnapshot"}))
        return NotPlain(f"{where} takes tensors with memory of their own, got a {kind} ({keys}); pass {local}")

    def _where(self, op: str) -> str:
        site = call_site()
        return f"rank {self._global_ranks[self._rank]}: {op}" + f" at {site}" * bool(site)

    def _one(self, op: str, tensors: Tensors) -> torch.Tensor:
        if len(tensors) != 1:
            raise ValueError(f"{self._where(op)} takes one tensor per rank, got {len(tensors)}; call it once for each")
        return tensors[0]

    def _root(self, op: str, root: int) -> int:
        if not 0 <= root < self._size:
            raise ValueError(f"{self._where(op)}: root must lie in [0, {self._size}), got {root}")
        return root

    def _list(
        self, places: Places, name: str, tensors: Tensors, like: torch.Tensor, *, may_differ: bool = False
    ) -> Tensors:
        """Check a list with one tensor for each rank, like `like`; if `may_differ`, others' may have other sizes."""
        if len(tensors) != self._size:
            raise ValueError(
                f"{self._where(places.op)}: {name} must hold one tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )
        for i, tensor in enumerate(tensors):
            self._check(places, tensor)
            is_bound = i == self._rank or not may_differ
            if tensor.dtype != like.dtype or (is_bound and tensor.numel() != like.numel()):
                raise ValueError(
                    f"{self._where(places.op)}: {name}[{i}] is {_describe(tensor)}, expected {_describe(like)} "
                    "as on the other side of the operation"
                )
        return tensors

    def _blocks(self, places: Places, whole: torch.Tensor, block: torch.Tensor, name: str) -> int:
        """Check that `whole` holds one `block` for each rank; return the elements of a block."""
        self._check(places, whole)
        if whole.dtype != block.dtype or whole.numel() != block.numel() * self._size:
            raise ValueError(
                f"{self._where(places.op)}: {name} must hold {self._size} x {block.numel()} elements of {block.dtype}, "
                f"got {_describe(whole)}"
            )
        return block.numel()

    def _reduction(self, op: str, reduce_op: Any, dtype: torch.dtype) -> tuple[int, int]:
        """Return the kernel and the code of a reduce operation that has a meaning for the dtype."""
        if reduce_op == RedOpType.SUM and dtype in _SUMMABLE:
            return _SUM, _SUM  # asking for the operation's name costs as much as a small message
        kind = reduce_op.op
        kernel, code = REDUCE_CODES[kind]
        if not _has_kernel(dtype, kernel) or (kind == RedOpType.PREMUL_SUM and not _is_inexact(dtype)):
            raise ValueError(f"{self._where(op)}: {_reduction_problem(kind, dtype)}")
        return kernel, code

    # ---- running ---------------------------------------------------------------------------------------------------

    def _run(
        self,
        method: str,
        args: tuple[object, ...],
        opts: Options,
        result: Tensors,
        keep: object = None,
        settle: Callable[[], None] | None = None,
        inputs: Tensors | None = None,
    ) -> PhalanxWork | None:
        """Run a collective of the core: in this thread, or on the native one when the call is asynchronous."""
        if is_profiling():
            settle = self._profiled(method, result if inputs is None else inputs, settle)
        timeout = opts.timeout  # the core itself is in no variable: a traceback would keep it
        if not opts.asyncOp:
            getattr(self._core, method)(*args, timeout, None)
            if settle is not None:
                settle()
            return None
        job = getattr(self._core, method)(*args, timeout, call_site())
        return self._track(PhalanxWork(job, self._core.wait_job, result, settle, keep, self._let_go))

    def _profiled(self, op: str, inputs: Tensors, settle: Callable[[], None] | None) -> Callable[[], None] | None:
        """Open a profiler event ``phalanx:<op>`` with the shapes of the inputs, which `settle` closes."""
        if self._in_event:
            return settle
        name = f"phalanx:{op.removesuffix('_split')}"
        events = [_torch.begin_event(name, inputs)]

        def close() -> None:
            if settle is not None:
                settle()
            if not events:  # a signal handler has closed it
                return
            events.pop()()

        return close

    def _track(self, work: PhalanxWork) -> PhalanxWork:
        """Keep a started operation and its tensors until it is over, whatever the caller does with the handle."""
        in_flight = self._in_flight
        with contextlib.suppress(KeyError):  # another thread may take the last
            for _ in range(min(_NUM_LOOKS, len(in_flight))):  # the oldest, in turns: there may be thousands
                other, _none = in_flight.popitem(last=False)
                if other.over:
                    other.let_go()
                else:
                    in_flight[other] = None
        in_flight[work] = None
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _let_go(self, work: PhalanxWork) -> None:
        self._in_flight.pop(work, None)

    def _done(self, opts: Options, result: Tensors) -> PhalanxWork | None:
        return finished(result) if opts.asyncOp else None

    # ---- collectives -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        tensor = self._one("broadcast", tensors)
        places = Places(self._where, "broadcast")
        code, item = self._check(places, tensor)
        root = self._root("broadcast", opts.rootRank)
        buffer = places.update(tensor)
        args = (buffer.data_ptr(), code, item, buffer.numel(), root)
        return self._run("broadcast", args, opts, tensors, buffer, places.settle)

    def allreduce(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        if len(tensors) == 1 and self._is_simple(tensors[0], opts):
            # The usual case, spelled out: each call of a helper costs as much as the core's part of a small message.
            tensor = tensors[0]
            address = tensor.data_ptr()
            code, item = DTYPE_CODES[tensor.dtype]
            self._core.all_reduce(address, address, code, item, tensor.numel(), _SUM, _SUM, opts.timeout, None)
            return None
        tensor = self._one("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, opts)
        places = Places(self._where, "all_reduce")
        code, item = self._check(places, tensor)
        kernel, agreed = self._reduction("all_reduce", opts.reduceOp, tensor.dtype)
        buffer = places.update(tensor)
        source = self._premultiplied(places, buffer, opts.reduceOp)
        args = (source.data_ptr(), buffer.data_ptr(), code, item, buffer.numel(), kernel, agreed)
        work = self._run("all_reduce", args, opts, tensors, (source, buffer), places.settle)
        if tensor.numel() == 1:
            self._last_of_one.append(work)
        return work

    @staticmethod
    def _is_simple(tensor: torch.Tensor, opts: Options) -> bool:
        """True for the blocking sum of one plain CPU tensor, unprofiled."""
        return (
            not opts.asyncOp
            and opts.reduceOp == RedOpType.SUM
            and tensor.dtype in _SUMMABLE
            and is_simple(tensor)
            and not is_profiling()
        )

    def _premultiplied(self, places: Places, tensor: torch.Tensor, reduce_op: Any) -> torch.Tensor:
        """Return the contiguous input of a reduction, multiplied by the factor of a PREMUL_SUM."""
        if reduce_op.op != RedOpType.PREMUL_SUM:
            return places.read(tensor)
        return torch.mul(tensor, premul_factor(reduce_op)).to(tensor.dtype).contiguous()

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Options) -> PhalanxWork | None:
        """Sum sparse COO tensors: gather every rank's entries, then coalesce. Blocking; equal on all ranks."""
        if opts.reduceOp.op != RedOpType.SUM:
            raise ValueError(f"{self._where('all_reduce')}: sparse tensors can only be summed, got {opts.reduceOp.op}")
        local = tensor.coalesce()
        blocking = _Blocking(opts.timeout)
        meta = torch.tensor([local.indices().shape[1], local.sparse_dim(), *local.shape], dtype=torch.int64)
        metas = [torch.empty_like(meta) for _ in range(self._size)]
        self.allgather([metas], [meta], blocking)
        if any(not torch.equal(m[1:], meta[1:]) for m in metas):
            raise ValueError(
                f"{self._where('all_reduce')}: sparse tensors differ in shape or sparse dimensions between ranks"
            )
        most = max(int(m[0]) for m in metas)
        parts = [self._gather_padded(part, most, blocking) for part in (local.indices().t(), local.values())]
        counts = [int(m[0]) for m in metas]
        indices, values = (torch.cat([p[:c] for p, c in zip(part, counts, strict=True)]) for part in parts)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
        tensor.copy_(total)
        return self._done(opts, [tensor])

    def _gather_padded(self, rows: torch.Tensor, most: int, opts: Options) -> Tensors:
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = [torch.empty_like(padded) for _ in range(self._size)]
        self.allgather([gathered], [padded], opts)
        return gathered

    def allreduce_coalesced(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        dense = [tensor for tensor in tensors if tensor.layout is not torch.sparse_coo]
        places = Places(self._where, "all_reduce")
        for tensor in dense:
            self._check(places, tensor)
        if do_overlap(dense, []):  # each is summed as it was before the call
            tensors = [t if t.layout is torch.sparse_coo else places.copy(t) for t in tensors]
        calls = [functools.partial(self.allreduce, [t]) for t in tensors]
        return self._coalesced("all_reduce", calls, opts, tensors, tensors, places.settle)

    def average_coalesced(
        self, tensors: Tensors, marks: torch.Tensor, timeout: timedelta, *, with_squares: bool
    ) -> float:
        """Replace `tensors` and `marks` by their means over the ranks, where they lie; blocks. See PhalanxGroup."""
        close = self._profiled("average_coalesced", tensors, None) if is_profiling() else None
        places = Places(self._where, "average_coalesced")
        squares = 0.0
        by_dtype: dict[torch.dtype, Tensors] = {}
        for tensor in tensors:
            self._check(places, tensor)
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, alike in by_dtype.items():
            code, item = DTYPE_CODES[dtype]
            kernel, agreed = self._reduction("average_coalesced", _AVG, dtype)
            num_squared = len(alike) if with_squares else 0
            buffers = [places.update(tensor) for tensor in alike]
            if dtype == marks.dtype:
                buffers.append(marks)
            addresses = [buffer.data_ptr() for buffer in buffers]
            counts = [buffer.numel() for buffer in buffers]
            squares += self._core.all_reduce_pieces(
                addresses, addresses, counts, code, item, kernel, agreed, num_squared, timeout
            )
        places.settle()
        if close is not None:
            close()
        return squares

    def _coalesced(
        self,
        op: str,
        calls: Sequence[Callable],
        opts: Options,
        result: Tensors,
        inputs: Tensors,
        settle: Callable[[], None] | None = None,
    ) -> PhalanxWork | None:
        """Run several operations as one. The group keeps their order, so the last one speaks for all."""
        if is_profiling():
            settle = self._profiled(op, inputs, settle)
        self._in_event = True
        try:
            works = [work for call in calls if (work := call(opts)) is not None]
        finally:
            self._in_event = False
        if works:
            return _Joined(works, result, settle)
        if settle is not None:
            settle()
        return self._done(opts, result)

    def _require_apart(self, op: str, targets: Sequence[Tensors], sources: Sequence[Tensors]) -> None:
        """Check what several operations write and read, by operation, before the first of them begins."""
        places = Places(self._where, op)
        for tensors in (*targets, *sources):
            for tensor in tensors:
                self._check(places, tensor)
        for i, mine in enumerate(targets):
            others = [t for j in range(len(targets)) if j != i for t in (*targets[j], *sources[j])]
            if any(do_overlap([t], others) for t in mine):
                raise ValueError(
                    f"{self._where(op)}: an output of coalesced operation {i} overlaps a tensor of another one, and "
                    "their order is not defined; pass tensors that do not overlap"
                )

    def reduce(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        tensor = self._one("reduce", tensors)
        places = Places(self._where, "reduce")
        code, item = self._check(places, tensor)
        root = self._root("reduce", opts.rootRank)
        kernel, agreed = self._reduction("reduce", opts.reduceOp, tensor.dtype)
        buffer = places.update(tensor) if self._rank == root else plain(tensor)
        source = self._premultiplied(places, buffer, opts.reduceOp)
        args = (source.data_ptr(), buffer.data_ptr(), code, item, buffer.numel(), kernel, agreed, root)
        return self._run("reduce", args, opts, tensors, (source, buffer), places.settle)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> PhalanxWork | None:
        source = self._one("all_gather", inputs)
        if len(outputs) != 1:
            raise ValueError(f"{self._where('all_gather')} takes one list of outputs, got {len(outputs)}")
        places = Places(self._where, "all_gather")
        code, item = self._check(places, source)
        blocks = self._list(places, "tensor_list", outputs[0], source, may_differ=True)
        keep, read_at, write_at = places.move([source], blocks, own=(0, self._rank, 0))
        args: tuple[object, ...] = (read_at[0], write_at, code, item, source.numel())
        method = "all_gather"
        if (counts := _different(blocks)) is not None:
            method, args = "all_gather_split", (read_at[0], write_at, counts, code, item)
        return self._run(method, args, opts, blocks, keep, places.settle, [source])

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> PhalanxWork | None:
        places = Places(self._where, "all_gather_into_tensor")
        count = self._blocks(places, output, source, "output_tensor")
        code, item = self._check(places, source)
        step = count * item
        keep, read_at, [out_at] = places.move([source], [output], own=(0, 0, self._rank * step))
        args = (read_at[0], _steps(out_at, step, self._size), code, item, count)
        return self._run("all_gather", args, opts, [output], keep, places.settle, [source])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> PhalanxWork | None:
        # torch's lists are by rank, then by tensor
        by_tensor = [[by_rank[i] for by_rank in outputs] for i in range(len(inputs))]
        self._require_apart("all_gather", by_tensor, [[t] for t in inputs])
        calls = [functools.partial(self.allgather, [o], [i]) for o, i in zip(by_tensor, inputs, strict=True)]
        return self._coalesced("all_gather", calls, opts, [t for by_rank in outputs for t in by_rank], inputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> PhalanxWork | None:
        return self._pairs("all_gather", self.all_gather_single, outputs, inputs, opts)

    def _pairs(
        self, op: str, run: Callable[..., PhalanxWork | None], outputs: Tensors, inputs: Tensors, opts: Options
    ) -> PhalanxWork | None:
        """Run an operation for each output and its input."""
        if len(outputs) != len(inputs):
            raise ValueError(f"{self._where(op)} takes as many outputs as inputs, got {len(outputs)} and {len(inputs)}")
        self._require_apart(op, [[t] for t in outputs], [[t] for t in inputs])
        calls = [functools.partial(run, o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._coalesced(op, calls, opts, outputs, inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> PhalanxWork | None:
        source = self._one("gather", inputs)
        places = Places(self._where, "gather")
        code, item = self._check(places, source)
        root = self._root("gather", opts.rootRank)
        if (self._rank == root) != (len(outputs) == 1):
            raise ValueError(
                f"{self._where('gather')}: gather_list must be given on the destination rank only; "
                f"call dist.gather(tensor, gather_list if rank == dst else None, dst=dst)"
            )
        blocks = self._list(places, "gather_list", outputs[0], source) if self._rank == root else []
        keep, read_at, write_at = places.move([source], blocks, own=(0, self._rank, 0) if blocks else None)
        args = (read_at[0], write_at, code, item, source.numel(), root)
        return self._run("gather", args, opts, blocks, keep, places.settle, [source])

    def gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> PhalanxWork | None:
        if self._rank != opts.rootRank:
            return self.gather([], [source], opts)
        places = Places(self._where, "gather")
        self._blocks(places, output, source, "output")
        self._check(places, source)
        buffer = places.write(output)
        work = self.gather([list(buffer.reshape(self._size, -1))], [source.reshape(-1)], opts)
        return self._after(work, places, [output])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options) -> PhalanxWork | None:
        target = self._one("scatter", outputs)
        places = Places(self._where, "scatter")
        code, item = self._check(places, target)
        root = self._root("scatter", opts.rootRank)
        if (self._rank == root) != (len(inputs) == 1):
            raise ValueError(
                f"{self._where('scatter')}: scatter_list must be given on the source rank only; "
                f"call dist.scatter(tensor, scatter_list if rank == src else None, src=src)"
            )
        blocks = self._list(places, "scatter_list", inputs[0], target) if self._rank == root else []
        keep, read_at, [out_at] = places.move(blocks, [target], own=(self._rank, 0, 0) if blocks else None)
        args = (read_at, out_at, code, item, target.numel(), root)
        return self._run("scatter", args, opts, outputs, keep, places.settle, blocks)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options) -> PhalanxWork | None:
        target = self._one("reduce_scatter", outputs)
        if len(inputs) != 1:
            raise ValueError(f"{self._where('reduce_scatter')} takes one list of inputs, got {len(inputs)}")
        places = Places(self._where, "reduce_scatter")
        code, item = self._check(places, target)
        blocks = self._list(places, "input_list", inputs[0], target, may_differ=True)
        kernel, agreed = self._reduction("reduce_scatter", opts.reduceOp, target.dtype)
        given = [self._premultiplied(places, block, opts.reduceOp) for block in blocks]
        keep, read_at, [out_at] = places.move(given, [target], own=(self._rank, 0, 0))
        args: tuple[object, ...] = (read_at, out_at, code, item, target.numel(), kernel, agreed)
        method = "reduce_scatter"
        if (counts := _different(blocks)) is not None:
            method, args = "reduce_scatter_split", (read_at, counts, out_at, code, item, kernel, agreed)
        return self._run(method, args, opts, [target], keep, places.settle, blocks)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> PhalanxWork | None:
        places = Places(self._where, "reduce_scatter_tensor")
        count = self._blocks(places, source, output, "input")
        code, item = self._check(places, output)
        kernel, agreed = self._reduction("reduce_scatter_tensor", opts.reduceOp, output.dtype)
        given = self._premultiplied(places, source, opts.reduceOp)
        step = count * item
        keep, [in_at], [out_at] = places.move([given], [output], own=(0, 0, -self._rank * step))
        args = (_steps(in_at, step, self._size), out_at, code, item, count, kernel, agreed)
        return self._run("reduce_scatter", args, opts, [output], keep, places.settle, [source])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> PhalanxWork | None:
        return self._pairs("reduce_scatter", self.reduce_scatter_single, outputs, inputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options) -> PhalanxWork | None:
        for name, tensors in (("output_tensor_list", outputs), ("input_tensor_list", inputs)):
            if len(tensors) != self._size:
                raise ValueError(
                    f"{self._where('all_to_all')}: {name} must hold one tensor for each of the {self._size} ranks, "
                    f"got {len(tensors)}"
                )
        places = Places(self._where, "all_to_all")
        codes = {self._check(places, t) for t in (*outputs, *inputs)}
        if len(codes) > 1:
            raise ValueError(f"{self._where('all_to_all')}: all tensors must have one dtype")
        code, item = codes.pop()
        keep, read_at, write_at = places.move(inputs, outputs)
        args = (read_at, [t.numel() for t in inputs], write_at, [t.numel() for t in outputs], code, item)
        return self._run("all_to_all_split", args, opts, outputs, keep, places.settle, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Options,
    ) -> PhalanxWork | None:
        op = "all_to_all_single"
        places = Places(self._where, op)
        code, item = self._check(places, source)
        self._check(places, output)
        if output.dtype != source.dtype:
            raise ValueError(f"{self._where(op)}: input is {source.dtype}, output is {output.dtype}")
        keep, [in_at], [out_at] = places.move([source], [output])
        if not output_split_sizes and not input_split_sizes and source.numel() == output.numel():
            count = self._even(op, source)
            step = count * item
            ins, outs = _steps(in_at, step, self._size), _steps(out_at, step, self._size)
            return self._run(
                "all_to_all", (ins, outs, code, item, count), opts, [output], keep, places.settle, [source]
            )
        in_counts = self._splits(op, "input_split_sizes", source, input_split_sizes)
        out_counts = self._splits(op, "output_split_sizes", output, output_split_sizes)
        ins, outs = _offsets(in_at, in_counts, item), _offsets(out_at, out_counts, item)
        args = (ins, in_counts, outs, out_counts, code, item)
        return self._run("all_to_all_split", args, opts, [output], keep, places.settle, [source])

    def _even(self, op: str, tensor: torch.Tensor) -> int:
        first = tensor.shape[0] if tensor.dim() else 1
        if first % self._size != 0:
            raise ValueError(
                f"{self._where(op)}: dimension 0 ({first}) must be divisible by the {self._size} ranks; "
                "else pass input_split_sizes and output_split_sizes"
            )
        return tensor.numel() // self._size

    def _splits(self, op: str, name: str, tensor: torch.Tensor, sizes: list[int]) -> list[int]:
        """Return the elements for each rank; `sizes` are rows of dimension 0, empty for even ones."""
        if not sizes:
            return [self._even(op, tensor)] * self._size
        rows = tensor.shape[0] if tensor.dim() else 1
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(
                f"{self._where(op)}: {name} must hold {self._size} sizes that add up to dimension 0 ({rows}), "
                f"got {list(sizes)}"
            )
        row = tensor.numel() // rows if rows else 0
        return [size * row for size in sizes]

    def barrier(self, opts: Options) -> PhalanxWork | None:
        return self._run("barrier", (), opts, [])

    def monitored_barrier(self, opts: Options, wait_all_ranks: bool = False) -> None:
        """Block until every rank came. Rank 0 names those that did not: the first, or (`wait_all_ranks`) all."""
        me = self._global_ranks[self._rank]
        timeout_ms = int(opts.timeout.total_seconds() * 1000)
        if _WRAPPED < opts.timeout < timedelta(0) and opts.timeout != _UNSET:
            raise ValueError(
                f"{self._where('monitored_barrier')}: timeout must be at least 0 s, got "
                f"{opts.timeout.total_seconds():g} s; leave it out for the group's"
            )
        if timeout_ms == 0:
            self._core.abort("monitored_barrier was given no time")
            raise CollectiveTimeout(f"Rank {me} timed out in monitoredBarrier after 0 ms", op="monitored_barrier")
        try:
            self._core.barrier(opts.timeout, None)
        except GroupUnusable:
            raise  # no rank is late
        except PhalanxError as error:
            ranks = error.ranks
            if self._rank != 0:
                text = (
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank {self._global_ranks[0]}"
                )
            elif wait_all_ranks and len(ranks) > 1:
                text = f"Ranks {', '.join(map(str, ranks))} failed to pass monitoredBarrier in {timeout_ms} ms"
            else:
                ranks = ranks[:1]
                text = f"Rank {ranks[0] if ranks else '?'} failed to pass monitoredBarrier in {timeout_ms} ms"
            kind = type(error)
            raise kind(f"{text}\n{error}", op="monitored_barrier", seq=error.seq, ranks=ranks) from error

    # ---- messages --------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> PhalanxWork:
        return self._message("send", tensors, self._root("send", dst), tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> PhalanxWork:
        return self._message("recv", tensors, self._root("recv", src), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> PhalanxWork:
        return self._message("recv", tensors, -1, tag)

    def _message(self, op: str, tensors: Tensors, peer: int, tag: int) -> PhalanxWork:
        tensor = self._one(op, tensors)
        places = Places(self._where, op)
        code, item = self._check(places, tensor)
        buffer = places.write(tensor) if op == "recv" else places.read(tensor)
        request = getattr(self._core, op)(buffer.data_ptr(), code, item, buffer.numel(), peer, tag, call_site())
        settle: Callable[[], None] | None = places.settle
        if is_profiling():
            settle = self._profiled("recvAnySource" if peer < 0 else op, tensors, settle)
        return self._track(PhalanxWork(request, self._core.wait_request, tensors, settle, buffer, self._let_go))

    def start_coalescing(self) -> None:
        """Collect the operations that follow into one handle."""
        self._coalescing = []

    def end_coalescing(self) -> PhalanxWork:
        works, self._coalescing = self._coalescing or [], None
        return joined(works) if works else finished([])

    # ---- life ------------------------------------------------------------------------------------------------------

    def _after(self, work: PhalanxWork | None, places: Places, result: Tensors) -> PhalanxWork | None:
        """Copy stand-ins back once `work`, which fills them, is over."""
        if work is None:
            places.settle()
            return None
        return _Joined([work], result, places.settle)

    def abort(self) -> None:
        """End every wait of this group, on all ranks, with an error. The group cannot be used again."""
        self._core.abort("abort() was called")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of operations that name none."""
        self._core.set_timeout(timeout.total_seconds())

    def note_progress(self) -> None:
        """Tell the launcher that a restart may get past what ends this rank, if it has done more than begin."""
        if not isinstance(self._core, _Destroyed) and self._core.seq > _TO_BEGIN:
            note_progress(_env.environment().get(_env.LAUNCH_VARIABLE, ""))

    def shutdown(self, why: str = "") -> None:
        """Leave the group. Peers that still wait for this rank get RankFailed. Idempotent.

        Args:
            why: The error that is the reason, for the peers.
        """
        self.note_progress()
        core, self._core = self._core, _Destroyed(self._name)
        core.leave(why)
        while self._in_flight:  # a work holds the core, and so the memory of the group
            self._in_flight.popitem()[0].let_go()
        self._coalescing = None
        self._segment = None


class _Destroyed:
    """Stands for the core of a group that this rank has left."""

    def __init__(self, name: str) -> None:
        self._name = name

    def leave(self, why: str = "") -> None:
        pass

    def __getattr__(self, op: str) -> object:
        raise GroupUnusable(
            f"group '{self._name}' was destroyed on this rank; call init_process_group() or new_group() again", op=op
        )


class _Joined(PhalanxWork):
    """Several operations that are over when all of them are."""

    _handle = property(lambda self: self._works[-1]._handle, lambda self, _: None)  # as long as the work has it

    def __init__(self, works: list[PhalanxWork], result: Tensors, settle: Callable[[], None] | None = None) -> None:
        super().__init__(None, None, result, settle)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            self._finish()
        return True

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def fulfil(self) -> None:
        for work in self._works:
            work.is_completed()  # settles those that copy
        super().fulfil()


def joined(works: list[PhalanxWork]) -> PhalanxWork:
    """Return one handle of operations whose results are theirs together."""
    return _Joined(works, [tensor for work in works for tensor in work._result])


class _Blocking:
    """Options of an operation that is part of another."""

    asyncOp = False

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout


def _reduction_problem(kind: Any, dtype: torch.dtype) -> str:
    """Return why there is no such reduction of elements of this dtype, and what to do instead."""
    if not any(_has_kernel(dtype, code) for code, _ in REDUCE_CODES.values()):
        return (
            f"elements of {dtype} can't be reduced (ReduceOp.{kind.name}), only sent and copied; convert the tensor: "
            "tensor.float()"
        )
    if kind == RedOpType.PREMUL_SUM:
        return f"ReduceOp.PREMUL_SUM multiplies by a factor and needs a floating-point or complex dtype, got {dtype}"
    whole = f"ReduceOp.{kind.name} is not supported for {dtype}; "
    if dtype.is_complex:
        return whole + "reduce the real and imaginary parts, torch.view_as_real(tensor)"
    if _is_inexact(dtype):
        return whole + "it works on bits of whole numbers and bool: convert the tensor, such as tensor.int()"
    return whole + "convert the tensor, such as tensor.float()"


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _different(tensors: Tensors) -> list[int] | None:
    """Return the tensors' elements, None if all have as many."""
    counts = [tensor.numel() for tensor in tensors]
    return counts if counts.count(counts[0]) < len(counts) else None


def _steps(first: int, step: int, num: int) -> list[int]:
    return [first + i * step for i in range(num)]


def _offsets(first: int, counts: list[int], item: int) -> list[int]:
    return [first + offset * item for offset in accumulate(counts[:-1], initial=0)]


@functools.cache
def _has_kernel(dtype: torch.dtype, kernel: int) -> bool:
    return _core.reduces(DTYPE_CODES[dtype][0], kernel)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
