"""The direct way, `phalanx.communicator`: it does what torch.distributed does, and refuses what that refuses."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx._errors import CollectiveMismatch, GroupUnusable
from tests.backend._calls import CALLS, Call, check_equal, splits
from tests.backend.test_dtypes import COPIED, MEANINGFUL

pytestmark = pytest.mark.kept_ranks

ReduceOp = dist.ReduceOp
SHAPES = ((1,), (5, 3), (40_003,))
SITE = re.compile(r" at \S+:\d+")  # where the call stands, which differs


def reduce_directly(comm, call):
    tensor = call.input()
    comm.all_reduce(tensor, call.reduce_op)
    return [tensor]


def reduce_scatter_directly(comm, call):
    outputs = [call.empty(), call.empty()]
    comm.reduce_scatter(outputs[0], torch.cat(call.blocks()), call.reduce_op)
    comm.reduce_scatter(outputs[1], call.blocks(), call.reduce_op)
    assert torch.equal(*outputs)
    return outputs[:1]


def broadcast_directly(comm, call):
    tensor = call.input()
    comm.broadcast(tensor, call.peer(call.root))
    return [tensor]


def gather_directly(comm, call):
    output, listed = call.empty(call.size), [call.empty() for _ in range(call.size)]
    comm.all_gather(output, call.input())
    comm.all_gather(listed, call.input())
    check_equal(torch.cat(listed), output, "a list of outputs")
    return [output]


def exchange_directly(comm, call):
    output = call.empty(call.size)
    comm.all_to_all(output, torch.cat(call.blocks()))
    return [output]


def exchange_splits_directly(comm, call):
    sent, received = splits(call)
    row = call.shape[1:] or call.shape
    output = torch.ones(sum(received), *row, dtype=call.dtype)
    comm.all_to_all(output, call.input(shape=(sum(sent), *row)), received, sent)
    return [output]


def pass_on_directly(comm, call):
    """As CALLS["ring"]; rank 0 receives from whoever sends."""
    if call.size == 1:
        return []
    output, tag = call.empty(), call.seed % 5
    after, before = call.peer((call.rank + 1) % call.size), call.peer((call.rank - 1) % call.size)
    if call.rank == 0:
        comm.send(call.input(), after, tag)
    assert comm.recv(output, None if call.rank == 0 else before, tag) == before
    if call.rank != 0:
        comm.send(call.input(), after, tag)
    return [output]


DIRECT = {
    "all_reduce": reduce_directly,
    "reduce_scatter_tensor": reduce_scatter_directly,
    "broadcast": broadcast_directly,
    "all_gather_into_tensor": gather_directly,
    "all_to_all_single": exchange_directly,
    "all_to_all_single_split": exchange_splits_directly,
    "ring": pass_on_directly,
}


def compare(name, group, **facts):
    call = Call(name, group, **facts)
    comm = phalanx.communicator(group)
    for got, want in zip(DIRECT[name](comm, call), call.run(), strict=True):
        check_equal(got, want, f"{name} of {facts}")


def do_as_torch_does(rank, world_size, dtypes=tuple(MEANINGFUL)):
    """Every operation, dtype and reduce operation, on the world and on a group in another order."""
    reversed_world = dist.new_group(list(range(world_size))[::-1], sort_ranks=False)
    for dtype in dtypes:
        for op in MEANINGFUL[dtype]:
            for shape in SHAPES:
                compare("all_reduce", dist.group.WORLD, dtype=dtype, reduce_op=op, shape=shape)
                compare("reduce_scatter_tensor", dist.group.WORLD, dtype=dtype, reduce_op=op, shape=shape)
        for group in (dist.group.WORLD, reversed_world):
            for name in DIRECT:
                compare(name, group, dtype=dtype, shape=(6, 2), root=world_size - 1, seed=3)
    phalanx.communicator().barrier()


def copy_what_has_no_arithmetic(rank, world_size):
    comm = phalanx.communicator()
    for dtype in COPIED:
        if dtype.is_floating_point and dtype.itemsize == 1:
            tensor = torch.full((5,), rank, dtype=torch.uint8).view(dtype)
            comm.broadcast(tensor, world_size - 1)
            assert tensor.view(torch.uint8).tolist() == [world_size - 1] * 5, dtype


def take_unusual_tensors(rank, world_size):
    """Columns, conjugates and negatives, storages larger than the tensor, memory that overlaps, parameters."""
    comm = phalanx.communicator()
    grid = torch.full((4, 3), float(rank + 1))
    comm.all_reduce(grid[:, 1])
    total = sum(range(1, world_size + 1))
    assert grid.tolist() == [[rank + 1.0, total, rank + 1.0]] * 4
    conjugate = torch.full((2,), complex(1, rank)).conj()
    comm.all_reduce(conjugate)
    assert conjugate.tolist() == [complex(world_size, -sum(range(world_size)))] * 2
    negative = torch._neg_view(torch.ones(2))
    comm.all_reduce(negative)
    assert negative.tolist() == [-float(world_size)] * 2
    whole = torch.full((world_size,), float(rank))
    comm.all_gather(whole, whole[rank : rank + 1])  # in place
    assert whole.tolist() == [float(r) for r in range(world_size)]
    shifted = torch.arange(world_size + 1.0)
    comm.all_to_all(shifted[1:], shifted[:-1])
    assert shifted.tolist() == [0.0, *[float(rank)] * world_size]
    lazy = torch.ones(3)
    copied = lazy._lazy_clone()  # shares its memory until one of the two is written
    comm.all_reduce(copied)
    assert (lazy.tolist(), copied.tolist()) == ([1.0] * 3, [float(world_size)] * 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        comm.all_reduce(parameter)
    assert parameter.tolist() == [float(world_size)] * 2


def refuse_as_torch_does(rank, world_size):
    """Return where the words differ from those for the same mistake through torch.distributed."""
    comm = phalanx.communicator()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(8)
    folded = torch.ones(3).expand(2, 3)  # elements that share their memory
    empty, four, two = torch.empty(3), torch.ones(4), torch.ones(2, dtype=torch.int64)
    mistakes = [
        (lambda: comm.all_reduce(freed), lambda: dist.all_reduce(freed)),
        (lambda: comm.all_gather(empty, four), lambda: dist.all_gather_into_tensor(empty, four)),
        (lambda: comm.all_gather(torch.ones(8), two), lambda: dist.all_gather_into_tensor(torch.ones(8), two)),
        (lambda: comm.reduce_scatter(four, empty), lambda: dist.reduce_scatter_tensor(four, empty)),
        (lambda: comm.all_to_all(empty, empty), lambda: dist.all_to_all_single(empty, empty)),
        (
            lambda: comm.all_to_all(four, four, [1, 1], [3, 1]),
            lambda: dist.all_to_all_single(four, four, [1, 1], [3, 1]),
        ),
        (lambda: comm.all_reduce(four, ReduceOp.BAND), lambda: dist.all_reduce(four, ReduceOp.BAND)),
        (lambda: comm.broadcast(four.to("meta"), 0), lambda: dist.broadcast(four.to("meta"), 0)),
        (lambda: comm.send(freed, 1 - rank), lambda: dist.send(freed, 1 - rank)),
        (lambda: comm.all_reduce(folded), lambda: dist.all_reduce(folded)),
    ]
    different = []
    for direct, through_torch in mistakes:
        told = []
        for call in (direct, through_torch):
            with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                call()
            told.append((type(error.value), SITE.sub("", str(error.value).splitlines()[0])))
        if told[0] != told[1]:
            different.append(told)
    for wrong in (
        lambda: comm.all_reduce(None),
        lambda: comm.all_gather(four, [1.0]),
        lambda: comm.send(1.0, 1 - rank),
    ):
        with pytest.raises(TypeError, match=r"takes tensors, got (NoneType|list|float)"):
            wrong()
    for call in (comm.all_reduce, functools.partial(comm.reduce_scatter, torch.empty(2))):
        for op, meant in (("sum", "SUM"), ("max", "MAX"), ("mean", "AVG"), (None, "SUM"), (0, "SUM")):
            told = rf"rank {rank}: (all_reduce|reduce_scatter) at \S*test_communicator.py:\d+: op must be a reduce "
            with pytest.raises(TypeError, match=rf"{told}.* got {op!r} .*; pass dist\.ReduceOp\.{meant}"):
                call(four, op)
    for wrong in (lambda: comm.broadcast(four, 7), lambda: comm.send(four, 7), lambda: comm.recv(four, rank)):
        with pytest.raises(ValueError, match=rf"rank {rank}: (broadcast|send|recv) at \S*test_communicator.py:\d+: "):
            wrong()
    return different


def give_and_get_in_one_tensor(rank, world_size):
    comm = phalanx.communicator()
    tensor = torch.arange(4.0) + 10 * rank
    for call in (
        lambda: comm.all_gather(tensor, tensor),
        lambda: dist.all_gather_into_tensor(tensor, tensor),
        lambda: comm.reduce_scatter(tensor, tensor),
        lambda: dist.reduce_scatter_tensor(tensor, tensor),
    ):
        with pytest.raises(ValueError, match=r"must hold|elements"):
            call()
    assert torch.equal(tensor, torch.arange(4.0) + 10 * rank)
    comm.all_to_all(tensor, tensor)
    half = torch.arange(2.0) + 2 * rank
    assert torch.equal(tensor, torch.cat([half + 10 * r for r in range(2)]))


def exchange_much_in_one_tensor(rank, world_size):
    """Blocks of 80 KB are read from the peers' memory, which no rank may do where another writes over what it gives."""
    comm = phalanx.communicator()
    block = 20_000
    inputs = [torch.arange(float(world_size * block)) + 1e6 * r for r in range(world_size)]
    expected = torch.cat([one[rank * block : (rank + 1) * block] for one in inputs])
    for in_place in ({0}, {1, 2}, {0, 1, 2}, set()):
        tensor = inputs[rank].clone()
        output = tensor if rank in in_place else torch.zeros_like(tensor)
        comm.all_to_all(output, tensor)
        check_equal(output, expected, f"in place on {in_place}")
        if rank not in in_place:
            check_equal(tensor, inputs[rank], f"an input, in place on {in_place}")


def fail_as_torch_does(rank, world_size):
    comm = phalanx.communicator()
    with pytest.raises(
        CollectiveMismatch, match=r"all_reduce\(float32, count=3, op=SUM\) at \S*test_communicator.py:\d+"
    ):
        comm.all_reduce(torch.ones(3)) if rank == 0 else comm.broadcast(torch.ones(3), 0)
    with pytest.raises(GroupUnusable):
        comm.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    with pytest.raises(GroupUnusable, match="destroyed") as error:
        comm.all_reduce(torch.ones(3))
    assert error.value.op == "all_reduce"
    with pytest.raises(GroupUnusable, match="destroyed"):
        comm.send(torch.ones(3), 1 - rank)
    with pytest.raises(ValueError, match="init_process_group"):
        phalanx.communicator()


def receive_another_size(rank, world_size):
    comm = phalanx.communicator()
    if rank == 0:
        with pytest.raises((CollectiveMismatch, GroupUnusable)):
            comm.send(torch.ones(6), 1)
            comm.barrier()
        return
    with pytest.raises(CollectiveMismatch, match=r"rank 0 sent send\(float32, count=6\)") as error:
        comm.recv(torch.ones(5), 0)
    assert re.search(r"recv of group .default. at \S*test_communicator\.py:\d+: ", str(error.value)), error.value


def need_a_group_of_ours(rank, world_size):
    with pytest.raises(ValueError, match="got one of gloo"):
        phalanx.communicator(dist.new_group(backend="gloo"))
    dist.barrier()  # Gloo fails on a rank that still connects when another ends
    outside = dist.new_group([0])
    if rank != 0:
        with pytest.raises(ValueError, match="member"):
            phalanx.communicator(outside)


def appear_in_a_profile(rank, world_size):
    comm = phalanx.communicator()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        comm.all_reduce(torch.ones(3))
    return sorted({event.name for event in watched.events() if event.name.startswith("phalanx:")})


def run_all(rank, world_size, functions):
    return [function(rank, world_size) for function in functions]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_does_what_torch_distributed_does(run_ranks, world_size):
    run_ranks(run_all, world_size, [do_as_torch_does, copy_what_has_no_arithmetic, take_unusual_tensors])


def test_it_refuses_what_torch_distributed_refuses_in_the_same_words(run_ranks):
    for [different] in run_ranks(run_all, 2, [refuse_as_torch_does]):
        assert different == []


def test_one_tensor_may_be_both_sides_only_where_they_are_of_one_size(run_ranks):
    run_ranks(give_and_get_in_one_tensor, 2)


def test_large_blocks_are_exchanged_in_one_tensor_on_any_of_the_ranks(run_ranks):
    run_ranks(exchange_much_in_one_tensor, 3)


def test_it_needs_a_group_of_the_backend(run_ranks):
    run_ranks(need_a_group_of_ours, 2)


def test_a_mismatch_ends_the_group_and_a_destroyed_one_says_so(run_ranks):
    run_ranks(fail_as_torch_does, 2)


def test_a_receive_of_another_size_names_its_line(run_ranks):
    run_ranks(receive_another_size, 2)


def test_a_profiler_sees_it(run_ranks):
    assert run_ranks(appear_in_a_profile, 2) == [["phalanx:all_reduce"]] * 2


def test_every_direct_operation_has_one_of_torchs_beside_it():
    assert set(DIRECT) <= set(CALLS)
