"""Torch's storages in shared memory: maps files as storages, counts references, and makes the storages of batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx import _torch
from phalanx._torch.lookup import NAMES, warn_of

if TYPE_CHECKING:
    import torch


def can_share_storages() -> bool:
    """Whether this torch has all names that this module needs; warn if one is missing."""
    try:
        _ = _torch.new_shared_storage, _torch.new_shared_fd, _torch.storage_use_count
    except ImportError:
        warn_of(NAMES["new_shared_storage"])
        return False
    return True


def map_storage(fd: int, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage over the first bytes of a file, as torch's shared memory; the caller may then close `fd`."""
    storage: torch.UntypedStorage = _torch.new_shared_fd(fd, size_bytes)
    return storage


def holders_of_storage(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the number of references to a storage, in C++ and in Python; each tensor on it adds to one of them."""
    return _torch.storage_use_count(_torch.attribute_of(storage, "_cdata")), sys.getrefcount(storage)


def make_shared_storages_with(make: Callable[[int], torch.UntypedStorage]) -> None:
    """Let torch's collate functions make the storage of a batch with `make` from now on, in place of ``/dev/shm``.

    Args:
        make: Function of the number of bytes; the storage that it returns is in the CPU's memory.
    """
    import torch

    plain = _torch.new_shared_storage

    def new_shared(cls: type[torch.UntypedStorage], size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        if torch.device(device).type != "cpu":
            made: torch.UntypedStorage = plain(size, device=device)
            return made
        return make(size)

    torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment]
