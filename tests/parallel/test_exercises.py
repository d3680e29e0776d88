"""The tutorials' exercises: gradients averaged by hand, and all_reduce as a ring of messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx

pytestmark = pytest.mark.kept_ranks

BACKENDS = ["phalanx", "gloo"]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


# ---------------------------------------------------------------- ring_all_reduce


def numbers(num_elems, dtype, rank):
    """Small whole numbers, whose sums every type holds exactly; other ones on each rank."""
    return (torch.arange(num_elems) % 7 + rank).to(dtype)


def total_of(num_elems, dtype, ranks):
    return sum(numbers(num_elems, torch.int64, rank) for rank in ranks).to(dtype)


def ring_of_many(rank, world_size):
    """Return what differs from the exact sum."""
    wrong = []
    lengths = [0, 1, world_size - 1, world_size + 1, 1023]
    for dtype, num_elems in [*((d, n) for d in DTYPES for n in lengths), (torch.float32, 1_000_003)]:
        tensor = numbers(num_elems, dtype, rank)
        got = phalanx.ring_all_reduce(tensor)
        if got is not tensor or not torch.equal(tensor, total_of(num_elems, dtype, range(world_size))):
            wrong.append((dtype, num_elems))
    return wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ring_sums_every_length_and_type(run_ranks, world_size, backend):
    for rank, wrong in enumerate(run_ranks(ring_of_many, world_size, backend=backend)):
        assert not wrong, f"rank {rank}"


def views(rank):
    """Return tensors of many layouts, by name; all of their storages hold other things too."""

    def base():
        return numbers(24, torch.float64, rank)

    return {
        "scalar": base()[5],
        "shaped": base().view(2, 3, 4),
        "transposed": base().view(4, 6).t(),
        "strided": base()[::3],
        "column": base().view(4, 6)[:, 1],
        "channels_last": base().view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "negated": torch.complex(base(), base()).conj().imag,
        "leaf": nn.Parameter(base()),
        "bool": torch.tensor([True, rank == 0, False]),
    }


def ring_of_layouts(rank, world_size):
    pairs = {}
    for name, tensor in views(rank).items():
        want = tensor.detach().clone()
        dist.all_reduce(want)
        pairs[name] = phalanx.ring_all_reduce(tensor).detach().clone(), want
    return pairs


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ring_works_in_place_on_any_layout(run_ranks, backend):
    for pairs in run_ranks(ring_of_layouts, 3, backend=backend):
        for name, (got, want) in pairs.items():
            assert torch.equal(got, want), name


def ring_of_floats(rank, world_size):
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(10_007, generator=generator)
    every = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(every, own)
    return phalanx.ring_all_reduce(own), torch.stack(every).double().sum(0)


def test_all_ranks_of_the_ring_have_the_same_bits(run_ranks):
    results = run_ranks(ring_of_floats, 4)
    for got, want in results:
        assert torch.equal(got, results[0][0])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def ring_of_groups(rank, world_size):
    """Two groups at the same time, the second in reversed order; then one with a rank outside."""
    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2], sort_ranks=False)]
    tensor = numbers(5, torch.int64, rank)
    phalanx.ring_all_reduce(tensor, pairs[rank // 2])
    most = dist.new_group([0, 1, 2])
    other = numbers(5, torch.int64, rank)
    if rank < 3:
        phalanx.ring_all_reduce(other, most)
        return tensor, other
    with pytest.raises(ValueError, match="rank 3: ring_all_reduce: this rank is not in the group"):
        phalanx.ring_all_reduce(other, most)
    return tensor, other


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ring_sums_within_its_group(run_ranks, backend):
    for rank, (pair, most) in enumerate(run_ranks(ring_of_groups, 4, backend=backend)):
        assert torch.equal(pair, total_of(5, torch.int64, [0, 1] if rank < 2 else [2, 3]))
        assert torch.equal(most, total_of(5, torch.int64, [0, 1, 2] if rank < 3 else [3]))


# ---------------------------------------------------------------- average_gradients


def parameter(shape, grad=None, dtype=torch.float32):
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    made.grad = grad
    return made


def train_alone_and_together(rank, world_size):
    """Return gradients of a model on the whole batch, and those averaged over its parts, for each kind of argument."""
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(4 * world_size, n, generator=generator, dtype=torch.float64) for n in (6, 2))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 2)).double()
    model[0].bias.requires_grad_(False)
    found = []
    own = slice(4 * rank, 4 * rank + 4)
    for part, argument in [
        (slice(None), None),
        (own, model),
        (own, list(model.parameters())),
        (own, model.parameters()),
    ]:
        model.zero_grad()
        nn.functional.mse_loss(model(x[part]), target[part]).backward()
        if argument is not None:
            phalanx.average_gradients(argument)
        found.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    assert model[0].bias.grad is None
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_averaged_gradients_are_those_of_the_whole_batch(run_ranks, world_size, backend):
    results = run_ranks(train_alone_and_together, world_size, backend=backend)
    for whole, *averaged in results:
        for grads in averaged:
            assert len(grads) == 3
            for got, want, on_rank_0 in zip(grads, whole, results[0][1], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
                assert torch.equal(got, on_rank_0)


def of_types(rank):
    dtypes = [torch.complex64, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128]
    return [parameter(2, torch.full((2,), rank + 1, dtype=dtype), dtype) for dtype in dtypes]


def tied(rank):
    twice = parameter(2, torch.full((2,), float(rank)))
    return [twice, parameter(1, torch.ones(1)), twice]


def transposed_on_rank_0(rank):
    return [parameter((2, 3), torch.ones(2, 3) if rank else torch.arange(6.0).view(3, 2).t())]


AVERAGES = {  # parameters with gradients as they are on a rank, and the gradients that both of two ranks then have
    "no parameters": (lambda rank: [], []),
    "no elements": (lambda rank: [parameter(0, torch.zeros(0)), parameter((), torch.tensor(float(rank)))], [[], 0.5]),
    "many types": (of_types, [[1.5, 1.5]] * 6),
    "one parameter twice": (tied, [[0.5, 0.5], [1.0], [0.5, 0.5]]),
    "None on rank 1": (lambda rank: [parameter(2, None if rank else torch.ones(2))], [[0.5, 0.5]]),
    "None on all ranks": (lambda rank: [parameter(3), parameter(1, torch.ones(1) * rank)], [None, [0.5]]),
    "None but None": (lambda rank: [parameter(3)], [None]),
    "transposed on rank 0": (transposed_on_rank_0, [[[0.5, 1.5, 2.5], [1.0, 2.0, 3.0]]]),
    "expanded": (lambda rank: [parameter((2, 3), torch.tensor(float(rank)).expand(2, 3))], [[[0.5] * 3] * 2]),
}


def average_each(rank, world_size):
    """Return, for each of `AVERAGES`, the gradients that this rank has afterwards, or what was raised."""
    results = {}
    for case, (make, _) in AVERAGES.items():
        model = make(rank)
        try:
            phalanx.average_gradients(model)
        except RuntimeError as error:
            results[case] = str(error)
        else:
            results[case] = [None if p.grad is None else p.grad.tolist() for p in model]
    return results


@pytest.fixture(scope="module", params=BACKENDS)
def averages(request, run_ranks):
    return run_ranks(average_each, 2, backend=request.param)


@pytest.mark.parametrize("case", AVERAGES)
def test_gradients_of_any_kind_are_averaged(averages, case):
    assert [result[case] for result in averages] == [AVERAGES[case][1]] * 2


def average_sparse(rank, world_size):
    """Embeddings with sparse gradients: rows of several ranks, of one, of none; and one that only rank 0 uses."""
    tables = nn.ModuleList([nn.Embedding(5, 2, sparse=True) for _ in range(2)])
    head = nn.Linear(2, 1, bias=False)
    nn.init.ones_(head.weight)
    output = head(tables[0](torch.tensor([rank, rank, 4])))
    if rank == 0:
        output = output + head(tables[1](torch.tensor([3, 3, 3])))
    output.sum().backward()
    phalanx.average_gradients([*tables.parameters(), *head.parameters()])
    return [table.weight.grad.is_sparse for table in tables], [table.weight.grad.to_dense() for table in tables]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_gradients_are_averaged_and_stay_sparse(run_ranks, backend):
    for sparse, (both, one) in run_ranks(average_sparse, 2, backend=backend):
        assert sparse == [True, True]
        assert both[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
        assert one[:, 0].tolist() == [0.0, 0.0, 0.0, 1.5, 0.0]


def average_in_groups(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = parameter(2, torch.full((2,), float(rank)))
    phalanx.average_gradients([own], pairs[rank // 2])
    with pytest.raises(ValueError, match=f"rank {rank}: average_gradients: this rank is not in the group"):
        phalanx.average_gradients([own], pairs[1 - rank // 2])
    return own.grad.tolist()


def test_gradients_are_averaged_within_the_group(run_ranks):
    assert run_ranks(average_in_groups, 4) == [[0.5, 0.5], [0.5, 0.5], [2.5, 2.5], [2.5, 2.5]]


@pytest.mark.parametrize("exercise", [phalanx.average_gradients, phalanx.ring_all_reduce])
def test_without_a_process_group_it_says_what_to_call(exercise):
    argument = [parameter(1, torch.ones(1))] if exercise is phalanx.average_gradients else torch.ones(1)
    with pytest.raises(ValueError, match="init_process_group"):
        exercise(argument)
