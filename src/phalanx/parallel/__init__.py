"""Data parallel training on any backend of torch.distributed.

Start with `ddp.ddp`, then `zero`. Nothing here runs a training loop.
"""

from phalanx.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.ddp.bridge import Bf16State, bf16_feedback_hook, bridge_hook
from phalanx.parallel.ddp.ddp import DistributedDataParallel
from phalanx.parallel.divergence.check import check_replicas
from phalanx.parallel.exercises import average_gradients, ring_all_reduce
from phalanx.parallel.hosts import HostGroups, host_groups
from phalanx.parallel.local_sgd import LocalSGD
from phalanx.parallel.zero import ZeroRedundancyOptimizer

__all__ = [
    "Bf16State",
    "DataParallel",
    "DistributedDataParallel",
    "HostGroups",
    "LocalSGD",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "average_gradients",
    "bf16_feedback_hook",
    "bridge_hook",
    "check_replicas",
    "convert_sync_batchnorm",
    "host_groups",
    "ring_all_reduce",
]
