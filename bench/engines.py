"""The operations of each engine, on the same kind of buffers. Only the ranks import this module."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work

from phalanx import _core

Run = Callable[[], object]

_ITEM_BYTES = 4  # float32
_SUMS = ("all_reduce", "reduce", "reduce_scatter")
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "send_recv", "barrier")
_ROOT = 0
_TIMEOUT_S = 300.0


class Buffers:
    """The buffers of one operation on one rank, shared by all engines.

    `a` is the input, and also the result if the operation works in place; otherwise `b` is the result. `out` is the
    buffer with this rank's result, or None if this rank has no result.
    """

    def __init__(self, op: str, size_bytes: int, rank: int, world_size: int) -> None:
        on_root = rank == _ROOT
        self._name = f"rank {rank}: {op} of {size_bytes} bytes"
        self._expected = float(world_size) if op in _SUMS else 1.0
        # If only the root sends data, the other ranks begin with a different value.
        self._given = 1.0 if on_root or op not in ("broadcast", "send_recv") else 0.0
        block = max(size_bytes // _ITEM_BYTES // world_size, 1)
        whole = block * world_size
        if op in _IN_PLACE:
            self.a = torch.empty(max(size_bytes // _ITEM_BYTES, 1))
            self.b = None
            has_result = {"reduce": on_root, "send_recv": rank < 2, "barrier": False}.get(op, True)
            self.out = self.a if has_result else None
            return
        num_in, num_out = {
            "reduce_scatter": (whole, block),
            "all_gather": (block, whole),
            "gather": (block, whole if on_root else 0),
            "scatter": (whole if on_root else 0, block),
            "all_to_all": (whole, whole),
        }[op]
        self.a, self.b = torch.empty(num_in), torch.empty(num_out)
        self.out = self.b

    def fill(self) -> None:
        """Set the values that `check` expects."""
        self.a.fill_(self._given)
        if self.b is not None:
            self.b.zero_()

    def check(self, engine: str) -> None:
        """Raise an AssertionError if the operation that ran after `fill` has left a wrong result."""
        if self.out is not None and not torch.all(self.out == self._expected):
            raise AssertionError(f"{self._name} by {engine} left {self.out}, expected {self._expected} everywhere")
        self.a.zero_()  # otherwise repeated sums in place would grow


class Engine(Protocol):
    def barrier(self) -> None:
        """Wait for all ranks, so that they begin together."""

    def operation(self, op: str, buffers: Buffers) -> Run:
        """Return a function that runs `op` once on these buffers."""

    def finish(self) -> None:
        """Restore the state that the next engine expects."""


class TorchEngine:
    """A backend that is called through ``torch.distributed``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def finish(self) -> None:
        pass

    def operation(self, op: str, buffers: Buffers) -> Run:
        a, b, group, on_root = buffers.a, buffers.b, self._group, self._rank == _ROOT
        if op == "gather":
            outs = list(b.chunk(self._world_size)) if on_root else None
            return lambda: dist.gather(a, outs, dst=_ROOT, group=group)
        if op == "scatter":
            ins = list(a.chunk(self._world_size)) if on_root else None
            return lambda: dist.scatter(b, ins, src=_ROOT, group=group)
        if op == "send_recv":
            send, recv = (functools.partial(run, group=group) for run in (dist.send, dist.recv))
            return _ping_pong(send, recv, a, self._rank)
        return {
            "all_reduce": lambda: dist.all_reduce(a, group=group),
            "broadcast": lambda: dist.broadcast(a, src=_ROOT, group=group),
            "reduce": lambda: dist.reduce(a, dst=_ROOT, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(b, a, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(b, a, group=group),
            "all_to_all": lambda: dist.all_to_all_single(b, a, group=group),
            "barrier": lambda: dist.barrier(group=group),
        }[op]


class _AtOnce(Work):
    """A work that is already complete."""

    def wait(self, timeout: object = None) -> bool:
        return True


class _NoOpGroup(dist.ProcessGroup):
    """A group whose operations do nothing."""


def _no_op(name: str, result: Work | None) -> Callable[..., Work | None]:
    def call(self: _NoOpGroup, *args: object, **named: object) -> Work | None:
        return result

    call.__name__ = name
    return call


for _name in ("allreduce", "broadcast", "reduce", "gather", "scatter", "barrier", "alltoall", "all_to_all_single",
              "all_gather_single", "reduce_scatter_single"):  # fmt: skip
    setattr(_NoOpGroup, _name, _no_op(_name, None))
for _name in ("send", "recv"):
    setattr(_NoOpGroup, _name, _no_op(_name, _AtOnce()))


class FrontEndEngine(TorchEngine):
    """The part of ``torch.distributed`` that runs before and after a backend's call, on a group that does nothing.

    Args:
        group: Another group of the same ranks, for the barriers between the turns.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(_no_op_group())
        self._meeting = group

    def barrier(self) -> None:
        dist.barrier(group=self._meeting)


def _no_op_group() -> dist.ProcessGroup:
    def create(options: object, backend_options: object) -> dist.ProcessGroup:
        return _NoOpGroup(options.store, options.group_rank, options.group_size)

    dist.Backend.register_backend("no_op", create, extended_api=True, devices="cpu")
    return dist.new_group(backend="no_op")


class DirectEngine:
    """``phalanx.communicator``, without torch's front end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        import phalanx

        self._comm = phalanx.communicator(group)

    def barrier(self) -> None:
        self._comm.barrier()

    def finish(self) -> None:
        pass

    def operation(self, op: str, buffers: Buffers) -> Run:
        a, b, comm = buffers.a, buffers.b, self._comm
        if op == "send_recv":
            return _ping_pong(comm.send, comm.recv, a, comm.rank)
        return {
            "all_reduce": lambda: comm.all_reduce(a),
            "broadcast": lambda: comm.broadcast(a, _ROOT),
            "reduce_scatter": lambda: comm.reduce_scatter(b, a),
            "all_gather": lambda: comm.all_gather(b, a),
            "all_to_all": lambda: comm.all_to_all(b, a),
            "barrier": lambda: comm.barrier(),
        }[op]


def _ping_pong(send: Callable[..., object], recv: Callable[..., object], buffer: object, rank: int) -> Run:
    """Return a function that sends a buffer from rank 0 to rank 1 and back; on the other ranks, it does nothing."""
    peer = 1 - rank

    def first() -> None:
        send(buffer, peer)
        recv(buffer, peer)

    def second() -> None:
        recv(buffer, peer)
        send(buffer, peer)

    return (first, second)[rank] if rank < 2 else lambda: None


class CoreEngine:
    """The core's all_reduce, called from Python directly rather than through torch."""

    def __init__(self, group: dist.ProcessGroup, *, compares_calls: bool = True) -> None:
        self._core = group._operations._core
        self._compares_calls = compares_calls

    def barrier(self) -> None:
        self._core.run(_core.Call("barrier"), [], [], _TIMEOUT_S, None)
        self._core.compares_calls = self._compares_calls

    def finish(self) -> None:
        self._core.compares_calls = True

    def operation(self, op: str, buffers: Buffers) -> Run:
        from phalanx.backend.types import DTYPE_CODES, SUM_CODES

        run, at = self._core.run, [buffers.a.data_ptr()]
        call = _core.Call("all_reduce", *DTYPE_CODES[torch.float32], buffers.a.numel(), *SUM_CODES)
        return lambda: run(call, at, at, _TIMEOUT_S, None)


class MemcpyEngine:
    """A copy of a buffer of the same size, on all ranks at the same time: the limit that this machine's memory sets."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def finish(self) -> None:
        pass

    def operation(self, op: str, buffers: Buffers) -> Run:
        copy = torch.full_like(buffers.a, 0.0)
        num_bytes = copy.numel() * _ITEM_BYTES
        memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
            ("memmove", ctypes.CDLL(None))
        )
        to, source = ctypes.c_void_p(copy.data_ptr()), ctypes.c_void_p(buffers.a.data_ptr())

        def run(kept: torch.Tensor = copy) -> None:
            memmove(to, source, num_bytes)

        return run


class MpiEngine:
    """Open MPI through mpi4py; the descriptions of the buffers are made once, before the calls."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD

    def barrier(self) -> None:
        self._comm.Barrier()

    def finish(self) -> None:
        pass

    def operation(self, op: str, buffers: Buffers) -> Run:
        comm, in_place, rank = self._comm, self._mpi.IN_PLACE, self._comm.rank
        a, b = ([t.numpy(), self._mpi.FLOAT] if t is not None else None for t in (buffers.a, buffers.b))
        on_root = rank == _ROOT
        if op == "send_recv":
            return _ping_pong(comm.Send, comm.Recv, a, rank)
        return {
            "all_reduce": lambda: comm.Allreduce(in_place, a),
            "broadcast": lambda: comm.Bcast(a, _ROOT),
            "reduce": lambda: comm.Reduce(in_place, a, root=_ROOT) if on_root else comm.Reduce(a, None, root=_ROOT),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(a, b),
            "all_gather": lambda: comm.Allgather(a, b),
            "gather": lambda: comm.Gather(a, b if on_root else None, _ROOT),
            "scatter": lambda: comm.Scatter(a if on_root else None, b, _ROOT),
            "all_to_all": lambda: comm.Alltoall(a, b),
            "barrier": lambda: comm.Barrier(),
        }[op]
