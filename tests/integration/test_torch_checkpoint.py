"""torch's distributed checkpoint saves and loads on phalanx, at once, by a thread and by a process, as on Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.integration._compare import Comparison, whole
from tests.integration.test_torch_sharding import make_model, shard, train_steps


def save_and_load(rank, world_size, folder, how, kind):
    """Train, save, lose everything, load; return the state before and after."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    def fresh():
        model = make_model()
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            shard(model, init_device_mesh("cpu", (world_size,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = fresh()
    train_steps(model, optimizer, rank)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    place = f"{folder}/{how}-{kind}-{dist.get_backend()}"
    state = {"model": model_state, "optimizer": optimizer_state}
    if how.startswith("async_save"):
        by = AsyncCheckpointerType.PROCESS if how.endswith("process") else AsyncCheckpointerType.THREAD
        dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=by).result(timeout=60)
    else:
        dcp.save(state, checkpoint_id=place)
    saved = whole(state)

    model, optimizer = fresh()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    before = whole(state)
    dcp.load(state, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return saved, before, whole({"model": get_state_dict(model, optimizer)[0], "optimizer": state["optimizer"]})


HOWS, KINDS = ("save", "async_save", "async_save by a process"), ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return Comparison(2, folder, {f"{h}-{k}": (save_and_load, (str(folder), h, k)) for h in HOWS for k in KINDS})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_a_checkpoint_loads_what_was_saved(comparison, how, kind):
    for saved, before, loaded in comparison.same_on_gloo(f"{how}-{kind}"):
        weight = next(name for name in saved["model"] if name.endswith("0.weight"))
        assert not torch.equal(saved["model"][weight], before["model"][weight])
        for name, value in saved["model"].items():
            assert torch.equal(value, loaded["model"][name]), name
        for name, entries in saved["optimizer"]["state"].items():
            for key, value in entries.items():
                assert torch.equal(value, loaded["optimizer"]["state"][name][key]), (name, key)
