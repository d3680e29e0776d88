"""DistributedDataParallel: one model on every rank, with gradients averaged while backward runs.

`forward` registers a hook on the tensors of the model's output. The hook fires when backward reaches them, and asks
autograd for a callback at the end of this backward pass. This works even if activation checkpoints run other backward
passes within this one. Hooks on the parameters record which of them got a gradient. `reducer` averages the gradients in
one of two ways:

- On the phalanx backend and the CPU nothing happens until the pass has ended; then one call of the core averages all
  gradients where autograd left them (`buckets.CoalescedBucket`).
- On other backends gradients go into flat buckets, which are averaged while backward runs (`buckets.FlatBucket`).

A missing gradient counts as zeros if another rank has one for that parameter; if no rank has one, ``.grad`` stays as it
is. The messages that average gradients also show, for each parameter, whether any rank has a gradient. So the graph is
not searched for unused parameters, and a missing gradient causes neither a hang nor an error.

**Parameters added to a wrapped model** are not averaged, because the ranks would have to agree on them; a warning names
them. Global hooks, which torch calls when a parameter or module is registered, count the additions to wrapped models.
So a forward pass compares only two numbers.

**Frozen parameters.** All ranks freeze the same parameters, but the ranks may have accumulated different gradients for
them. So a parameter that was frozen stays in the buckets for one more averaged pass, whether or not this rank has a
gradient for it, and is left alone afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from phalanx import _torch
from phalanx._errors import warn_caller
from phalanx._torch import disable_dynamo
from phalanx._torch.nested import to_device
from phalanx.data.epochs import repeated_orders
from phalanx.parallel.ddp.buckets import BoundHook, Division
from phalanx.parallel.ddp.grad_bucket import CommHook
from phalanx.parallel.ddp.reducer import Reducer
from phalanx.parallel.ddp.replica import Replica
from phalanx.parallel.ddp.uneven_inputs import active_ranks, add_hint
from phalanx.wire.rank_group import group_or_world

_UNSUPPORTED = (
    "delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "skip_all_reduce_unused_params",
    "bucket_cap_mb_list", "batched_grad_copy", "lazy_bucket_allocation",
)  # fmt: skip


class DistributedDataParallel(nn.Module, Joinable):
    """torch's DistributedDataParallel, on any backend: same arguments, same gradients, same ``state_dict``.

    Every rank wraps the same module and trains it on the rank's own part of the batch. After ``backward()`` each
    parameter's ``.grad`` is the mean over the ranks, with the same bits on all of them.

    Differences from torch's:

    - Parameters without a gradient in a backward pass cause neither a hang nor an error. If another rank has a
      gradient, this rank contributes zeros; if no rank has one, ``.grad`` stays as it was. Each rank warns once about
      each such parameter, the first time that no gradient reaches it, unless `find_unused_parameters` is set.
    - Parameters that are added to the module after it was wrapped are not averaged, as in torch, but a warning names
      them.
    - If the models differ between ranks, all ranks raise the same error, which names the first difference.
    - If a loop forgets to call ``set_epoch`` of torch's DistributedSampler, rank 0 warns once.
    - ``grad_norm()`` returns the norm of all gradients. Parameters may be frozen and unfrozen at any time; a gradient
      accumulated under ``no_sync()`` is averaged in the next averaged pass, even if its parameter has been frozen.
      :class:`phalanx.SyncBatchNorm` works on the CPU.
    - `gradient_as_bucket_view` is True by default. With False, gradients that are averaged in a buffer are copied out
      of the buffer afterwards. These copies double the memory of the gradients and cost up to a tenth of a step.
    - Unsupported arguments raise an error: `delay_all_reduce_named_params`, `param_to_hook_all_reduce`,
      `mixed_precision`, `skip_all_reduce_unused_params`, `bucket_cap_mb_list`, `batched_grad_copy` and
      `lazy_bucket_allocation`.

    Args:
        module: Model to train; its parameters and buffers are set to those of rank 0.
        device_ids: List with this rank's GPU, to which inputs are moved; None for a module on the CPU or on several
            devices.
        output_device: Ignored. torch moves the outputs to this device if the module is on several devices.
        dim: Ignored, as in torch.
        broadcast_buffers: Whether each forward pass sets the buffers to those of rank 0; None means True.
        init_sync: Whether the constructor compares the ranks' models, and copies rank 0's parameters and buffers to all
            ranks.
        process_group: Ranks that train together; by default all.
        bucket_cap_mb: MiB of gradients that are reduced together; None means 25.
        find_unused_parameters: Whether parameters without a gradient are expected, so that there is no warning.
        check_reduction: Ignored, as in torch.
        gradient_as_bucket_view: Whether each ``.grad`` is a view of its bucket, which saves a copy of the gradients.
        static_graph: Ignored; the graph may change.
        device_mesh: One-dimensional mesh to use instead of `process_group`.
        forward_sync_buffers: Replacement for `broadcast_buffers`; even if it is False, the constructor copies rank 0's
            buffers once.

    Raises:
        ValueError: The module has no trainable parameter, is on the wrong devices, or differs between ranks; or an
            argument is not supported.
        RuntimeError: Both `process_group` and `device_mesh` are given, or the mesh has several dimensions.

    Example:
        >>> ddp = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        >>> with ddp.no_sync():
        ...     ddp(torch.ones(4, 2)).mean().backward()
        >>> ddp(torch.ones(4, 2)).mean().backward()
        >>> ddp.grad_norm()
        tensor(3.4641)
        >>> ddp.take_averaging_s() >= ddp.take_waiting_s()
        True
        >>> with ddp.join():
        ...     ddp(torch.ones(4, 2)).mean().backward()
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> ddp.register_comm_hook(None, bf16_compress_hook)
        >>> ddp.remove_hooks()
    """

    broadcast_buffers: bool
    forward_sync_buffers: bool
    _comm_hook: BoundHook | None = None
    _divides_by_initial_world_size = True

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        given = locals().copy()  # the arguments by name
        super().__init__()
        Joinable.__init__(self)
        _refuse(given)
        buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        with_buffers = buffers is not False or forward_sync_buffers is not None
        self.process_group: dist.ProcessGroup = _choose_group(process_group, device_mesh)
        self.module = module
        self.dim = dim
        self.broadcast_buffers = self.forward_sync_buffers = buffers is not False
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.require_backward_grad_sync: bool = True
        self.require_forward_param_sync: bool = True
        self._replica = Replica(module, self.process_group)
        self.parameters_to_ignore: set[str] = self._replica.ignored
        if init_sync:
            self._replica.verify(with_buffers=with_buffers)
        self._set_devices(device_ids, output_device)
        if init_sync:
            self._replica.broadcast(with_buffers=with_buffers)
        self._has_buffers = self.broadcast_buffers and any(self._replica.buffers())
        self._reducer = self._make_reducer()
        if dist.get_rank() == 0:
            repeated_orders.watch(self)
        if find_unused_parameters and static_graph:
            warn_caller("find_unused_parameters and static_graph are both unneeded here")

    def _set_devices(self, device_ids: Any, output_device: Any) -> None:
        parameters = [p for _, p in self._replica.parameters()]
        if not any(p.requires_grad for p in parameters):
            raise ValueError(
                f"rank {dist.get_rank()}: DistributedDataParallel: no parameter of the module requires a gradient; "
                "use the module as it is"
            )
        devices = {p.device for p in parameters}
        self.device: torch.device = next(iter(devices))
        self.device_type: str = self.device.type
        self.is_multi_device_module: bool = len(devices) > 1
        if device_ids and (len(device_ids) > 1 or self.device_type == "cpu" or self.is_multi_device_module):
            raise ValueError(
                f"rank {dist.get_rank()}: DistributedDataParallel: device_ids must name the one GPU that holds the "
                f"module, got {device_ids} for a module on {', '.join(map(str, sorted(devices, key=str)))}; "
                "leave it out on a CPU and for a module on several devices"
            )
        self.device_ids: list[int | torch.device] | None = list(device_ids) if device_ids else None
        self.output_device: int | torch.device | None = output_device or (device_ids[0] if device_ids else None)

    def _make_reducer(self) -> Reducer:
        return Reducer(
            self._replica,
            bucket_cap_mb=self.bucket_cap_mb,
            as_view=self.gradient_as_bucket_view,
            comm_hook=self._comm_hook,
            warns_of_unused=not self.find_unused_parameters,
        )

    # ---- passes ----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._before_forward(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._after_forward(output)
        return output

    @disable_dynamo
    def _before_forward(self, inputs: Any, kwargs: Any) -> Any:
        self._reducer.follow_freezing()
        if torch.is_grad_enabled():
            self._reducer.name_newcomers()
            self._reducer.loop.begin_forward()
        if self._is_joining():
            Join.notify_join_context(self)
        if self._has_buffers and self.require_forward_param_sync:
            self._sync_buffers()
        if self._is_joining():
            self._count_active(active=self._averages_now())
        if self.device_ids:
            return to_device((inputs, kwargs), self.device)
        return inputs, kwargs

    @disable_dynamo
    def _after_forward(self, output: Any) -> None:
        # As in torch: buffers become rank 0's before the first evaluation after training, and are then left alone, so
        # that ranks may evaluate different numbers of batches.
        self._reducer.loop.end_phase()
        averages = self._averages_now()
        if averages != self.require_forward_param_sync:  # an attribute of a module takes a microsecond to set
            self.require_forward_param_sync = averages
        if averages:
            self._reducer.expect_backward(output)
        elif not self.require_backward_grad_sync:
            self._reducer.expect_nothing()

    def _averages_now(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _sync_buffers(self, *, active: bool = True) -> None:
        """Set the buffers to those of rank 0, or within ``join()`` to those of the last rank that still has data."""
        src = active_ranks(self.process_group, active=active)[-1] if self._is_joining() else 0
        try:
            self._replica.broadcast_buffers(src)
        except Exception as error:
            add_hint(error, "broadcasting buffers at the beginning of forward()")
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them.

        The backward pass of the first forward pass outside of the context averages the sum.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all averaged gradients together, a tensor of shape ()."""
        return self._reducer.norm(self.device)

    def divide_averaging(self, division: Division | None) -> None:
        """Limit averaging, from now on, to the elements of a gradient that each rank needs for a divided step.

        Every rank must call this between the same backward passes. Elements of ``.grad`` that a rank does not need then
        hold its own gradient. The call has an effect only where the phalanx backend averages gradients on the CPUs of
        one host.

        Args:
            division: Elements that each rank needs, and whether any rank needs all; None: all ranks need all.
        """
        self._reducer.divide(division)

    def remove_hooks(self) -> None:
        """Detach the wrapper for good: backward passes no longer average, and the model can be wrapped again."""
        self._reducer.remove_hooks()

    def take_averaging_s(self) -> float:
        """Return the time that backward passes have spent averaging gradients since the last call, in seconds.

        Waiting for other ranks counts. Averaging that overlaps with the computation of gradients does not count, and
        neither does the work of a GPU in the background.
        """
        return self._reducer.take_averaging_s()

    def take_waiting_s(self) -> float:
        """Return the time spent waiting for the slowest rank since the last call, in seconds.

        `take_averaging_s` includes this time. The waiting is measured only if the phalanx backend averages gradients on
        the CPUs of one host; otherwise, 0.0 is returned.
        """
        return self._reducer.take_waiting_s()

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` average each bucket.

        Args:
            state: First argument of the hook.
            hook: One of torch's hooks, or a function of your own that returns a ``torch.futures.Future`` of the
                averaged ``bucket.buffer()``.

        Raises:
            TypeError: `hook` is not callable.
            RuntimeError: A hook was registered before.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook can only be called once.")
        self._comm_hook = functools.partial(hook, state)
        self._reducer.use_comm_hook(self._comm_hook)

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return torch's ``Join`` context, in which ranks that run out of data contribute zeros.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, rather than by the
                number of ranks that still have data.
            enable: Whether the context does anything.
            throw_on_early_termination: Whether all ranks raise an error when the first rank runs out of data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self._replica, self._reducer, self._follow_forward, with_buffers=self.broadcast_buffers)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _is_joining(self) -> bool:
        return bool(_torch.attribute_of(self, "_join_config").enable)

    def _follow_forward(self) -> bool:
        """Take part, without data, in a forward pass of the other ranks; return whether any rank averages gradients."""
        if self._has_buffers and self.require_forward_param_sync:
            self._sync_buffers(active=False)
        self.require_forward_param_sync = self._count_active(active=False) > 0
        return self.require_forward_param_sync

    def _count_active(self, *, active: bool) -> int:
        """Return how many ranks average gradients in this pass, and scale the means to match; every rank calls this."""
        num_active = len(active_ranks(self.process_group, active=active))
        if num_active and not self._divides_by_initial_world_size:
            self._reducer.scale(dist.get_world_size(self.process_group) / num_active)
        return num_active

    # ---- copies ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError("DistributedDataParallel can only be pickled or copied with the default process group")
        left_out = {"process_group", "_replica", "_reducer"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = _choose_group(None, None)
        self._replica = Replica(self.module, self.process_group)
        self._reducer = self._make_reducer()


class _Shadow(JoinHook):
    """Contributes zeros on a rank that has run out of data, within ``join()``, while other ranks continue.

    Args:
        replica: Model that this rank trained until the rank ran out of data.
        reducer: Reducer of the model's gradients.
        follow_forward: Function that takes part in a forward pass of the other ranks, and returns whether any of them
            averages gradients.
        with_buffers: Whether the model ends up with the buffers of the last rank that had data.
    """

    def __init__(
        self, replica: Replica, reducer: Reducer, follow_forward: Callable[[], bool], *, with_buffers: bool
    ) -> None:
        self._replica = replica
        self._reducer = reducer
        self._follow_forward = follow_forward
        self._with_buffers = with_buffers
        self._own: dict[nn.Parameter, Tensor | None] = {}  # this rank's gradients, restored at the end

    def main_hook(self) -> None:
        self._own = self._own or {parameter: parameter.grad for parameter in self._reducer.averaged}
        if self._follow_forward():
            self._reducer.average_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        for parameter, grad in self._own.items():
            parameter.grad = grad
        [*_, src] = active_ranks(self._replica.group, active=is_last_joiner)
        self._replica.broadcast(src, with_buffers=self._with_buffers)
        self._reducer.scale(1.0)


def _refuse(given: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if given[name] not in (None, False):
            raise ValueError(
                f"DistributedDataParallel: {name} is not supported; use torch.nn.parallel.DistributedDataParallel, "
                "which runs on the phalanx backend too"
            )


def _choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    return group_or_world(process_group, "DistributedDataParallel")
