"""The table of torch's private names, with replacements for those that can be replaced.

Any version of torch may drop a private name. The table says for each name where torch defines it, what phalanx uses it
for, and what is lost without it. A missing name is replaced, with a warning that says what is lost. If the name can't
be replaced, its first use raises an ImportError that states the name and the version of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Name(NamedTuple):  # importing dataclasses would take a third of the time that phalanx adds to import torch
    """A private name of torch.

    Attributes:
        path: Dotted path of the name in torch.
        use: Purpose for which phalanx needs it.
        loses: Effect of the name's absence; empty if the name can't be replaced, so that its use raises ImportError.
        instead: Replacement, used with a warning; None if the caller provides the replacement or there is none.
    """

    path: str
    use: str
    loses: str = ""
    instead: Any = None


# ---- replacements --------------------------------------------------------------------------------------------------


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _add_each(targets: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for target, other in zip(targets, others, strict=True):
        target.add_(other)


def _multiply_each(targets: Sequence[torch.Tensor], factor: float) -> None:
    for target in targets:
        target.mul_(factor)


def _broadcast_each(group: Any, tensors: Sequence[torch.Tensor], _: int, src: int) -> None:
    import torch

    with torch.no_grad():
        for tensor in tensors:
            buffer = tensor.contiguous()
            torch.distributed.broadcast(buffer, group=group, group_src=src)
            tensor.copy_(buffer)


def _abort_world() -> None:
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    world.abort()
    dist.destroy_process_group()


def _disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return torch.compiler.disable(function)


def _load_nothing() -> None:
    """Stand in for torch's worker loop in a torch that lacks it; no process ever runs this function."""


class _NoError:
    """Stands in for the class of errors that workers send, if torch lacks it; no error is of this class."""


# ---- the table -----------------------------------------------------------------------------------------------------

NAMES = {
    # How torch finds the backend, and how ranks meet.
    "rendezvous_handlers": Name(
        "torch.distributed.rendezvous._rendezvous_handlers",
        "to report which ranks are missing while ranks meet",
        "ranks meet by torch's own rendezvous, which waits in silence and does not know mpirun",
        {},
    ),
    "backend_plugins": Name(
        "torch.distributed.Backend._plugins", "to make a group of phalanx where a program asks for Gloo"
    ),
    "self_recording_backends": Name(
        "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",
        "to have torch's Flight Recorder record groups in the place of Gloo, which records itself",
        "the Flight Recorder does not see groups in the place of Gloo",
        set(),
    ),
    "C10dBackend": Name("torch._C._distributed_c10d.Backend", "as the base of the backend that C++ callers reach"),
    "ErrorType": Name("torch._C._distributed_c10d.ErrorType", "to say which kind of failure ended a group"),
    "register_backend": Name("torch.distributed.ProcessGroup._register_backend", "to serve C++ callers"),
    "set_default_backend": Name("torch.distributed.ProcessGroup._set_default_backend", "to serve C++ callers"),
    "get_backend": Name("torch.distributed.ProcessGroup._get_backend", "for a group with other devices than the CPU"),
    "new_process_group_helper": Name(
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "for a group with other devices than the CPU, such as cpu:phalanx,cuda:nccl",
    ),
    "create_process_group_wrapper": Name(
        "torch.distributed.distributed_c10d._create_process_group_wrapper",
        "for TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "torch does not compare the collectives of the ranks; phalanx does, in any case",
        lambda backend, *_: backend,
    ),
    "coalescing_manager": Name(
        "torch.distributed.distributed_c10d._coalescing_manager", "to try coalesced collectives in phalanx.testing.fuzz"
    ),
    "make_premul_sum": Name(
        "torch.distributed._make_nccl_premul_sum",
        "to make calls, or make them again, whose sum multiplies first",
    ),
    "WindowAttr": Name("torch._C._distributed_c10d.WindowAttr", "to answer a window's get_attr()"),
    "set_group_name": Name("torch.distributed.ProcessGroup._set_group_name", "to split a group"),
    "set_group_desc": Name("torch.distributed.ProcessGroup._set_group_desc", "to split a group"),
    "get_default_store": Name(
        "torch.distributed.distributed_c10d._get_default_store",
        "to learn which ranks share a host, when phalanx.init finds a process group made by hand",
    ),
    "abort_process_group": Name(
        "torch.distributed.distributed_c10d._abort_process_group",
        "to leave an NCCL group whose other ranks may have failed",
        "the group is aborted by its public method and then destroyed",
        _abort_world,
    ),
    "world": Name(
        "torch.distributed.distributed_c10d._world",
        "to abort every group of a rank that is kept when another one fails",
    ),
    "uses_torchcomms": Name(
        "torch.distributed.distributed_c10d._use_torchcomms_enabled",
        "to report that torchcomms makes Gloo's groups",
        "it is not reported if torchcomms makes Gloo's groups",
        lambda: False,
    ),
    "GlooOptions": Name(
        "torch.distributed.ProcessGroupGloo._Options", "to say on which address Gloo listens between hosts"
    ),
    # Processes that load data.
    "begin_worker": Name(
        "torch.utils.data._utils.signal_handling._set_worker_signal_handlers",
        "to keep signals that ask a rank to save from the processes that load data for it",
        "a signal that asks ranks to save may end the processes that load data for them",
        lambda *_: None,
    ),
    "worker_loop": Name(
        "torch.utils.data._utils.worker._worker_loop",
        "to know a process that loads data when it is started",
        "a signal that asks ranks to save may end the processes that load data for them",
        _load_nothing,
    ),
    "set_worker_pids": Name(
        "torch.utils.data._utils.signal_handling._set_worker_pids",
        "to report the death of a phalanx.DataLoader's worker where the rank waits for a batch",
        "a rank is interrupted at any line when a worker of its phalanx.DataLoader dies, even with worker_retries",
        lambda *_: None,
    ),
    "ExceptionWrapper": Name(
        "torch._utils.ExceptionWrapper",
        "to name the sample at which a dataset raises an error in a worker",
        "errors of a dataset in a worker do not name the sample",
        _NoError,
    ),
    "new_shared_storage": Name(
        "torch.UntypedStorage._new_shared",
        "to let the workers of a DataLoader collate batches in unnamed memory",
        "the workers of a phalanx.DataLoader hand over batches in /dev/shm, as torch's do",
    ),
    "new_shared_fd": Name(
        "torch.UntypedStorage._new_shared_fd_cpu",
        "to map the batches that workers of a DataLoader hand over",
        "the workers of a phalanx.DataLoader hand over batches in /dev/shm, as torch's do",
    ),
    "storage_use_count": Name(
        "torch._C._storage_Use_Count",
        "to know when a batch that a worker of a DataLoader has handed over is no longer used",
        "the workers of a phalanx.DataLoader hand over batches in /dev/shm, as torch's do",
    ),
    # Kinds of tensors, and observers of their operations.
    "dispatch_keys": Name("torch._C._dispatch_keys", "to know whether a tensor's memory may be touched"),
    "is_torch_function_enabled": Name("torch._C._is_torch_function_enabled", "for tensors of a class of their own"),
    "num_dispatch_modes": Name(
        "torch._C._len_torch_dispatch_stack",
        "to see that a dispatch mode intercepts operations",
        "each operation goes through torch's dispatcher, which costs some 5 us",
        lambda: 1,
    ),
    "is_profiling": Name(
        "torch.autograd._profiler_enabled",
        "to see that a profiler runs",
        "the profiler shows no operations of the phalanx backend",
        lambda: False,
    ),
    "record_function_enter": Name(
        "torch.autograd._record_function_with_args_enter", "for events of the profiler", "events show no shapes"
    ),
    "record_function_exit": Name(
        "torch.autograd._record_function_with_args_exit", "for events of the profiler", "events show no shapes"
    ),
    # torch.compile.
    "set_code_exec_strategy": Name(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy", "for torch.compile", "it may compile the backend, too"
    ),
    "FrameExecStrategy": Name(
        "torch._C._dynamo.eval_frame._FrameExecStrategy", "for torch.compile", "it may compile the backend, too"
    ),
    "FrameAction": Name(
        "torch._C._dynamo.eval_frame._FrameAction", "for torch.compile", "it may compile the backend, too"
    ),
    "disable_dynamo": Name(
        "torch._disable_dynamo",
        "to keep what DistributedDataParallel does around forward() out of torch.compile",
        "importing phalanx.parallel takes a second longer",
        _disable_dynamo,
    ),
    # Backward passes.
    "current_graph_task_id": Name("torch._C._current_graph_task_id", "to tell one backward pass from the next"),
    "current_autograd_node": Name("torch._C._current_autograd_node", "to tell backward() from autograd.grad()"),
    "will_engine_execute_node": Name("torch._C._will_engine_execute_node", "to tell backward() from autograd.grad()"),
    "queue_callback": Name(
        "torch.autograd.Variable._execution_engine.queue_callback", "to average gradients when backward() ends"
    ),
    # Many tensors at once.
    "broadcast_coalesced": Name(
        "torch.distributed._broadcast_coalesced",
        "to send a model's parameters and buffers",
        "each parameter and buffer is sent by itself, which is slower",
        _broadcast_each,
    ),
    "foreach_copy_": Name("torch._foreach_copy_", "to copy many tensors", "tensors are copied one by one", _copy_each),
    "foreach_add_": Name("torch._foreach_add_", "to add many tensors", "tensors are added one by one", _add_each),
    "foreach_mul_": Name(
        "torch._foreach_mul_", "to scale many tensors", "tensors are scaled one by one", _multiply_each
    ),
    # Optimizers, modules, data, checkpoints.
    "global_pre_hooks_of_optimizers": Name(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "to leave optimizers with hooks undivided",
        "a hook on all optimizers sees a part of the parameters where a Trainer divides the step",
        {},
    ),
    "global_post_hooks_of_optimizers": Name(
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "to leave optimizers with hooks undivided",
        "a hook on all optimizers sees a part of the parameters where a Trainer divides the step",
        {},
    ),
    "BatchNorm": Name("torch.nn.modules.batchnorm._BatchNorm", "as the base of all BatchNorm layers"),
    "check_input_dim": Name("torch.nn.SyncBatchNorm._check_input_dim", "for SyncBatchNorm's errors"),
    "check_non_zero_input_channels": Name(
        "torch.nn.SyncBatchNorm._check_non_zero_input_channels", "for SyncBatchNorm's errors"
    ),
    "place_of_shard": Name(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "to know where a DTensor's shard lies"
    ),
}

ATTRIBUTES = {
    "_worker_info": ("torch.utils.data._utils.worker", "to read a stream whole in each worker of a DataLoader"),
    "_cdata": ("torch.UntypedStorage", "to know when a batch that a worker has handed over is no longer used"),
    "_orig_mod": ("torch._dynamo.OptimizedModule", "to name a compiled model's parameters as before torch.compile"),
    "_join_config": ("torch.distributed.algorithms.Joinable", "for model.join()"),
    "_timeout": (
        "torch.distributed.ProcessGroupGloo._Options",
        "to bound the time that Gloo takes to connect, and for a group that torch splits off",
    ),
    "_threads": ("torch.distributed.ProcessGroupGloo._Options", "to bound Gloo's threads"),
    "_devices": ("torch.distributed.ProcessGroupGloo._Options", "to say on which address Gloo listens"),
}
"""Private attributes of torch's objects, each with its class or module and its use. All of them must exist."""

MARK_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: the names of parameters that DistributedDataParallel ignores; torch's DDP reads it, too."""
MARK_STEPS_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute that torch sets on parameters whose optimizer steps in backward. A model with such parameters is refused;
if torch renames the attribute, the model is accepted."""
HOOKS_OF_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes in which optimizers keep hooks. The step of an optimizer with hooks is not divided. If torch renames the
attributes, such a step is divided, and a hook sees only parts of the parameters."""
PARTS_OF_SCHEDULER = "_schedulers"
MILESTONES_OF_SCHEDULER = "_milestones"
"""`PARTS_OF_SCHEDULER` holds the schedules within a SequentialLR or a ChainedScheduler; `MILESTONES_OF_SCHEDULER` holds
the steps at which a SequentialLR switches to the next schedule. If torch renames them, the schedules within are not
checked."""
SCHEDULER_COUNTERS = frozenset({"_last_lr", "_step_count", "_is_initial", "_get_lr_called_within_step"})
"""Counters that schedulers keep among their hyperparameters. If torch adds a counter, it looks like a changed
hyperparameter, and a run refuses to resume from its own checkpoint."""

OVERRIDDEN = {
    "torch.distributed.ProcessGroup": (  # the last four exist only before torch 2.14
        *("_get_backend_name", "_get_sequence_number_for_group", "_allgather_base", "_reduce_scatter_base"),
        *("_start_coalescing", "_end_coalescing"),
    ),
    "torch._C._distributed_c10d.Backend": ("_get_sequence_number_for_group", "_set_sequence_number_for_group"),
}
"""Private methods of torch's classes that our subclasses override."""
