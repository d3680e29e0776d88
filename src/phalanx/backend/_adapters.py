"""How torch reaches the operations.

torch looks in two places. Python callers (``dist.all_reduce``) go to the ``ProcessGroup``; C++ callers (the
dispatcher, and with it profilers, hooks and the Flight Recorder) go to the ``Backend`` that is registered on it.

torch >= 2.14: :class:`PhalanxBackend` is the backend. :class:`PhalanxGroup` stands before it because torch wraps the
Work that a Python backend returns in one that answers neither ``is_completed()`` nor ``_source_rank()``: it hands
out the real one, and takes a shorter way where nobody listens.
Older torch: a Python class can only be a ``ProcessGroup``. :class:`PhalanxGroup` runs the operations itself, and an
inner Gloo backend stands for those who ask for one (FSDP2, DCP) and for the few C++ calls that cannot reach Python.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

from phalanx import _env, _torch
from phalanx._tensors import Overridden
from phalanx._torch import is_profiling, num_dispatch_modes
from phalanx.backend._flight import joined
from phalanx.backend._memory import NotPlain
from phalanx.backend._ops import Operations
from phalanx.backend._work import PhalanxWork, end_threads, finished

_TorchFunctionDisabled = torch.DisableTorchFunctionSubclass
GroupName: Any = getattr(c10d, "GroupName", str)  # a NewType of str in newer torch
HAS_PYTHON_BACKENDS = _torch.version() >= (2, 14)

# Name in torch -> (method of Operations, class of its options, how many arguments come before them).
_COLLECTIVES = {
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
    "scatter": ("scatter", c10d.ScatterOptions, 2),
    "reduce_scatter": ("reduce_scatter", c10d.ReduceScatterOptions, 2),
    "reduce_scatter_single": ("reduce_scatter_single", c10d.ReduceScatterOptions, 2),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", c10d.ReduceScatterOptions, 2),
    "alltoall": ("alltoall", c10d.AllToAllOptions, 2),
    "all_to_all_single": ("all_to_all_single", c10d.AllToAllOptions, 4),
    "barrier": ("barrier", c10d.BarrierOptions, 0),
}
# Former names. Newer torch routes them to the ones above itself, and would call these again from the base method.
if not HAS_PYTHON_BACKENDS:
    _COLLECTIVES |= {
        "_allgather_base": _COLLECTIVES["all_gather_single"],
        "allgather_into_tensor_coalesced": _COLLECTIVES["all_gather_single_coalesced"],
        "_reduce_scatter_base": _COLLECTIVES["reduce_scatter_single"],
        "reduce_scatter_tensor_coalesced": _COLLECTIVES["reduce_scatter_single_coalesced"],
        "alltoall_base": _COLLECTIVES["all_to_all_single"],
    }
_MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv_anysource"}


def _options(cls: type, extra: tuple[object, ...], named: dict[str, object]) -> object:
    """Return the options of a call: given whole, or as torch's shorthands (reduce op, root, timeout)."""
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


def _listed(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch's shorthand ``group.allreduce(tensor)`` stands for ``group.allreduce([tensor])``."""
    if op in ("broadcast", "allreduce", "reduce") and isinstance(args[0], torch.Tensor):
        return ([args[0]],)
    if op in ("allgather", "gather") and isinstance(args[1], torch.Tensor):
        return ([args[0]] if args[0] and isinstance(args[0][0], torch.Tensor) else args[0], [args[1]])
    if op in ("scatter", "reduce_scatter") and isinstance(args[0], torch.Tensor):
        return ([args[0]], [args[1]] if args[1] and isinstance(args[1][0], torch.Tensor) else args[1])
    return args


_issued = threading.local()
"""The works that the backend returned to this thread: what comes out of the dispatcher is a wrapper of the last."""


class PhalanxGroup(ProcessGroup):
    """The process group that Python callers see.

    Args:
        store: Key-value store of the group, for groups split off it.
        operations: What it does.
        inner: The backend registered for C++ callers.
        global_ranks: Number of each rank in the world.
        build: `build_group` of this package, for groups split off it.
    """

    def __init__(
        self,
        store: Store,
        operations: Operations,
        timeout: timedelta,
        global_ranks: list[int],
        build: Callable[..., PhalanxGroup],
    ) -> None:
        if HAS_PYTHON_BACKENDS:
            super().__init__(store, operations._rank, operations._size)
        else:  # only this constructor makes an object that Python can override
            super().__init__(operations._rank, operations._size)
        self._store = store
        self._operations = operations
        self._timeout = timeout
        self._global_ranks = global_ranks
        self._build = build
        self.backend: Any = None
        self._pid = os.getpid()
        self._num_splits = 0
        self._listened = False
        self._direct: bool | None = None if HAS_PYTHON_BACKENDS else True

    def getBackendName(self) -> str:
        return "phalanx"

    # ---- which way -------------------------------------------------------------------------------------------------

    def _goes_direct(self) -> bool:
        """True if nobody listens to the dispatcher: hooks, profilers, dispatch modes, the debug wrapper."""
        if self._direct is None:
            self._direct = not (
                self._listened or _env.wants_torchs_records() or c10d.get_debug_level() == c10d.DebugLevel.DETAIL
            )
        if not self._direct or not HAS_PYTHON_BACKENDS:
            return self._direct
        return not num_dispatch_modes() and not is_profiling()

    def register_pre_hook(self, *args: Any) -> None:
        self._listened, self._direct = True, None
        super().register_pre_hook(*args)

    def register_post_hook(self, *args: Any) -> None:
        self._listened, self._direct = True, None
        super().register_post_hook(*args)

    def average_coalesced(
        self, tensors: list[torch.Tensor], marks: torch.Tensor, *, with_squares: bool = False
    ) -> float:
        """Replace CPU tensors by their means over the ranks, in one pass over where they lie; blocks.

        What torch has no name for: data parallel training prefers it to copying gradients into buckets.

        Args:
            tensors: Dense, any shapes and floating or complex dtypes; the same on all ranks.
            marks: One more tensor to average, of the dtype of one of `tensors`, contiguous.
            with_squares: Add up the squares of the means of `tensors` on the way.

        Returns:
            That sum of squares, the same bits on all ranks; 0.0 if not asked for.
        """
        with _TorchFunctionDisabled():  # gradients may be of a class that answers in torch's place
            return self._operations.average_coalesced(tensors, marks, self._timeout, with_squares=with_squares)

    # ---- what is not a collective ----------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        opts = c10d.BarrierOptions()
        opts.timeout = self._timeout if timeout is None else timeout
        self._operations.monitored_barrier(opts, wait_all_ranks)

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # phalanx has one
    ) -> ProcessGroup | None:
        """Return the group of `ranks` (numbers in this group), or None on ranks outside it."""
        self._num_splits += 1
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{self._num_splits}"
        store = c10d.PrefixStore(f"split/{self._num_splits}/{ranks[0]}", self._store)
        group = self._build(
            store,
            ranks.index(self.rank()),
            len(ranks),
            name,
            [self._global_ranks[r] for r in ranks],
            timeout or self._timeout,
        )
        _torch.set_group_name(group, GroupName(name))
        _torch.set_group_desc(group, group_desc or f"{self.group_desc}:split")
        return group

    def _get_sequence_number_for_group(self) -> int:
        return self._operations._core.seq

    def _set_sequence_number_for_group(self) -> None:
        """The core counts from the start; nothing to agree on."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._operations.set_timeout(timeout)

    def abort(self) -> None:
        self._operations.abort()

    def shutdown(self) -> None:
        self._operations.shutdown()
        if os.getpid() != self._pid:
            return  # forked: the threads of the inner backend stayed in the parent, and destroying it would not end
        super().shutdown()
        _kept.discard(self)
        if not _kept:
            end_threads()

    # Before 2.14 nothing else answers these.
    if not HAS_PYTHON_BACKENDS:

        def _start_coalescing(self, device: torch.device | None = None) -> None:
            self._operations.start_coalescing()

        def _end_coalescing(self, device: torch.device | None = None) -> Any:
            return self._operations.end_coalescing()


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Rename a function, for tracebacks and for pybind11: it knows a call of the base method by its frame's name."""
    function.__code__ = function.__code__.replace(co_name=name)
    function.__name__ = name
    function.__qualname__ = f"PhalanxGroup.{name}"
    return function


def direct(run: Callable[..., Any], operations: Operations, args: tuple[Any, ...]) -> object:
    """Run an operation without torch's dispatcher.

    Raises:
        NotPlain: The dispatcher is needed.
    """
    try:
        return run(operations, *args)
    except Overridden:  # not always: entering this costs as much as looking at a tensor
        with _TorchFunctionDisabled():
            return run(operations, *args)


def _dispatchable(refusal: NotPlain) -> NotPlain:
    """Return the refusal where torch's dispatcher leads back here, and raise it where it would lead to Gloo."""
    if HAS_PYTHON_BACKENDS:
        return refusal
    raise NotPlain(f"{refusal}, or use torch 2.14 or newer, which can unwrap some of these") from None


class _Dispatch:
    """What surrounds a call of an operation by torch's dispatcher, which unwraps tensors and tells those who listen.

    Args:
        refusal: Why the call could not go directly: its tensors mean something to the dispatcher, or to nobody.
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
        """Return the work that the backend returned, of which torch returned a wrapper."""
        works = self._works
        if len(works) > 1:  # the dispatcher made several operations of it, one for each tensor inside
            return joined(works)
        return works[0] if works else work


def _collective(name: str) -> Callable[..., Any]:
    method, options, num_args = _COLLECTIVES[name]
    base = getattr(ProcessGroup, name, None)
    run = getattr(Operations, method)

    def call(self: PhalanxGroup, *args: Any, **named: Any) -> object:
        refusal = None
        if base is None or self._goes_direct():
            given = args
            if len(args) != num_args + 1 or not isinstance(args[-1], options):
                given = (*_listed(method, args[:num_args]), _options(options, args[num_args:], named))
            try:
                return direct(run, self._operations, given)
            except NotPlain as error:
                if base is None:
                    raise
                refusal = _dispatchable(error)
        with _Dispatch(refusal) as dispatch:
            work = base(self, *args, **named)
        return dispatch.unwrap(work)

    return _named(call, name)


def _message(name: str) -> Callable[..., Any]:
    base = getattr(ProcessGroup, name)
    run = getattr(Operations, _MESSAGES[name])

    def call(self: PhalanxGroup, *args: Any) -> object:
        refusal = None
        if self._goes_direct():
            try:
                return direct(run, self._operations, args)
            except NotPlain as error:
                refusal = _dispatchable(error)
        with _Dispatch(refusal) as dispatch:
            work = base(self, *args)
        return dispatch.unwrap(work)

    return _named(call, name)


for _name in _COLLECTIVES:
    setattr(PhalanxGroup, _name, _collective(_name))
for _name in _MESSAGES:
    setattr(PhalanxGroup, _name, _message(_name))

_kept: set[PhalanxGroup] = set()
"""Groups that torch refers to from C++ alone: their Python half must not be collected before they are shut down."""


def keep(group: PhalanxGroup) -> None:
    _kept.add(group)


def kept_groups() -> list[PhalanxGroup]:
    """Return the groups of this process that were not shut down."""
    return list(_kept)


if HAS_PYTHON_BACKENDS:
    from phalanx._torch import C10dBackend

    class PhalanxBackend(C10dBackend):
        """The backend that torch's dispatcher calls, for the devices of the group."""

        def __init__(self, operations: Operations, timeout: timedelta) -> None:
            super().__init__(operations._rank, operations._size)
            self._operations = operations
            self._options = C10dBackend.Options("phalanx", timeout)

        def getBackendName(self) -> str:
            return "phalanx"

        @property
        def options(self) -> C10dBackend.Options:
            return self._options

        @property
        def supports_splitting(self) -> bool:
            return True

        @property
        def supports_coalescing(self) -> bool:
            return False  # messages of a batch progress together anyway

        def start_coalescing(self) -> None:
            self._operations.start_coalescing()

        def end_coalescing(self) -> object:
            return self._operations.end_coalescing()

        def monitored_barrier(self, opts: object, wait_all_ranks: bool = False) -> None:
            self._operations.monitored_barrier(opts, wait_all_ranks)

        def _get_sequence_number_for_group(self) -> int:
            return self._operations._core.seq

        def _set_sequence_number_for_group(self) -> None:
            """The core counts from the start; nothing to agree on."""

        def set_timeout(self, timeout: timedelta) -> None:
            self._operations.set_timeout(timeout)

        def abort(self) -> None:
            self._operations.abort()

        def shutdown(self) -> None:
            self._operations.shutdown()

    def _operation(method: str) -> Callable[..., Any]:
        run = getattr(Operations, method)

        def call(self: PhalanxBackend, *args: Any) -> object:
            with _TorchFunctionDisabled():
                # A blocking operation has no work, but the Flight Recorder learns from one that it is over.
                work = run(self._operations, *args) or finished([])
            if (works := getattr(_issued, "works", None)) is not None:
                works.append(work)
            return work

        return _named(call, method)

    for _method in {*(entry[0] for entry in _COLLECTIVES.values()), *_MESSAGES.values()}:
        setattr(PhalanxBackend, _method, _operation(_method))


def keep_from_compiler() -> None:
    """Have torch.compile run the methods of groups and works as they are."""
    classes = (PhalanxGroup, PhalanxWork, *([PhalanxBackend] if HAS_PYTHON_BACKENDS else []))
    members = [member for cls in classes for member in vars(cls).values()]
    _torch.keep_from_compiler(member.__code__ for member in members if isinstance(member, FunctionType))
