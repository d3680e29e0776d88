"""Routes a call of torch's to `Operations`: directly where nobody listens, otherwise through torch's dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from phalanx._torch.tensors import Overridden
from phalanx.backend.calls.flight import joined
from phalanx.backend.calls.memory import NotPlain, OtherDevice
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.work import PhalanxWork

HAS_PYTHON_BACKENDS = _torch.version() >= (2, 14)

# Name in torch -> (method of Operations, class of its options, number of arguments before them).
COLLECTIVES = {
    "broadcast": ("broadcast", c10d.BroadcastOptions, 1),
    "allreduce": ("allreduce", c10d.AllreduceOptions, 1),
    "allreduce_coalesced": ("allreduce_coalesced", c10d.AllreduceCoalescedOptions, 1),
    "reduce": ("reduce", c10d.ReduceOptions, 1),
    "allgather": ("allgather", c10d.AllgatherOptions, 2),
    "allgather_coalesced": ("allgather_coalesced", c10d.AllgatherOptions, 2),
    "all_gather_single": ("all_gather_single", c10d.AllgatherOptions, 2),
    "all_gather_single_coalesced": ("all_gather_single_coalesced", c10d.AllgatherOptions, 2),
    "gather": ("gather", c10d.GatherOptions, 2),
    "gather_single": ("gather_single", c10d.GatherOptions, 2),
    "gather_into_tensor": ("gather_single", c10d.GatherOptions, 2),
    "scatter": ("scatter", c10d.ScatterOptions, 2),
    "reduce_scatter": ("reduce_scatter", c10d.ReduceScatterOptions, 2),
    "reduce_scatter_single": ("reduce_scatter_single", c10d.ReduceScatterOptions, 2),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", c10d.ReduceScatterOptions, 2),
    "alltoall": ("alltoall", c10d.AllToAllOptions, 2),
    "all_to_all_single": ("all_to_all_single", c10d.AllToAllOptions, 4),
    "barrier": ("barrier", c10d.BarrierOptions, 0),
}
# Former names. Newer torch maps them to those above by itself, and would call these again from the base method.
if not HAS_PYTHON_BACKENDS:
    COLLECTIVES |= {
        "_allgather_base": COLLECTIVES["all_gather_single"],
        "allgather_into_tensor_coalesced": COLLECTIVES["all_gather_single_coalesced"],
        "_reduce_scatter_base": COLLECTIVES["reduce_scatter_single"],
        "reduce_scatter_tensor_coalesced": COLLECTIVES["reduce_scatter_single_coalesced"],
        "alltoall_base": COLLECTIVES["all_to_all_single"],
    }
MESSAGES = {"send": 3, "recv": 3, "recv_anysource": 2}  # numbers of arguments
_UNREACHED = ("gather_single", "gather_into_tensor")
"""Operations that torch's dispatcher does not lead to a Python backend: they go directly even if somebody listens."""


def _options(cls: type, extra: tuple[object, ...], named: dict[str, object]) -> object:
    """Return the options of a call, built from torch's shorthands (reduce op, root, timeout) if they are not given."""
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


def complete(name: str, args: tuple[Any, ...], named: dict[str, object]) -> tuple[Any, ...]:
    """Return the arguments of a collective with torch's defaults and shorthands spelled out."""
    method, options, num_args = COLLECTIVES[name]
    if len(args) == num_args + 1 and isinstance(args[-1], options):
        return args
    return (*_listed(method, args[:num_args]), _options(options, args[num_args:], named))


def _listed(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with torch's shorthand spelled out: ``allreduce(tensor)`` is ``allreduce([tensor])``."""
    if op in ("broadcast", "allreduce", "reduce") and isinstance(args[0], torch.Tensor):
        return ([args[0]],)
    if op in ("allgather", "gather") and isinstance(args[1], torch.Tensor):
        return ([args[0]] if args[0] and isinstance(args[0][0], torch.Tensor) else args[0], [args[1]])
    if op in ("scatter", "reduce_scatter") and isinstance(args[0], torch.Tensor):
        return ([args[0]], [args[1]] if args[1] and isinstance(args[1][0], torch.Tensor) else args[1])
    return args


_issued = threading.local()
"""The works that the backend returned to this thread while a call went through torch's dispatcher, which wraps them."""


def note_issued(work: PhalanxWork) -> None:
    """Remember a work that the backend returns to torch's dispatcher."""
    if (works := getattr(_issued, "works", None)) is not None:
        works.append(work)


def direct(run: Callable[..., Any], operations: Operations, args: tuple[Any, ...]) -> object:
    """Run an operation without torch's dispatcher.

    Raises:
        NotPlain: The dispatcher is needed.
    """
    try:
        return run(operations, *args)
    except Overridden:  # only then: entering this costs as much as checking a tensor
        with torch.DisableTorchFunctionSubclass():
            return run(operations, *args)


def _dispatchable(refusal: NotPlain) -> NotPlain:
    """Return the refusal if torch's dispatcher leads back here; raise it if that would lead to Gloo."""
    if HAS_PYTHON_BACKENDS:
        return refusal
    raise NotPlain(f"{refusal}, or use torch 2.14 or newer, which can unwrap some of these") from None


class _Dispatch:
    """Surrounds a call that goes through torch's dispatcher, which unwraps tensors and notifies listeners.

    Args:
        refusal: Reason why the call could not go directly: only the dispatcher may know what its tensors mean.
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
        """Return the backend's own work in place of torch's wrapper."""
        works = self._works
        if len(works) > 1:  # the dispatcher split the call, one operation for each inner tensor
            return joined(works)
        return works[0] if works else work


def entry_point(name: str) -> Callable[..., Any]:
    """Return the method of a process group that runs the operation of this name."""
    method, options, num_args = COLLECTIVES.get(name, (name, None, MESSAGES.get(name, 0)))
    base = None if name in _UNREACHED else getattr(ProcessGroup, name, None)
    run = getattr(Operations, method)

    def call(self: Any, *args: Any, **named: Any) -> object:
        refusal = None
        # Only torch knows the names of the arguments.
        if base is None or (len(args) >= num_args and self.goes_direct()):
            given = args
            if options is not None and (len(args) != num_args + 1 or not isinstance(args[-1], options)):
                given = complete(name, args, named)
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

    return call
