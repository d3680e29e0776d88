"""The ``phalanx`` backend of ``torch.distributed``: collectives of CPU tensors over shared memory."""

from __future__ import annotations

import atexit
import ctypes
import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

from phalanx import _core, _torch
from phalanx._env import GroupOptions, seconds
from phalanx._last_words import tell_when_ended
from phalanx.backend._adapters import GroupName, PhalanxGroup, keep, keep_from_compiler, kept_groups
from phalanx.backend._bridged import BridgedGroup
from phalanx.backend._core_failures import from_core, report_core_stall
from phalanx.backend._dispatch import HAS_PYTHON_BACKENDS
from phalanx.backend._hosts import join_group
from phalanx.backend._links import closed_at_exec
from phalanx.backend._members import Ranks
from phalanx.backend._ops import Operations
from phalanx.backend._work import call_site

__all__ = ["PhalanxGroup"]

_core.configure(call_site, from_core, report_core_stall)


def _end_as_member() -> None:
    """Keep groups that were not destroyed from leaving in order while the interpreter ends.

    So a script that raises or exits early looks like what it is: its peers see the exit code, and the launcher learns
    how far it got.
    """
    _core.end_stall_reports()
    for group in kept_groups():
        group._operations.note_progress()
        core = group._operations._core
        if isinstance(core, BridgedGroup):
            core.end_threads()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(core))


def _serve_monitored_barrier() -> None:
    """Make torch's function accept our groups: before 2.14 it refuses every backend that is not named gloo."""
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
    """Do what a process needs before its first group, but not when it imports this package."""
    atexit.register(_end_as_member)
    keep_from_compiler()
    if not HAS_PYTHON_BACKENDS:
        _serve_monitored_barrier()


def leave_groups(error: BaseException) -> None:
    """Leave every group of this process because of an error, and report it to the ranks that wait for this one."""
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    for group in kept_groups():
        group._operations.shutdown(why)


def create_group(options: Any, backend_options: Any) -> ProcessGroup:
    """Create the group that ``init_process_group`` or ``new_group`` asks for; torch calls this.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name, global ranks.
        backend_options: The user's ``pg_options``: `GroupOptions`, or torch's own for another device's backend.
    """
    tell_when_ended()
    own = backend_options if isinstance(backend_options, GroupOptions) else None
    size = options.group_size
    global_ranks = list(options.global_ranks_in_group) or list(range(size))
    name = options.group_id if options.global_ranks_in_group else "default"
    devices = _torch.devices_of_new_group()
    others = {device: backend for device, backend in devices.items() if backend != "phalanx"}
    group = build_group(options.store, options.group_rank, size, name, global_ranks, options.timeout, own)
    if others:
        _add_devices(group, others, options, None if own else backend_options)
    return group


def build_group(
    store: Store,
    rank: int,
    size: int,
    name: str,
    global_ranks: list[int],
    timeout: timedelta,
    options: GroupOptions | None = None,
) -> PhalanxGroup:
    """Join the group and return it, with a backend registered for CPU tensors."""
    _begin()
    core, segment = join_group(store, rank, size, name, global_ranks, timeout.total_seconds(), options)
    operations = Operations(core, segment, name, Ranks(rank, size, global_ranks))
    group = PhalanxGroup(store, operations, timeout, global_ranks, build_group)
    limit = timedelta(seconds=seconds("timeout", timeout))  # Gloo's clock overflows
    if HAS_PYTHON_BACKENDS:
        from phalanx.backend._adapters import PhalanxBackend

        # The debug wrapper refers only to the C++ half, and without its Python half the backend has no operations.
        group.backend = PhalanxBackend(operations, timeout)
        backend: Any = group.backend
        if c10d.get_debug_level() == c10d.DebugLevel.DETAIL and c10d.is_gloo_available():
            with closed_at_exec():
                backend = _torch.create_process_group_wrapper(backend, name, store, rank, size, limit)
        kind = ProcessGroup.BackendType.CUSTOM
    else:
        with closed_at_exec():
            backend = c10d.ProcessGroupGloo(c10d.PrefixStore("inner", store), rank, size, timeout=limit)
        kind = ProcessGroup.BackendType.GLOO
        # If a rank went on and ended while another is still connecting, that one would see a lost connection.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{r}" for r in range(size)], limit)
    _torch.set_default_backend(group, kind)
    _torch.register_backend(group, torch.device("cpu"), kind, backend)
    keep(group)
    return group


def _add_devices(group: PhalanxGroup, others: dict[str, str], options: Any, backend_options: Any) -> None:
    """Have torch create the backends of the other devices, in a separate group, and register them on this one."""
    config = ",".join(f"{device}:{backend}" for device, backend in others.items())
    ranks = list(options.global_ranks_in_group)
    beside, _ = _torch.new_process_group_helper(
        options.group_size,
        options.group_rank,
        ranks,
        config,
        c10d.PrefixStore("beside", options.store),
        GroupName(f"{options.group_id}:{config}"),
        backend_options,
        timeout=options.timeout,
    )
    assert isinstance(beside, ProcessGroup)  # this rank is a member
    for device in others:
        backend = _torch.get_backend(beside, torch.device(device))
        _torch.register_backend(group, torch.device(device), c10d.Backend.backend_type_map[others[device]], backend)
