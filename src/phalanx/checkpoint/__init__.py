"""Checkpoints that are published whole or not at all, verified before loading, and never unpickled.

On disk there is a folder for each saved step; in memory there are snapshots, for ranks that are restarted. Works with
any backend. Names are loaded on first use, because listing and verifying checkpoints need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; when the program runs, __getattr__ does this
    from phalanx.checkpoint.disk.folder import Checkpoint
    from phalanx.checkpoint.disk.retention import list_checkpoints, prune, verify
    from phalanx.checkpoint.loading import Loaded, load
    from phalanx.checkpoint.memory.snapshots import snapshot
    from phalanx.checkpoint.saving import save, wait
    from phalanx.checkpoint.state.tree import unwrap

__all__ = ["Checkpoint", "Loaded", "list_checkpoints", "load", "prune", "save", "snapshot", "unwrap", "verify", "wait"]

_EXPORTS = {
    "Checkpoint": "phalanx.checkpoint.disk.folder",
    "Loaded": "phalanx.checkpoint.loading",
    "list_checkpoints": "phalanx.checkpoint.disk.retention",
    "load": "phalanx.checkpoint.loading",
    "prune": "phalanx.checkpoint.disk.retention",
    "save": "phalanx.checkpoint.saving",
    "snapshot": "phalanx.checkpoint.memory.snapshots",
    "unwrap": "phalanx.checkpoint.state.tree",
    "verify": "phalanx.checkpoint.disk.retention",
    "wait": "phalanx.checkpoint.saving",
}


if not TYPE_CHECKING:  # or they would accept any name

    def __getattr__(name: str) -> Any:
        if name in _EXPORTS:
            return getattr(importlib.import_module(_EXPORTS[name]), name)
        raise AttributeError(f"module 'phalanx.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
