"""ZeroRedundancyOptimizer steps to the bits of the plain optimizer, with one copy of its state among the ranks."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.algorithms.join import Join

import phalanx
from phalanx.parallel import shared_memory
from phalanx.parallel.pieces import cuts

pytestmark = pytest.mark.kept_ranks

CASES = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"lr": 1e-3}),
    "Adam, amsgrad": (optim.Adam, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
    "Adam, fused": (optim.Adam, {"lr": 1e-3, "fused": True}),
    "AdamW": (optim.AdamW, {"lr": 1e-3}),
    "AdamW, foreach": (optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2}),
    "whole parameters": (optim.Adafactor, {"lr": 1e-2}),
}


def build_model():
    """Return a model whose parameters have several layouts and sizes, one of them most of all elements."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 6, 6)), nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(256, 333), nn.ReLU(), nn.Linear(333, 7)
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


def groups_of(model):
    weights, biases = ([p for name, p in model.named_parameters() if name.endswith(end)] for end in ("weight", "bias"))
    return [{"params": weights}, {"params": biases, "lr": 0.02}]


def train(model, optimizer, rank, num_steps, first_step=0):
    for step in range(first_step, first_step + num_steps):
        x = torch.randn(4, 108, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def equal_parameters(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def equal_states(one, other):
    """Compare two state dicts of optimizers, to the bit."""
    for index, values in one["state"].items():
        for name, value in values.items():
            theirs = other["state"][index][name]
            assert type(value) is type(theirs)
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs)), (index, name)
    assert one["state"].keys() == other["state"].keys()
    return one["param_groups"] == other["param_groups"]


def step_both(rank, world_size, case, share_parameters):
    """Return whether the plain and the sharded optimizer agree, and how many elements this rank steps."""
    optimizer_class, settings = CASES[case]
    plain, sharded = build_model(), build_model()
    optimizers = [
        optimizer_class(groups_of(plain), **settings),
        phalanx.ZeroRedundancyOptimizer(
            groups_of(sharded), optimizer_class, share_parameters=share_parameters, **settings
        ),
    ]
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        schedule = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        ddp = phalanx.DistributedDataParallel(model)
        for step in range(5):
            train(ddp, optimizer, rank, 1, step)
            schedule.step()
    own = sum(s.numel() for g in optimizers[1].optim.param_groups for s in g["params"])
    return equal_parameters(plain, sharded) and equal_states(*(o.state_dict() for o in optimizers)), own


def step_all_cases(rank, world_size, share_parameters):
    torch.set_num_threads(1)
    return {case: step_both(rank, world_size, case, share_parameters) for case in CASES}


@pytest.mark.parametrize(
    ("world_size", "share_parameters", "backend"),
    [(1, True, "phalanx"), (2, True, "phalanx"), (3, False, "phalanx"), (2, False, "gloo"), (2, True, "gloo")],
)
def test_steps_to_the_bits_of_the_plain_optimizer(run_ranks, world_size, share_parameters, backend):
    results = run_ranks(step_all_cases, world_size, share_parameters, backend=backend)
    total = sum(p.numel() for p in build_model().parameters())
    for case in CASES:
        assert all(result[case][0] for result in results), case
        shares = [result[case][1] for result in results]
        assert sum(shares) == total
        if case != "whole parameters":
            assert max(shares) < total / world_size + 400


def save_and_load(rank, world_size, folder):
    """Train in turns: sharded, plain, sharded on another number of ranks; return the last parameters."""
    torch.set_num_threads(1)
    path = os.path.join(folder, "state.pt")
    model = build_model()
    optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-3)
    if os.path.exists(path):
        states = torch.load(path)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    train(model, optimizer, 0, 2, first_step=2 * (4 - world_size))  # the same batches on every rank
    state = optimizer.state_dict()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": state}, path)
    return [p.detach().clone() for p in model.parameters()]


def test_state_resumes_on_any_world_size_and_in_the_plain_optimizer(run_ranks, tmp_path):
    results = [run_ranks(save_and_load, world_size, str(tmp_path)) for world_size in (4, 3, 2)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for turn, ranks in enumerate(results):
        train(model, optimizer, 0, 2, first_step=2 * turn)
        for parameters in ranks:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True)), turn
    resumed = build_model()
    states = torch.load(tmp_path / "state.pt")
    resumed.load_state_dict(states["model"])
    loaded = optim.AdamW(resumed.parameters(), lr=1.0)
    loaded.load_state_dict(states["optimizer"])
    for each in ((model, optimizer), (resumed, loaded)):
        train(*each, 0, 2, first_step=6)
    torch.set_num_threads(threads)
    assert equal_parameters(model, resumed)


def consolidate(rank, world_size):
    """Save as scripts for torch's do: on one rank alone."""
    torch.set_num_threads(1)
    model = build_model()
    optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-3)
    train(model, optimizer, 0, 2)
    whole = optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        same = equal_states(whole, optimizer.state_dict())
    else:
        with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\) on all ranks"):
            optimizer.state_dict()
        same = True
    train(model, optimizer, 0, 1)
    return same, float(optimizer.state_dict()["state"][0]["step"])  # of all ranks again


def test_only_one_rank_has_a_consolidated_state_until_the_next_step(run_ranks):
    assert run_ranks(consolidate, 2) == [(True, 3.0)] * 2


def train_unevenly(rank, world_size, optimizer_class, backend):
    torch.set_num_threads(1)
    model = build_model()
    ddp = phalanx.DistributedDataParallel(model)
    if optimizer_class is phalanx.ZeroRedundancyOptimizer:
        optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
        joined = [ddp, optimizer]
    else:
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        joined = [ddp]
    with Join(joined):
        train(ddp, optimizer, rank, 2 + 2 * rank)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_ranks_may_run_out_of_data_before_others(run_ranks, backend):
    plain, sharded = (
        run_ranks(train_unevenly, 2, optimizer_class, backend, backend=backend)
        for optimizer_class in (optim.SGD, phalanx.ZeroRedundancyOptimizer)
    )
    assert all(torch.equal(parameters, plain[1]) for parameters in (*sharded, plain[0]))


def memory_for_adam(rank, world_size, how):
    from bench.ddp import proportional_mib  # brings matplotlib, which other ranks need not import

    warm_up = nn.Linear(2, 2)
    warm_up(torch.ones(1, 2)).sum().backward()
    optim.Adam(warm_up.parameters()).step()  # imports what it needs
    model = nn.Linear(4096, 2048)  # 32 MiB
    x = torch.ones(1, 4096)
    dist.barrier()
    before = proportional_mib()
    if how == "plain":
        optimizer = optim.Adam(model.parameters())
    else:
        optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.Adam, share_parameters=how == "shared")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    used = proportional_mib() - before
    dist.barrier()
    return used / 32


def test_two_ranks_keep_one_copy_of_parameters_and_state(run_ranks, monkeypatch):
    """In units of the model's size: Adam's state is two; parameters were there before."""
    monkeypatch.setenv("PHALANX_MEMORY", "default")  # else freed gradients would be resident, too
    plain, private, shared = (sum(run_ranks(memory_for_adam, 2, how)) for how in ("plain", "private", "shared"))
    assert 3.7 < plain < 4.6  # two for each rank
    assert 1.7 < private < 2.6  # two in all
    assert 0.7 < shared < 1.6  # two in all, and one copy of the parameters went away


def disagree(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Linear(40, 5)
    optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=1.0, share_parameters=True)
    alike = [torch.empty_like(model.weight) for _ in range(world_size)]
    dist.all_gather(alike, model.weight.detach())
    dist.barrier()  # the one weight is what a slower rank may still be copying
    if rank == 1:
        model.weight.data.fill_(3)
    dist.barrier()
    seen = model.weight.unique().tolist()
    dist.barrier()
    for bad in (
        lambda: optimizer.add_param_group({"params": []}),
        lambda: optimizer.load_state_dict({"param_groups": []}),
    ):
        with pytest.raises((NotImplementedError, ValueError), match="ZeroRedundancyOptimizer"):
            bad()
    calls = []
    assert optimizer.step(lambda: calls.append(torch.is_grad_enabled()) or 5) == 5
    return all(torch.equal(a, alike[0]) for a in alike), seen, calls


def test_shared_parameters_begin_as_those_of_rank_0_and_are_one(run_ranks):
    assert run_ranks(disagree, 2) == [(True, [3.0], [True])] * 2


def sparse_gradient(rank, world_size):
    embedding = nn.Embedding(1000, 64, sparse=True)
    optimizer = phalanx.ZeroRedundancyOptimizer(embedding.parameters(), optim.SGD, lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


def test_a_sparse_gradient_of_a_cut_parameter_is_refused(run_ranks):
    with pytest.raises(phalanx.RankError, match=r"rank \d: ZeroRedundancyOptimizer: step\(\) takes dense gradients"):
        run_ranks(sparse_gradient, 2)


NOWHERE = shared_memory.Address(pid=2**22 + 1, fd=3, inode=4, size_bytes=5)  # beyond the largest pid


def share_with_a_stranger(rank, world_size):
    create = shared_memory.Block.create

    def lie(num_bytes, purpose):
        block = create(num_bytes, purpose)
        block.__class__ = type("Stranger", (shared_memory.Block,), {"address": NOWHERE})
        return block

    shared_memory.Block.create = lie
    with pytest.raises(RuntimeError) as failure:
        phalanx.ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optim.SGD, lr=1.0, share_parameters=True)
    return str(failure.value)


def test_ranks_that_cannot_share_say_so_on_every_rank(run_fresh_ranks):
    for rank, text in enumerate(run_fresh_ranks(share_with_a_stranger, 2)):
        assert f"rank {rank}: parameters cannot be shared: rank 1: cannot map the memory of rank 0" in text


def take_other_memory(rank, world_size, share_parameters):
    models = [build_model(), build_model()]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.SGD(models[0].parameters(), lr=0.5)
    ours = phalanx.ZeroRedundancyOptimizer(
        models[1].parameters(), torch.optim.SGD, lr=0.5, share_parameters=share_parameters
    )
    for model in models:
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
            parameter.grad = torch.ones_like(parameter)
    plain.step()
    if share_parameters:
        with pytest.raises(ValueError, match="was given memory of its own"):
            ours.step()
        return
    for _ in range(2):
        ours.step()
    plain.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("share_parameters", [False, True])
def test_parameters_that_were_given_other_memory_are_stepped(run_ranks, share_parameters):
    run_ranks(take_other_memory, 2, share_parameters)


def test_no_process_group_is_an_error_that_shows_the_call():
    with pytest.raises(ValueError, match=r"phalanx\.init\(\)"):
        phalanx.ZeroRedundancyOptimizer(nn.Linear(1, 1).parameters(), optim.SGD, lr=1.0)


@given(
    numels=st.lists(st.integers(0, 2000), min_size=1, max_size=8),
    num_shards=st.integers(1, 6),
    cut=st.sampled_from([0, 128]),
)
def test_cuts_tile_the_buffer_evenly(numels, num_shards, cut):
    begins = [0, *itertools.accumulate(-(-n // 64) * 64 for n in numels)][:-1]
    places = cuts(begins, numels, num_shards, cut)
    assert len(places) == num_shards - 1
    assert places == sorted(places)
    bounds = [0, *places, begins[-1] + numels[-1]]
    shares = []
    for lo, hi in itertools.pairwise(bounds):
        pieces = [(max(lo, b), min(hi, b + n)) for b, n in zip(begins, numels, strict=True)]
        shares.append(sum(max(stop - start, 0) for start, stop in pieces))
    assert sum(shares) == sum(numels)
    for place in places:
        inside = [(place - b, n) for b, n in zip(begins, numels, strict=True) if b < place < b + n]
        assert all(cut and at % cut == 0 for at, _ in inside)
    slack = 128 if cut else max(numels)
    assert max(shares) <= sum(numels) / num_shards + slack + 1
