"""Buckets: groups of a model's gradients, averaged over the ranks in the way that suits the backend and the device.

A `Bucket` loads gradients, starts to average them, and stores the means. There are three kinds.

**FlatBucket.** On backends other than phalanx, or with a communication hook, gradients of one dtype and device are
copied into flat buffers of 25 MiB, in the reverse order of the parameters. The first pass counts how often each
gradient arrives. From the second pass on, a bucket starts as soon as it is complete, in a fixed order, while backward
runs.

**SparseBucket.** The sparse gradient of one embedding.

**CoalescedBucket.** On the phalanx backend and the CPU, gradients are averaged in place once backward has ended. One
call of the core stages chunks, sums them in rank order, scales them and writes them back in one pass, and also computes
the sum of squares if `grad_norm()` was ever called. One more small tensor, the marks, shows for each parameter whether
this rank had a gradient.

**Only the range that a rank steps.** If each rank's optimizer steps only a range of the parameters (`Division`), the
large gradients are reduce-scattered: each rank gets the means of its range, and keeps its own gradient elsewhere. This
happens only in the trainer's own backward pass, and only if nothing on any rank looks at gradients (an optimizer's
hook, a wrapper of the optimizer's step, `grad_norm()`) or steps a whole parameter. The small gradients are averaged
first, and in that message each rank also reports whether it needs all means. If any rank does, all ranks get all means.

**No buckets in shared memory, no overlap on the thread that computes.** The first plan was to write gradients into
buckets in the shared memory segment, and to reduce a bucket once all ranks have filled it. The costs below are
fractions of a step without communication, for the MLP 784-1024-10 on two cores. Copying gradients into any buffer as
they arrive costs 0.12 before a byte is exchanged (0.05 for 17 M parameters); averaging them in place costs 0.07 to 0.10
in all, because the staging slots of a pipelined all_reduce stay in the second-level cache, and a bucket does not.
Overlap gains nothing if the cores that would reduce are busy computing. Each synchronization of all ranks costs 0.03 to
0.05, so one at the end is cheaper than one at every bucket.

**What averaging costs** on two cores (``python -m bench.ddp --rounds 5``, which shows how much of it is waiting):

- The MLP has 3.3 MB of gradients and a step of 2.4 ms. Averaging takes 0.45 ms when nothing else runs, and 0.6 to 0.75
  ms at the end of a backward pass, when neither gradients nor code are in the first-level caches and the ranks wait
  0.01 to 0.14 ms for each other. Hooks and the wrapper add 0.1 to 0.2 ms. A local average of two such messages takes
  0.24 ms. Nearly all of these gradients belong to the first layer. They arrive last, so no computation is left to
  overlap with.
- 17 M parameters have 68 MB of gradients, which must be read from main memory and written back to it. Averaging takes
  12 to 13 ms, a local average of two such messages 9.7 ms, and ``t.add_(t)`` of one 6.1 ms. Averaging only the range
  that a rank steps takes 8.5 instead of 12.4 ms.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._torch import foreach_mul_
from phalanx._torch.tensors import is_one_range
from phalanx.parallel.ddp.grad_bucket import GradBucket, checked_future, tensor_of
from phalanx.parallel.layout import flat, num_reals, shaped, views_of

BoundHook: TypeAlias = Callable[[Any], torch.futures.Future[Any]]
"""Communication hook bound to its state, called as ``hook(bucket)``."""


class Bucket(abc.ABC):
    """Gradients that are averaged together.

    ``load()`` collects the gradients, ``start()`` begins to average them, and ``store()`` waits and stores the means in
    ``.grad``.

    Args:
        parameters: Parameters whose gradients the bucket averages.
        group: Ranks to average over.

    Attributes:
        used: Parameters that have a gradient on this rank.
        num_awaited: Number of gradients still to arrive in this backward pass; -1: unknown.
        scale: Factor by which the means are multiplied; it differs from 1 if only ranks that still have data count.
        index: Position in the order of reduction.
        is_last: Whether this bucket is the last in that order.
        started: Whether the bucket was started and is not yet stored.
        overlaps: Whether the bucket may be started while backward runs.
        waited_s: Seconds that the last `wait` spent waiting for other ranks; 0.0 if that is unknown.
    """

    overlaps = True

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters: list[nn.Parameter] = list(parameters)
        self.used: set[nn.Parameter] = set()
        self.num_awaited = -1
        self.scale: float = 1.0
        self.index = 0
        self.is_last = True
        self.started = False
        self.waited_s: float = 0.0
        self._group = group
        self._work: dist.Work | None = None
        self._hooked: tuple[torch.futures.Future[Any], Tensor] | None = None  # a hook's future and buffer

    def _mark(self, marks: Tensor) -> None:
        """Fill `marks`, one element for each parameter: 1 if this rank has a gradient for it, else 0."""
        marks.fill_(1)
        if len(self.used) < len(self.parameters):
            for i, parameter in enumerate(self.parameters):
                if parameter not in self.used:
                    marks[i] = 0

    def _call(self, hook: BoundHook, buffer: Tensor, gradients: list[Tensor]) -> None:
        future = hook(GradBucket(self.index, buffer, gradients, self.parameters, self.is_last))
        self._hooked = checked_future(future), buffer

    def _finish(self) -> Tensor | None:
        """Wait for the work that `start` began, and return the communication hook's result; None without a hook."""
        work, hooked = self._work, self._hooked
        self._work, self._hooked, self.started = None, None, False
        if work is not None:
            work.wait()
        return None if hooked is None else tensor_of(*hooked)

    @abc.abstractmethod
    def load(self) -> None:
        """Collect the parameters' gradients, with zeros for parameters that have none."""

    @abc.abstractmethod
    def load_nothing(self) -> None:
        """Collect zeros, as on a rank without data."""

    @abc.abstractmethod
    def start(self, hook: BoundHook | None = None) -> None:
        """Begin to average the loaded gradients, or let `hook` average them."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the means have arrived."""

    @abc.abstractmethod
    def store(self) -> None:
        """Wait, then store the means in ``.grad``, except for parameters that have no gradient on any rank."""

    @abc.abstractmethod
    def norm(self) -> Tensor:
        """Return the 2-norm of the means, of shape ()."""


def _dense_gradient(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the gradient of a parameter, made dense if necessary."""
    if grad.is_sparse:  # the parameter was not passed to make_buckets() as sparse
        parameter.grad = grad = grad.to_dense()
    return grad


class FlatBucket(Bucket):
    """Gradients of one dtype on one device, copied into one buffer.

    The buffer ends with one element for each parameter: 1 if this rank has a gradient for it, else 0. So the mean of
    that element shows, without another message, whether any rank has a gradient.

    Args:
        parameters: Parameters whose gradients the bucket holds.
        group: Ranks to average over.
        averages: Whether the group's backend supports ``ReduceOp.AVG``.
        as_view: Whether each ``.grad`` becomes a view of the buffer rather than a copy.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, averages: bool, as_view: bool
    ) -> None:
        super().__init__(parameters, group)
        self._averages = averages
        self._as_view = as_view
        first = parameters[0]
        num_elems = sum(map(num_reals, parameters))
        self._flat = torch.zeros(num_elems + len(parameters), dtype=first.dtype.to_real(), device=first.device)
        self._gradients, self._used_anywhere = self._flat[:num_elems], self._flat[num_elems:]
        self._views = views_of(self._gradients, parameters)

    @torch.no_grad()
    def load(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            grad = parameter.grad
            if grad is None:
                self.used.discard(parameter)  # the gradient was dropped after it arrived
                view.zero_()
            elif grad.is_sparse or grad.data_ptr() != view.data_ptr():
                view.copy_(_dense_gradient(parameter, grad))
        self._mark(self._used_anywhere)

    @torch.no_grad()
    def load_nothing(self) -> None:
        self._flat.zero_()

    def start(self, hook: BoundHook | None = None) -> None:
        self.started = True
        if hook is not None:
            self._work = dist.all_reduce(self._used_anywhere, group=self._group, async_op=True)
            self._call(hook, self._gradients, self._views)
        elif self._averages:
            self._work = dist.all_reduce(self._flat, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
        else:
            self._flat.div_(dist.get_world_size(self._group))
            self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    @torch.no_grad()
    def wait(self) -> None:
        averaged = self._finish()
        if averaged is not None and averaged.data_ptr() != self._gradients.data_ptr():
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


class SparseBucket(Bucket):
    """The gradient of one parameter, as a sparse tensor."""

    def __init__(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
        super().__init__([parameter], group)
        self._sum: Tensor | None = None

    def load(self) -> None:
        grad = self.parameters[0].grad
        if grad is None:
            self.used.clear()
            self.load_nothing()
        elif grad.is_sparse:
            self._sum = grad.detach().coalesce().clone()
        else:  # dense, because another layer uses the weight, too
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

    def start(self, hook: BoundHook | None = None) -> None:
        assert self._sum is not None
        self.started = True
        if hook is not None:
            self._call(hook, self._sum, [self._sum])
        else:
            self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def wait(self) -> None:
        averaged = self._finish()
        assert self._sum is not None
        if averaged is None:
            self._sum = self._sum * (self.scale / dist.get_world_size(self._group))
        else:
            self._sum = averaged if self.scale == 1 else averaged * self.scale

    def store(self) -> None:
        self.wait()
        assert self._sum is not None
        grad = self.parameters[0].grad
        if self._sum.coalesce().values().numel():
            self.parameters[0].grad = self._sum if grad is None or grad.is_sparse else self._sum.to_dense()

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.zeros(()) if self._sum is None else self._sum.coalesce().values())


class Division(Protocol):
    """Elements of the averaged gradients that each rank needs if only a divided optimizer reads the gradients."""

    def length(self, parameter: nn.Parameter) -> int:
        """Return how many elements of a gradient each rank needs; 0: every rank needs all elements.

        The ranks' ranges follow each other in rank order, and the last rank also needs the remainder. The length is the
        same on every rank.
        """
        ...

    def needs_whole(self) -> bool:
        """Return whether this rank needs all elements after this backward pass."""
        ...


class CoalescedBucket(Bucket):
    """Gradients on the CPU that a group averages in place, in one pass once backward has ended.

    The group must have ``average_coalesced(tensors, marks, with_squares)`` and ``average_waited_s``. On a CPU, this is
    faster than averaging in a buffer, because the cores that compute would have to copy all gradients into the buffer.

    Attributes:
        division: Elements that each rank needs; the other elements keep this rank's own gradient. None: every rank
            needs all elements.
    """

    overlaps = False
    division: Division | None = None

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        super().__init__(parameters, group)
        self._averaging: Any = group
        self._tensors: list[Tensor] = []
        self._sizes_bytes = [p.numel() * p.element_size() for p in parameters]
        self._wants_squares = False
        self._squares: float | None = None
        self._marks = torch.ones(len(parameters) + 1, dtype=parameters[0].dtype)
        self._used_anywhere, self._needs_whole = self._marks[:-1], self._marks[-1:]

    def load(self) -> None:
        self._collect()
        places = sorted(zip([t.data_ptr() for t in self._tensors], self._sizes_bytes, strict=True))
        if any(begin + size_bytes > later for (begin, size_bytes), (later, _) in itertools.pairwise(places)):
            self._separate()
        self._mark(self._used_anywhere)

    def _collect(self) -> None:
        self._tensors = [
            self._zeros(p) if (grad := p.grad) is None else grad if grad.is_contiguous() else _in_memory_order(p, grad)
            for p in self.parameters
        ]

    def _separate(self) -> None:
        """Give each gradient its own memory.

        Autograd may let gradients share memory: after ``y = a.view(6) + b.view(6)``, the gradients of `a` and `b` are
        views of one tensor.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._collect()

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        self.used.discard(parameter)  # the gradient was dropped after it arrived
        return torch.zeros(parameter.numel(), dtype=parameter.dtype)

    def load_nothing(self) -> None:
        self._tensors = [self._zeros(p) for p in self.parameters]
        self._used_anywhere.zero_()

    def start(self, hook: BoundHook | None = None) -> None:
        pass  # wait() does everything, in one pass

    def wait(self) -> None:
        average = self._averaging.average_coalesced
        if self.division is not None:
            self._average_parts(self.division)
        else:
            squares = average(self._tensors, self._used_anywhere, with_squares=self._wants_squares)
            self.waited_s = self._averaging.average_waited_s
            self._squares = squares * self.scale**2 if self._wants_squares else None
        if self.scale != 1:
            foreach_mul_(self._tensors, self.scale)

    def _average_parts(self, division: Division) -> None:
        """Average the elements of each gradient that this rank needs, or all elements if any rank needs them.

        The first message averages the undivided gradients. From the same message, the ranks learn whether any rank
        needs all elements.
        """
        lengths = [division.length(p) for p in self.parameters]
        self._needs_whole.fill_(self._wants_squares or division.needs_whole())
        average, nothing = self._averaging.average_coalesced, self._marks[:0]
        average([*(t for t, n in zip(self._tensors, lengths, strict=True) if not n), self._marks], nothing)
        self.waited_s = self._averaging.average_waited_s
        self._squares = None
        divided = [(t, n) for t, n in zip(self._tensors, lengths, strict=True) if n]
        if self._needs_whole.item():
            average([tensor for tensor, _ in divided], nothing)
            return
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        for tensor, length in divided:
            elements = flat(tensor)
            cuts = [*range(0, size * length, length), len(elements)]
            blocks = [elements[begin:end] for begin, end in itertools.pairwise(cuts)]
            dist.reduce_scatter(blocks[rank], blocks, dist.ReduceOp.AVG, group=self._group)

    def store(self) -> None:
        self.wait()
        if len(self.used) < len(self.parameters):
            anywhere = self._used_anywhere.tolist()
            for parameter, mean, used in zip(self.parameters, self._tensors, anywhere, strict=True):
                if used and parameter.grad is None:
                    parameter.grad = shaped(mean, parameter)
        self._tensors = []  # autograd copies a gradient instead of passing it on if anything else refers to it

    def norm(self) -> Tensor:
        if self._squares is not None:
            return torch.tensor(self._squares**0.5)
        self._wants_squares = True  # takes effect in the next pass
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.zeros(()), *map(torch.linalg.vector_norm, grads)]))


def _in_memory_order(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the gradient, flattened if it has the parameter's layout, which is the same on every rank."""
    grad = _dense_gradient(parameter, grad)
    return flat(grad) if grad.stride() == parameter.stride() and is_one_range(grad) else grad


def make_buckets(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    bucket_cap_mb: float,
    *,
    sparse: Iterable[Tensor] = (),
    as_view: bool = False,
    hooked: bool = False,
) -> list[Bucket]:
    """Divide parameters into buckets in reverse order, in which backward is likely to compute their gradients.

    The buckets are the same on every rank that passes the same parameters. Each holds one dtype on one device, or one
    sparse gradient. A group that averages tensors in place needs no buffers, unless there is a communication hook.

    Args:
        parameters: Parameters in the order of the model.
        group: Ranks to average over.
        bucket_cap_mb: Size in MiB; a buffer that has reached it accepts no further gradient.
        sparse: Parameters whose gradients are sparse.
        as_view: Whether gradients become views of their buffers.
        hooked: Whether a communication hook will average the buckets.
    """
    in_order, others = list(reversed(parameters)), set(sparse)
    last: list[Bucket] = [SparseBucket(p, group) for p in in_order if p in others]
    dense_on_cpu = [p for p in in_order if p not in others and p.device.type == "cpu"]
    if dense_on_cpu and hasattr(group, "average_coalesced") and not hooked:
        last.append(CoalescedBucket(dense_on_cpu, group))
        others.update(dense_on_cpu)
    open_lists: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    sizes_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[nn.Parameter]] = []
    for parameter in in_order:
        if parameter in others:
            continue
        kind = (parameter.dtype, parameter.device)
        open_lists.setdefault(kind, []).append(parameter)
        sizes_bytes[kind] = sizes_bytes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes_bytes[kind] >= bucket_cap_mb * 2**20:
            closed.append(open_lists.pop(kind))
            del sizes_bytes[kind]
    lists = [*closed, *open_lists.values()]
    averages = {device: _averages(group, device) for device in {members[0].device for members in lists}}
    first = [FlatBucket(ps, group, averages=averages[ps[0].device], as_view=as_view) for ps in lists]
    buckets = [*first, *last]
    for index, bucket in enumerate(buckets):
        bucket.index, bucket.is_last = index, index == len(buckets) - 1
    return buckets


def _averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's backend supports ``ReduceOp.AVG`` on a device."""
    if hasattr(group, "average_coalesced"):
        return True
    return f"{device.type}:nccl" in str(dist.get_backend_config(group)).split(",")
