"""`check_replicas` names the first tensor that ranks do not hold alike, on every rank and on any backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import phalanx

pytestmark = pytest.mark.kept_ranks


def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5)
    )
    model.register_buffer("table", torch.arange(70_000.0))
    model.register_buffer("phases", torch.ones(3, dtype=torch.complex64).conj())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3, 3, 3)).sum().backward()
    optimizer.step()
    model.register_buffer("one", torch.ones(1, dtype=torch.complex64).conj().imag)  # its stride is 2
    model.register_buffer("hole", torch.tensor([float("nan")]))
    model.register_buffer("levels", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))
    channels = torch.ones(2), torch.zeros(2, dtype=torch.long)
    model.register_buffer("channels", torch.quantize_per_channel(torch.ones(2, 2), *channels, 0, torch.qint8))
    return model, optimizer


def requantized(model, scale, point):
    return lambda: setattr(model, "levels", torch.quantize_per_tensor(torch.ones(3), scale, point, torch.quint8))


def flip(tensor, place, bit=0):
    """Flip a bit of an element, in the order of the elements."""
    bits = tensor.detach().contiguous().view(torch.int32).view(-1)
    bits[place] ^= 1 << bit
    with torch.no_grad():
        tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))


def changes(rank, model, optimizer):
    """Each change that rank 1 makes, what is then named first, and how it differs."""
    weight, bias = model[0].weight, model[3].bias
    yield lambda: flip(weight, 3 * 27 + 5), "parameter '0.weight' at [3, 0, 1, 2] is ", "value"
    yield lambda: flip(bias, 4, 30), "parameter '3.bias' at [4] is ", "value"
    yield lambda: flip(model.table, 69_999), "buffer 'table' at [69999] is 69999.0 on ranks 0 and 2, and ", "value"
    yield (
        lambda: model.table[2:].fill_(float("nan")),
        "buffer 'table' at [2] is 2.0 on ranks 0 and 2, and nan on",
        "NaN",
    )
    yield lambda: model.phases[1:2].zero_(), "buffer 'phases' at [1] is (1-0j) on ranks 0 and 2, and 0j on", "value"
    yield lambda: model.one.fill_(2.0), "buffer 'one' at [0] is -0.0 on ranks 0 and 2, and 2.0 on", "value"
    levels = (
        "buffer 'levels' is quint8 (scale 0.1, zero point 0) [3] on ranks 0 and 2, and quint8 (scale 0.5, zero point 3)"
    )
    yield requantized(model, 0.5, 3), levels, "dtype"
    bits = "buffer 'hole' at [0] is nan (bits 0x7fc00000) on ranks 0 and 2, and nan (bits 0x7fc00001) on"
    yield lambda: flip(model.hole, 0), bits, "NaN"
    yield lambda: flip(optimizer.state[bias]["exp_avg"], 0), "exp_avg of parameter '3.bias' at [0] is ", "value"
    yield (
        lambda: optimizer.state[bias]["step"].add_(1),
        "step of parameter '3.bias' is 1.0 on ranks 0 and 2, and",
        "value",
    )
    yield lambda: optimizer.state[bias].pop("exp_avg"), "exp_avg of parameter '3.bias' is float32 [5] on", "missing"
    yield lambda: optimizer.param_groups[0].update(lr=1.0), "lr of parameter group 0 is 0.001 on ranks 0 and 2", "value"
    yield (
        lambda: setattr(bias, "data", bias.data.double()),
        "parameter '3.bias' is float32 [5] on ranks 0 and 2",
        "dtype",
    )
    yield lambda: setattr(bias, "data", bias.data[:3]), "parameter '3.bias' is float32 [5] on ranks 0 and 2", "shape"


def name_each(rank, world_size):
    model, optimizer = make()
    phalanx.check_replicas(model, optimizer)
    found = []
    for number in range(len(list(changes(rank, model, optimizer)))):
        model, optimizer = make()
        change, words, how = list(changes(rank, model, optimizer))[number]
        if rank == 1:
            change()
        try:
            phalanx.check_replicas(model, optimizer)
        except phalanx.ReplicaMismatch as error:
            found.append((words in str(error), error.ranks, error.how == how, str(error)))
    return found


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_every_rank_names_tensor_place_ranks_and_kind(run_ranks, backend):
    every = run_ranks(name_each, 3, backend=backend)
    assert every == [every[0]] * 3
    assert [one for one in every[0] if one[:3] != (True, (1,), True)] == []
    assert len(every[0]) == 14


def without_a_majority(rank, world_size):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1), model.bias.fill_(rank)
    with pytest.raises(phalanx.ReplicaMismatch) as caught:
        phalanx.check_replicas(model)
    return caught.value.ranks, caught.value.tensors


def test_without_a_majority_all_ranks_are_named(run_ranks):
    assert run_ranks(without_a_majority, 2) == [((0, 1), ("parameter 'bias'",))] * 2


def allowed(rank, world_size):
    model, optimizer = make()
    phalanx.DistributedDataParallel(model)
    model.register_buffer("cache", torch.zeros(rank), persistent=False)
    model.register_buffer("own", torch.full((2,), float(rank)))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    model(torch.randn(4, 3, 3, 3) + rank)  # running statistics
    phalanx.check_replicas(model, optimizer)
    phalanx.check_replicas(phalanx.DistributedDataParallel(model, init_sync=False), optimizer)
    divided = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    divided.step()
    phalanx.check_replicas(model, divided)
    half = dist.new_group([0, 1])
    if rank < 2:
        phalanx.check_replicas(model, group=half)
    else:
        with pytest.raises(ValueError, match="rank 2: check_replicas: this rank is not in the group"):
            phalanx.check_replicas(model, group=half)
    model[0].weight.data = model[0].weight.data.contiguous() if rank else model[0].weight.data
    phalanx.check_replicas(model)  # its elements lie in another order
    return True


def test_what_may_differ_is_not_compared(run_ranks):
    assert all(run_ranks(allowed, 3))


def a_statistic_of_all(rank, world_size):
    model = phalanx.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    model[0].running_mean += rank
    with pytest.raises(phalanx.ReplicaMismatch, match=r"buffer '0.running_mean' at \[0\] is 0.0 on rank 0, and 1.0 on"):
        phalanx.check_replicas(model)


def test_statistics_that_are_synchronized_are_compared(run_ranks):
    run_ranks(a_statistic_of_all, 2)


def shards(rank, world_size):
    model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(ValueError, match="check_replicas: parameter 'weight' is a DTensor, of which each rank has"):
        phalanx.check_replicas(model)


def test_shards_are_refused_by_name(run_ranks):
    run_ranks(shards, 2, backend="gloo")


def with_buffer(tensor):
    model = nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    model.register_buffer("odd", tensor)
    return model


def lbfgs(change):
    model = with_buffer(torch.ones(1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    optimizer.step(lambda: closure(model, optimizer))
    optimizer.state[model.weight]["old_dirs"][0] += change
    return model, optimizer


def closure(model, optimizer):
    optimizer.zero_grad()
    loss = (model(torch.ones(3, 2)) - 1).square().sum()
    loss.backward()
    return loss


def of_a_loss(change):
    model, margin = with_buffer(torch.ones(1)), nn.Parameter(torch.ones(2) + change)
    return model, torch.optim.SGD([*model.parameters(), margin], lr=0.1)


def differ_in_odd_places(rank, world_size):
    bits = torch.tensor([1, 2 + (rank == 1)], dtype=torch.uint8)
    found = []
    for given in (
        (with_buffer(bits.view(torch.float4_e2m1fn_x2)),),
        lbfgs(float(rank == 1)),
        of_a_loss(float(rank == 1)),
    ):
        with pytest.raises(phalanx.ReplicaMismatch) as caught:
            phalanx.check_replicas(*given)
        found.append((caught.value.tensors[0], caught.value.ranks, str(caught.value)))
    for given in (lbfgs(0.0), of_a_loss(0.0)):
        phalanx.check_replicas(*given)
    return found


def test_dtypes_without_numbers_nested_state_and_parameters_of_a_loss_are_compared(run_ranks):
    every = run_ranks(differ_in_odd_places, 3)
    assert every == [every[0]] * 3
    (odd, odd_ranks, words), (state, state_ranks, _), (margin, margin_ranks, _) = every[0]
    assert "buffer 'odd' at [1] is bits 0x02 on ranks 0 and 2, and bits 0x03 on rank 1" in words
    assert (odd, state, margin) == ("buffer 'odd'", "old_dirs[0] of parameter 'weight'", "the optimizer's parameter 2")
    assert odd_ranks == state_ranks == margin_ranks == (1,)


def freed():
    tensor = torch.ones(30)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def mistakes():
    """What rank 1 gives alone, and what all ranks then raise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.ones(1), mesh, [Replicate()])
    good = with_buffer(torch.ones(1))
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(good.parameters(), lr=0.1), 1)
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    unread = "rank 1: can't read buffer 'odd' to compare it: "
    yield (with_buffer(whole),), ValueError, "rank 1: check_replicas: buffer 'odd' is a DTensor, of which each rank"
    yield (None,), TypeError, "rank 1: check_replicas: model must be a torch.nn.Module, got NoneType"
    yield ({},), TypeError, "rank 1: check_replicas: model must be a torch.nn.Module, got dict"
    yield (good, schedule), TypeError, "rank 1: check_replicas: optimizer must be a torch.optim.Optimizer, got StepLR"
    for tensor in (torch.nested.nested_tensor([torch.ones(1)]), ragged, fake(), freed()):
        yield (with_buffer(tensor),), RuntimeError, unread


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def mistakes_of_one_rank(rank, world_size):
    wrong = []
    for number, (given, kind, words) in enumerate(mistakes()):
        model = with_buffer(torch.ones(1))
        try:
            phalanx.check_replicas(*(given if rank == 1 else (model,)))
        except Exception as error:
            if type(error) is not kind or words not in str(error):
                wrong.append(repr(error))
        else:
            wrong.append(words)
        next_one = torch.full((1,), float(number))
        dist.all_reduce(next_one)  # is paired with that of the other ranks
        assert next_one.item() == number * world_size
    return wrong, number


def test_what_one_rank_cannot_compare_all_ranks_raise_and_name(run_ranks):
    assert run_ranks(mistakes_of_one_rank, 3) == [([], 7)] * 3


def test_without_a_group_it_says_so():
    with pytest.raises(ValueError, match="check_replicas: there is no process group yet"):
        phalanx.check_replicas(nn.Linear(1, 1))
