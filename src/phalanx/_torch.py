"""torch's private names: each that phalanx uses, what for, and what happens where torch no longer has it.

Nothing else in phalanx uses one; ``tests/test_torch_names.py`` holds this. A name of `NAMES` is looked up when it is
first asked for: `from phalanx._torch import dispatch_keys` binds it once, for hot paths and for classes;
``_torch.get_default_store()`` asks where it is used, so that a missing name fails there and nowhere else. All of
them were seen in torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # while torch is imported, it calls our plugin, which needs this module
    import torch

_TESTED = "2.11 to 2.15"


@dataclass(frozen=True)
class Name:
    """A private name of torch.

    Attributes:
        path: Where it is found.
        use: What phalanx needs it for.
        loses: What is worse without it. Empty: nothing can replace it, and asking for it raises ImportError.
        instead: What replaces it, with a warning; None: the function of this module that asks for it knows.
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


# ---- the table -----------------------------------------------------------------------------------------------------

NAMES = {
    # How torch finds the backend, and how ranks meet.
    "rendezvous_handlers": Name(
        "torch.distributed.rendezvous._rendezvous_handlers",
        "to let ranks meet with a word about whom they wait for",
        "ranks meet by torch's own rendezvous, which waits in silence and does not know mpirun",
        {},
    ),
    "C10dBackend": Name("torch._C._distributed_c10d.Backend", "as the base of the backend that C++ callers reach"),
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
    "GlooOptions": Name(
        "torch.distributed.ProcessGroupGloo._Options", "to say on which address Gloo listens between hosts"
    ),
    # What a tensor is, and who listens.
    "dispatch_keys": Name("torch._C._dispatch_keys", "to know whether a tensor's memory may be touched"),
    "is_torch_function_enabled": Name("torch._C._is_torch_function_enabled", "for tensors of a class of their own"),
    "num_dispatch_modes": Name(
        "torch._C._len_torch_dispatch_stack",
        "to see that a dispatch mode wants to hear of an operation",
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
    # Modules, data, checkpoints.
    "BatchNorm": Name("torch.nn.modules.batchnorm._BatchNorm", "as the base of all BatchNorm layers"),
    "check_input_dim": Name("torch.nn.SyncBatchNorm._check_input_dim", "for SyncBatchNorm's errors"),
    "check_non_zero_input_channels": Name(
        "torch.nn.SyncBatchNorm._check_non_zero_input_channels", "for SyncBatchNorm's errors"
    ),
    "worker_info": Name(
        "torch.utils.data._utils.worker._worker_info", "to read a stream whole in each worker of a DataLoader"
    ),
    "place_of_shard": Name(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "to know where a DTensor's shard lies"
    ),
}

ATTRIBUTES = {
    "_orig_mod": ("torch._dynamo.OptimizedModule", "to name a compiled model's parameters as before torch.compile"),
    "_join_config": ("torch.distributed.algorithms.Joinable", "for model.join()"),
    "_remaining_restarts": ("torch.distributed.elastic.agent.server.SimpleElasticAgent", "to restart several nodes"),
    "_store": ("torch.distributed.elastic.agent.server.SimpleElasticAgent", "for the agents of several nodes to talk"),
    "_worker_group": ("torch.distributed.elastic.agent.server.SimpleElasticAgent", "to stop the ranks of a node"),
    "_timeout": ("torch.distributed.ProcessGroupGloo._Options", "to bound the time that Gloo takes to connect"),
    "_threads": ("torch.distributed.ProcessGroupGloo._Options", "to bound Gloo's threads"),
    "_devices": ("torch.distributed.ProcessGroupGloo._Options", "to say on which address Gloo listens"),
}
"""Private attributes of torch's objects: the class that has each, and what for. A missing one raises ImportError."""

MARK_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Names on a module the parameters that DistributedDataParallel leaves alone, in torch as well."""
MARK_STEPS_IN_BACKWARD = "_in_backward_optimizers"
"""What torch sets on parameters whose optimizer steps within backward; without it, such a model is not refused."""
SCHEDULER_COUNTERS = frozenset({"_last_lr", "_step_count", "_is_initial", "_get_lr_called_within_step"})
"""Where schedulers count, beside their hyperparameters. With another one, a run would refuse its own resumption."""

OVERRIDDEN = {
    "torch.distributed.ProcessGroup": (  # the last four before torch 2.14
        *("_get_sequence_number_for_group", "_allgather_base", "_reduce_scatter_base"),
        *("_start_coalescing", "_end_coalescing"),
    ),
    "torch._C._distributed_c10d.Backend": ("_get_sequence_number_for_group", "_set_sequence_number_for_group"),
    "torch.distributed.elastic.agent.server.SimpleElasticAgent": (
        *("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"),  # abstract: a lost one is a TypeError
        "_exit_barrier",  # torch's own waits as long, and prints what it meets
        "_record_worker_events",  # torch's own looks for the failed rank among this node's
    ),
}
"""Private methods of torch's classes that ours replace."""


# ---- looking up ----------------------------------------------------------------------------------------------------


@functools.cache
def version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    import torch

    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def __getattr__(key: str) -> Any:
    if key not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {key!r}")
    name = NAMES[key]
    try:
        found = _find(name.path)
    except ImportError:
        if name.instead is None:
            raise missing(name.path, name.use) from None
        _warn_of(name)
        found = name.instead
    globals()[key] = found
    return found


def _find(path: str) -> Any:
    """Return what is at a path; modules on the way are imported.

    Raises:
        ImportError: It is not there.
    """
    names = path.split(".")
    found: Any = importlib.import_module(names[0])
    for i, name in enumerate(names[1:], 2):
        below = ".".join(names[:i])
        if below in sys.modules:  # torch.distributed has a function of the name of its module rendezvous
            found = sys.modules[below]
        else:
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(below)
    return found


def missing(path: str, use: str) -> ImportError:
    """Return the error of a name that this torch lacks."""
    import torch

    return ImportError(
        f"torch {torch.__version__} has no {path}, which phalanx needs {use}. Use a torch that this phalanx is tested "
        f"with, {_TESTED}, or a newer phalanx"
    )


def _warn_of(name: Name) -> None:
    _warn(f"has no {name.path}: {name.loses}")


def _warn(what: str) -> None:
    import torch

    warnings.warn(
        f"torch {torch.__version__} {what}. This phalanx is tested with torch {_TESTED}", RuntimeWarning, stacklevel=4
    )


def attribute_of(value: object, attribute: str) -> Any:
    """Return one of `ATTRIBUTES` of an object.

    Raises:
        ImportError: This torch's objects have none.
    """
    try:
        return getattr(value, attribute)
    except AttributeError:
        owner, use = ATTRIBUTES[attribute]
        raise missing(f"{owner}.{attribute}", use) from None


# ---- what takes several names --------------------------------------------------------------------------------------


def begin_event(name: str, inputs: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Open an event of the profiler with the shapes of `inputs`, and return what closes it, in whatever order.

    It ends on a thread of its own: so the profiler takes it for an asynchronous one, which need not nest in others.
    torch 2.11 would lose it.
    """
    try:
        enter, leave = __getattr__("record_function_enter"), __getattr__("record_function_exit")
    except ImportError:
        from torch.autograd.profiler import record_function

        _warn_of(NAMES["record_function_enter"])
        event = record_function(name)
        event.__enter__()
        return lambda: event.__exit__(None, None, None)
    opened = enter(name, *inputs)

    def close() -> None:
        if version() < (2, 13):
            return leave(opened)
        closer = threading.Thread(target=leave, args=(opened,))
        closer.start()
        closer.join()

    return close


def keep_from_compiler(codes: Iterable[CodeType]) -> None:
    """Have torch.compile run functions as they are; a graph that calls one breaks there."""
    try:
        strategy, action = __getattr__("FrameExecStrategy"), __getattr__("FrameAction")
        choose = __getattr__("set_code_exec_strategy")
    except ImportError:
        _warn_of(NAMES["set_code_exec_strategy"])
        return
    for code in codes:
        choose(code, strategy(action.SKIP, action.SKIP))


def gloo_options(**given: Any) -> Any:
    """Return options of ProcessGroupGloo: `timeout`, `threads`, `devices`."""
    options = __getattr__("GlooOptions")()
    for name, value in given.items():
        attribute_of(options, f"_{name}")
        setattr(options, f"_{name}", value)
    return options


@contextlib.contextmanager
def outside_of_workers() -> Iterator[None]:
    """Let ``get_worker_info()`` return None, as it does outside the workers of a DataLoader."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = __getattr__("worker_info"), None
    try:
        yield
    finally:
        worker._worker_info = info


def uncompiled(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that torch.compile has wrapped in `module`; None if it has not."""
    from torch import nn

    if type(module).__name__ != "OptimizedModule" and not hasattr(module, "_orig_mod"):
        return None
    inner = attribute_of(module, "_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


# ---- what torch does not tell --------------------------------------------------------------------------------------


def devices_of_new_group() -> dict[str, str]:
    """Return the devices of the group that torch is making, and the backend of each.

    A creator that returns a ProcessGroup ends torch's loop over the devices, and is not told the others. So they are
    read from torch's frames: from the nearest local variable, whatever its name, that is a BackendConfig.

    Raises:
        ImportError: There is none, and this machine has a device beside the CPU.
    """
    import torch
    import torch.distributed as dist

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, dist.BackendConfig):
                    return value.get_device_backend_map()
        frame = frame.f_back
    if torch.accelerator.is_available():
        raise missing("BackendConfig where it makes a group", "to serve other devices than the CPU")
    return {"cpu": "phalanx"}


def backend_argument(frame: FrameType) -> str | None:
    """Return the `backend` that ``init_process_group`` was given, "" for none, if that is what runs in `frame`.

    Neither torch's rendezvous nor a store is told the backend.
    """
    import torch.distributed as dist

    code = frame.f_code
    if code.co_name != "init_process_group" or code.co_filename != dist.distributed_c10d.__file__:
        return None
    if "backend" not in code.co_varnames:
        loses = NAMES["rendezvous_handlers"].loses
        _warn(f"does not tell the backend that init_process_group was given: {loses}")
        return None
    backend = str(frame.f_locals.get("backend") or "")
    return "" if backend == dist.Backend.UNDEFINED else backend  # what torch makes of None
