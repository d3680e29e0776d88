"""Where a name is torch's, its arguments are torch's: the same names, kinds and defaults, except in a table."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import phalanx
import phalanx.parallel
from phalanx.parallel.ddp.grad_bucket import GradBucket

DDP = phalanx.DistributedDataParallel
ZERO = phalanx.ZeroRedundancyOptimizer

SAME = {
    "DistributedDataParallel": (DDP, DistributedDataParallel),
    "DistributedDataParallel.join": (DDP.join, DistributedDataParallel.join),
    "DistributedDataParallel.no_sync": (DDP.no_sync, DistributedDataParallel.no_sync),
    "DistributedDataParallel.register_comm_hook": (DDP.register_comm_hook, DistributedDataParallel.register_comm_hook),
    "DistributedDataParallel.join_hook": (DDP.join_hook, DistributedDataParallel.join_hook),
    "ZeroRedundancyOptimizer": (ZERO, ZeroRedundancyOptimizer),
    "ZeroRedundancyOptimizer.step": (ZERO.step, ZeroRedundancyOptimizer.step),
    "ZeroRedundancyOptimizer.state_dict": (ZERO.state_dict, ZeroRedundancyOptimizer.state_dict),
    "ZeroRedundancyOptimizer.load_state_dict": (ZERO.load_state_dict, ZeroRedundancyOptimizer.load_state_dict),
    "ZeroRedundancyOptimizer.add_param_group": (ZERO.add_param_group, ZeroRedundancyOptimizer.add_param_group),
    "ZeroRedundancyOptimizer.consolidate_state_dict": (
        ZERO.consolidate_state_dict,
        ZeroRedundancyOptimizer.consolidate_state_dict,
    ),
    "ZeroRedundancyOptimizer.join_hook": (ZERO.join_hook, ZeroRedundancyOptimizer.join_hook),
    "SyncBatchNorm": (phalanx.SyncBatchNorm, nn.SyncBatchNorm),
    "SyncBatchNorm.convert_sync_batchnorm": (
        phalanx.SyncBatchNorm.convert_sync_batchnorm,
        nn.SyncBatchNorm.convert_sync_batchnorm,
    ),
    "convert_sync_batchnorm": (phalanx.convert_sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm),
    "DataParallel": (phalanx.DataParallel, nn.DataParallel),
    "DistributedSampler": (phalanx.DistributedSampler, DistributedSampler),
    "DistributedSampler.set_epoch": (phalanx.DistributedSampler.set_epoch, DistributedSampler.set_epoch),
    "DataLoader": (phalanx.DataLoader, DataLoader),
    "bf16_feedback_hook": (phalanx.parallel.bf16_feedback_hook, powerSGD_hook.powerSGD_hook),
    "spawn": (phalanx.spawn, mp.spawn),
    "SpawnContext.join": (phalanx.SpawnContext.join, mp.ProcessContext.join),
    "init": (phalanx.init, dist.init_process_group),
    "checkpoint.save": (phalanx.checkpoint.save, torch_checkpoint.save),
    "checkpoint.load": (phalanx.checkpoint.load, torch_checkpoint.load),
}
_ALONE = "the place in the job is found, so what is not given is None, and what is given is named"
_LAUNCHED = "init makes the store and the groups' names, since it knows the launch"
_DCP = "phalanx.checkpoint saves the steps of a run in a folder; torch's own works on phalanx, too"
DIFFERENCES = {
    "DistributedDataParallel": {"gradient_as_bucket_view": "True: a copy of each gradient costs memory and time"},
    "SpawnContext.join": {"grace_period": "fixed: ranks that are told to end have 5 s"},
    "init": {
        **dict.fromkeys(("init_method", "timeout", "world_size", "rank"), _ALONE),
        **dict.fromkeys(("store", "group_name", "pg_options", "_ranks", "enable_reconfigure"), _LAUNCHED),
        "device_id": "called device, which may be a CPU",
    },
    "checkpoint.save": dict.fromkeys(
        (
            "state_dict",
            "checkpoint_id",
            "storage_writer",
            "planner",
            "process_group",
            "no_dist",
            "use_collectives",
        ),
        _DCP,
    ),
    "checkpoint.load": dict.fromkeys(
        ("state_dict", "checkpoint_id", "storage_reader", "planner", "process_group", "no_dist"), _DCP
    ),
}


def differing(ours, torchs) -> set[str]:
    """Return the parameters of torch's that ours lacks, or has with another kind or default, or in another place."""
    own, parameters = (inspect.signature(function).parameters for function in (ours, torchs))
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = set()
    for place, (name, parameter) in enumerate(parameters.items()):
        if parameter.kind in variadic:
            if parameter.kind not in (other.kind for other in own.values()):
                found.add(name)
            continue
        same = name in own and (own[name].kind, own[name].default) == (parameter.kind, parameter.default)
        is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if not same or (not is_keyword and list(own)[place] != name):
            found.add(name)
    return found


@pytest.mark.skipif(not torch.__version__.startswith("2.15."), reason="the signatures are those of torch 2.15")
@pytest.mark.parametrize("name", SAME)
def test_arguments_are_torchs_apart_from_the_differences_that_have_a_reason(name):
    assert differing(*SAME[name]) == set(DIFFERENCES.get(name, ()))


@pytest.mark.parametrize(
    ("ours", "torchs"), [(GradBucket, dist.GradBucket), (DDP, Joinable), (ZERO, Joinable)], ids=lambda c: c.__name__
)
def test_whoever_takes_torchs_class_finds_its_methods_here(ours, torchs):
    assert {name for name in dir(torchs) if not name.startswith("_")} <= {*dir(ours)}
