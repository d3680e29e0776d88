"""Data for several ranks: samplers, partitions, loaders and seeds. Works with any backend.

Start with `sampler`, then `loader`; `positions` resumes epochs. `sharing` holds data once per host, `handover` carries
batches from workers to ranks, and `workers` replaces workers that die. Only `parts` and `sharing` communicate between
ranks, and nothing here computes a step.
"""

from phalanx.data.batches import GlobalBatches
from phalanx.data.loader import DataLoader
from phalanx.data.partition import DataPartitioner, Partition
from phalanx.data.random_state import RandomState
from phalanx.data.sampler import DistributedSampler
from phalanx.data.seeds import seed_everything
from phalanx.data.shards import shard_iterable
from phalanx.data.sharing.share import share

__all__ = [
    "DataLoader",
    "DataPartitioner",
    "DistributedSampler",
    "GlobalBatches",
    "Partition",
    "RandomState",
    "seed_everything",
    "shard_iterable",
    "share",
]
