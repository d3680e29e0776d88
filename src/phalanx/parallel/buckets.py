"""Buckets: gradients that are averaged over the ranks together, each kind in the way that suits it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._tensors import is_one_range
from phalanx._torch import foreach_mul_
from phalanx.parallel.layout import flat, shaped

CommHook: TypeAlias = Callable[[Any, Any], torch.futures.Future[Any]]


class GradBucket:
    """Bucket of gradients for a communication hook, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(
        self, index: int, buffer: Tensor, gradients: list[Tensor], parameters: list[nn.Parameter], is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters
        self._is_last = is_last

    def index(self) -> int:
        """Return the position of the bucket in the order of reduction."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, in one tensor of shape ``(num_elems,)``."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor that `buffer` returns."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer with the shapes of the parameters."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this bucket is the last to be reduced."""
        return self._is_last


class Bucket(abc.ABC):
    """Gradients that are averaged together.

    ``load()`` collects them, ``start()`` begins, ``store()`` waits and hands the means to the parameters.
    """

    started: bool = False
    """True from `start` until `store`."""
    overlaps = True
    """It may be started while backward runs."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters: list[nn.Parameter] = list(parameters)
        self.used: set[nn.Parameter] = set()  # those that have a gradient to average
        self.num_awaited = -1  # gradients that are still to come in this backward pass; -1: not known
        self.scale: float = 1.0  # of the mean, where it is not over all ranks
        self.index = 0
        self.is_last = True
        self._group = group

    def _mark(self, marks: Tensor) -> None:
        """Fill `marks`, one element for each parameter: 1 if this rank has a gradient of it, else 0."""
        marks.fill_(1)
        if len(self.used) < len(self.parameters):
            for i, parameter in enumerate(self.parameters):
                if parameter not in self.used:
                    marks[i] = 0

    @abc.abstractmethod
    def load(self) -> None:
        """Collect the parameters' gradients, zeros for those that have none."""

    @abc.abstractmethod
    def load_nothing(self) -> None:
        """Take part with zeros, as a rank without data."""

    @abc.abstractmethod
    def start(self, hook: CommHook | None = None, state: object = None) -> None:
        """Begin to average what was loaded, or let ``hook(state, GradBucket)`` do it."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the means are there."""

    @abc.abstractmethod
    def store(self) -> None:
        """Wait, then hand the means to the parameters; one that no rank has a gradient of keeps what it had."""

    @abc.abstractmethod
    def norm(self) -> Tensor:
        """Return the 2-norm of the means, of shape ()."""


class FlatBucket(Bucket):
    """Gradients of one dtype on one device, copied into one buffer.

    The buffer ends with one element for each parameter, 1 if this rank has a gradient of it: its mean tells whether
    any rank has, without another message.

    Args:
        parameters: Parameters whose gradients the bucket holds.
        group: The ranks to average with.
        averages: The group's backend knows ReduceOp.AVG.
        as_view: Parameters get views of the buffer as their ``.grad``, not copies.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, averages: bool, as_view: bool
    ) -> None:
        super().__init__(parameters, group)
        self._averages = averages
        self._as_view = as_view
        first = parameters[0]
        num_elems = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        self._flat = torch.zeros(num_elems + len(parameters), dtype=first.dtype.to_real(), device=first.device)
        self._gradients, self._used_anywhere = self._flat[:num_elems], self._flat[num_elems:]
        self._views = list(_views(self._gradients, parameters))
        self._work: dist.Work | None = None
        self._future: torch.futures.Future | None = None

    @torch.no_grad()
    def load(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            grad = parameter.grad
            if grad is None:
                self.used.discard(parameter)  # dropped since it came
                view.zero_()
            elif grad.is_sparse or grad.data_ptr() != view.data_ptr():
                view.copy_(_dense(parameter, grad))
        self._mark(self._used_anywhere)

    @torch.no_grad()
    def load_nothing(self) -> None:
        self._flat.zero_()

    def start(self, hook: CommHook | None = None, state: object = None) -> None:
        self.started = True
        if hook is None:
            if self._averages:
                self._work = dist.all_reduce(self._flat, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
            else:
                self._flat.div_(dist.get_world_size(self._group))
                self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)
            return
        self._work = dist.all_reduce(self._used_anywhere, group=self._group, async_op=True)
        bucket = GradBucket(self.index, self._gradients, self._views, self.parameters, self.is_last)
        self._future = hook(state, bucket)

    @torch.no_grad()
    def wait(self) -> None:
        work, future = self._work, self._future
        self._work, self._future, self.started = None, None, False
        if work is not None:
            work.wait()
        if future is not None:
            averaged = _tensor_of(future)
            if averaged.data_ptr() != self._gradients.data_ptr():
                self._gradients.copy_(averaged)
        if self.scale != 1:
            self._gradients.mul_(self.scale)

    def store(self) -> None:
        self.wait()
        complete = len(self.used) == len(self.parameters)
        anywhere = None if complete else self._used_anywhere.tolist()
        for i, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if anywhere is not None and not anywhere[i]:
                continue
            if parameter.grad is None or self._as_view:
                parameter.grad = view if self._as_view else view.clone()
            else:
                parameter.grad.detach().copy_(view)

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._gradients)


class CoalescedBucket(Bucket):
    """Gradients that a group averages where they lie, in one pass when backward has ended.

    For groups with a method ``average_coalesced(tensors, marks, with_squares)``. On a CPU that beats a buffer: whatever
    autograd makes would have to be copied there, by the cores that compute.
    """

    overlaps = False

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        super().__init__(parameters, group)
        self._average = group.average_coalesced
        self._tensors: list[Tensor] = []
        self._sizes_bytes = [p.numel() * p.element_size() for p in parameters]
        self._wants_squares = False
        self._squares: float | None = None
        self._used_anywhere = torch.ones(len(parameters), dtype=parameters[0].dtype)

    def load(self) -> None:
        self._collect()
        end = 0
        for begin, size_bytes in sorted(zip([t.data_ptr() for t in self._tensors], self._sizes_bytes, strict=True)):
            if begin < end:
                self._separate()
                break
            end = begin + size_bytes
        self._mark(self._used_anywhere)

    def _collect(self) -> None:
        self._tensors = [
            self._zeros(p) if (grad := p.grad) is None else grad if grad.is_contiguous() else _in_memory_order(p, grad)
            for p in self.parameters
        ]

    def _separate(self) -> None:
        """Give gradients memory of their own.

        Autograd lets some share it: after ``y = a.view(6) + b.view(6)``, those of `a` and `b` are views of that of `y`.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._collect()

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        self.used.discard(parameter)  # dropped since it came
        return torch.zeros(parameter.numel(), dtype=parameter.dtype)

    def load_nothing(self) -> None:
        self._tensors = [self._zeros(p) for p in self.parameters]
        self._used_anywhere.zero_()

    def start(self, hook: CommHook | None = None, state: object = None) -> None:
        pass  # all in one pass, in wait()

    def wait(self) -> None:
        squares = self._average(self._tensors, self._used_anywhere, with_squares=self._wants_squares)
        self._squares = squares * self.scale**2 if self._wants_squares else None
        if self.scale != 1:
            foreach_mul_(self._tensors, self.scale)

    def store(self) -> None:
        self.wait()
        if len(self.used) < len(self.parameters):
            anywhere = self._used_anywhere.tolist()
            for parameter, mean, used in zip(self.parameters, self._tensors, anywhere, strict=True):
                if used and parameter.grad is None:
                    parameter.grad = shaped(mean, parameter)
        self._tensors = []  # a gradient that somebody else refers to is not handed over by autograd but copied

    def norm(self) -> Tensor:
        if self._squares is not None:
            return torch.tensor(self._squares**0.5)
        self._wants_squares = True  # from the next time on
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.zeros(()), *map(torch.linalg.vector_norm, grads)]))


def _tensor_of(future: torch.futures.Future) -> Tensor:
    """Return what a communication hook's future holds: the tensor, or a list of it."""
    value = future.wait()
    return value[0] if isinstance(value, list | tuple) else value


def _dense(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    if grad.is_sparse:  # of a module that make_buckets() was not told of
        parameter.grad = grad = grad.to_dense()
    return grad


def _in_memory_order(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the gradient, flat if its layout is the parameter's, which is the same on every rank."""
    grad = _dense(parameter, grad)
    return flat(grad) if grad.stride() == parameter.stride() and is_one_range(grad) else grad


class SparseBucket(Bucket):
    """The gradient of one parameter that comes as a sparse tensor."""

    def __init__(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
        super().__init__([parameter], group)
        self._work: dist.Work | None = None
        self._future: torch.futures.Future | None = None
        self._sum: Tensor | None = None

    def load(self) -> None:
        grad = self.parameters[0].grad
        if grad is None:
            self.used.clear()
            self.load_nothing()
        elif grad.is_sparse:
            self._sum = grad.detach().coalesce().clone()
        else:  # the weight serves another layer too
            self._sum = grad.detach().to_sparse(1)

    def load_nothing(self) -> None:
        parameter = self.parameters[0]
        self._sum = torch.sparse_coo_tensor(
            torch.zeros((1, 0), dtype=torch.int64),
            parameter.new_zeros((0, *parameter.shape[1:])),
            parameter.shape,
            device=parameter.device,
            check_invariants=False,
        ).coalesce()

    def start(self, hook: CommHook | None = None, state: object = None) -> None:
        assert self._sum is not None
        self.started = True
        if hook is not None:
            bucket = GradBucket(self.index, self._sum, [self._sum], self.parameters, self.is_last)
            self._future = hook(state, bucket)
            return
        self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def wait(self) -> None:
        assert self._sum is not None
        work, future = self._work, self._future
        self._work, self._future, self.started = None, None, False
        if work is not None:
            work.wait()
            self._sum = self._sum * (self.scale / dist.get_world_size(self._group))
        if future is not None:
            self._sum = _tensor_of(future)

    def store(self) -> None:
        self.wait()
        assert self._sum is not None
        grad = self.parameters[0].grad
        if self._sum.coalesce().values().numel():
            self.parameters[0].grad = self._sum if grad is None or grad.is_sparse else self._sum.to_dense()

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.zeros(()) if self._sum is None else self._sum.coalesce().values())


def make_buckets(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    bucket_cap_mb: float,
    *,
    sparse: Iterable[Tensor] = (),
    as_view: bool = False,
    hooked: bool = False,
) -> list[Bucket]:
    """Group parameters into buckets, in the order in which backward is expected to make their gradients: the reverse.

    The same on every rank that passes the same parameters. A bucket holds one dtype on one device, and at most
    `bucket_cap_mb` MiB, or one parameter. A group that averages tensors where they lie needs no buffers, unless a
    communication hook wants to see them (`hooked`).
    """
    open_lists: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    sizes_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[nn.Parameter]] = []
    buckets: list[Bucket] = []
    sparse = set(sparse)
    dense_on_cpu = [p for p in reversed(parameters) if p not in sparse and p.device.type == "cpu"]
    in_place: list[Bucket] = []
    if dense_on_cpu and hasattr(group, "average_coalesced") and not hooked:
        in_place.append(CoalescedBucket(dense_on_cpu, group))
        parameters = [p for p in parameters if p in sparse or p.device.type != "cpu"]
    for parameter in reversed(parameters):
        if parameter in sparse:
            buckets.append(SparseBucket(parameter, group))
            continue
        kind = (parameter.dtype, parameter.device)
        open_lists.setdefault(kind, []).append(parameter)
        sizes_bytes[kind] = sizes_bytes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes_bytes[kind] >= bucket_cap_mb * 2**20:
            closed.append(open_lists.pop(kind))
            del sizes_bytes[kind]
    lists = [*closed, *open_lists.values()]
    averages = {device: _averages(group, device) for device in {members[0].device for members in lists}}
    dense = [FlatBucket(ps, group, averages=averages[ps[0].device], as_view=as_view) for ps in lists]
    buckets = [*dense, *buckets, *in_place]
    for index, bucket in enumerate(buckets):
        bucket.index, bucket.is_last = index, index == len(buckets) - 1
    return buckets


def _averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the group's backend knows ReduceOp.AVG."""
    if hasattr(group, "average_coalesced"):
        return True
    return f"{device.type}:nccl" in str(dist.get_backend_config(group)).split(",")


def _views(buffer: Tensor, parameters: Sequence[nn.Parameter]) -> Iterable[Tensor]:
    """Yield the part of a flat buffer that belongs to each parameter, in its shape and memory layout."""
    begin = 0
    for parameter in parameters:
        if parameter.is_complex():
            part = torch.view_as_complex(buffer[begin : begin + 2 * parameter.numel()].view(-1, 2))
            begin += 2 * parameter.numel()
        else:
            part = buffer[begin : begin + parameter.numel()]
            begin += parameter.numel()
        yield shaped(part, parameter)
