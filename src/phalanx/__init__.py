"""Train one PyTorch model on many processes as if they were one.

``torch.distributed.init_process_group("phalanx")`` is all that a script needs: it works without importing this package.
The names and packages below are loaded on first use, so that importing :mod:`phalanx` costs nothing and cannot break.

Start with `_plugin`, which torch calls, or `cli`, which users call; ``docs/design.md`` has a table of the packages in
this package. Nothing here is imported before it is used.
"""

import importlib
import sys

TYPE_CHECKING = False  # type checkers assume True; importing typing would take longer than the rest of this module
if TYPE_CHECKING:  # for editors and type checkers; at run time, __getattr__ imports these names
    from phalanx import checkpoint, data, parallel, testing, train
    from phalanx._errors import (
        CheckpointError,
        CollectiveMismatch,
        CollectiveTimeout,
        GroupAborted,
        GroupUnusable,
        NonFinite,
        NotPublished,
        OutOfSharedMemory,
        PhalanxError,
        RankFailed,
        ReplicaMismatch,
        WrongResult,
    )
    from phalanx._plugin import install_as_default, replace_gloo
    from phalanx._settings import GroupOptions
    from phalanx.backend.communicator import Communicator, communicator
    from phalanx.checkpoint.publication.publishing import Publication, publish
    from phalanx.checkpoint.publication.subscribing import Published, Subscription, subscribe
    from phalanx.data import (
        DataLoader,
        DataPartitioner,
        DistributedSampler,
        RandomState,
        seed_everything,
        shard_iterable,
        share,
    )
    from phalanx.debugging.breakpoints import breakpoint
    from phalanx.failure.ending import RankError
    from phalanx.host.block_pool import tune_process
    from phalanx.launch.spawn.spawn import SpawnContext, spawn
    from phalanx.parallel import (
        DataParallel,
        DistributedDataParallel,
        HostGroups,
        LocalSGD,
        SyncBatchNorm,
        ZeroRedundancyOptimizer,
        average_gradients,
        check_replicas,
        convert_sync_batchnorm,
        host_groups,
        ring_all_reduce,
    )
    from phalanx.session.session import Session, init, shutdown
    from phalanx.session.survival import resilient
    from phalanx.train import Trainer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "DataLoader",
    "DataParallel",
    "DataPartitioner",
    "DistributedDataParallel",
    "DistributedSampler",
    "GroupAborted",
    "GroupOptions",
    "GroupUnusable",
    "HostGroups",
    "LocalSGD",
    "NonFinite",
    "NotPublished",
    "OutOfSharedMemory",
    "PhalanxError",
    "Publication",
    "Published",
    "RandomState",
    "RankError",
    "RankFailed",
    "ReplicaMismatch",
    "Session",
    "SpawnContext",
    "Subscription",
    "SyncBatchNorm",
    "Trainer",
    "WrongResult",
    "ZeroRedundancyOptimizer",
    "__version__",
    "average_gradients",
    "breakpoint",
    "check_replicas",
    "checkpoint",
    "communicator",
    "convert_sync_batchnorm",
    "data",
    "host_groups",
    "init",
    "install_as_default",
    "parallel",
    "publish",
    "replace_gloo",
    "resilient",
    "ring_all_reduce",
    "seed_everything",
    "shard_iterable",
    "share",
    "shutdown",
    "spawn",
    "subscribe",
    "testing",
    "train",
    "tune_process",
]

_PACKAGES = ("checkpoint", "data", "parallel", "testing", "train")
_MODULES = {
    "_errors": "PhalanxError CheckpointError CollectiveMismatch CollectiveTimeout GroupAborted GroupUnusable "
    "NonFinite NotPublished OutOfSharedMemory RankFailed ReplicaMismatch WrongResult",
    "_settings": "GroupOptions",
    "debugging.breakpoints": "breakpoint",
    "failure.ending": "RankError",
    "launch.spawn.spawn": "SpawnContext spawn",
    "session.session": "Session init shutdown",
    "session.survival": "resilient",
    "data": "DataLoader DataPartitioner DistributedSampler RandomState seed_everything shard_iterable share",
    "parallel": "DataParallel DistributedDataParallel HostGroups LocalSGD ZeroRedundancyOptimizer SyncBatchNorm "
    "average_gradients check_replicas convert_sync_batchnorm host_groups ring_all_reduce",
    "train.trainer": "Trainer",
    "checkpoint.publication.publishing": "Publication publish",
    "checkpoint.publication.subscribing": "Published Subscription subscribe",
    "backend.communicator": "Communicator communicator",
    "_plugin": "install_as_default replace_gloo",
    "host.block_pool": "tune_process",
}


def _on_first_use(package: str, modules: dict[str, str], subpackages: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    """Return ``__getattr__`` and ``__dir__`` for a package whose names are loaded on first use.

    Args:
        modules: Modules below `phalanx`, each with the names, separated by spaces, that are loaded from it.
        subpackages: Names of subpackages that are loaded on first use.
    """
    places = {name: f"phalanx.{module}" for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name in subpackages:
            return importlib.import_module(f"{package}.{name}")
        if name in places:
            return getattr(importlib.import_module(places[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted(sys.modules[package].__all__)


if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name because of __getattr__
    __getattr__, __dir__ = _on_first_use(__name__, _MODULES, _PACKAGES)
