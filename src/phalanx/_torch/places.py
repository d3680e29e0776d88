"""Tells torch's C++ half that a group has other ranks: its rank and size, and the group that a shrink has made.

**Rank and size.** torch asks the backend (``ProcessGroup::getRank`` and ``getSize``), whose two numbers are protected:
its own backends set them in `reconfigure`, and a Python class has no name for them. Overriding ``rank()`` in Python
would not reach C++: the reducer of torch's DistributedDataParallel would divide gradients by the former number of
ranks. A second backend can't be registered in place of the first either. So the two adjacent numbers are written where
they lie. Their place is found once, on a backend made with two numbers that occur nowhere else, and believed only if
torch then answers with what was written. In a torch where they are not found, groups can't be reconfigured, and say so.

**The shrunken group.** torch wraps whatever `shrink` returns in a plain group named gloo, and the logger of its DDP
would read our backend as if it were Gloo's. Here such a backend brings its own group.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

_SEARCHED_BYTES = 64  # a backend has several strings behind these numbers
_FIRST, _SECOND = (0x5CA1AB1E - 1, 0x5CA1AB1E), (3, 7)
_PLACE = struct.Struct("=ii")


def can_move() -> bool:
    """Whether this torch can reconfigure groups, and lets a Python backend say its new rank."""
    from phalanx._torch import C10dBackend

    return hasattr(C10dBackend, "reconfigure") and _offset() >= 0


def move(backend: Any, rank: int, size: int) -> None:
    """Give a backend another rank and size, for C++ callers as well."""
    _write(backend, _offset(), rank, size)


@functools.cache
def _offset() -> int:
    """Return where a C++ backend has its rank and then its size; -1 if they are not found."""
    from phalanx._torch import C10dBackend

    probe = C10dBackend(*_FIRST)
    offset = ctypes.string_at(_address(probe), _SEARCHED_BYTES).find(_PLACE.pack(*_FIRST))
    if offset < 0:
        return -1
    _write(probe, offset, *_SECOND)
    return offset if (probe.rank(), probe.size()) == _SECOND else -1


def _write(backend: Any, offset: int, rank: int, size: int) -> None:
    ctypes.memmove(_address(backend) + offset, _PLACE.pack(rank, size), _PLACE.size)


def _address(backend: Any) -> int:
    """Return where the C++ object of a backend lies: pybind11 has it right behind the head of the Python object."""
    return int(ctypes.c_void_p.from_address(id(backend) + object.__basicsize__).value or 0)


def return_own_groups(group_of: Callable[[Any], Any]) -> None:
    """Have `dist.shrink_group` return the group that a backend brings.

    Args:
        group_of: Function that returns the group of a backend that `shrink` made; None for other backends.
    """
    from torch.distributed import distributed_c10d as c10d

    torchs = c10d._create_shrunk_process_group

    @functools.wraps(torchs)
    def create(new_backend: Any, remaining_ranks: list[int], metadata: Any, is_default_group: bool) -> Any:
        group = group_of(new_backend)
        if group is None:
            return torchs(new_backend, remaining_ranks, metadata, is_default_group)
        from phalanx._torch import set_group_desc, set_group_name

        # torch takes ranks of the group for ranks of the world, and keeps the former numbers of the world's.
        remaining_ranks[:] = group.global_ranks
        set_group_name(group, metadata["new_group_name"])
        set_group_desc(group, "default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk")
        return group

    c10d._create_shrunk_process_group = create


def can_shrink() -> bool:
    """Whether this torch shrinks groups in the way that `return_own_groups` expects."""
    from torch.distributed import distributed_c10d as c10d

    return can_move() and hasattr(c10d, "_create_shrunk_process_group")
