"""The two entrances through which torch reaches the operations.

torch has two entrances. Python callers (``dist.all_reduce``) go to the ``ProcessGroup``; C++ callers (the dispatcher,
and with it profilers, hooks and the Flight Recorder) go to the ``Backend`` that is registered on it.

torch >= 2.14: :class:`PhalanxBackend` is the backend. :class:`PhalanxGroup` stands in front of it because torch wraps
the Work that a Python backend returns in one whose ``is_completed()`` is always false and whose ``_source_rank()``
raises, so ``dist.recv()`` from any source could not work. The group returns the real Work, and saves some 5 us when
there is no hook, profiler, dispatch mode or debug wrapper. Older torch: a Python class can only be a ``ProcessGroup``,
so :class:`PhalanxGroup` runs the operations itself, and contains a Gloo backend for code that asks for a backend
(FSDP2, DCP) and for the few C++ calls that cannot reach Python.

torch's Flight Recorder is on only if ``TORCH_FR_BUFFER_SIZE`` is set. torch 2.15 would turn it on by default, which
costs a Python backend about 10 us per operation; our black box holds the same facts.

Before torch 2.14 `dist.monitored_barrier` refuses every backend that is not named gloo, so it is wrapped there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

from phalanx import _env, _torch
from phalanx._torch import is_profiling, num_dispatch_modes
from phalanx.backend.calls.collectives import UNSET, Blocking
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.work import PhalanxWork, end_threads
from phalanx.backend.torch.dispatch import (
    ALL_GATHER_SINGLE,
    ALL_GATHER_SINGLE_COALESCED,
    ALL_TO_ALL_SINGLE,
    ALLGATHER,
    ALLGATHER_COALESCED,
    ALLREDUCE,
    ALLREDUCE_COALESCED,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GATHER,
    GATHER_SINGLE,
    HAS_PYTHON_BACKENDS,
    RECV,
    RECV_ANYSOURCE,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    REDUCE_SCATTER_SINGLE_COALESCED,
    SCATTER,
    SEND,
    backend_method,
    entry_point,
)

_TorchFunctionDisabled = torch.DisableTorchFunctionSubclass
GroupName: Any = getattr(c10d, "GroupName", str)  # a NewType of str in newer torch


class _Common:
    """Methods that torch calls on groups and on backends alike."""

    _operations: Operations

    def getBackendName(self) -> str:
        """Return the name for C++ callers. torch's DDP would read a backend named gloo as a C++ ProcessGroupGloo."""
        return "phalanx" if HAS_PYTHON_BACKENDS else self._operations.title  # before torch 2.14 a C++ Gloo lives inside

    def name(self) -> str:
        return self._operations.title

    @property
    def num_collectives(self) -> int:
        """Number of collectives that this rank has begun in the group."""
        return self._operations._core.seq

    @property
    def has_messages(self) -> bool:
        """Whether this rank has sent or received a message in the group."""
        return self._operations.num_messages > 0

    def _get_sequence_number_for_group(self) -> int:
        return self.num_collectives

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the core counts from the start, so there is nothing to agree on."""

    def _enable_collectives_timing(self) -> None:
        """Do nothing, like Gloo: only the times of NCCL are ever read."""

    @property
    def timeout(self) -> timedelta:
        """Timeout of operations that have none of their own."""
        return self._operations.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._operations.set_timeout(timeout)

    def abort(self) -> None:
        self._operations.abort()


class PhalanxGroup(_Common, ProcessGroup):
    """The process group that Python callers see.

    Args:
        store: Key-value store of this group alone; it holds nothing of an earlier group.
        operations: Operations of the group.
        global_ranks: Rank in the world of each rank of the group.
        build: `build_group` of this package, which makes the groups that are split off this one.

    Attributes:
        life_store: The argument `store`.
        backend: Backend registered for C++ callers.
        other_devices: Types of the devices whose tensors torch's dispatcher passes to another backend.
        pids: Process id of each member on this host, by its rank in the world.
    """

    def __init__(
        self,
        store: Store,
        operations: Operations,
        global_ranks: list[int],
        build: Callable[..., PhalanxGroup],
    ) -> None:
        if HAS_PYTHON_BACKENDS:
            super().__init__(store, operations._rank, operations._size)
        else:  # of the base's constructors, only this one lets Python override methods
            super().__init__(operations._rank, operations._size)
        self.life_store = store
        self._operations = operations
        self._global_ranks = global_ranks
        self._build = build
        self.backend: Any = None
        self.other_devices: set[str] = set()
        self.pids: Mapping[int, int] = {}
        self._pid = os.getpid()
        self._num_splits = 0
        self._listened = False
        self._direct: bool | None = None if HAS_PYTHON_BACKENDS else True

    def _get_backend_name(self) -> str:
        return self._operations.title

    def goes_direct(self) -> bool:
        """Whether a call may bypass torch's dispatcher: there is no hook, profiler, dispatch mode or debug wrapper."""
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
        """Replace CPU tensors by their means over the ranks, in place and in one pass; blocks.
        torch has no such operation. It spares data-parallel training the copies of gradients into buckets.

        Args:
            tensors: Dense tensors of floating or complex dtypes, with the same shapes and dtypes on all ranks.
            marks: One more tensor to average, contiguous, with the dtype of one of `tensors`.
            with_squares: Whether to add up the squares of the means of `tensors` as well.

        Returns:
            The sum of squares, the same bits on all ranks; 0.0 without `with_squares`.
        """
        with _TorchFunctionDisabled():  # gradients may be of a class that overrides torch's functions
            return self._operations.average_coalesced(tensors, marks, with_squares=with_squares)

    @property
    def average_waited_s(self) -> float:
        """Seconds that the last `average_coalesced` waited until every rank had come; 0.0 between hosts."""
        return self._operations.average_waited_s

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._operations.monitored_barrier(Blocking(UNSET if timeout is None else timeout), wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if hasattr(ProcessGroup, "set_timeout"):  # from torch 2.15 on
            limit = timedelta(seconds=_env.seconds("timeout", timeout))  # bounded: longer ones overflow in C++
            ProcessGroup.set_timeout(self, limit)  # for the backends of other devices

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # phalanx has one backend
    ) -> ProcessGroup | None:
        """Return the group of `ranks`, numbered as in this group; None on the other ranks."""
        self._num_splits += 1
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{self._num_splits}"
        store = c10d.PrefixStore(f"split/{self._num_splits}/{ranks[0]}", self.life_store)
        group = self._build(
            store,
            ranks.index(self.rank()),
            len(ranks),
            name,
            [self._global_ranks[r] for r in ranks],
            timeout or self._operations.timeout,
        )
        _torch.set_group_name(group, GroupName(name))
        _torch.set_group_desc(group, group_desc or f"{self.group_desc}:split")
        return group

    def shutdown(self) -> None:
        self._operations.shutdown()
        if os.getpid() != self._pid:
            return  # forked: the inner Gloo's threads stayed in the parent, and destroying it would hang
        super().shutdown()
        if self in _kept:
            _kept.discard(self)
            _left.append(self._operations.num_exchanges)
        if not _kept:
            end_threads()

    # ---- what torch's front end calls ------------------------------------------------------------------------------

    broadcast = entry_point(BROADCAST)
    allreduce = entry_point(ALLREDUCE)
    allreduce_coalesced = entry_point(ALLREDUCE_COALESCED)
    reduce = entry_point(REDUCE)
    allgather = entry_point(ALLGATHER)
    allgather_coalesced = entry_point(ALLGATHER_COALESCED)
    all_gather_single = entry_point(ALL_GATHER_SINGLE)
    all_gather_single_coalesced = entry_point(ALL_GATHER_SINGLE_COALESCED)
    gather = entry_point(GATHER)
    gather_single = entry_point(GATHER_SINGLE)
    gather_into_tensor = entry_point(GATHER_SINGLE._replace(name="gather_into_tensor"))
    scatter = entry_point(SCATTER)
    reduce_scatter = entry_point(REDUCE_SCATTER)
    reduce_scatter_single = entry_point(REDUCE_SCATTER_SINGLE)
    reduce_scatter_single_coalesced = entry_point(REDUCE_SCATTER_SINGLE_COALESCED)
    alltoall = entry_point(ALLTOALL)
    all_to_all_single = entry_point(ALL_TO_ALL_SINGLE)
    barrier = entry_point(BARRIER)
    send = entry_point(SEND)
    recv = entry_point(RECV)
    recv_anysource = entry_point(RECV_ANYSOURCE)

    # Before 2.14 these older names must be implemented, too. Newer torch maps them to the names above by itself, and a
    # method here would be called again from the base method.
    if not HAS_PYTHON_BACKENDS:
        _allgather_base = entry_point(ALL_GATHER_SINGLE._replace(name="_allgather_base"))
        allgather_into_tensor_coalesced = entry_point(
            ALL_GATHER_SINGLE_COALESCED._replace(name="allgather_into_tensor_coalesced")
        )
        _reduce_scatter_base = entry_point(REDUCE_SCATTER_SINGLE._replace(name="_reduce_scatter_base"))
        reduce_scatter_tensor_coalesced = entry_point(
            REDUCE_SCATTER_SINGLE_COALESCED._replace(name="reduce_scatter_tensor_coalesced")
        )
        alltoall_base = entry_point(ALL_TO_ALL_SINGLE._replace(name="alltoall_base"))

        def _start_coalescing(self, device: torch.device | None = None) -> None:
            self._operations.start_coalescing()

        def _end_coalescing(self, device: torch.device | None = None) -> Any:
            return self._operations.end_coalescing()


class InnerGloo(c10d.ProcessGroupGloo):
    """The backend of a group before torch 2.14, where torch sets a timeout through it alone."""

    operations: Operations

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self.operations.set_timeout(timeout)


_kept: set[PhalanxGroup] = set()
"""Groups that are not shut down. torch may refer to them from C++ alone, so this keeps their Python halves alive."""


_left: list[int] = []
"""Number of operations with data of each group that was shut down."""


def keep(group: PhalanxGroup) -> None:
    _kept.add(group)


def kept_groups() -> list[PhalanxGroup]:
    """Return the groups of this process that have not been shut down."""
    return list(_kept)


def num_exchanges() -> int:
    """Return how many collectives with data and messages this process has begun, in all its groups, past ones too."""
    return sum(_left) + sum(group._operations.num_exchanges for group in kept_groups())


if HAS_PYTHON_BACKENDS:
    from phalanx._torch import C10dBackend

    class PhalanxBackend(_Common, C10dBackend):
        """The backend that torch's dispatcher calls, for the devices of the group."""

        def __init__(self, operations: Operations) -> None:
            super().__init__(operations._rank, operations._size)
            self._operations = operations

        @property
        def options(self) -> C10dBackend.Options:
            return C10dBackend.Options("phalanx", self._operations.timeout)

        @property
        def supports_splitting(self) -> bool:
            return True

        @property
        def supports_coalescing(self) -> bool:
            return False  # not needed: messages of a batch progress together anyway

        @property
        def supports_window(self) -> bool:
            return False  # defined because torch's default calls this method again, endlessly; so below

        supports_reconfigure = supports_shrinking = supports_window
        _supports_time_estimate = supports_time_estimate = supports_window  # torch 2.14 has no underscore

        def start_coalescing(self) -> None:
            self._operations.start_coalescing()

        def end_coalescing(self) -> object:
            return self._operations.end_coalescing()

        def monitored_barrier(self, timeout: Any = UNSET, wait_all_ranks: bool = False) -> None:
            is_given = isinstance(timeout, c10d.BarrierOptions)  # C++ passes the options in its place
            self._operations.monitored_barrier(timeout if is_given else Blocking(timeout), wait_all_ranks)

        def shutdown(self) -> None:
            self._operations.shutdown()

        # ---- what torch's dispatcher calls -------------------------------------------------------------------------

        broadcast = backend_method(BROADCAST)
        allreduce = backend_method(ALLREDUCE)
        allreduce_coalesced = backend_method(ALLREDUCE_COALESCED)
        reduce = backend_method(REDUCE)
        allgather = backend_method(ALLGATHER)
        allgather_coalesced = backend_method(ALLGATHER_COALESCED)
        all_gather_single = backend_method(ALL_GATHER_SINGLE)
        all_gather_single_coalesced = backend_method(ALL_GATHER_SINGLE_COALESCED)
        gather = backend_method(GATHER)
        gather_single = backend_method(GATHER_SINGLE)
        gather_into_tensor = backend_method(GATHER_SINGLE._replace(name="gather_into_tensor"))
        scatter = backend_method(SCATTER)
        reduce_scatter = backend_method(REDUCE_SCATTER)
        reduce_scatter_single = backend_method(REDUCE_SCATTER_SINGLE)
        reduce_scatter_single_coalesced = backend_method(REDUCE_SCATTER_SINGLE_COALESCED)
        alltoall = backend_method(ALLTOALL)
        all_to_all_single = backend_method(ALL_TO_ALL_SINGLE)
        barrier = backend_method(BARRIER)
        send = backend_method(SEND)
        recv = backend_method(RECV)
        recv_anysource = backend_method(RECV_ANYSOURCE)
        allreduce_sparse = allreduce


CLASSES = (_Common, PhalanxGroup, PhalanxWork, *([PhalanxBackend] if HAS_PYTHON_BACKENDS else []))


def keep_from_compiler(*classes: type) -> None:
    """Keep torch.compile from tracing the methods of these classes."""
    members = [member for cls in classes for member in vars(cls).values()]
    _torch.keep_from_compiler(member.__code__ for member in members if isinstance(member, FunctionType))
