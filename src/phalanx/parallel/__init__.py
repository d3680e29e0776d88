"""One model on many ranks: data parallel training on any backend of torch.distributed."""

from phalanx.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.ddp import DistributedDataParallel
from phalanx.parallel.exercises import average_gradients, ring_all_reduce
from phalanx.parallel.sharded import ShardedOptimizer

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "average_gradients",
    "convert_sync_batchnorm",
    "ring_all_reduce",
]
