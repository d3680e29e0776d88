"""Checkpoints that are published whole or not at all, verified before loading, and never unpickled.

On disk there is a folder for each saved step; in memory there are snapshots, for ranks that are restarted. Works with
any backend.
"""

from phalanx.checkpoint.folder import Checkpoint
from phalanx.checkpoint.loading import Loaded, load
from phalanx.checkpoint.memory import snapshot
from phalanx.checkpoint.retention import list_checkpoints, prune, verify
from phalanx.checkpoint.saving import save, wait
from phalanx.checkpoint.tree import unwrap

__all__ = ["Checkpoint", "Loaded", "list_checkpoints", "load", "prune", "save", "snapshot", "unwrap", "verify", "wait"]
