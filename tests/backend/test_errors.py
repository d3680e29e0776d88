"""Mistakes of the caller: an error that names rank and operation and shows the right call. The group lives on."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
import torch.distributed as dist

from phalanx import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupUnusable,
    OutOfSharedMemory,
    PhalanxError,
    RankFailed,
)

pytestmark = pytest.mark.kept_ranks

ReduceOp = dist.ReduceOp
META = torch.device("meta")  # stands for any device that is no CPU


def ones(*shape, **options):
    return torch.ones(*(shape or (3,)), **options)


def opts(cls, **fields):
    made = cls()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def call_with_root(op, root, group, num_ranks):
    tensors = {"gather": [[], [ones()]], "scatter": [[ones()], []]}.get(op, [[ones()]])
    getattr(group, op)(*tensors, opts(getattr(dist, f"{op.capitalize()}Options"), rootRank=root))


# Each: what the message must say besides rank and operation, the operation, and the call. torch's own checks come
# before ours in the functions of torch.distributed; below them, in the group's methods, ours stand alone.
WRONG_CALLS = {
    "device": [
        ("to_empty", "broadcast", lambda g, n: g.broadcast([ones(device=META)], opts(dist.BroadcastOptions))),
        ("to_empty", "all_reduce", lambda g, n: g.allreduce([ones(device=META)], opts(dist.AllreduceOptions))),
        ("on meta, which has none", "reduce", lambda g, n: g.reduce([ones(device=META)], opts(dist.ReduceOptions))),
        ("to_empty", "send", lambda g, n: g.send([ones(device=META)], (g.rank() + 1) % n, 0)),
        ("to_empty", "recv", lambda g, n: g.recv([ones(device=META)], (g.rank() + 1) % n, 0)),
    ],
    "layout": [
        ("to_dense()", "broadcast", lambda g, n: g.broadcast([ones().to_sparse()], opts(dist.BroadcastOptions))),
        ("to_dense()", "all_gather", lambda g, n: dist.all_gather([ones()] * n, ones().to_sparse())),
        ("to_dense()", "all_reduce", lambda g, n: dist.all_reduce(ones(3, 3).to_sparse_csr())),
    ],
    "root": [
        *(
            (f"{name} must lie in [0, 2), got {root}", op, functools.partial(call_with_root, op, root))
            for op, name, root in (
                ("broadcast", "src", 2),
                ("reduce", "dst", -1),
                ("gather", "dst", 7),
                ("scatter", "src", 7),
            )
        ),
        ("dst must lie in [0, 2), got 5", "send", lambda g, n: dist.send(ones(), dst=5)),
        ("src must lie in [0, 2), got 5", "recv", lambda g, n: dist.recv(ones(), src=5)),
        ("src must lie in [0, 2), got 5", "recv", lambda g, n: dist.irecv(ones(), group_src=5)),
    ],
    "list": [
        ("each of the 2 ranks, got 3", "all_gather", lambda g, n: dist.all_gather([ones()] * 3, ones())),
        ("each of the 2 ranks, got 1", "reduce_scatter", lambda g, n: dist.reduce_scatter(ones(), [ones()])),
        ("each of the 2 ranks, got 1", "all_to_all", lambda g, n: dist.all_to_all([ones()] * n, [ones()])),
        ("each of the 2 ranks, got 3", "all_to_all", lambda g, n: dist.all_to_all([ones()] * 3, [ones()] * n)),
        (
            "gather_list if rank == dst else None",
            "gather",
            lambda g, n: g.gather([[ones()] * n] if g.rank() else [], [ones()], opts(dist.GatherOptions)),
        ),
        (
            "scatter_list if rank == src else None",
            "scatter",
            lambda g, n: g.scatter([ones()], [[ones()] * n] if g.rank() else [], opts(dist.ScatterOptions)),
        ),
        (
            "call it once for each",
            "all_reduce",
            lambda g, n: g.allreduce([ones(), ones()], opts(dist.AllreduceOptions)),
        ),
    ],
    "shape": [
        ("] is 4 elements", "all_gather", lambda g, n: dist.all_gather([ones(4)] * n, ones())),
        ("2 x 3 elements", "all_gather_into_tensor", lambda g, n: dist.all_gather_into_tensor(ones(5), ones())),
        ("2 x 3 elements", "reduce_scatter_tensor", lambda g, n: dist.reduce_scatter_tensor(ones(), ones(7))),
        ("] is 2 elements", "reduce_scatter", lambda g, n: dist.reduce_scatter(ones(), [ones(2)] * n)),
        ("divisible by the 2 ranks", "all_to_all_single", lambda g, n: dist.all_to_all_single(ones(), ones())),
        (
            "add up to dimension 0 (4), got [1, 1]",
            "all_to_all_single",
            lambda g, n: dist.all_to_all_single(ones(4), ones(4), [2, 2], [1, 1]),
        ),
        (
            "2 sizes that add up",
            "all_to_all_single",
            lambda g, n: dist.all_to_all_single(ones(4), ones(4), [1, 1, 2], [2, 2]),
        ),
        (
            "2 sizes that add up",
            "all_to_all_single",
            lambda g, n: dist.all_to_all_single(ones(4), ones(4), [5, -1], [2, 2]),
        ),
    ],
    "dtype": [
        ("BAND is not supported for torch.float32", "all_reduce", lambda g, n: dist.all_reduce(ones(), ReduceOp.BAND)),
        (
            "BXOR is not supported for torch.float16",
            "reduce",
            lambda g, n: dist.reduce(ones(dtype=torch.half), 0, ReduceOp.BXOR),
        ),
        (
            "AVG is not supported for torch.bool",
            "all_reduce",
            lambda g, n: dist.all_reduce(ones(dtype=torch.bool), ReduceOp.AVG),
        ),
        (
            "torch.float8_e5m2 can't be reduced (ReduceOp.SUM), only sent and copied",
            "all_reduce",
            lambda g, n: dist.all_reduce(ones().to(torch.float8_e5m2)),
        ),
        (
            "needs a floating-point or complex dtype, got torch.int32",
            "all_reduce",
            lambda g, n: dist.all_reduce(ones(dtype=torch.int32), dist._make_nccl_premul_sum(2.0)),
        ),
        (
            "MIN is not supported for torch.complex64; reduce the real and imaginary parts",
            "reduce_scatter",
            lambda g, n: dist.reduce_scatter(ones(dtype=torch.cfloat), [ones(dtype=torch.cfloat)] * n, ReduceOp.MIN),
        ),
        (
            "torch.float64",
            "all_to_all_single",
            lambda g, n: g.all_to_all_single(ones(4), ones(4, dtype=torch.double), [], [], opts(dist.AllToAllOptions)),
        ),
    ],
}


def make_wrong_calls(rank, world_size, kind):
    problems = []
    for i, (says, op, call) in enumerate(WRONG_CALLS[kind]):
        try:
            call(dist.group.WORLD, world_size)
        except (ValueError, TypeError) as error:
            text = str(error)
            again = pickle.loads(pickle.dumps(error))
            if not isinstance(error, RuntimeError) or type(again) is not type(error) or str(again) != text:
                problems.append(f"{kind} {i}: Gloo raises RuntimeError, this is a {type(error).__name__}")
            if f"rank {rank}: {op}" not in text or says not in text:
                problems.append(f"{kind} {i}: {text}")
        else:
            problems.append(f"{kind} {i}: {op} raised nothing")
        total = ones()
        dist.all_reduce(total)  # nobody was left waiting: the group works
        assert total.tolist() == [2.0] * 3
    return problems


def wrong_calls_that_torch_catches(rank, world_size):
    """Whoever speaks first, it is an error on the rank that made the mistake."""
    caught = []
    for call in (
        lambda: dist.broadcast(ones(), 5),
        lambda: dist.send(ones(), 9),
        lambda: dist.all_gather([ones(dtype=torch.int32)] * 2, ones()),
        lambda: dist.scatter(ones(), [ones()] * 2, src=1 - rank),
        lambda: dist.all_reduce("tensor"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call()
        caught.append(type(error.value).__name__)
    dist.barrier()
    return len(caught)


def use_after_the_end(rank, world_size):
    texts = []
    group = dist.new_group()
    kept = group
    dist.destroy_process_group(group)
    for call in (
        lambda: kept.allreduce([ones()], opts(dist.AllreduceOptions)),
        lambda: kept.barrier(opts(dist.BarrierOptions)),
        lambda: kept.send([ones()], 1 - rank, 0),
    ):
        with pytest.raises(GroupUnusable) as error:
            call()
        texts.append(str(error.value))
    with pytest.raises(ValueError, match=r"."):
        dist.all_reduce(ones(), group=kept)
    total = ones()
    dist.all_reduce(total)
    return texts, total.tolist()


def use_after_abort(rank, world_size):
    dist.group.WORLD.abort()
    texts = []
    for call in (
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_reduce(ones(), async_op=True).wait(),
        lambda: dist.send(ones(), 1 - rank),
    ):
        with pytest.raises((GroupUnusable, GroupAborted)) as error:
            call()
        texts.append(str(error.value))
    dist.destroy_process_group()
    return texts


def abort_a_waiting_rank(rank, world_size):
    """abort() on one rank ends the waits of the others, named."""
    dist.barrier()  # both have come out of init_process_group
    if rank == 1:
        dist.group.WORLD.abort()
        return None
    with pytest.raises(PhalanxError) as error:
        dist.all_reduce(ones())
    return type(error.value), error.value.ranks, error.value.op, str(error.value)


@pytest.mark.parametrize("kind", sorted(WRONG_CALLS))
def test_a_wrong_call_is_one_clear_error_and_the_group_lives_on(run_ranks, kind):
    assert run_ranks(make_wrong_calls, 2, kind) == [[], []]


def test_what_torch_catches_itself_harms_nobody(run_ranks):
    assert run_ranks(wrong_calls_that_torch_catches, 2) == [5, 5]


def test_a_destroyed_group_says_so(run_ranks):
    for texts, total in run_ranks(use_after_the_end, 2):
        for text in texts:
            assert "was destroyed on this rank" in text
            assert "new_group()" in text
        assert total == [2.0] * 3


def test_an_aborted_group_says_so(run_ranks):
    for texts in run_ranks(use_after_abort, 2):
        for text in texts:
            assert "abort" in text
            assert "init_process_group" in text


def test_abort_on_one_rank_ends_the_wait_of_another(run_ranks):
    kind, named, op, text = run_ranks(abort_a_waiting_rank, 2)[0]
    # It may find the group aborted, or the aborting rank gone already.
    assert kind in (GroupAborted, RankFailed)
    assert named == (1,)
    assert op == "all_reduce"
    assert "rank 1" in text


@pytest.mark.parametrize(
    "error",
    [
        CollectiveMismatch("ranks differ", op="all_reduce", seq=7, ranks=(0, 2)),
        CollectiveTimeout("late", op="barrier", seq=3, ranks=(1,)),
        RankFailed("gone", op="recv", ranks=(3,), pid=17, exit_code=None, signal=9),
        GroupAborted("enough"),
        GroupUnusable("over", op="broadcast"),
        OutOfSharedMemory("full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_with_their_facts(error):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)
    assert isinstance(error, PhalanxError)
    assert isinstance(error, RuntimeError)


def test_errors_are_also_what_their_kind_is_elsewhere():
    late = CollectiveTimeout("late", ranks=(1, 2))
    assert isinstance(late, TimeoutError)
    assert late.missing == (1, 2)
    assert isinstance(OutOfSharedMemory("full"), MemoryError)
