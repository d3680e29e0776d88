"""Checkpoints that are published whole or not at all, verified before loading, and never unpickled.

The disk holds one folder for each saved step. Memory holds snapshots, from which restarted ranks resume, and
publications, which other processes read. This package works with any backend. It loads each of its names on first use,
because listing and verifying checkpoints need no torch.

Start with `saving`, then `loading`: these two say what the ranks agree on, and in which order. Nothing here imports
`phalanx.train`; a Trainer calls `loading.load_run` instead of `load`.
"""

from typing import TYPE_CHECKING

from phalanx import _on_first_use

if TYPE_CHECKING:  # for editors and type checkers; when the program runs, __getattr__ imports the names
    from phalanx.checkpoint.disk.folder import Checkpoint
    from phalanx.checkpoint.disk.retention import list_checkpoints, prune, verify
    from phalanx.checkpoint.loading import Loaded, load
    from phalanx.checkpoint.memory.snapshots import snapshot
    from phalanx.checkpoint.saving import save, wait
    from phalanx.checkpoint.state.tree import unwrap

__all__ = ["Checkpoint", "Loaded", "list_checkpoints", "load", "prune", "save", "snapshot", "unwrap", "verify", "wait"]

_MODULES = {
    "checkpoint.disk.folder": "Checkpoint",
    "checkpoint.disk.retention": "list_checkpoints prune verify",
    "checkpoint.loading": "Loaded load",
    "checkpoint.memory.snapshots": "snapshot",
    "checkpoint.saving": "save wait",
    "checkpoint.state.tree": "unwrap",
}

if not TYPE_CHECKING:  # with a module __getattr__, type checkers would accept any name
    __getattr__, __dir__ = _on_first_use(__name__, _MODULES)
