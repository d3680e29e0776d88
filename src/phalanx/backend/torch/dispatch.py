"""Routes a call of torch to `Operations`: through torch's dispatcher if something listens there, else directly.

The methods of a group are entry points of the core where the core has a short way (``csrc/python/entry_points.cpp``).
An entry point runs a blocking collective of plain tensors itself, and calls the function in this module for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from phalanx import _core, _torch
from phalanx._torch import is_profiling, num_dispatch_modes
from phalanx._torch.options import Layout
from phalanx._torch.tensors import Overridden
from phalanx.backend.calls.flight import joined
from phalanx.backend.calls.memory import NotPlain, OtherDevice
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.work import PhalanxWork, finished
from phalanx.backend.types import REDUCE_CODES

HAS_PYTHON_BACKENDS = _torch.version() >= (2, 14)


class Operation(NamedTuple):
    """An operation as torch calls it.

    Attributes:
        name: Name of the method in torch.
        run: Method of `Operations` that runs the operation.
        num_args: Number of arguments before the options.
        options: Class of the options; None if the operation has no options.
        is_led_here: Whether torch's dispatcher passes this operation to a Python backend. If not, the operation always
            goes directly.
    """

    name: str
    run: Callable[..., Any]
    num_args: int
    options: type | None = None
    is_led_here: bool = True


BROADCAST = Operation("broadcast", Operations.broadcast, 1, c10d.BroadcastOptions)
ALLREDUCE = Operation("allreduce", Operations.allreduce, 1, c10d.AllreduceOptions)
ALLREDUCE_COALESCED = Operation(
    "allreduce_coalesced", Operations.allreduce_coalesced, 1, c10d.AllreduceCoalescedOptions
)
REDUCE = Operation("reduce", Operations.reduce, 1, c10d.ReduceOptions)
ALLGATHER = Operation("allgather", Operations.allgather, 2, c10d.AllgatherOptions)
ALLGATHER_COALESCED = Operation("allgather_coalesced", Operations.allgather_coalesced, 2, c10d.AllgatherOptions)
ALL_GATHER_SINGLE = Operation("all_gather_single", Operations.all_gather_single, 2, c10d.AllgatherOptions)
ALL_GATHER_SINGLE_COALESCED = Operation(
    "all_gather_single_coalesced", Operations.all_gather_single_coalesced, 2, c10d.AllgatherOptions
)
GATHER = Operation("gather", Operations.gather, 2, c10d.GatherOptions)
GATHER_SINGLE = Operation("gather_single", Operations.gather_single, 2, c10d.GatherOptions, is_led_here=False)
SCATTER = Operation("scatter", Operations.scatter, 2, c10d.ScatterOptions)
REDUCE_SCATTER = Operation("reduce_scatter", Operations.reduce_scatter, 2, c10d.ReduceScatterOptions)
REDUCE_SCATTER_SINGLE = Operation(
    "reduce_scatter_single", Operations.reduce_scatter_single, 2, c10d.ReduceScatterOptions
)
REDUCE_SCATTER_SINGLE_COALESCED = Operation(
    "reduce_scatter_single_coalesced", Operations.reduce_scatter_single_coalesced, 2, c10d.ReduceScatterOptions
)
ALLTOALL = Operation("alltoall", Operations.alltoall, 2, c10d.AllToAllOptions)
ALL_TO_ALL_SINGLE = Operation("all_to_all_single", Operations.all_to_all_single, 4, c10d.AllToAllOptions)
BARRIER = Operation("barrier", Operations.barrier, 0, c10d.BarrierOptions)
SEND = Operation("send", Operations.send, 3)
RECV = Operation("recv", Operations.recv, 3)
RECV_ANYSOURCE = Operation("recv_anysource", Operations.recv_anysource, 2)


def _options(cls: type, extra: tuple[object, ...], named: dict[str, object]) -> object:
    """Return the options of a call; if none were passed, build them from the shorthands (reduce op, root, timeout)."""
    for value in (*extra, *named.values()):
        if isinstance(value, cls):
            return value
    opts = cls()
    for value in (*extra, *named.values()):
        if isinstance(value, timedelta):
            opts.timeout = value
        elif isinstance(value, int) and hasattr(opts, "rootRank"):
            opts.rootRank = value
        elif value is not None and hasattr(opts, "reduceOp"):
            opts.reduceOp = value
    return opts


def complete(operation: Operation, args: tuple[Any, ...], named: dict[str, object]) -> tuple[Any, ...]:
    """Return the arguments of a collective with torch's defaults and shorthands spelled out."""
    name, _, num_args, options, _ = operation
    assert options is not None
    if len(args) == num_args + 1 and isinstance(args[-1], options):
        return args
    return (*_listed(name, args[:num_args]), _options(options, args[num_args:], named))


def _listed(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with torch's shorthand spelled out: ``allreduce(tensor)`` is ``allreduce([tensor])``."""
    if name in _OF_TENSORS and isinstance(args[0], torch.Tensor):
        return ([args[0]],)
    if name in _TO_LISTS and isinstance(args[1], torch.Tensor):
        return ([args[0]] if args[0] and isinstance(args[0][0], torch.Tensor) else args[0], [args[1]])
    if name in _FROM_LISTS and isinstance(args[0], torch.Tensor):
        return ([args[0]], [args[1]] if args[1] and isinstance(args[1][0], torch.Tensor) else args[1])
    return args


_OF_TENSORS = ("broadcast", "allreduce", "reduce")
_TO_LISTS = ("allgather", "gather")
_FROM_LISTS = ("scatter", "reduce_scatter")


_issued = threading.local()
"""Works, by thread, that the backend returns during a call through torch's dispatcher; torch wraps them."""


def direct(run: Callable[..., Any], operations: Operations, args: tuple[Any, ...]) -> object:
    """Run an operation without torch's dispatcher.

    Raises:
        NotPlain: A tensor is not plain, so the dispatcher has to unwrap it.
    """
    try:
        return run(operations, *args)
    except Overridden:  # the guard below is entered only now, because it costs as much as checking a tensor
        with torch.DisableTorchFunctionSubclass():
            return run(operations, *args)


def _dispatchable(refusal: NotPlain) -> NotPlain:
    """Return the refusal if torch's dispatcher would call this backend again; raise it if Gloo would be called."""
    if HAS_PYTHON_BACKENDS:
        return refusal
    raise NotPlain(f"{refusal}, or use torch 2.14 or newer, which can unwrap some of these") from None


class _Dispatch:
    """Surrounds a call that goes through torch's dispatcher, which unwraps tensors and notifies listeners.

    Args:
        refusal: Reason why the call could not go directly, if that was tried; the dispatcher may be able to unwrap the
            call's tensors.
    """

    def __init__(self, refusal: NotPlain | None) -> None:
        self._refusal = refusal
        self._works: list[PhalanxWork] = []

    def __enter__(self) -> _Dispatch:
        self._outer, _issued.works = getattr(_issued, "works", None), self._works
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        _issued.works = self._outer
        if self._refusal is not None and kind in (NotImplementedError, RuntimeError, TypeError):
            raise kind(f"{self._refusal}\n{error}") from error

    def unwrap(self, work: object) -> object:
        """Return the backend's own work instead of `work`, torch's wrapper around it."""
        works = self._works
        if len(works) > 1:  # the dispatcher split the call, one operation for each inner tensor
            return joined(works)
        return works[0] if works else work


def entry_point(operation: Operation) -> Any:
    """Return the method of `PhalanxGroup` that runs an operation: a function, or an entry point of the core around it.

    Both look alike, even to `inspect`.
    """
    name, run, num_args, options, is_led_here = operation
    base = getattr(ProcessGroup, name, None) if is_led_here else None

    def call(self: Any, *args: Any, **named: Any) -> object:
        refusal = None
        # Named arguments go through torch's own method, which alone knows their names.
        if base is None or (len(args) >= num_args and self.goes_direct()):
            given = args
            if options is not None and (len(args) != num_args + 1 or not isinstance(args[-1], options)):
                given = complete(operation, args, named)
            try:
                return direct(run, self._operations, given)
            except NotPlain as error:
                if base is None:
                    raise
                refusal = _dispatchable(error)
            except OtherDevice as error:
                if base is None or error.type not in self.other_devices:
                    raise
        with _Dispatch(refusal) as dispatch:
            work = base(self, *args, **named)
        return dispatch.unwrap(work)

    method = _rerunnable(named_as(name, call), entry_point, operation)
    is_usual = getattr(Operations, run.__name__, None) is run  # false for a verified group, which runs another function
    layout = Layout.of(options) if is_usual and options is not None else None
    return method if layout is None else _core.entry_point(method, run.__name__, options, *layout)


_core.configure_entry_points(
    is_profiling, num_dispatch_modes, {int(op): code for op, (kernel, code) in REDUCE_CODES.items() if kernel == code}
)


def backend_method(operation: Operation) -> Any:
    """Return the method of `PhalanxBackend` that runs an operation for torch's dispatcher."""
    name, run, num_args, options, _ = operation

    def call(self: Any, *args: Any, **named: Any) -> object:
        if options is not None and len(args) != num_args + 1:  # called from Python; the dispatcher passes all arguments
            args = complete(operation, args, named)
        with torch.DisableTorchFunctionSubclass():
            # A blocking operation returns no work, but the Flight Recorder needs one to see that the operation is over.
            work = run(self._operations, *args) or finished([])
        if (works := getattr(_issued, "works", None)) is not None:
            works.append(work)
        return work

    return _rerunnable(named_as(name, call), backend_method, operation)


def _rerunnable(method: Any, make: Callable[[Operation], Any], operation: Operation) -> Any:
    """Give a method a function `with_run(change)`, which returns the method around ``change(operation.run)``."""
    method.with_run = lambda change: make(operation._replace(run=change(operation.run)))
    return method


def named_as(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Rename a function, for tracebacks, and for pybind11, which looks at the name when an override calls its base."""
    function.__code__ = function.__code__.replace(co_name=name)
    function.__name__ = name
    function.__qualname__ = f"PhalanxGroup.{name}"
    return function
