"""DistributedDataParallel: one model on every rank, with gradients averaged while backward runs.

The path of a gradient: the hook of its parameter (`_on_gradient`) -> its bucket (see `buckets`), which is reduced when
all its gradients have come -> the parameter's ``.grad``. Buckets that are left are reduced when backward ends
(`_finish_backward`), because a parameter without a gradient is not an error here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from phalanx import _torch
from phalanx._errors import RankFailed
from phalanx._nested import to_device
from phalanx._rank_group import RankGroup, group_or_world
from phalanx._torch import current_graph_task_id, disable_dynamo, queue_callback
from phalanx.data.epochs import repeated_orders
from phalanx.parallel.buckets import Bucket, CommHook, make_buckets

_BROADCAST_BYTES = 250 << 20


class DistributedDataParallel(nn.Module, Joinable):
    """torch's DistributedDataParallel, on any backend: same arguments, same gradients, same ``state_dict``.

    Every rank wraps the same module and feeds it its own part of the batch. After ``backward()`` each parameter's
    ``.grad`` is the mean over the ranks, with the same bits on all of them.

    What differs from torch's:

    - Parameters without a gradient in a backward pass neither hang nor raise. If another rank has a gradient, this
      rank counts as zeros; if no rank has one, ``.grad`` stays as it was. Each rank names them once, unless
      `find_unused_parameters` is set.
    - If the models differ between ranks, all ranks raise one error that names the first difference.
    - If a loop forgets ``set_epoch`` of torch's DistributedSampler, rank 0 warns once.
    - ``grad_norm()`` returns the norm of all gradients. Parameters may be frozen and unfrozen at any time.
      :class:`phalanx.SyncBatchNorm` works on the CPU.
    - `gradient_as_bucket_view` is True by default. Where gradients are averaged in a buffer, a copy of each would cost
      its memory again and up to a tenth of a step.
    - Not supported, and refused by name: `delay_all_reduce_named_params`, `param_to_hook_all_reduce`,
      `mixed_precision`, `skip_all_reduce_unused_params`, `bucket_cap_mb_list`, `batched_grad_copy` and
      `lazy_bucket_allocation`.

    Args:
        module: Model to train; its parameters and buffers are set to those of rank 0.
        device_ids: GPU of this rank, in a list, to which inputs are moved; None for the CPU or several devices.
        output_device: Accepted as in torch, where it moves outputs of a module on several devices.
        dim: Accepted as in torch.
        broadcast_buffers: Whether each forward pass sets the buffers to those of rank 0; None: True.
        init_sync: Whether to compare the ranks' models and copy rank 0's parameters and buffers now.
        process_group: Ranks that train together; by default all.
        bucket_cap_mb: MiB of gradients that are reduced together; None: 25.
        find_unused_parameters: Whether parameters without a gradient are expected, and not named.
        check_reduction: Accepted as in torch, where it has no effect either.
        gradient_as_bucket_view: Whether each ``.grad`` is a view of its bucket, which saves a copy of the gradients.
        static_graph: Accepted as in torch; it has no effect here.
        device_mesh: One-dimensional mesh to use instead of `process_group`.
        forward_sync_buffers: Replacement of `broadcast_buffers`; even False copies rank 0's buffers once, now.

    Raises:
        ValueError: The module has nothing to train, is on devices that do not fit, or differs between ranks; or an
            argument is not supported.
    """

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
        super().__init__()
        Joinable.__init__(self)
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            batched_grad_copy=batched_grad_copy,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        self.process_group: dist.ProcessGroup = _choose_group(process_group, device_mesh)
        self.module = module
        self.dim = dim
        buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers: bool = buffers is not False
        self.forward_sync_buffers: bool = self.broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.parameters_to_ignore: set[str] = set(getattr(module, _torch.MARK_IGNORED_BY_DDP, ()))
        self.require_backward_grad_sync: bool = True
        self.require_forward_param_sync: bool = True
        with_buffers = self.broadcast_buffers or forward_sync_buffers is not None
        if init_sync:
            self._verify_model(with_buffers)
        self._set_devices(device_ids, output_device)
        self._hook: CommHook | None = None
        self._hook_state: object = None
        self._named_unused = False
        self._averaging_s = [0.0]  # a list: an attribute of a module takes a microsecond to set
        self._buckets: list[Bucket] = []
        self._remove_hooks: Callable[[], object] = _nothing
        if init_sync:
            self._broadcast_state(0, with_buffers)
        self._build()
        if dist.get_rank() == 0:
            repeated_orders.watch(self)
        if find_unused_parameters and static_graph:
            warnings.warn("find_unused_parameters and static_graph are both unneeded here", stacklevel=2)

    # ---- the model -------------------------------------------------------------------------------------------------

    def _set_devices(self, device_ids: Any, output_device: Any) -> None:
        trained = [p for _, p in self._parameters_of_module() if p.requires_grad]
        if not trained:
            raise ValueError(
                f"rank {dist.get_rank()}: DistributedDataParallel: no parameter of the module requires a gradient; "
                "use the module as it is"
            )
        devices = {p.device for _, p in self._parameters_of_module()}
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

    def _parameters_of_module(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, with its name, except those that the module wants ignored."""
        for name, parameter in self.module.named_parameters():
            if name not in self.parameters_to_ignore:
                yield name, parameter

    def _buffers_of_module(self) -> list[tuple[str, Tensor]]:
        return [(name, b) for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def _verify_model(self, with_buffers: bool) -> None:
        """Raise the same error on every rank if the models differ in a tensor's name, shape or dtype."""
        own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self._parameters_of_module()]
        if with_buffers:
            own += [(name, tuple(b.shape), str(b.dtype), True) for name, b in self._buffers_of_module()]
        every = RankGroup(self.process_group).gather(own)
        for rank, other in enumerate(every):
            for mine, theirs in itertools.zip_longest(every[0], other):
                if mine != theirs:
                    ranks = [dist.get_global_rank(self.process_group, r) for r in (0, rank)]
                    raise ValueError(
                        f"rank {dist.get_rank()}: DistributedDataParallel: the model differs between ranks: "
                        f"{_describe(mine)} on rank {ranks[0]}, {_describe(theirs)} on rank {ranks[1]}. "
                        "Build the same model on every rank"
                    )

    def _broadcast_state(self, src: int, with_buffers: bool) -> None:
        """Copy parameters, and maybe buffers, of the group's rank `src` to all ranks."""
        tensors = [p.detach() for _, p in self._parameters_of_module()]
        if with_buffers:
            tensors += [b.detach() for _, b in self._buffers_of_module()]
        if tensors:
            _torch.broadcast_coalesced(self.process_group, tensors, _BROADCAST_BYTES, src)

    def _build(self) -> None:
        """Make buckets for the parameters that are trained now, and hang a hook on each."""
        trained = [(name, p) for name, p in self._parameters_of_module() if p.requires_grad]
        self._names = {p: name for name, p in trained}
        if any(hasattr(p, _torch.MARK_STEPS_IN_BACKWARD) for p in self._names):
            raise ValueError(
                f"rank {dist.get_rank()}: DistributedDataParallel: a parameter has an optimizer that steps within "
                "backward, before gradients are averaged; call optimizer.step() after backward() instead"
            )
        accumulated = self._names.keys() & {p for bucket in self._buckets for p in bucket.used}
        self._buckets = make_buckets(
            list(self._names),
            self.process_group,
            self.bucket_cap_mb,
            sparse=_sparse_parameters(self.module),
            as_view=self.gradient_as_bucket_view,
            hooked=self._hook is not None,
        )
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for parameter in accumulated:
            self._bucket_of[parameter].used.add(parameter)
        self._candidates = [p for _, p in self._parameters_of_module()]
        self._trained = [p.requires_grad for p in self._candidates]
        self._has_buffers = self.broadcast_buffers and bool(self._buffers_of_module())
        self._expected: dict[nn.Parameter, int] = {}  # how often its gradient came in the backward pass before
        self._pass = _Pass()
        on_gradient = functools.partial(_call_weakly, weakref.ref(self))
        handles = [p.register_post_accumulate_grad_hook(on_gradient) for p in self._names]
        self._remove_hooks()
        self._remove_hooks = remove = weakref.finalize(self, _remove_all, handles)
        remove.atexit = False

    # ---- forward ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._before_forward(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._after_forward(output)
        return output

    @disable_dynamo
    def _before_forward(self, inputs: Any, kwargs: Any) -> Any:
        if [p.requires_grad for p in self._candidates] != self._trained:
            self._build()  # something was frozen or unfrozen
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
        # As in torch: buffers become rank 0's before the first evaluation after training, then stay. So ranks may
        # evaluate different numbers of batches.
        averages = self._averages_now()
        if averages != self.require_forward_param_sync:
            self.require_forward_param_sync = averages
        if not averages:
            if not self.require_backward_grad_sync:
                self._pass.armed = False
            return
        if self._pass.task is not None and self._pass.task != current_graph_task_id():
            self._abandon()
        self._pass.armed = True
        begin = functools.partial(_call_weakly, weakref.ref(self))
        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: begin(None))

    def _is_joining(self) -> bool:
        return bool(_torch.attribute_of(self, "_join_config").enable)

    def _averages_now(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone; the first backward pass of a forward outside averages the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _sync_buffers(self, *, active: bool = True) -> None:
        buffers = [b.data for _, b in self._buffers_of_module()]  # not detach(): backward may have saved this version
        src = self._last_active_rank(active=active) if self._is_joining() else 0
        try:
            _torch.broadcast_coalesced(self.process_group, buffers, _BROADCAST_BYTES, src)
        except Exception as error:
            _add_hint(error, "was broadcasting buffers at the beginning of forward()")
            raise

    # ---- backward --------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """Called when gradients first reach an output of the model in this backward pass."""
        task = current_graph_task_id()
        if task == self._pass.task:
            return
        if self._pass.task is not None:
            self._abandon()
        self._pass = _Pass(task, _torch.current_autograd_node())
        for bucket in self._buckets:
            if bucket.overlaps:
                bucket.num_awaited = sum(self._expected[p] for p in bucket.parameters) if self._expected else -1
        queue_callback(functools.partial(self._finish_backward, task))

    def _abandon(self) -> None:
        """Forget the backward pass that runs, or that an error ended, but for the gradients that it has made."""
        for bucket in self._buckets:
            if bucket.started:
                bucket.wait()  # other ranks take part
        self._pass = _Pass()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Called when a gradient was added to ``parameter.grad``, in the thread that runs backward."""
        bucket = self._bucket_of[parameter]
        bucket.used.add(parameter)
        if not self._pass.reached:
            if self._pass.task is None:
                if not self._pass.armed:
                    return
                self._begin_backward()  # no tensor was found in the model's output
            self._pass.reached = True
        if not bucket.overlaps:
            return
        if bucket.started:
            raise RuntimeError(
                f"rank {dist.get_rank()}: DistributedDataParallel: {self._names[parameter]!r} got another gradient "
                "after its bucket was reduced: it is used more often than in the backward pass before. Give "
                "reentrant checkpoints use_reentrant=False, or pass a larger bucket_cap_mb"
            )
        arrived = self._pass.arrived
        times = arrived[parameter] = arrived.get(parameter, 0) + 1
        if self._expected and times <= self._expected[parameter]:
            bucket.num_awaited -= 1
        while self._pass.next < len(self._buckets) and self._buckets[self._pass.next].num_awaited == 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._pass.next]
        bucket.load()
        bucket.start(self._hook, self._hook_state)
        self._pass.next += 1

    def _finish_backward(self, task: int) -> None:
        """Reduce what is left, wait for all, hand the means to the parameters."""
        if task != self._pass.task:
            self._pass = _Pass()  # another backward pass ran within this one, and what it averaged is not all
        elif not self._pass.reached and not _fills_grads(self._pass.node):
            self._pass = _Pass(armed=True)
            return  # it was torch.autograd.grad()
        begin_s = time.perf_counter()
        try:
            while self._pass.next < len(self._buckets):
                self._start_next()
            for bucket in self._buckets:
                bucket.store()
            self._averaging_s[0] += time.perf_counter() - begin_s
        except Exception as error:
            _add_hint(error, "was averaging gradients at the end of backward()")
            raise
        finally:
            arrived, self._pass = self._pass.arrived, _Pass()
            unused = []
            for bucket in self._buckets:
                if bucket.overlaps:
                    self._expected.update((p, arrived.get(p, 1)) for p in bucket.parameters)
                if len(bucket.used) < len(bucket.parameters):
                    unused += [self._names[p] for p in bucket.parameters if p not in bucket.used]
                bucket.used.clear()
        repeated_orders.count_pass()
        if unused and not self.find_unused_parameters and not self._named_unused:
            self._name_unused(unused)

    def _name_unused(self, names: list[str]) -> None:
        self._named_unused = True
        some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warnings.warn(
            f"rank {dist.get_rank()}: DistributedDataParallel: no gradient reached {some} in this backward pass. "
            "They count as zeros where another rank has a gradient, and stay as they are where none has. "
            "If that is meant, pass find_unused_parameters=True; if not, look for an output that the loss leaves out",
            stacklevel=2,
        )

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all averaged gradients together, a tensor of shape ()."""
        norms = [bucket.norm() for bucket in self._buckets]
        return torch.linalg.vector_norm(torch.stack([norm.to(self.device) for norm in norms]))

    def take_averaging_s(self) -> float:
        """Return how long backward passes have averaged gradients, and waited for other ranks, since the last call.

        In seconds. What overlaps with the computation of gradients does not count, nor what a GPU does meanwhile.
        """
        taken, self._averaging_s[0] = self._averaging_s[0], 0.0
        return taken

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
        if self._hook is not None:
            raise RuntimeError("register_comm_hook can only be called once.")
        self._hook, self._hook_state = hook, state
        self._build()

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return torch's ``Join`` context, in which ranks that run out of data take part with zeros.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, and not of those
                that still have data.
            enable: Whether the context does anything.
            throw_on_early_termination: Whether all ranks raise when the first runs out of data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _count_active(self, *, active: bool) -> int:
        """Agree with all ranks on how many average gradients in this pass, joined ones not counted."""
        count = torch.tensor([int(active)], device=self.device)
        dist.all_reduce(count, group=self.process_group)
        num_active = int(count.item())
        if not self._divide_by_initial_world_size and num_active:
            for bucket in self._buckets:
                bucket.scale = dist.get_world_size(self.process_group) / num_active
        return num_active

    def _last_active_rank(self, *, active: bool) -> int:
        rank = torch.tensor([dist.get_rank(self.process_group) if active else -1], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    # ---- copies ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError("DistributedDataParallel can only be pickled or copied with the default process group")
        left_out = {"process_group", "_remove_hooks", "_names", "_buckets", "_bucket_of", "_expected", "_pass"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = _choose_group(None, None)
        self._buckets = []
        self._remove_hooks = _nothing
        self._build()


@dataclasses.dataclass
class _Pass:
    """A backward pass whose gradients are averaged, or the wait for one.

    Not attributes of the module, which take a microsecond each to set.
    """

    task: int | None = None  # of the autograd engine, once it runs
    node: Any = None  # where it came to the model's output
    armed: bool = False  # a forward pass came before
    reached: bool = False  # a parameter got a gradient
    next: int = 0  # bucket to start: they are started in their order
    arrived: dict[nn.Parameter, int] = dataclasses.field(default_factory=dict)


class _Shadow(JoinHook):
    """Takes part with zeros, on a rank that has no more data while others go on."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self._own: dict[nn.Parameter, Tensor | None] = {}  # gradients of this rank, while it has those of the others

    def main_hook(self) -> None:
        ddp = self.ddp
        self._own = self._own or {p: p.grad for bucket in ddp._buckets for p in bucket.parameters}
        if ddp._has_buffers and ddp.require_forward_param_sync:
            ddp._sync_buffers(active=False)
        ddp.require_forward_param_sync = ddp._count_active(active=False) > 0
        if not ddp.require_forward_param_sync:
            return
        for bucket in ddp._buckets:
            bucket.used.clear()
            bucket.load_nothing()
            bucket.start(ddp._hook, ddp._hook_state)
        for bucket in ddp._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.store()  # for an optimizer that takes part, too, such as ZeroRedundancyOptimizer

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self.ddp
        for parameter, grad in self._own.items():
            parameter.grad = grad
        ddp._broadcast_state(ddp._last_active_rank(active=is_last_joiner), ddp.broadcast_buffers)
        for bucket in ddp._buckets:
            bucket.scale = 1.0


def _call_weakly(ddp: weakref.ref[DistributedDataParallel], parameter: nn.Parameter | None) -> None:
    """A hook on a tensor must not keep the DistributedDataParallel alive."""
    this = ddp()
    if this is None:
        return
    if parameter is None:
        this._begin_backward()
    else:
        this._on_gradient(parameter)


def _fills_grads(node: Any) -> bool:
    """True if ``backward()`` runs that came to `node`, False if ``torch.autograd.grad()``."""
    while following := [below for below, _ in node.next_functions if below is not None]:
        node = following[0]
    try:
        return _torch.will_engine_execute_node(node)  # backward() comes to every leaf
    except RuntimeError:
        return False  # a leaf that autograd.grad() was asked for


def _add_hint(error: Exception, doing: str) -> None:
    """Add to an error what is often its cause, unless it names a rank that has gone, and what to look for there."""
    if hasattr(error, "add_note") and not isinstance(error, RankFailed):  # Python 3.11
        error.add_note(
            f"rank {dist.get_rank()} {doing}. If another rank ran out of data earlier: give all ranks the same number "
            "of batches (DistributedSampler does, with pad=True or drop_last=True), or run the loop within: "
            "with model.join():"
        )


def _nothing() -> None:
    pass


def _remove_all(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _refuse(**unsupported: Any) -> None:
    for name, value in unsupported.items():
        if value not in (None, False):
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


def _describe(parameter: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if parameter is None:
        return "no further parameter"
    name, shape, dtype, trained = parameter
    return f"{name!r} {list(shape)} {dtype.removeprefix('torch.')}{'' if trained else ' frozen'}"


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    return {m.weight for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _find_tensors(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _find_tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
