"""The two entrances through which torch reaches the operations.

Python callers (``dist.all_reduce``) go to the ``ProcessGroup``. C++ callers (the dispatcher, and with it profilers,
hooks and the Flight Recorder) go to the ``Backend`` that is registered on the group.

torch >= 2.14: :class:`PhalanxBackend` is the backend. :class:`PhalanxGroup` stands in front of it, because torch puts a
wrapper around the Work of a Python backend. The wrapper's ``is_completed()`` is always false, and its
``_source_rank()`` raises, so ``dist.recv()`` from any source could not work. The group returns the real Work, and saves
some 5 us when there is no hook, profiler, dispatch mode or debug wrapper. Older torch: a Python class can only be a
``ProcessGroup``, so :class:`PhalanxGroup` runs the operations itself, and contains a Gloo backend for code that asks
for a backend (FSDP2, DCP) and for the few C++ calls that cannot reach Python.

torch's Flight Recorder sees our calls only if ``TORCH_FR_BUFFER_SIZE`` is set. torch 2.15 turns the recorder on by
default, but it costs a Python backend about 10 us per operation, and our black box holds the same facts.

Before torch 2.14, `dist.monitored_barrier` refuses every backend that is not named gloo, so `groups` wraps it.

``tests/backend/_members.py`` lists the members that are implemented, and those that are refused, with messages. A group
must implement or refuse every member that torch adds, because some of torch's defaults call the Python class again,
endlessly. C++ callers look for some methods under their C++ names; these are defined twice.

A reconfigure changes a group's rank and size. Both classes return the rank and size of the operations. C++ callers,
such as the reducer of torch's DistributedDataParallel, get these numbers from the group, too, because torch calls
`getRank` and `getSize` of the group. Only a C++ extension that asks the backend itself would see the former numbers,
because these two methods are not virtual in a backend; nothing in torch does so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

from phalanx import _env, _torch
from phalanx._errors import KINDS, CollectiveTimeout, RankFailed
from phalanx._errors.facts import Peer
from phalanx._torch import is_profiling, num_dispatch_modes
from phalanx._torch.shrinking import can_shrink
from phalanx.backend.calls.collectives import UNSET, Blocking
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.work import PhalanxWork, end_threads
from phalanx.backend.handles import close_lobby
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
    named_as,
)
from phalanx.backend.torch.making import Maker
from phalanx.backend.windows.tensors import allocate_tensor, allocates_on
from phalanx.backend.windows.window import new_window

_TIME_IT = "run the collective between two calls of time.perf_counter(), or under torch.profiler"
_MAKE_ANEW = "destroy the group to free its memory, and make a new one: destroy_process_group(), init_process_group()"
_NO_MEMBERSHIP = (
    "this group keeps its ranks: reconfigure and shrink need torch 2.14 and a group with one backend, without "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL and without PHALANX_VERIFY"
)
_TorchFunctionDisabled = torch.DisableTorchFunctionSubclass
GroupName: Any = getattr(c10d, "GroupName", str)  # a NewType of str in newer torch


def refused(name: str, instead: str) -> Any:
    """Return a method for a feature of torch that phalanx lacks; its error names what to use instead."""

    def refuse(self: Any, *args: Any, **named: Any) -> NoReturn:
        where = self._operations.arguments(name).where()
        raise NotImplementedError(f"{where} is not supported by phalanx; {instead}")

    return named_as(name, refuse)


class _Common:
    """Methods that torch calls on groups and on backends alike."""

    _operations: Operations

    def getBackendName(self) -> str:
        """Return the name for C++ callers: not gloo, because torch's DDP would cast such a backend to ProcessGroupGloo.

        Before torch 2.14, the backend is a real ProcessGroupGloo (`InnerGloo`), so the cast is safe.
        """
        return "phalanx" if HAS_PYTHON_BACKENDS else self._operations.title

    def name(self) -> str:
        return self._operations.title

    def rank(self) -> int:
        return self._operations.ranks.rank

    def size(self) -> int:
        return self._operations.ranks.size

    @property
    def num_collectives(self) -> int:
        """Number of collectives that this rank has begun in the group."""
        return self._operations._core.seq

    @property
    def has_messages(self) -> bool:
        """Whether this rank has sent or received a message in the group."""
        return self._operations.num_messages > 0

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has called, whether or not they have begun.

        The number is the same on all ranks that are at the same point of the script.
        """
        return self._operations._core.issued

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the core counts from the start, so there is nothing to agree on."""

    def _enable_collectives_timing(self) -> None:
        """Do nothing, like Gloo: torch reads only NCCL's times."""

    @property
    def timeout(self) -> timedelta:
        """Timeout of operations that have none of their own."""
        return self._operations.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._operations.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Add to the timeouts of operations that start from now on, until the first of them is over."""
        self._operations.extend_timeout(timeout)

    def abort(self) -> None:
        self._operations.abort()

    @property
    def supports_window(self) -> bool:
        return True

    def new_window(self, tensor: torch.Tensor | None = None) -> Any:  # not torch's Window, which has no constructor
        """Return a window of the group; register `tensor` in it if given. Every rank must call this."""
        return new_window(self._operations, tensor)

    def supports_tensor_alloc(self, device: torch.device | str | int) -> bool:
        return allocates_on(device)

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return an uninitialized CPU tensor of shape ``(size,)`` in memory that the ranks of this host can map."""
        ranks = self._operations.ranks
        return allocate_tensor(size, dtype=dtype, device=device, rank=ranks.global_ranks[ranks.rank])

    def get_error(self) -> Any:
        """Return torch's code for the failure that ended the group; SUCCESS while it works. No other rank is asked."""
        kinds, failure = _torch.ErrorType, self._operations.abort_hooks.failure
        if failure is None:
            return kinds.REMOTE_ERROR if self._operations.is_failed else kinds.SUCCESS
        error = KINDS[failure.kind]
        if failure.by not in (None, Peer(rank=failure.rank)) or issubclass(error, RankFailed):
            return kinds.REMOTE_ERROR
        return kinds.TIMEOUT if issubclass(error, CollectiveTimeout) else kinds.COMM_ERROR

    @property
    def supports_abort_hooks(self) -> bool:
        return True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Register a function for this rank to call before it raises a failure of the group, and before ``abort()``."""
        self._operations.abort_hooks.register(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._operations.abort_hooks.unregister(hook_id)

    def _wait_for_pending_works(self) -> None:
        """Block until this rank's operations are over, whether they succeed or not."""
        self._operations.wait_for_all()

    _register_on_completion_hook = refused(
        "_register_on_completion_hook", "call get_future().then() on the work of an asynchronous call"
    )


class _OfBackends(_Common):
    """Methods that torch calls on backends alone."""

    maker: Maker

    def split(self, store: Store, ranks: list[int], opts: Any = None) -> Any:
        """Return the backend of the group of `ranks`.

        Raises:
            ValueError: This rank is not one of `ranks`; torch's C++ code does not accept None instead of a backend.
        """
        group = self.maker.split(ranks, *_timeout_and_name(opts), store)
        if group is None:
            where = self._operations.arguments("split").where()
            raise ValueError(f"{where}: this rank is not one of {list(ranks)}; use dist.split_group()")
        return group.backend

    def shutdown(self) -> None:
        self._operations.shutdown()
        let_go(self._operations)  # torch's C++ code shuts down only the backend of a group that it has made

    def merge(self, store: Store, opts: Any, rank: int, size: int) -> Any:
        """Return the backend of a group of the `size` ranks, perhaps from several jobs, that pass the same store."""
        return self.maker.merge(store, size, *_timeout_and_name(opts), rank).backend

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: unlike with NCCL, ranks outside a new group take no part in making it."""

    def get_comm(self) -> Any:
        """Return an object whose ``finalize()`` does nothing; torch calls it to destroy a torchcomms world."""
        return SimpleNamespace(finalize=lambda: None)

    def memory_stats(self) -> dict[str, int]:
        """Return the sizes of this host's segment, which groups may share: bytes in memory, and bytes mapped."""
        return self._operations.memory_stats()

    _start_time_estimate = refused("_start_time_estimate", _TIME_IT)
    _end_time_estimate = refused("_end_time_estimate", _TIME_IT)
    suspend = refused("suspend", _MAKE_ANEW)
    resume = refused("resume", _MAKE_ANEW)
    _no_allocator = refused("mem_allocator", "any CPU tensor is communicated where it lies, such as torch.empty()")
    mem_allocator = property(_no_allocator)


def _timeout_and_name(opts: Any) -> tuple[timedelta | None, str]:
    """Return the timeout and the name of a new group from a backend's options."""
    if opts is None:
        return None, ""
    return _torch.attribute_of(opts, "_timeout"), opts.group_name


class PhalanxGroup(_Common, ProcessGroup):
    """The process group that Python callers see.

    Args:
        store: Key-value store of this group alone; it holds nothing from an earlier group.
        operations: Operations of the group.
        global_ranks: Rank in the world of each rank of the group.
        build: `build_group` of this package, which makes the groups that are split off this one.

    Attributes:
        life_store: The argument `store`.
        maker: Maker of groups out of this one.
        backend: Backend registered for C++ callers.
        other_devices: Types of the devices whose tensors torch's dispatcher passes to another backend.
        processes: Identity of each member's process on this host, by its rank in the world.
        communicator_type: Class of the object that `phalanx.communicator` returns; None: `Communicator`.
    """

    communicator_type: Any = None

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
        self.maker = Maker(operations, store, global_ranks, build)
        self.backend: Any = None
        self.other_devices: set[str] = set()
        self.processes: Mapping[int, Sequence[int]] = {}
        self._pid = os.getpid()
        self._listened = False
        self._direct: bool | None = None if HAS_PYTHON_BACKENDS else True

    def _get_backend_name(self) -> str:
        return self._operations.title

    getRank, getSize = _Common.rank, _Common.size

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
        """Replace CPU tensors by their means over the ranks, in place and in one pass. Blocks.

        torch has no such operation. With it, data-parallel training need not copy gradients into buckets.

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
    def global_ranks(self) -> list[int]:
        """Rank in the world of each rank of the group."""
        return list(self._operations.ranks.global_ranks)

    def _require_membership(self) -> None:
        if not self.supports_reconfigure:  # torch raises if there are several backends
            raise NotImplementedError(_NO_MEMBERSHIP)

    def get_reconfigure_handle(self) -> str:
        """Return this rank's handle, with which other ranks can form a group; see `phalanx.backend.handles`."""
        self._require_membership()
        return str(self.backend.get_reconfigure_handle())

    def reconfigure(self, opts: Any) -> Any:
        """Give the group other ranks; see `phalanx.backend.membership`. Blocks, and returns a work that is over."""
        self._require_membership()
        return self.backend.reconfigure(opts)

    def moved(self, store: Store, processes: Mapping[int, Sequence[int]], global_ranks: list[int]) -> None:
        """Adopt the store, the processes and the ranks that a reconfigure has given the group."""
        self.life_store, self.processes = store, processes
        self.maker.moved(store, processes, global_ranks)
        self.backend.moved(store)

    @property
    def average_waited_s(self) -> float:
        """Seconds that the last `average_coalesced` waited for the last rank; always 0.0 if the group spans hosts."""
        return self._operations.average_waited_s

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._operations.monitored_barrier(Blocking(UNSET if timeout is None else timeout), wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if hasattr(ProcessGroup, "set_timeout"):  # exists from torch 2.15 on
            limit = timedelta(seconds=_env.seconds("timeout", timeout))  # bounded: a longer timeout overflows in C++
            ProcessGroup.set_timeout(self, limit)  # sets it for the backends of other devices, too

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # ignored: phalanx has one backend
    ) -> ProcessGroup | None:
        """Return a new group of `ranks`, which are ranks of this group; None on the ranks that are not among them."""
        group = self.maker.split(ranks, timeout, group_name or "")
        return group and _described(group, group_desc or f"{self.group_desc}:split")

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """Return a group of the `size` ranks, perhaps from several jobs, that call this with the same store."""
        group = self.maker.merge(store, size, timeout, group_name or "")
        return _described(group, group_desc or f"{self.group_desc}:merge")

    def abort(self) -> None:
        super().abort()
        if self.other_devices:
            ProcessGroup.abort(self)  # the backends of other devices

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        super()._add_ephemeral_timeout(timeout)
        torchs = super(_Common, self)
        if self.other_devices and hasattr(torchs, "_add_ephemeral_timeout"):  # from torch 2.15 on
            torchs._add_ephemeral_timeout(timeout)  # the backends of other devices

    def shutdown(self) -> None:
        self._operations.shutdown()
        if os.getpid() != self._pid:
            return  # forked: the inner Gloo's threads stayed in the parent, and destroying it would hang
        super().shutdown()
        let_go(self._operations)

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

    # Before 2.14, these older names must be implemented, too. Newer torch maps them to the names above on its own; if
    # they were defined there as well, torch's base methods would call them again.
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

        def get_group_store(self) -> Store:
            return self.life_store

        def _start_coalescing(self, device: torch.device | None = None) -> None:
            self._operations.start_coalescing()

        def _end_coalescing(self, device: torch.device | None = None) -> Any:
            return self._operations.end_coalescing()


def _described(group: PhalanxGroup, desc: str) -> PhalanxGroup:
    """Tell torch the name and the description of a group that was made from another one."""
    _torch.set_group_name(group, GroupName(group._operations.name))
    _torch.set_group_desc(group, desc)
    return group


class InnerGloo(_OfBackends, c10d.ProcessGroupGloo):
    """The backend of a group before torch 2.14: Gloo, except for the methods that are implemented in Python."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self._operations.set_timeout(timeout)


_kept: dict[Operations, PhalanxGroup] = {}
"""Groups that are not shut down. torch may refer to them only from C++, so this keeps their Python halves alive."""


_left: list[int] = []
"""`Operations.num_exchanges` of each group that was shut down: its messages and its collectives with data, together."""


def keep(group: PhalanxGroup) -> None:
    _kept[group._operations] = group


def let_go(operations: Operations) -> None:
    """Release a group that this rank has left; after the last one, end the threads and close the lobby. Idempotent."""
    group = _kept.get(operations)
    if group is not None and group._pid == os.getpid():  # otherwise forked: see `PhalanxGroup.shutdown`
        del _kept[operations]
        _left.append(operations.num_exchanges)
    if not _kept:
        end_threads()
        close_lobby()


def kept_groups() -> list[PhalanxGroup]:
    """Return the groups of this process that have not been shut down."""
    return list(_kept.values())


def num_exchanges() -> int:
    """Return the number of messages and of collectives with data begun here, in all groups, including past ones."""
    return sum(_left) + sum(group._operations.num_exchanges for group in kept_groups())


if HAS_PYTHON_BACKENDS:
    from phalanx._torch import C10dBackend

    class PhalanxBackend(_OfBackends, C10dBackend):
        """The backend that torch's dispatcher calls, for the devices of the group.

        Args:
            operations: Operations of the group.
            maker: Maker of groups out of this one.
        """

        def __init__(self, operations: Operations, maker: Maker) -> None:
            super().__init__(operations._rank, operations._size)
            self._operations, self.maker = operations, maker
            self.membership: Any = None  # a `Membership`; None: this group keeps its ranks
            self.brings: PhalanxGroup | None = None  # group that `shrink` has made with this backend

        @property
        def supports_reconfigure(self) -> bool:
            return self.membership is not None

        @property
        def supports_shrinking(self) -> bool:
            return self.membership is not None and can_shrink()

        def _members(self) -> Any:
            if self.membership is None:
                raise NotImplementedError(_NO_MEMBERSHIP)
            return self.membership

        def get_reconfigure_handle(self) -> str:
            return str(self._members().handle())

        def reconfigure(self, opts: Any) -> Any:
            return self._members().reconfigure(opts)

        def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
            return self._members().shrink(ranks_to_exclude, shrink_flags, opts_override)

        def moved(self, store: Store) -> None:
            """Note the store of the group's new ranks, after a reconfigure."""

        @property
        def options(self) -> C10dBackend.Options:
            return C10dBackend.Options("phalanx", self._operations.timeout)

        @property
        def supports_splitting(self) -> bool:
            return True

        @property
        def supports_coalescing(self) -> bool:
            return False  # not needed: messages of a batch make progress together anyway

        @property
        def supports_time_estimate(self) -> bool:
            return False  # torch's default would call this method again, endlessly

        _supports_time_estimate = supports_time_estimate  # torch 2.14 uses the name without the underscore

        def start_coalescing(self) -> None:
            self._operations.start_coalescing()

        def end_coalescing(self) -> object:
            return self._operations.end_coalescing()

        def monitored_barrier(self, timeout: Any = UNSET, wait_all_ranks: bool = False) -> None:
            is_given = isinstance(timeout, c10d.BarrierOptions)  # C++ passes the options instead of the timeout
            self._operations.monitored_barrier(timeout if is_given else Blocking(timeout), wait_all_ranks)

        registerAbortHook = _Common.register_abort_hook
        unregisterAbortHook = _Common.unregister_abort_hook
        getMemAllocator = _OfBackends._no_allocator

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


CLASSES = (_Common, _OfBackends, Maker, PhalanxGroup, PhalanxWork, *([PhalanxBackend] if HAS_PYTHON_BACKENDS else []))


def keep_from_compiler(*classes: type) -> None:
    """Keep torch.compile from tracing the methods of these classes."""
    members = [member for cls in classes for member in vars(cls).values()]
    _torch.keep_from_compiler(member.__code__ for member in members if isinstance(member, FunctionType))
