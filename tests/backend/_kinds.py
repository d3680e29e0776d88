"""Tensors of every kind that torch can make, and every operation with all of its tensors of one kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS

Make = Callable[[torch.Tensor], torch.Tensor]


class Labelled(torch.Tensor):
    """A subclass that only adds Python methods."""


class Meddling(torch.Tensor):
    """A subclass that is asked before every function of torch, and answers nonsense about its memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("data_ptr", "numel", "is_contiguous", "untyped_storage"):
            return 1
        return super().__torch_function__(func, types, args, kwargs or {})


def _inference(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return value.clone()


def _inference_strided(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return _strided(value)


def _strided(value: torch.Tensor) -> torch.Tensor:
    return torch.stack([value, value + 100], -1)[..., 0]


def _negative(value: torch.Tensor) -> torch.Tensor:
    view = torch.complex(value, -value).conj().imag
    assert view.is_neg()
    return view


def _two(value: torch.Tensor) -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(value.clone(), value.clone())


def _awaited(value: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(value.clone())


def _fake(value: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = _fake.__dict__.setdefault("mode", FakeTensorMode())  # tensors of two modes do not mix
    with mode:
        return torch.ones(value.shape)


def _dtensor(value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = _dtensor.__dict__.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    return DTensor.from_local(value.clone(), mesh, [Replicate()], run_check=False)


def _masked(value: torch.Tensor) -> torch.Tensor:
    return torch.masked.masked_tensor(value.clone(), torch.ones_like(value, dtype=torch.bool))


def _emptied(value: torch.Tensor) -> torch.Tensor:
    tensor = value.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _cut(value: torch.Tensor) -> torch.Tensor:
    tensor = torch.cat([value.reshape(-1)] * 2)[value.numel() :].reshape(value.shape)
    tensor.untyped_storage().resize_(2 * value.nbytes - 1)
    return tensor


def _packed(value: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_channel(
        value.reshape(-1, 1), torch.ones(value.numel()), torch.zeros(value.numel()), 0, torch.quint4x2
    )


# Give what a plain tensor gives.
MOVED: dict[str, Make] = {
    "plain": torch.clone,
    "parameter": torch.nn.Parameter,
    "leaf": lambda value: value.clone().requires_grad_(),
    "labelled": lambda value: value.clone().as_subclass(Labelled),
    "meddling": lambda value: value.clone().as_subclass(Meddling),
    "inference": _inference,
    "inference, strided": _inference_strided,
    "strided": _strided,
    "negative": _negative,
    "copied on write": torch._lazy_clone,
    "two in one": _two,
    "awaited": _awaited,
    "functional": torch._to_functional_tensor,
    "shared": lambda value: value.clone().share_memory_(),
}
# Have no values: nothing is moved, and nothing harmed.
EMPTY: dict[str, Make] = {"fake": _fake}
# Have no memory that could be moved.
REFUSED: dict[str, Make] = {
    "dtensor": _dtensor,
    "masked": _masked,
    "emptied": _emptied,
    "cut": _cut,
    "packed": _packed,
    "meta": lambda value: value.to("meta"),
    "csr": lambda value: value.reshape(-1, 1).to_sparse_csr(),
    "mkldnn": lambda value: value.to_mkldnn(),
    "nested": lambda value: torch.nested.nested_tensor([value, value]),
    "jagged": lambda value: torch.nested.nested_tensor([value, value], layout=torch.jagged),
}
if not HAS_PYTHON_BACKENDS:  # torch's dispatcher, which unwraps these, can't lead back to a Python backend
    REFUSED |= {kind: MOVED.pop(kind) for kind in ("two in one", "awaited", "functional")} | EMPTY


def values_of(tensor: torch.Tensor) -> list[float]:
    """Return the elements; of one with two tensors inside, of both, which must be equal."""
    if type(tensor).__name__ == "TwoTensor":
        assert torch.equal(tensor.a, tensor.b), f"{tensor.a} is not {tensor.b}"
        tensor = tensor.a
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().reshape(-1).tolist()


# Each takes ``new(first)``, which makes a tensor of three elements from `first` on, and returns works and results.
Run = Callable[[Callable[[float], torch.Tensor], int, int, dict], tuple[list[Any], list[torch.Tensor]]]
RUNS: dict[str, Run] = {}


def _run(function: Run) -> Run:
    RUNS[function.__name__] = function
    return function


@_run
def broadcast(new, rank, size, how):
    tensor = new(rank)
    return [dist.broadcast(tensor, size - 1, **how)], [tensor]


@_run
def all_reduce(new, rank, size, how):
    tensor = new(rank)
    return [dist.all_reduce(tensor, **how)], [tensor]


@_run
def reduce(new, rank, size, how):
    tensor = new(rank)
    return [dist.reduce(tensor, 0, **how)], [tensor] if rank == 0 else []


@_run
def all_gather(new, rank, size, how):
    outputs = [new(-9) for _ in range(size)]
    return [dist.all_gather(outputs, new(rank), **how)], outputs


@_run
def gather(new, rank, size, how):
    outputs = [new(-9) for _ in range(size)] if rank == 0 else None
    return [dist.gather(new(rank), outputs, 0, **how)], outputs or []


@_run
def scatter(new, rank, size, how):
    output = new(-9)
    return [dist.scatter(output, [new(r) for r in range(size)] if rank == 0 else None, 0, **how)], [output]


@_run
def reduce_scatter(new, rank, size, how):
    output = new(-9)
    return [dist.reduce_scatter(output, [new(r + rank) for r in range(size)], **how)], [output]


@_run
def all_to_all(new, rank, size, how):
    outputs = [new(-9) for _ in range(size)]
    return [dist.all_to_all(outputs, [new(10 * rank + r) for r in range(size)], **how)], outputs


@_run
def all_gather_into_tensor(new, rank, size, how):
    output = new(-9, size)
    return [dist.all_gather_into_tensor(output, new(rank), **how)], [output]


@_run
def reduce_scatter_tensor(new, rank, size, how):
    output = new(-9)
    return [dist.reduce_scatter_tensor(output, new(rank, size), **how)], [output]


@_run
def all_to_all_single(new, rank, size, how):
    output = new(-9, size)
    return [dist.all_to_all_single(output, new(rank, size), **how)], [output]


@_run
def all_reduce_coalesced(new, rank, size, how):
    tensors = [new(rank), new(rank + 5)]
    if not how["async_op"]:
        return [dist.all_reduce_coalesced(tensors)], tensors
    with c10d._coalescing_manager(async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [works], tensors


@_run
def messages(new, rank, size, how):
    """A ring, by single calls or in a batch."""
    output, tensor = new(-9), new(rank)
    after, before = (rank + 1) % size, (rank - 1) % size
    if not how["async_op"]:
        return [dist.isend(tensor, after), dist.irecv(output, before)], [output]
    ops = [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, output, before)]
    return dist.batch_isend_irecv(ops), [output]


def attempt(make: Make, name: str, rank: int, size: int, async_op: bool) -> tuple[str, Any]:
    """Return ("done", values of the results) or ("raised", the error)."""

    def new(first: float, num_blocks: int = 1) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototypes
            return make(torch.arange(float(first), first + 3 * num_blocks))

    try:
        works, results = RUNS[name](new, rank, size, {"async_op": async_op})
        for work in works:
            if work is not None:
                work.wait()
    except Exception as error:
        return "raised", error
    return "done", results
