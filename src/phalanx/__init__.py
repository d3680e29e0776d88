"""Train one PyTorch model on many processes as if they were one.

``torch.distributed.init_process_group("phalanx")`` is all that a script needs: it works without importing this package.
Names below are loaded on first use, so that importing :mod:`phalanx` costs nothing and cannot break.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "PhalanxError": "phalanx._errors",
    "CheckpointError": "phalanx._errors",
    "CollectiveMismatch": "phalanx._errors",
    "CollectiveTimeout": "phalanx._errors",
    "GroupAborted": "phalanx._errors",
    "GroupUnusable": "phalanx._errors",
    "NonFinite": "phalanx._errors",
    "OutOfSharedMemory": "phalanx._errors",
    "RankFailed": "phalanx._errors",
    "GroupOptions": "phalanx._env",
    "RankError": "phalanx.launch.outcome",
    "spawn": "phalanx.launch.spawn",
    "Session": "phalanx.session",
    "init": "phalanx.session",
    "shutdown": "phalanx.session",
    "DataLoader": "phalanx.data",
    "DataPartitioner": "phalanx.data",
    "DistributedSampler": "phalanx.data",
    "RandomState": "phalanx.data",
    "seed_everything": "phalanx.data",
    "shard_iterable": "phalanx.data",
    "DataParallel": "phalanx.parallel",
    "DistributedDataParallel": "phalanx.parallel",
    "LocalSGD": "phalanx.parallel",
    "ShardedOptimizer": "phalanx.parallel",
    "SyncBatchNorm": "phalanx.parallel",
    "average_gradients": "phalanx.parallel",
    "convert_sync_batchnorm": "phalanx.parallel",
    "host_groups": "phalanx.parallel",
    "ring_all_reduce": "phalanx.parallel",
    "Trainer": "phalanx.train.trainer",
    "Communicator": "phalanx.backend._communicator",
    "communicator": "phalanx.backend._communicator",
    "install_as_default": "phalanx.backend",
}

__all__ = ["__version__", "checkpoint", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module("phalanx.checkpoint")
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
