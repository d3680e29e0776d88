"""Creates a group of the ``phalanx`` backend when torch asks for one.

When the process ends, groups that the script did not destroy are kept alive; after an error, this rank leaves all
groups and tells the peers why.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

from phalanx import _core, _torch
from phalanx._env import seconds, verifies_every
from phalanx._errors import PhalanxError
from phalanx._settings import GroupOptions, Settings, read_settings
from phalanx._text import class_and_message
from phalanx._torch.replace import say_once
from phalanx._torch.shrinking import can_shrink, return_own_groups
from phalanx.backend.calls.ops import Formless, Operations
from phalanx.backend.calls.work import settle_futures
from phalanx.backend.failures.core_failures import from_core, report_core_stall
from phalanx.backend.failures.members import Ranks
from phalanx.backend.hosts.bridged import BridgedGroup
from phalanx.backend.hosts.joining import Joined, join_group
from phalanx.backend.hosts.links import closed_at_exec
from phalanx.backend.membership import Membership, reconfigures
from phalanx.backend.torch.adapters import (
    CLASSES,
    GroupName,
    InnerGloo,
    PhalanxGroup,
    keep,
    keep_from_compiler,
    kept_groups,
    num_exchanges,
)
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.debugging import attached
from phalanx.failure.last_words import tell_when_ended
from phalanx.record import writer
from phalanx.record.sites import call_site, shown_file
from phalanx.rendezvous.launched import met_in
from phalanx.rendezvous.solo import count_exchanges

__all__ = ["PhalanxGroup"]

GLOO = "gloo"


_core.configure(call_site, shown_file, from_core, report_core_stall)


def _end_as_member() -> None:
    """Keep groups alive that the script did not destroy, so that this rank does not leave them normally at exit.

    If a script raises or exits early, its peers must see the exit code and not a rank that left its groups, and the
    launcher must learn how far the script got. Native threads run until the process is gone, so their memory must stay.
    """
    settle_futures()
    _core.end_stall_reports()
    for group in kept_groups():
        group._operations.note_progress()
        core = group._operations.core
        group._operations.end_threads()
        if isinstance(core, BridgedGroup):
            core.end_threads()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # also keeps its running operations and their tensors


def _serve_monitored_barrier() -> None:
    """Make torch's ``monitored_barrier`` accept our groups: before 2.14, it refuses every backend but gloo."""
    torchs = c10d.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        target = group or dist.group.WORLD
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        if isinstance(target, PhalanxGroup):
            target.monitored_barrier(timeout, wait_all_ranks)
        elif dist.get_rank(target) >= 0:
            torchs(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


@functools.cache
def _begin() -> None:
    """Run the set-up that a process needs once it makes a group, but not if it only imports this package."""
    atexit.register(_end_as_member)
    attached.listen()  # lets a debugger attach; a rank that the launcher forked listens already
    keep_from_compiler(*CLASSES)
    if HAS_PYTHON_BACKENDS:
        count_exchanges(num_exchanges)  # in older torch, some C++ calls would be missed: they bypass us
        if can_shrink():
            return_own_groups(lambda backend: getattr(backend, "brings", None))
    else:
        _serve_monitored_barrier()


def leave_groups(error: BaseException) -> None:
    """Leave every group of this process because of an error, and report the error to the peers."""
    why = class_and_message(error).partition("\n")[0]
    for group in kept_groups():
        group._operations.shutdown(why)


def create_group(options: Any, backend_options: Any, *, own: str = "phalanx") -> ProcessGroup | None:
    """Create the group that ``init_process_group`` or ``new_group`` asks for; torch calls this.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name, global ranks.
        backend_options: The user's ``pg_options``: `GroupOptions`, or torch's options for another device's backend.
        own: Name of the requested backend: ``gloo`` where phalanx replaces Gloo.

    Returns:
        The group; None if Gloo itself must make the group. That happens only where phalanx replaces Gloo: if the
        program asked for Gloo only on devices other than the CPU, or if the group awaits its ranks and phalanx does not
        support that.
    """
    devices = _torch.devices_of_new_group(own)
    if devices.get("cpu") != own and own == GLOO:
        return None
    given = backend_options if isinstance(backend_options, GroupOptions) else None
    others = {device: backend for device, backend in devices.items() if backend != own}
    awaits_ranks = getattr(options, "enable_reconfigure", False)  # exists from torch 2.14 on
    if awaits_ranks and (others or not reconfigures() or verifies_every(_settings(given).verify)):
        _refuse_without_ranks(own)
        return None
    tell_when_ended(writer.note)
    size = options.group_size
    global_ranks = list(options.global_ranks_in_group) or list(range(size))
    is_world = not (options.global_ranks_in_group or dist.is_initialized())
    parent = dist.group.WORLD if options.global_ranks_in_group else None
    processes = parent.processes if isinstance(parent, PhalanxGroup) else met_in(options.store) if is_world else {}
    name = "default" if is_world else options.group_id
    group = build_group(
        options.store,
        options.group_rank,
        size,
        name,
        global_ranks,
        options.timeout,
        given,
        displayed=own,
        devices=[device for device, backend in devices.items() if backend == own],
        processes=processes,
        numbers_itself=not options.global_ranks_in_group,
        awaits_ranks=awaits_ranks,
    )
    if others:
        _add_devices(group, others, options, None if given else backend_options)
    return group


def build_group(
    store: Store,
    rank: int,
    size: int,
    name: str,
    global_ranks: list[int],
    timeout: timedelta,
    options: GroupOptions | None = None,
    *,
    displayed: str,
    devices: Sequence[str],
    processes: Mapping[int, Sequence[int]],
    op: str = "join",
    numbers_itself: bool = False,
    awaits_ranks: bool = False,
) -> PhalanxGroup:
    """Join the group and return it, with a backend registered for its devices.

    Args:
        displayed: Name of the backend that programs see: ``gloo`` where phalanx replaces Gloo.
        devices: Types of devices whose tensors the group accepts; Gloo itself handles tensors on a GPU.
        processes: Known members on this host, by rank in the world: pid, start time (0: unknown) and pid namespace.
        op: Purpose of the meeting, in messages: ``join`` or ``shrink``.
        numbers_itself: Whether the group's own ranks are the ranks of the world.
        awaits_ranks: Whether the group has no ranks until its `reconfigure` is called.
    """
    _begin()
    writer.begin(global_ranks[rank], size)
    if awaits_ranks:
        core: Any = Formless(name, "has no ranks yet: call dist._reconfigure() on each of them")
        joined = Joined(core, None, store, processes, life="", num_groups=0, settings=_settings(options))
    else:
        joined = join_group(
            store,
            rank,
            size,
            name,
            global_ranks,
            timeout.total_seconds(),
            options,
            is_in_place=displayed == GLOO,
            processes=processes,
            op=op,
        )
    every = verifies_every(joined.settings.verify)
    ranks = Ranks(rank, size, global_ranks)
    operations_of: Any = _verified().VerifiedOperations if every else Operations
    operations = operations_of(joined.core, joined.segment, name, ranks, timeout)
    operations.title = displayed
    if every:
        operations.verify(c10d.PrefixStore("verify", joined.store), every, joined.settings.silence_s)
    build = functools.partial(build_group, displayed=displayed, devices=devices, processes=joined.processes)
    group_of = _verified().VerifiedGroup if every else PhalanxGroup
    group: PhalanxGroup = group_of(joined.store, operations, global_ranks, build)
    group.processes = joined.processes
    _give_backend(group, timeout, devices)
    if HAS_PYTHON_BACKENDS and reconfigures() and not every:
        group.backend.membership = Membership(group, options, numbers_itself, joined.life)
    keep(group)
    return group


def _give_backend(group: PhalanxGroup, timeout: timedelta, devices: Sequence[str]) -> None:
    """Give a group its backend, registered for `devices`, the types of devices whose tensors the group accepts."""
    limit = timedelta(seconds=seconds("timeout", timeout))  # capped, because Gloo's clock would overflow
    is_gloo = group._operations.title == GLOO or not HAS_PYTHON_BACKENDS
    kind = ProcessGroup.BackendType.GLOO if is_gloo else ProcessGroup.BackendType.CUSTOM
    backend = (_python_backend if HAS_PYTHON_BACKENDS else _inner_gloo)(group, group.life_store, limit)
    _torch.set_default_backend(group, kind)
    for device in devices:
        _torch.register_backend(group, torch.device(device), kind, backend)
    group.other_devices |= {*devices} - {"cpu"}


def _settings(options: GroupOptions | None) -> Settings:
    return (options or GroupOptions()).over(read_settings())


def _refuse_without_ranks(own: str) -> None:
    """Let Gloo make a group that has no ranks yet, if the program asked for Gloo.

    Raises:
        PhalanxError: The program asked for phalanx.
    """
    why = "it needs a group with one backend, without TORCH_DISTRIBUTED_DEBUG=DETAIL and without PHALANX_VERIFY"
    if own != GLOO:
        raise PhalanxError(
            f"init_process_group(enable_reconfigure=True): {why}. Unset them, or name one backend",
            op="join",
            entry="reconfigure",
        )
    say_once(f"a group with enable_reconfigure stays on Gloo: {why}")


def _python_backend(group: PhalanxGroup, store: Store, limit: timedelta) -> Any:
    """Give a group its backend; return the object for C++ callers (from torch 2.14 on).

    That object is the backend itself, or torch's debug wrapper around it.
    """
    from phalanx.backend.torch.adapters import PhalanxBackend

    operations = group._operations
    is_gloo = operations.title == GLOO
    cls: Any = _gloo_shaped() if is_gloo else PhalanxBackend
    if type(operations) is not Operations:
        cls = _verified().verified(cls)
    # The wrapper refers only to the C++ half of the backend; the group keeps the Python half, which does all the work.
    group.backend = cls(operations, group.maker, *((store, group.global_ranks) if is_gloo else ()))
    if c10d.get_debug_level() != c10d.DebugLevel.DETAIL or not c10d.is_gloo_available():
        return group.backend
    ranks = operations.ranks
    with closed_at_exec():
        return _torch.create_process_group_wrapper(group.backend, operations.name, store, ranks.rank, ranks.size, limit)


def _inner_gloo(group: PhalanxGroup, store: Store, limit: timedelta) -> Any:
    """Give a group a Gloo backend and return it: before torch 2.14, C++ callers can reach no other backend."""
    rank, size = group._operations.ranks.rank, group._operations.ranks.size
    with closed_at_exec():
        backend = InnerGloo(c10d.PrefixStore("inner", store), rank, size, timeout=limit)
    backend._operations, backend.maker = group._operations, group.maker
    group.backend = backend
    # Each rank waits until all are connected. If a rank continued and exited earlier, others would see a lost
    # connection.
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{r}" for r in range(size)], limit)
    return backend


@functools.cache
def _verified() -> Any:
    """Import and return the module with the classes of verified groups; other groups never need it."""
    from phalanx.backend.verify import verified

    return verified


@functools.cache
def _gloo_shaped() -> Any:
    from phalanx.backend.torch.gloo_shape import GlooShaped

    keep_from_compiler(GlooShaped)
    return GlooShaped


def _add_devices(group: PhalanxGroup, others: dict[str, str], options: Any, backend_options: Any) -> None:
    """Let torch create the backends of the other devices in a separate group, and register them on `group`."""
    config = ",".join(f"{device}:{backend}" for device, backend in others.items())
    ranks = list(options.global_ranks_in_group)
    beside, _ = _torch.new_process_group_helper(
        options.group_size,
        options.group_rank,
        ranks,
        config,
        c10d.PrefixStore("beside", group.life_store),
        GroupName(f"{options.group_id}:{config}"),
        backend_options,
        timeout=options.timeout,
    )
    assert isinstance(beside, ProcessGroup)  # not a NON_GROUP_MEMBER: this rank is a member
    for device in others:
        backend = _torch.get_backend(beside, torch.device(device))
        _torch.register_backend(group, torch.device(device), c10d.Backend.backend_type_map[others[device]], backend)
        group.other_devices.add(device)
