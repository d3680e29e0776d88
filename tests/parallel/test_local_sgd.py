"""LocalSGD equals a computation by hand for all hosts in one process, resumes within a window, names mistakes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import phalanx
from phalanx.parallel.local_sgd import nesterov

pytestmark = pytest.mark.kept_ranks

NUM_STEPS = 11  # of windows of four: two meetings, and sync() after three more
EVERY = 4


def build_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)


def inner_optimizer(model):
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x), y)


def groups_of(rank, hosts):
    """The groups of this rank, if `hosts` says to which each belongs."""
    return phalanx.host_groups(f"host {hosts[rank]}")


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(one, other, **tolerance):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_same_bits(states):
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(value, state[name]), name


# ---- by hand -------------------------------------------------------------------------------------------------------


def by_hand(hosts, outer_class, *, warmup_steps=0, rounds=False):
    """Train all hosts in one process: a copy of the model for each, whose batch is that of all its ranks."""
    start = build_model()
    models = [copy.deepcopy(start) for _ in sorted(set(hosts))]
    members = [[rank for rank, host in enumerate(hosts) if host == number] for number in range(len(models))]
    optimizers = [inner_optimizer(model) for model in models]
    outer = outer_class and outer_class(list(start.parameters()))
    left_out = [[torch.zeros_like(p) for p in start.parameters()] for _ in models]
    apart = 0
    for step in range(NUM_STEPS):
        for model, ranks, optimizer in zip(models, members, optimizers, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                (loss_of(model, rank, step) / len(ranks)).backward()
            optimizer.step()
        apart += 1
        warming_up = step < warmup_steps
        if warming_up or apart == EVERY or step == NUM_STEPS - 1:
            meet(start, models, members, None if warming_up else outer, left_out, rounds)
            apart = 0
    return start


@torch.no_grad()
def meet(start, models, members, outer, left_out, rounds):
    num_ranks = sum(map(len, members))
    for i, p in enumerate(start.parameters()):
        ways = []
        for model, ranks, rest in zip(models, members, left_out, strict=True):
            way = (p - list(model.parameters())[i]) * (len(ranks) * len(models) / num_ranks)
            if rounds:
                way += rest[i]
                rest[i] = way - way.bfloat16()
                way = way.bfloat16()
            ways.append(way)
        way = torch.stack(ways).sum(0).float() / len(models)  # rounds again, if these are bf16
        p.grad = way
        if outer is None:
            p.sub_(way)
    if outer is not None:
        outer.step()
    for model in models:
        for p, q in zip(model.parameters(), start.parameters(), strict=True):
            p.copy_(q)


# ---- against the reference -----------------------------------------------------------------------------------------


def train(rank, world_size, hosts, options, seed_by_rank=False):
    """Return this rank's parameters at the end, and after which steps the hosts met."""
    groups = groups_of(rank, hosts)
    model = build_model()
    if seed_by_rank and rank > 0:
        model = build_model(seed=rank)
    net = phalanx.DistributedDataParallel(model, process_group=groups.host, broadcast_buffers=False)
    optimizer = inner_optimizer(model)
    outer = phalanx.LocalSGD(model.parameters(), every=EVERY, process_group=groups, **options)
    met = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
        if outer.step():
            met.append(step + 1)
    assert outer.sync()
    assert not outer.sync()
    return state_of(model), met


def check_against_hand(run_ranks, hosts, options, backend="phalanx", met=(4, 8), **by_hand_options):
    results = run_ranks(train, len(hosts), hosts, options, True, backend=backend)
    want = by_hand(hosts, options.get("outer_optimizer", nesterov), **by_hand_options)
    parameters = dict(want.named_parameters())
    for state, meetings in results:
        assert tuple(meetings) == met
        assert_close({name: state[name] for name in parameters}, parameters, rtol=1e-4, atol=1e-6)
    assert_same_bits([{name: state[name] for name in parameters} for state, _ in results])


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1]])
def test_a_diloco_step_is_that_of_one_process(run_ranks, hosts):
    check_against_hand(run_ranks, hosts, {})


@pytest.mark.parametrize(("hosts", "backend"), [([0, 1], "gloo"), ([0, 0, 1, 1], "phalanx")])
def test_without_an_outer_optimizer_parameters_are_averaged(run_ranks, hosts, backend):
    check_against_hand(run_ranks, hosts, {"outer_optimizer": None}, backend)


def test_warm_up_averages_every_step(run_ranks):
    results = run_ranks(train_warming_up, 2, 3)
    want = dict(by_hand([0, 1], nesterov, warmup_steps=3).named_parameters())
    for state, met in results:
        assert met == [1, 2, 3, 7, 11]
        assert_close({name: state[name] for name in want}, want, rtol=1e-4, atol=1e-6)


def train_warming_up(rank, world_size, warmup_steps):
    model = build_model()
    optimizer = inner_optimizer(model)
    outer = phalanx.LocalSGD(model.parameters(), every=EVERY, warmup_steps=warmup_steps)
    met = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if outer.step():
            met.append(step + 1)
    return state_of(model), met


# ---- what crosses --------------------------------------------------------------------------------------------------


def train_alone(rank, world_size, compress):
    """Train with each rank as one host; return its parameters, and those by hand with as many threads."""
    model = build_model()
    optimizer = inner_optimizer(model)
    outer = phalanx.LocalSGD(model.parameters(), every=EVERY, compress=compress)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        outer.step()
    outer.sync()
    return dict(model.named_parameters()), dict(by_hand([0, 1], nesterov, rounds=bool(compress)).named_parameters())


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("compress", [None, "bf16"])
def test_the_residual_of_rounding_is_sent_at_the_next_synchronization(run_ranks, backend, compress):
    for got, want in run_ranks(train_alone, 2, compress, backend=backend):
        assert_same_bits([got, want])


def step_by_what_bf16_cannot_hold(rank, world_size):
    """Go a way of 1.001 for each of 64 meetings, of which bf16 has 1.0."""
    groups = groups_of(rank, [0, 0, 1, 1])
    parameter = nn.Parameter(torch.zeros(5))
    outer = phalanx.LocalSGD([parameter], every=1, process_group=groups, outer_optimizer=None, compress="bf16")
    for _ in range(64):
        parameter.data += 1.001
        outer.step()
    return parameter.tolist()


def test_rounding_does_not_add_up(run_ranks):
    for values in run_ranks(step_by_what_bf16_cannot_hold, 4):
        assert values == pytest.approx([64.064] * 5, abs=0.01)


def count_what_crosses(rank, world_size, hosts):
    groups = groups_of(rank, hosts)
    parameters = [nn.Parameter(torch.zeros(7, 3)), nn.Parameter(torch.zeros(10, dtype=torch.float64))]
    outer = phalanx.LocalSGD(parameters, every=1, process_group=groups)
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, group=None, **kwargs):
        if group is groups.across and tensor.is_floating_point():
            sent.append((str(tensor.dtype), tensor.numel()))
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = counting
    outer.step()
    return sent


def test_one_copy_for_each_host_crosses_in_one_call_for_each_dtype(run_fresh_ranks):
    results = run_fresh_ranks(count_what_crosses, 5, [0, 0, 1, 1, 1])
    float32, float64 = "torch.float32", "torch.float64"
    assert results[:2] == results[2:4] == [[(float32, 10), (float64, 5)], [(float32, 11), (float64, 5)]]
    assert results[4] == []  # its host's first two carry what it has


def average_buffers(rank, world_size, hosts):
    groups = groups_of(rank, hosts)
    model = build_model()
    outer = phalanx.LocalSGD(model.parameters(), every=1, process_group=groups, buffers=model.buffers())
    model[1].running_mean.fill_(rank)
    model[1].num_batches_tracked.fill_(rank)
    outer.step()
    return model[1].running_mean.tolist(), model[1].num_batches_tracked.item()


def test_buffers_are_averaged_over_all_ranks_if_asked(run_ranks):
    for rank, (mean, count) in enumerate(run_ranks(average_buffers, 3, [0, 0, 1])):
        assert mean == [1.0] * 8
        assert count == rank


def train_shards(rank, world_size):
    """FSDP2 within each host; LocalSGD between the ranks that hold the same shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "host"))
    model = build_model()
    del model[1]  # its statistics would be of a part of the batch
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=mesh["host"])
    host = rank // 2
    ours = [p.to_local() for p in model.parameters()]
    runs = {
        "sharded": (model, phalanx.LocalSGD(ours, every=2, process_group=mesh.get_group("across"))),
        "whole": (
            phalanx.DistributedDataParallel(whole, process_group=mesh.get_group("host")),
            phalanx.LocalSGD(whole.parameters(), every=2, process_group=mesh.get_group("across")),
        ),
    }
    for net, outer in runs.values():
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, 10 * host + rank, step).backward()
            optimizer.step()
            outer.step()
    with pytest.raises(ValueError, match=r"parameters are DTensors: pass their local shards"):
        phalanx.LocalSGD(model.parameters(), every=2)
    return {n: p.full_tensor() for n, p in model.named_parameters()}, dict(whole.named_parameters())


def test_shards_of_fsdp_synchronize_like_whole_parameters(run_ranks):
    for sharded, whole in run_ranks(train_shards, 4):
        assert_close(sharded, whole, rtol=1e-4, atol=1e-6)


# ---- going on ------------------------------------------------------------------------------------------------------


def train_and_resume(rank, world_size, folder, hosts, compress, stop):
    """Train whole; train to `stop`, save, go on in other objects; return both ends."""
    groups = groups_of(rank, hosts)

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 100), nn.Linear(100, 3))  # 80 kB: in parts
        net = phalanx.DistributedDataParallel(model, process_group=groups.host)
        optimizer = inner_optimizer(model)
        outer = phalanx.LocalSGD(model.parameters(), every=EVERY, process_group=groups, compress=compress)
        return net, optimizer, outer

    def run(net, optimizer, outer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
            outer.step()

    whole = make(0)
    run(*whole, 0, NUM_STEPS)
    part = make(0)
    run(*part, 0, stop)
    names = ("model", "optimizer", "outer")
    phalanx.checkpoint.save(folder, dict(zip(names, part, strict=True)), stop)
    phalanx.checkpoint.wait()
    torch.save(part[2].state_dict(), f"{folder}/rank_{rank}.pt")
    again = make(1)
    run(*again, 0, 2)  # whatever was there before
    phalanx.checkpoint.load(folder, dict(zip(names, again, strict=True)))
    run(*again, stop, NUM_STEPS)
    third = make(2)[2]
    third.load_state_dict(torch.load(f"{folder}/rank_{rank}.pt"))
    assert third.state_dict()["left_out"] == part[2].state_dict()["left_out"]
    return state_of(whole[0].module), state_of(again[0].module)


@pytest.mark.parametrize(
    ("hosts", "compress", "stop"), [([0, 0, 1, 1], "bf16", 6), ([0, 1], None, 4), ([0, 1], None, 7)]
)
def test_a_checkpoint_resumes_in_the_middle_of_a_window(run_ranks, tmp_path, hosts, compress, stop):
    results = run_ranks(train_and_resume, len(hosts), str(tmp_path), hosts, compress, stop)
    for whole, resumed in results:
        assert_same_bits([whole, resumed])


def save_or_load_at_a_meeting(rank, world_size, folder, *, save):
    torch.manual_seed(rank)
    model = nn.Linear(300, 100)
    outer = phalanx.LocalSGD(model.parameters(), every=2, compress="bf16")
    if save:
        for _ in range(2):
            model.weight.data += 0.1 * rank
            outer.step()
        phalanx.checkpoint.save(folder, {"model": model, "outer": outer}, 2)
        phalanx.checkpoint.wait()
    else:
        phalanx.checkpoint.load(folder, {"model": model, "outer": outer})
        assert torch.equal(outer.state_dict()["starts"][0][:30000], model.weight.flatten())
        assert not torch.tensor(list(outer.state_dict()["left_out"][0])).any()
    return outer.num_steps, state_of(model)


def saver(rank, world_size, folder):
    return save_or_load_at_a_meeting(rank, world_size, folder, save=True)


def loader(rank, world_size, folder):
    return save_or_load_at_a_meeting(rank, world_size, folder, save=False)


def test_a_state_saved_at_a_synchronization_loads_on_any_number_of_ranks(run_ranks, tmp_path):
    [(_, saved), _] = run_ranks(saver, 2, str(tmp_path))
    for num_steps, state in run_ranks(loader, 3, str(tmp_path)):
        assert num_steps == 2
        assert_same_bits([saved, state])


# ---- mistakes ------------------------------------------------------------------------------------------------------


def make_mistakes(rank, world_size):
    """Make each mistake on one rank or on both; return what each rank was told."""
    model = build_model()
    attempts = {
        "every": {"every": 0 if rank else 4},
        "warm-up": {"every": 4, "warmup_steps": -1},
        "compress": {"every": 4, "compress": "int8"},
        "nothing": {"every": 4, "params": []},
        "integers": {"every": 4, "params": [torch.zeros(3, dtype=torch.int64)]},
        "other": {"every": 4 + rank},
        "shapes": {"every": 4, "params": [torch.zeros(3 + rank)]},
    }
    told = {}
    for name, options in attempts.items():
        options.setdefault("params", list(model.parameters()))
        with pytest.raises(ValueError, match="LocalSGD: ") as raised:
            phalanx.LocalSGD(**options)
        told[name] = str(raised.value)
    outer = phalanx.LocalSGD(model.parameters(), every=3)
    state = outer.state_dict()
    with pytest.raises(
        ValueError, match=r"a state of \[\[3\]\] elements with an outer optimizer does not fit \[\[91\]\]"
    ):
        outer.load_state_dict({**state, "starts": [torch.zeros(3)]})
    with pytest.raises(ValueError, match="without an outer optimizer does not fit"):
        outer.load_state_dict({**state, "outer_optimizer": None})
    outer.step()
    with pytest.raises(ValueError, match="LocalSGD: ") as raised:
        (outer.step(), outer.step()) if rank else outer.sync()
    told["steps"] = str(raised.value)
    return told


def test_mistakes_are_the_same_error_on_every_rank(run_ranks):
    one, other = run_ranks(make_mistakes, 2)
    assert one["every"] == other["every"] == "rank 1: LocalSGD: every must be at least 1, got 0"
    assert one["warm-up"].endswith("warmup_steps must be at least 0, got -1")
    assert one["compress"].endswith("compress must be None or \"bf16\", got 'int8'")
    assert "no parameters" in one["nothing"]
    assert "floating-point" in one["integers"]
    assert one["other"] == other["other"]
    assert one["other"].startswith("LocalSGD: every differs between ranks: 4 on rank 0, 5 on rank 1")
    assert one["shapes"].startswith("LocalSGD: parameters or buffers differ in number, shape or dtype between ranks 0")
    assert "different numbers of steps, 1 to 3; this one has taken 1" in one["steps"]
    assert "different numbers of steps, 1 to 3; this one has taken 3" in other["steps"]


def test_a_process_group_is_needed():
    with pytest.raises(ValueError, match=r"LocalSGD: there is no process group yet; call phalanx\.init\(\)"):
        phalanx.LocalSGD(build_model().parameters(), every=2)
    with pytest.raises(ValueError, match=r"host_groups: there is no process group yet; call phalanx\.init\(\)"):
        phalanx.host_groups()
