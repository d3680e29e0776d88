"""Buckets of a model's gradients, each kind averaged in the way that suits it.

On other backends than phalanx, or where a communication hook is set, gradients of one dtype and device are copied into
flat buckets of 25 MB in the reverse order of the parameters. The first pass counts how often each gradient arrives.
From the second pass on, a bucket starts as soon as it is complete, in a fixed order, while backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel.ddp.bucket import BoundHook, Bucket, dense_gradient
from phalanx.parallel.ddp.coalesced import CoalescedBucket
from phalanx.parallel.layout import num_reals, views_of


class FlatBucket(Bucket):
    """Gradients of one dtype on one device, copied into one buffer.

    The buffer ends with one element for each parameter, 1 if this rank has a gradient for it: its mean tells whether
    any rank has one, without another message.

    Args:
        parameters: Parameters whose gradients the bucket holds.
        group: Ranks to average over.
        averages: Whether the group's backend supports ``ReduceOp.AVG``.
        as_view: Whether each ``.grad`` becomes a view of the buffer, and not a copy.
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
                self.used.discard(parameter)  # dropped since it came
                view.zero_()
            elif grad.is_sparse or grad.data_ptr() != view.data_ptr():
                view.copy_(dense_gradient(parameter, grad))
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
    """The gradient of one parameter that comes as a sparse tensor."""

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


def make_buckets(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    bucket_cap_mb: float,
    *,
    sparse: Iterable[Tensor] = (),
    as_view: bool = False,
    hooked: bool = False,
) -> list[Bucket]:
    """Divide parameters into buckets, in the order in which backward should make their gradients: the reverse.

    The buckets are the same on every rank that passes the same parameters. Each holds one dtype on one device, or one
    sparse gradient. A group that averages tensors where they lie needs no buffers, unless a communication hook wants
    to see them.

    Args:
        parameters: Parameters in the order of the model.
        group: Ranks to average over.
        bucket_cap_mb: Size in MiB from which on a buffer takes no further gradient.
        sparse: Parameters whose gradients are sparse.
        as_view: Whether gradients become views of their buffers.
        hooked: Whether a communication hook is going to average the buckets.
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
