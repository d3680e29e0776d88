"""Makes groups out of a group: of some of its ranks, or of ranks from several jobs.

torch calls the group (``split_group``, ``merge_remote_group``), or, from its own C++ groups, the backend (``split``,
``merge``). Both call this module, so a rank counts all its splits in one place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from phalanx._errors import ArgumentError
from phalanx.backend.calls.ops import Operations

_OFFICE = "mergeGroupRank"
"""Key under which torch counts the ranks that have asked for a merged group, to number them in order of arrival."""


class Maker:
    """Makes groups out of one group.

    Args:
        operations: Operations of the group.
        store: Key-value store of the group alone.
        global_ranks: Rank in the world of each rank of the group.
        build: `build_group` of `phalanx.backend.groups`, with the arguments that new groups inherit already bound.
    """

    def __init__(
        self, operations: Operations, store: Store, global_ranks: list[int], build: Callable[..., Any]
    ) -> None:
        self._operations = operations
        self._store = store
        self._global_ranks = global_ranks
        self._build = build
        self._num_splits = 0

    def moved(self, store: Store, processes: Mapping[int, Sequence[int]], global_ranks: list[int]) -> None:
        """Adopt the store, the processes and the ranks that a reconfigure has given the group."""
        self._store, self._global_ranks = store, global_ranks
        self._build = functools.partial(self._build, processes=processes)
        self._num_splits = 0

    @property
    def build(self) -> Callable[..., Any]:
        """The argument `build`."""
        return self._build

    def split(
        self, ranks: Sequence[int], timeout: timedelta | None, name: str, store: Store | None = None
    ) -> Any | None:
        """Return a new group of `ranks`; None on the ranks that are not among them.

        Args:
            ranks: Ranks of this group, in the order of their numbers in the new group.
            timeout: Timeout of the new group; None: the timeout of this group.
            name: Name of the new group.
            store: Store in which the new group's ranks meet; None: the store of this group.

        Raises:
            ArgumentError: A number is not a rank of this group, or occurs twice.
        """
        where = self._operations.arguments("split").where()
        size = self._operations.ranks.size
        ranks = [operator.index(rank) for rank in ranks]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise ArgumentError(f"{where}: ranks must be different numbers from 0 to {size - 1}, got {ranks}")
        self._num_splits += 1
        me = self._operations.ranks.rank
        if me not in ranks:
            return None
        return self._build(
            c10d.PrefixStore(f"split/{self._num_splits}/{ranks[0]}", self._store if store is None else store),
            ranks.index(me),
            len(ranks),
            name or f"{self._operations.name}:split:{self._num_splits}",
            [self._global_ranks[rank] for rank in ranks],
            timeout or self._operations.timeout,
        )

    def merge(self, store: Store, size: int, timeout: timedelta | None, name: str, rank: int | None = None) -> Any:
        """Return a new group of all ranks, perhaps from several jobs, that call this with the same store.

        Messages number these ranks from 0, because different jobs use the same numbers for different processes.

        Args:
            store: Store that all these ranks reach, and that nothing else uses.
            size: Number of ranks that will call this.
            timeout: Timeout of the new group; None: the timeout of this group.
            name: Name of the new group.
            rank: Number of this rank in the new group; None: the ranks are numbered in the order of their calls.

        Raises:
            ArgumentError: `size` is less than 1, or more than `size` ranks have called this.
        """
        where = self._operations.arguments("merge").where()
        if size < 1:
            raise ArgumentError(f"{where}: size must be at least 1, got {size}")
        number = store.add(_OFFICE, 1) - 1 if rank is None else rank
        if not 0 <= number < size:
            raise ArgumentError(
                f"{where}: size is {size}, and this is rank {number}; pass the number of all ranks that call, and a "
                "store that no earlier merge has used"
            )
        return self._build(
            c10d.PrefixStore("merged", store),
            number,
            size,
            name or f"{self._operations.name}:merge",
            list(range(size)),
            timeout or self._operations.timeout,
            processes={},  # the known processes are keyed by ranks in a world, which mean nothing in this group
        )
