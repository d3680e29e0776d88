"""Makes a group look like Gloo to torch and to programs, in class, name and options; passes GPU tensors to Gloo itself.

A group that replaces Gloo is an ordinary group with a second name, which programs see, and a list of devices that it
accepts. Python code and profilers see the name ``gloo``. C++ code sees ``phalanx``, because the logger of torch's DDP
casts a backend named gloo to the C++ `ProcessGroupGloo` and reads its members.

From torch 2.14 on, the ``__class__`` of `GlooShaped` is `ProcessGroupGloo`, so `isinstance` returns True, while
pybind11 looks at the real type. The options are of Gloo's class. Before 2.14, the group contains a real Gloo anyway.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from phalanx._env import seconds
from phalanx._errors import KINDS, GroupAborted
from phalanx.backend.calls.collectives import BARRIER, UNSET
from phalanx.backend.calls.memory import OtherDevice
from phalanx.backend.calls.ops import Operations
from phalanx.backend.hosts.links import closed_at_exec
from phalanx.backend.torch.adapters import PhalanxBackend
from phalanx.backend.torch.dispatch import named_as
from phalanx.backend.torch.making import Maker


def _by_device(run: Any) -> Any:
    """Return a method that runs a collective, or passes it to Gloo itself if its tensors are on another device."""

    def call(self: GlooShaped, *args: Any) -> object:
        try:
            return run(self, *args)
        except OtherDevice:
            return getattr(self.gloo(), run.__name__)(*args)

    method: Any = named_as(run.__name__, call)
    method.with_run = lambda change: _by_device(run.with_run(change))
    return method


class GlooShaped(PhalanxBackend):
    """From torch 2.14 on, the backend of a group that takes Gloo's place.

    ``isinstance(backend, ProcessGroupGloo)`` is true. Gloo also accepts tensors on a GPU. Collectives of such tensors
    go to a real Gloo group, which all ranks create at the first of these collectives.

    Args:
        store: Key-value store of the group, through which Gloo connects the ranks.
    """

    def __init__(self, operations: Operations, maker: Maker, store: Store, global_ranks: list[int]) -> None:
        super().__init__(operations, maker)
        self._store = store
        self._global_ranks = global_ranks
        self._gloo: Any = None
        self._making = threading.Lock()

    @property
    def options(self) -> Any:
        options = _torch.gloo_options(timeout=self._limit)
        options.global_ranks_in_group = self._global_ranks
        return options

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=seconds("timeout", self._operations.timeout))  # capped: Gloo's clock would overflow

    @property  # type: ignore[misc] # isinstance asks for it
    def __class__(self) -> type:
        return c10d.ProcessGroupGloo

    def get_error(self) -> Any:
        """Return torch's code for the failure that ended the group; as on Gloo, this rank's own abort is no failure."""
        failure = self._operations.abort_hooks.failure
        if failure is not None and KINDS[failure.kind] is GroupAborted and failure.by is None:
            return _torch.ErrorType.SUCCESS
        return super().get_error()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._gloo is not None:
            self._gloo.set_timeout(self._limit)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def gloo(self) -> Any:
        """Return Gloo itself. The first call connects the ranks, so all of them must make it.

        Raises:
            CollectiveMismatch: Another rank made another call instead.
        """
        with self._making:
            if self._gloo is None:
                self._operations._core.run(BARRIER, [], [], UNSET, None)
                store = c10d.PrefixStore("gloo", self._store)
                with closed_at_exec():
                    self._gloo = c10d.ProcessGroupGloo(store, self.rank(), self.size(), timeout=self._limit)
            return self._gloo

    def moved(self, store: Store) -> None:
        self._store, self._gloo = store, None
        self._global_ranks = list(self._operations.ranks.global_ranks)

    def shutdown(self) -> None:
        super().shutdown()
        self._gloo = None

    broadcast = _by_device(PhalanxBackend.broadcast)
    allreduce = _by_device(PhalanxBackend.allreduce)
    allreduce_coalesced = _by_device(PhalanxBackend.allreduce_coalesced)
    reduce = _by_device(PhalanxBackend.reduce)
    allgather = _by_device(PhalanxBackend.allgather)
    allgather_coalesced = _by_device(PhalanxBackend.allgather_coalesced)
    all_gather_single = _by_device(PhalanxBackend.all_gather_single)
    all_gather_single_coalesced = _by_device(PhalanxBackend.all_gather_single_coalesced)
    gather = _by_device(PhalanxBackend.gather)
    gather_single = _by_device(PhalanxBackend.gather_single)
    scatter = _by_device(PhalanxBackend.scatter)
    reduce_scatter = _by_device(PhalanxBackend.reduce_scatter)
    reduce_scatter_single = _by_device(PhalanxBackend.reduce_scatter_single)
    reduce_scatter_single_coalesced = _by_device(PhalanxBackend.reduce_scatter_single_coalesced)
    alltoall = _by_device(PhalanxBackend.alltoall)
    all_to_all_single = _by_device(PhalanxBackend.all_to_all_single)
