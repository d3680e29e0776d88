"""State loads on another number of ranks than saved it: plain state, FSDP2, DTensors; ranks with their own tensors."""

from __future__ import annotations

import os

import numpy
import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import phalanx
import phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from phalanx.testing import run_ranks
from tests.checkpoint._tools import assert_same, call, copy_of, group_of, model, save, step, whole

KINDS = ("plain", "ddp", "fsdp", "sharded")
SAVED_BY, LOADED_BY = (1, 2, 4), (1, 2, 3, 4)


def fresh(kind):
    module = model()
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
    if kind in ("ddp", "sharded"):
        module = DistributedDataParallel(module)
    elif kind == "fsdp":
        for layer in (module[0], module[3], module[4]):
            fully_shard(layer)
        fully_shard(module)
    if kind == "sharded":
        return module, phalanx.ZeroRedundancyOptimizer(module.parameters(), optim.Adam, lr=0.01)
    return module, optim.Adam(module.parameters(), lr=0.01)


def state_of(module, optimizer):
    """Return everything put together, the same whatever has trained it."""
    names = [name.removeprefix("module.") for name, _ in module.named_parameters()]
    values = optimizer.state_dict()["state"]
    named = {names[index]: {k: whole(v).clone() for k, v in entry.items()} for index, entry in values.items()}
    return {"model": copy_of(getattr(module, "module", module)), "optimizer": named}


def mesh_tensors(rank, world_size, value=None):
    """Two-dimensional meshes, uneven shards, replicas; filled with `value`, or with a number for each element."""
    rows = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (rows, world_size // rows))
    data = torch.arange(7 * 5.0).view(7, 5) if value is None else torch.full((7, 5), value)
    placements = {
        "rows": [Replicate(), Shard(0)],
        "columns": [Shard(1), Replicate()],
        "both": [Shard(0), Shard(1)],
        "nested": [Shard(0), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    return {name: distribute_tensor(data, mesh, places) for name, places in placements.items()}


def save_kinds(rank, world_size, base):
    kept = {}
    for kind in KINDS:
        if kind == "plain" and world_size > 1:
            continue  # is ddp
        module, optimizer = fresh(kind)
        for number in range(3):
            step(module, optimizer, number)
        save(f"{base}/{kind}-{world_size}", {"model": module, "optimizer": optimizer, "epoch": 3})
        kept[kind] = state_of(module, optimizer)
    save(f"{base}/mesh-{world_size}", mesh_tensors(rank, world_size))
    return kept


def load_kinds(rank, world_size, base):
    """Load what every number of ranks has saved, as its own kind of model and as one other.

    That is another one on each number of ranks, so that each checkpoint is loaded as every kind of model.
    """
    loaded = {}
    for name in sorted(name for name in os.listdir(base) if name.split("-")[0] in KINDS):
        own = KINDS.index(name.split("-")[0])
        kinds = {KINDS[own], KINDS[(own + 1 + (world_size - 1) % 3) % len(KINDS)]}
        for kind in sorted({"plain" if kind == "ddp" and world_size == 1 else kind for kind in kinds}):
            module, optimizer = fresh(kind)
            state = {"model": module, "optimizer": optimizer, "epoch": 0}
            ckpt.load(f"{base}/{name}", state)
            assert state["epoch"] == 3
            loaded[name, kind] = state_of(module, optimizer)
            step(module, optimizer, 5)  # it can go on
    for saved_by in SAVED_BY:
        state = mesh_tensors(rank, world_size, -1.0)
        plain = {name: torch.zeros(7, 5) for name in state}
        for target in (state, plain):
            ckpt.load(f"{base}/mesh-{saved_by}", target)
            for name, tensor in target.items():
                assert torch.equal(whole(tensor), torch.arange(35.0).view(7, 5)), (saved_by, name)
    return loaded


def save_two_dims(rank, world_size, base):
    """FSDP2 over tensor parallel: shards of shards, whose order is not that of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 6))
    wanted = copy_of(module)
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["data"])
    held = {name: tensor.to_local().clone() for name, tensor in module.state_dict().items()}
    save(f"{base}/two", {"model": module})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    ckpt.load(f"{base}/two", {"model": module})
    assert_same({name: tensor.to_local() for name, tensor in module.state_dict().items()}, held)
    return wanted


def load_two_dims(rank, world_size, base):
    module = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 6))
    nn.init.zeros_(module[0].weight)
    ckpt.load(f"{base}/two", {"model": module})
    return copy_of(module)


def hold_stages(rank, world_size, base):
    """A pipeline by hand: every rank has another part of the model."""

    def stage(value):
        module = nn.Linear(200, 100 + rank)
        return nn.init.constant_(module.weight, value), module

    def same_names(value):
        return {"stage": torch.full((300, 300), value)}

    _, module = stage(rank + 1.0)
    optimizer = optim.Adam(module.parameters())
    module(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    save(f"{base}/stages", {"stage": module, "optimizer": optimizer})
    save(f"{base}/same", same_names(rank + 1.0))
    _, other = stage(0.0)
    state = {"stage": other, "optimizer": optim.Adam(other.parameters())}
    ckpt.load(f"{base}/stages", state)
    assert_same(copy_of(other), copy_of(module))
    assert_same(state["optimizer"].state_dict(), optimizer.state_dict())
    target = same_names(0.0)
    ckpt.load(f"{base}/same", target)
    assert target["stage"].eq(rank + 1.0).all()


def load_too_few(rank, world_size, base):
    for name in ("stages", "same"):
        with pytest.raises(CheckpointError) as caught:
            ckpt.load(f"{base}/{name}", {})
        said = "2 ranks saved tensors of their own, so only 2 ranks can load them, but there are 3"
        assert said in str(caught.value)


def save_what_all_have(rank, world_size, folder):
    save(folder, {"x": torch.zeros(300, 300)})
    files = ckpt.list_checkpoints(folder)[0].files
    return [file["size_bytes"] for file in files.values()]


def save_partial(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(CheckpointError, match=r"x is a DTensor that is not reduced yet \(Partial\)"):
        ckpt.save(folder, {"x": tensor}, 1)


def differ_in_sizes(rank, world_size, folder):
    """Buffers and arrays may differ in size, and any number of ranks still loads the rest."""
    module = model()
    module.register_buffer("seen", torch.full((rank + 1,), rank))
    state = {"model": module, "array": numpy.arange(1000 * (rank + 1)), "random": torch.get_rng_state()}
    if world_size == 2:
        save(folder, state)
    fresh_state = {"array": None, "model": {"3.weight": torch.zeros(150, 150)}}
    ckpt.load(folder, fresh_state, strict=False)
    assert torch.equal(fresh_state["model"]["3.weight"], module[3].weight)
    return len(fresh_state["array"])


PHASES = (
    *((size, save_kinds, "kinds") for size in SAVED_BY),
    (4, save_two_dims, "two"),
    (2, hold_stages, "own"),
    (2, save_what_all_have, "alike"),
    (2, save_partial, "partial"),
    (2, differ_in_sizes, "sizes"),
    *((size, load_kinds, "kinds") for size in LOADED_BY),
    (1, load_two_dims, "two"),
    (3, load_too_few, "own"),
    (3, differ_in_sizes, "sizes"),
)


def run_phases(rank, world_size, base):
    outcomes = {}
    for number, (size, function, folder) in enumerate(PHASES):
        with group_of(size, rank, f"{base}/{number}") as is_in:
            if is_in:
                os.makedirs(f"{base}/{folder}", exist_ok=True)
                outcomes[size, function.__name__] = call(function, rank, size, f"{base}/{folder}")
    return outcomes


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """``outcome(size, function)``: what it has returned on each rank."""
    outcomes = run_ranks(run_phases, max(LOADED_BY), str(tmp_path_factory.mktemp("saved")), init=False, timeout_s=150)

    def values(size, function):
        found = [outcomes[rank][size, function.__name__] for rank in range(size)]
        for rank, (_, problem) in enumerate(found):
            assert problem is None, f"rank {rank}: {problem}"
        return [value for value, _ in found]

    return values


@pytest.mark.parametrize("loaded_by", LOADED_BY)
def test_any_number_of_ranks_loads_what_any_other_has_saved(outcome, loaded_by):
    kept = {size: outcome(size, save_kinds) for size in SAVED_BY}
    for rank, loaded in enumerate(outcome(loaded_by, load_kinds)):
        for (name, kind), state in loaded.items():
            saved_kind, saved_by = name.split("-")
            own = rank if loaded_by == int(saved_by) else 0
            assert_same(state, kept[int(saved_by)][own][saved_kind], f"{name} loaded as {kind} on {loaded_by}")


def test_shards_of_shards_come_together(outcome):
    [loaded] = outcome(1, load_two_dims)
    assert_same(loaded, outcome(4, save_two_dims)[0])


def test_ranks_get_their_own_tensors_back(outcome):
    outcome(2, hold_stages)
    outcome(3, load_too_few)


def test_what_all_ranks_have_alike_is_written_once(outcome):
    sizes = outcome(2, save_what_all_have)[0]
    assert sum(sizes) < 1.2 * 300 * 300 * 4
    assert max(sizes) < 1.1 * min(sizes)


def test_an_unreduced_sum_is_refused(outcome):
    outcome(2, save_partial)


def test_values_that_every_rank_saves_load_on_any_number_of_ranks(outcome):
    assert outcome(2, differ_in_sizes) == [1000, 2000]
    assert outcome(3, differ_in_sizes) == [1000] * 3
