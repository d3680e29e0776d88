"""Looks up torch's private names, and holds the functions that need several of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from phalanx._torch import version
from phalanx._torch.names import (
    ATTRIBUTES,
    HOOKS_OF_OPTIMIZER,
    MARK_IGNORED_BY_DDP,
    MARK_STEPS_IN_BACKWARD,
    MILESTONES_OF_SCHEDULER,
    NAMES,
    OVERRIDDEN,
    PARTS_OF_SCHEDULER,
    SCHEDULER_COUNTERS,
    Name,
)

if TYPE_CHECKING:  # not at run time: the import of torch runs our plugin, which imports this module
    import torch

__all__ = [
    "ATTRIBUTES",
    "HOOKS_OF_OPTIMIZER",
    "MARK_IGNORED_BY_DDP",
    "MARK_STEPS_IN_BACKWARD",
    "MILESTONES_OF_SCHEDULER",
    "NAMES",
    "OVERRIDDEN",
    "PARTS_OF_SCHEDULER",
    "SCHEDULER_COUNTERS",
]

_TESTED = "2.11 to 2.15"


def __getattr__(key: str) -> Any:
    if key not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {key!r}")
    name = NAMES[key]
    try:
        found = _find(name.path)
    except ImportError:
        if name.instead is None:
            raise missing(name.path, name.use) from None
        warn_of(name)
        found = name.instead
    globals()[key] = found
    return found


def _find(path: str) -> Any:
    """Return the object at a dotted path; import the modules along the path.

    Raises:
        ImportError: There is no such object.
    """
    names = path.split(".")
    found: Any = importlib.import_module(names[0])
    for i, name in enumerate(names[1:], 2):
        below = ".".join(names[:i])
        if below in sys.modules:  # torch.distributed.rendezvous is a module and a function; getattr finds the function
            found = sys.modules[below]
        else:
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(below)
    return found


def missing(path: str, use: str) -> ImportError:
    """Return the error for a name that this torch lacks."""
    import torch

    return ImportError(
        f"torch {torch.__version__} has no {path}, which phalanx needs {use}. Use a torch that this phalanx is tested "
        f"with, {_TESTED}, or a newer phalanx"
    )


def warn_of(name: Name) -> None:
    """Warn of what is lost because this torch lacks a name."""
    _warn(f"has no {name.path}: {name.loses}")


def _warn(what: str) -> None:
    import torch

    warnings.warn(
        f"torch {torch.__version__} {what}. This phalanx is tested with torch {_TESTED}", RuntimeWarning, stacklevel=5
    )


def attribute_of(value: object, attribute: str) -> Any:
    """Return one of `ATTRIBUTES` of an object.

    Raises:
        ImportError: The object lacks the attribute in this version of torch.
    """
    try:
        return getattr(value, attribute)
    except AttributeError:
        owner, use = ATTRIBUTES[attribute]
        raise missing(f"{owner}.{attribute}", use) from None


# ---- functions that need several names -----------------------------------------------------------------------------


def begin_event(name: str, inputs: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Open an event of the profiler with the shapes of `inputs`, and return a function that closes it.

    Events may be closed in any order: each is closed on another thread, so the profiler treats it as an asynchronous
    event, which need not nest in other events. torch before 2.13 would lose an event that is closed on another thread,
    so there the calling thread closes it.
    """
    try:
        enter, leave = __getattr__("record_function_enter"), __getattr__("record_function_exit")
    except ImportError:
        from torch.autograd.profiler import record_function

        warn_of(NAMES["record_function_enter"])
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
    """Keep torch.compile from compiling the functions with these code objects; a graph breaks at their calls."""
    try:
        strategy, action = __getattr__("FrameExecStrategy"), __getattr__("FrameAction")
        choose = __getattr__("set_code_exec_strategy")
    except ImportError:
        warn_of(NAMES["set_code_exec_strategy"])
        return
    for code in codes:
        choose(code, strategy(action.SKIP, action.SKIP))


def gloo_options(**given: Any) -> Any:
    """Return options for ProcessGroupGloo, with the given `timeout`, `threads` or `devices`."""
    options = __getattr__("GlooOptions")()
    for name, value in given.items():
        attribute_of(options, f"_{name}")
        setattr(options, f"_{name}", value)
    return options


@contextlib.contextmanager
def outside_of_workers() -> Iterator[None]:
    """Let ``get_worker_info()`` return None, as it does outside the workers of a DataLoader."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = attribute_of(worker, "_worker_info"), None
    try:
        yield
    finally:
        worker._worker_info = info


def uncompiled(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that torch.compile has wrapped in `module`; None if `module` is not such a wrapper."""
    from torch import nn

    if type(module).__name__ != "OptimizedModule" and not hasattr(module, "_orig_mod"):
        return None
    inner = attribute_of(module, "_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


# ---- facts for which torch has no API ------------------------------------------------------------------------------


def devices_of_new_group(own: str) -> dict[str, str]:
    """Return the devices of the group that torch is making, and the backend of each.

    torch calls a backend's creator in a loop over the devices. It passes the creator only one device, and the loop ends
    when the creator returns a ProcessGroup. So the devices are read from torch's stack: from the BackendConfig in the
    nearest frame of torch that has a local variable of this type, whatever its name.

    Args:
        own: Name of the backend whose creator calls this function.

    Raises:
        ImportError: There is no such variable, and this machine has an accelerator.
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
    return {"cpu": own}


def num_groups_made() -> int:
    """Return torch's count of the groups made so far, for processes that join later; 0 if no process can join later."""
    try:
        return int(__getattr__("world").group_count)
    except ImportError:
        return 0


def wrap_making_of_groups(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function with which torch makes every group."""
    from torch.distributed import distributed_c10d as c10d

    c10d._new_process_group_helper = wrap(__getattr__("new_process_group_helper"))


def begin_workers_with(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Make torch set a worker's signal handlers inside a context. Call this in a process before it becomes a worker."""
    from torch.utils.data._utils import signal_handling

    begin = __getattr__("begin_worker")

    def begin_worker(*args: Any) -> None:
        with around():
            begin(*args)

    signal_handling._set_worker_signal_handlers = begin_worker


class UnwatchedPid(int):
    """The pid of a loader's worker whose death torch's handler of SIGCHLD does not report."""


@functools.cache
def leave_to_phalanx() -> None:
    """Keep torch's handler of SIGCHLD from watching workers with an `UnwatchedPid`."""
    from torch.utils.data._utils import signal_handling

    watch = __getattr__("set_worker_pids")

    def watch_others(key: int, child_pids: tuple[int, ...]) -> None:
        watch(key, tuple(pid for pid in child_pids if not isinstance(pid, UnwatchedPid)))

    signal_handling._set_worker_pids = watch_others


def backend_argument(frame: FrameType) -> str | None:
    """Return the `backend` argument of the ``init_process_group`` call that a frame runs; "" if it was not given.

    For any other frame, return None. The argument is read from the frame because torch passes the backend neither to
    its rendezvous nor to a store.
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
    return "" if backend == dist.Backend.UNDEFINED else backend  # torch replaces None by UNDEFINED
