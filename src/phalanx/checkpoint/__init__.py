"""Checkpoints that are published whole or not at all, verified before they are loaded, never unpickled.

On disk one folder for each step, in memory a snapshot of each step for a group that is started again. Knows
torch.distributed, and no backend.
"""

from phalanx.checkpoint.folder import Checkpoint
from phalanx.checkpoint.loading import Loaded, load
from phalanx.checkpoint.memory import snapshot
from phalanx.checkpoint.retention import list_checkpoints, prune, verify
from phalanx.checkpoint.saving import save, wait
from phalanx.checkpoint.tree import unwrap

__all__ = ["Checkpoint", "Loaded", "list_checkpoints", "load", "prune", "save", "snapshot", "unwrap", "verify", "wait"]
