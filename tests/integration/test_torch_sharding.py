"""FSDP2, hybrid sharding, tensor parallelism and the ZeRO optimizer train on phalanx to the bits of Gloo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.integration._compare import Comparison

NUM_STEPS = 3


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 3))


def batch(step, share):
    """The batch of one data-parallel share."""
    generator = torch.Generator().manual_seed(1000 * share + step)
    return torch.randn(8, 10, generator=generator), torch.randn(8, 3, generator=generator)


def mse_loss(output, target):
    return nn.functional.mse_loss(output.to(target.dtype), target)  # torch 2.11 has none of two dtypes


def train_steps(model, optimizer, share):
    losses = []
    for step in range(NUM_STEPS):
        x, target = batch(step, share)
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shard(model, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def train_fsdp2(rank, world_size, kind):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (world_size,))
    options = {}
    if kind == "mixed_precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "no_reshard":
        options["reshard_after_forward"] = False
    model = make_model()
    shard(model, mesh, **options)
    if kind == "group_memory":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train_steps(model, optimizer, rank)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=full).get("state")  # on rank 0
    # Loaded into a fresh model, the full state trains on to the same loss.
    again = make_model()
    shard(again, mesh, **options)
    set_model_state_dict(
        again,
        dict(state) if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    x, target = batch(NUM_STEPS, rank)
    after = [mse_loss(m(x), target).item() for m in (model, again)]
    return losses, after, dict(state), optimizer_state


def train_hsdp(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    shard(model, mesh)
    losses = train_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return losses, {name: p.full_tensor() for name, p in model.named_parameters()}


def train_tensor_parallel(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train_steps(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), share=0)
    shards = {name: list(p.to_local().shape) for name, p in model.named_parameters()}
    return losses, {name: p.full_tensor().detach() for name, p in model.named_parameters()}, shards


def train_zero(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    losses = train_steps(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    consolidated = optimizer.state_dict() if rank == 0 else None
    return losses, dict(model.module.state_dict()), consolidated


FSDP2_KINDS = ["plain", "no_reshard", "mixed_precision", "group_memory"]
PROGRAMS = {kind: (train_fsdp2, (kind,)) for kind in FSDP2_KINDS} | {
    "tensor_parallel": (train_tensor_parallel, ()),
    "zero": (train_zero, ()),
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return Comparison(2, tmp_path_factory.mktemp("sharding"), PROGRAMS)


@pytest.mark.parametrize("kind", FSDP2_KINDS)
def test_fsdp2_trains_to_gloos_bits_and_its_state_loads(comparison, kind):
    results = comparison.same_on_gloo(kind)
    assert results[0][0] != results[1][0], "the ranks saw the same batches"
    for _, (loss, loss_again), _, _ in results:
        assert loss == loss_again
    state = results[0][2]
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in make_model().state_dict().items()
    }


def test_hybrid_sharding_on_four_ranks_trains_to_gloos_bits(tmp_path):
    results = Comparison(4, tmp_path, {"hsdp": (train_hsdp, ())}).same_on_gloo("hsdp")
    for name, value in results[0][1].items():
        assert all(torch.equal(value, other[1][name]) for other in results), name


def test_tensor_parallelism_trains_to_gloos_bits(comparison):
    (losses, weights, shards), other = comparison.same_on_gloo("tensor_parallel")
    assert losses == other[0]
    assert losses[-1] < losses[0] or losses[0] != losses[1]
    assert shards["0.weight"] == [32, 10]
    assert shards["2.weight"] == [3, 32]
    assert weights["2.weight"].shape == (3, 64)


def test_the_zero_optimizer_trains_to_gloos_bits_and_consolidates(comparison):
    (_, state, consolidated), (_, other_state, _) = comparison.same_on_gloo("zero")
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    assert len(consolidated["state"]) == len(state)
