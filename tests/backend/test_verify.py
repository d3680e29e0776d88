"""``PHALANX_VERIFY``: a wrong result of any operation is an error on every rank, and right ones are not disturbed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import phalanx
from phalanx._command_line import UsageError
from phalanx.backend.calls.ops import Operations
from phalanx.backend.torch.adapters import PhalanxGroup
from phalanx.backend.verify import replay

pytestmark = pytest.mark.kept_ranks

AT = 2  # element that a fault changes
WRONG = 1  # rank whose core is at fault


class FaultyCore:
    """A core whose results are wrong: after each of its operations one element of a tensor is another one."""

    def __init__(self, core, target, at=AT):
        self._core, self._target, self._at = core, target, at

    def __getattr__(self, name):
        method = getattr(self._core, name)
        if name not in {
            *("run", "run_plain", "average_plain", "all_reduce_pieces", "wait_collective", "recv_plain", "wait_request")
        }:
            return method

        def call(*args):
            done = method(*args)
            if (done is None) == (name == "run") and done is not False:  # an asynchronous run is not over
                self._target.detach().view(-1)[self._at] = 77
            return done

        return call


def verified_group(word="gloo", **options):
    """Return a group that is verified, and one beside it that is not."""
    os.environ["PHALANX_VERIFY"] = word
    group = dist.new_group(backend="phalanx", **options)
    del os.environ["PHALANX_VERIFY"]
    return group


def spoil(group, target, at=AT):
    operations = group._operations
    operations._core = FaultyCore(operations._core, target, at)


def heal(group):
    group._operations._core = group._operations._core._core


def values(rank, n=6, dtype=torch.float32):
    made = torch.arange(1, n + 1) + 10 * rank
    return (made % 2 == 0) if dtype is torch.bool else made.to(dtype)


def reducing(op, dtype=torch.float32):
    def make(rank, size, group):
        tensor = values(rank, dtype=dtype)
        return tensor, lambda: dist.all_reduce(tensor, op, group=group)

    return make


def average_coalesced(rank, size, group):
    tensors, marks = [values(rank), values(rank, 3)], torch.zeros(1)
    return tensors[0], lambda: group.average_coalesced(tensors, marks)


def coalesced(rank, size, group):
    tensors = [values(rank), values(rank, 3, torch.int64)]
    return tensors[0], lambda: group.allreduce_coalesced(tensors).wait()


def broadcast(rank, size, group):
    tensor = values(rank)
    return tensor, lambda: dist.broadcast(tensor, 0, group=group)


def reduce(rank, size, group):
    tensor = values(rank)
    return tensor, lambda: dist.reduce(tensor, WRONG, group=group)


def all_gather(rank, size, group):
    outs = [torch.zeros(6) for _ in range(size)]
    return outs[0], lambda: dist.all_gather(outs, values(rank), group=group)


def all_gather_single(rank, size, group):
    out = torch.zeros(6 * size)
    return out, lambda: dist.all_gather_into_tensor(out, values(rank), group=group)


def gather(rank, size, group):
    outs = [torch.zeros(6) for _ in range(size)] if rank == WRONG else None
    return (outs or [None])[0], lambda: dist.gather(values(rank), outs, WRONG, group=group)


def scatter(rank, size, group):
    out, ins = torch.zeros(6), [values(r) for r in range(size)] if rank == 0 else None
    return out, lambda: dist.scatter(out, ins, 0, group=group)


def reduce_scatter(rank, size, group):
    out = torch.zeros(6)
    return out, lambda: dist.reduce_scatter(out, [values(rank + r) for r in range(size)], group=group)


def reduce_scatter_single(rank, size, group):
    out = torch.zeros(6)
    return out, lambda: dist.reduce_scatter_tensor(out, values(rank, 6 * size), group=group)


def all_to_all(rank, size, group):
    outs = [torch.zeros(6) for _ in range(size)]
    return outs[0], lambda: dist.all_to_all(outs, [values(rank + r) for r in range(size)], group=group)


def all_to_all_single(rank, size, group):
    out = torch.zeros(6 * size)
    return out, lambda: dist.all_to_all_single(out, values(rank, 6 * size), group=group)


def asynchronous(rank, size, group):
    tensor = values(rank)
    return tensor, lambda: dist.all_reduce(tensor, group=group, async_op=True).wait()


def future(rank, size, group):
    tensor = values(rank)
    return tensor, lambda: dist.all_gather_into_tensor(tensor, values(rank, 6 // size), group, async_op=True).wait()


def direct(rank, size, group):
    tensor = values(rank, dtype=torch.complex64)  # a product that torch's front end refuses
    return tensor, lambda: phalanx.communicator(group).all_reduce(tensor, Op.PRODUCT)


def complex_sum(rank, size, group):
    tensor = values(rank, dtype=torch.complex64)  # torch's front end would make pairs of it
    return tensor, lambda: phalanx.communicator(group).all_reduce(tensor)


Op = dist.ReduceOp
CASES = {
    "all_reduce": reducing(Op.SUM),
    "average": reducing(Op.AVG),
    "product": reducing(Op.PRODUCT),
    "minimum": reducing(Op.MIN),
    "half": reducing(Op.SUM, torch.float16),
    "whole numbers": reducing(Op.SUM, torch.int32),
    "average of whole numbers": reducing(Op.AVG, torch.int64),
    "bits": reducing(Op.BXOR, torch.uint8),
    "unsigned": reducing(Op.MAX, torch.uint64),
    "short": reducing(Op.SUM, torch.int16),
    "bool": reducing(Op.SUM, torch.bool),
    **{
        make.__name__: make
        for make in (
            *(average_coalesced, coalesced, broadcast, reduce, all_gather, all_gather_single, gather),
            *(scatter, reduce_scatter, reduce_scatter_single, all_to_all, all_to_all_single, asynchronous, future),
            *(direct, complex_sum),
        )
    },
}


def spoil_each(rank, size, folder):
    """Return, for each case, the error of this rank, and check that the group is as good as before."""
    os.chdir(folder)
    group = verified_group()
    found = {}
    for name, make in CASES.items():
        target, call = make(rank, size, group)
        if rank == WRONG:
            spoil(group, target)
        try:
            call()
            found[name] = None
        except phalanx.WrongResult as error:
            found[name] = (error.op, error.ranks, error.index, str(error), error.path)
        if rank == WRONG:
            heal(group)
        after = torch.ones(3)
        dist.all_reduce(after, group=group)
        assert after.tolist() == [float(size)] * 3
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_wrong_result_of_each_operation_is_an_error_on_every_rank(run_ranks, tmp_path, world_size):
    results = run_ranks(spoil_each, world_size, str(tmp_path))
    for name in CASES:
        told = [result[name] for result in results]
        assert all(told), f"{name}: {told}"
        for rank, (op, ranks, index, message, path) in enumerate(told):
            assert (ranks, index) == ((WRONG,), (AT,)), f"{name}: {message}"
            assert f"rank {rank}: {op} #" in message, f"{name}: {message}"
            assert f"the result of rank {WRONG} at " in message
            assert "test_verify.py:" in message
            assert sorted(os.listdir(tmp_path / path)) == [f"rank_{r}.pt" for r in range(world_size)], name


def show_one(rank, size, folder):
    os.chdir(folder)
    group = verified_group()
    tensor = torch.full((2, 3), float(rank))
    if rank == WRONG:
        spoil(group, tensor)
    try:
        dist.all_reduce(tensor, group=group)
    except phalanx.WrongResult as error:
        return error.got, error.want, error.index, error.path, tensor.tolist()


def test_the_error_has_both_values_and_the_folder_the_inputs(run_ranks, tmp_path):
    (got, want, index, path, _), (*_, wrong) = run_ranks(show_one, 2, str(tmp_path))
    assert (float(got), float(want), index) == (wrong[0][2], 1.0, (0, 2))
    states = [torch.load(tmp_path / path / f"rank_{r}.pt") for r in range(2)]
    assert [state["args"][0][0].tolist() for state in states] == [[[float(r)] * 3] * 2 for r in range(2)]
    assert states[WRONG]["results"][0].tolist() == wrong


def every_third(rank, size, folder):
    os.chdir(folder)
    group = verified_group("gloo:3")
    found = []
    for i in range(7):
        tensor = values(rank)
        if rank == WRONG:
            spoil(group, tensor)
        try:
            dist.broadcast(tensor, 0, group=group)
        except phalanx.WrongResult as error:
            found.append((i + 1, error.seq))
        if rank == WRONG:
            heal(group)
    return found


def test_every_kth_call_is_verified_on_all_ranks(run_ranks, tmp_path):
    assert run_ranks(every_third, 2, str(tmp_path)) == [[(3, 3), (6, 6)]] * 2


def wrong_message(rank, size, folder, source, num_right, word):
    """Rank 0 sends on two tags; the receiver spoils the last message. Return the error of the receiver."""
    os.chdir(folder)
    group = verified_group(word)
    if rank == 0:
        for i in range(num_right + 1):
            dist.send(torch.arange(5) + i, 1, group=group, tag=3)
            dist.send(torch.arange(2), 1, group=group, tag=4)
        try:
            dist.barrier(group=group)
        except phalanx.PhalanxError as error:
            return type(error).__name__, str(error)
        return None
    tensor = torch.zeros(5, dtype=torch.int64)
    for i in range(num_right + 1):
        if i == num_right:
            spoil(group, tensor)
        try:
            dist.recv(tensor, source, group=group, tag=3)
        except phalanx.WrongResult as error:
            return type(error).__name__, str(error)
        dist.recv(torch.zeros(2, dtype=torch.int64), source, group=group, tag=4)
    heal(group)
    dist.barrier(group=group)
    return None


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize(("num_right", "word"), [(0, "gloo"), (1, "gloo:2")])
def test_a_wrong_message_is_an_error_of_its_receiver_and_ends_the_group(run_ranks, tmp_path, source, num_right, word):
    sender, receiver = run_ranks(wrong_message, 2, str(tmp_path), source, num_right, word)
    assert receiver[0] == "WrongResult"
    assert f"recv of message {num_right + 1} with tag 3 from rank 0" in receiver[1]
    assert "Element [2] is" in receiver[1]
    assert sender[0] == "RankFailed"
    assert f"WrongResult: {receiver[1][:200]}" in sender[1]


def test_a_message_that_is_not_the_kth_is_not_verified(run_ranks, tmp_path):
    assert run_ranks(wrong_message, 2, str(tmp_path), 0, 0, "gloo:2") == [None, None]


def exchange_in_disorder(rank, size):
    """Receives from any source and from one, waited for in another order than posted, and a batch of both."""
    group = verified_group("gloo:2")
    for _ in range(3):
        if rank == 0:
            works = [dist.isend(torch.full((3 + i,), float(i)), 1, group=group) for i in range(6)]
        else:
            into = [torch.zeros(3 + i) for i in range(6)]
            works = [dist.irecv(t, 0 if i % 2 else None, group=group) for i, t in enumerate(into)]
        for work in reversed(works):
            work.wait()
        if rank == 1:
            assert [t[0].item() for t in into] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        peer, out, back = 1 - rank, torch.full((4,), float(rank)), torch.zeros(4)
        ops = [dist.P2POp(dist.isend, out, peer, group), dist.P2POp(dist.irecv, back, peer, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert back[0].item() == peer


def test_messages_in_any_order_are_verified_against_their_own_copy(run_ranks):
    run_ranks(exchange_in_disorder, 2)


def share_a_tag(rank, size):
    """Three threads send on one tag, and three receive."""
    group = verified_group()

    def exchange(thread):
        told = []
        for i in range(40):
            tensor = torch.full((50,), float(40 * thread + i))
            dist.send(tensor, 1, group=group) if rank == 0 else dist.recv(tensor, 0, group=group)
            told.append(tensor.unique().tolist())
        return told

    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(exchange, range(3)))
    dist.barrier(group=group)
    return sorted(value for one in told for value in one)


def test_threads_may_share_a_tag(run_ranks):
    assert run_ranks(share_a_tag, 2) == [[[float(i)] for i in range(120)]] * 2


class ClosedGloo:
    """A Gloo whose connections the other rank has closed."""

    def recv(self, *_):
        raise RuntimeError("Connection closed by peer")


def outlive_the_sender(rank, size):
    group = verified_group()
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        return dist.send(tensor, 1, group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group._operations.proof._oracle._channel, "engine", ClosedGloo)
        dist.recv(tensor, 0, group=group)
    return tensor.tolist()


def test_a_message_whose_sender_has_gone_is_received(run_ranks):
    assert run_ranks(outlive_the_sender, 2) == [None, [0.0] * 3]


def move_parts_of_bytes(rank, size):
    """Move elements that torch does not even copy."""
    group = verified_group()
    found = []
    for dtype in (torch.uint4, torch.int1, torch.bits8):
        tensor = torch.full((4,), 9 * (1 - rank), dtype=torch.uint8).view(dtype)
        dist.broadcast(tensor, 0, group=group)
        into = [torch.zeros(4, dtype=torch.uint8).view(dtype) for _ in range(size)]
        dist.all_gather(into, tensor, group=group)
        found.append([one.view(torch.uint8).tolist() for one in into])
    return found


def test_dtypes_that_torch_does_not_copy_are_verified(run_ranks):
    assert run_ranks(move_parts_of_bytes, 2) == [[[[9] * 4] * 2] * 3] * 2


def call_while_messages_run(rank, size):
    """Make collectives that the peer makes before it answers messages of the same, or interleaved, memory."""
    group = verified_group()
    table, sent = torch.zeros(4, 2), torch.full((1 << 20,), float(rank))
    if rank == 0:
        works = [dist.irecv(table[:, 0], 1, group=group), dist.isend(sent, 1, group=group)]
    dist.all_reduce(table[:, 1], group=group)
    dist.broadcast(sent, 0, group=group)
    if rank == 1:
        dist.send(torch.ones(4), 0, group=group)
        dist.recv(sent, 0, group=group)
        return sent.sum().item()
    for work in works:
        work.wait()
    return table.tolist()


def test_a_collective_never_waits_for_a_message(run_ranks):
    assert run_ranks(call_while_messages_run, 2) == [[[1.0, 0.0]] * 4, 0.0]


def follow_each_other(rank, size):
    """Asynchronous calls on one tensor, and calls whose works nobody waits for before the group is left."""
    group = verified_group()
    tensor = torch.ones(50_000)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]
    dist.all_reduce(tensor, group=group)
    for work in works:
        work.wait()
    dist.all_reduce(torch.ones(10), group=group, async_op=True)
    dist.destroy_process_group(group)
    return tensor[0].item()


def test_calls_on_one_tensor_follow_each_other(run_ranks):
    assert run_ranks(follow_each_other, 2) == [16.0] * 2


def divide(rank, size, folder):
    os.chdir(folder)
    part = verified_group(ranks=[1, 2])
    os.environ["PHALANX_VERIFY"] = "gloo"
    whole = dist.new_group(backend="phalanx")
    split = whole.split_group([0, 1]) if rank < 2 else None
    found = []
    for group in (part if rank else None, split):
        tensor = values(rank)
        if rank == WRONG:
            spoil(group, tensor)
        try:
            if group is not None:
                group.allreduce(tensor).wait()  # dist.all_reduce does not know groups that were split off
        except phalanx.WrongResult as error:
            found.append(error.ranks)
    return found


def test_groups_of_some_ranks_are_verified(run_ranks, tmp_path):
    assert run_ranks(divide, 3, str(tmp_path)) == [[(WRONG,)], [(WRONG,)] * 2, [(WRONG,)]]


def unset(rank, size):
    group = dist.new_group(backend="phalanx")
    return type(group) is PhalanxGroup, type(group._operations) is Operations, hasattr(group, "proof")


def test_a_group_has_the_usual_classes_where_nothing_is_to_be_verified(run_ranks):
    assert run_ranks(unset, 2) == [(True, True, False)] * 2


def in_place_of_gloo(rank, size, folder):
    os.chdir(folder)
    os.environ["PHALANX_VERIFY"] = "gloo"
    phalanx.replace_gloo()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    beside = group._operations.proof._oracle._gloo
    tensor = values(rank)
    if rank == WRONG:
        spoil(group, tensor)
    try:
        dist.all_reduce(tensor)
    except phalanx.WrongResult as error:
        return type(group).__name__, type(beside) is c10d.ProcessGroupGloo, error.ranks, error.index


def test_a_group_in_the_place_of_gloo_is_verified_on_gloo_itself(run_fresh_ranks, tmp_path):
    want = ("VerifiedGroup", True, (WRONG,), (AT,))
    assert run_fresh_ranks(in_place_of_gloo, 2, str(tmp_path), init=False) == [want] * 2


def on_two_hosts(rank, size, folder):
    os.chdir(folder)
    os.environ["PHALANX_HOST"] = f"host-{rank % 2}"
    os.environ["PHALANX_VERIFY"] = "gloo"
    dist.init_process_group("phalanx")
    everything = torch.zeros(6 * size)
    dist.all_gather_into_tensor(everything, values(rank))
    for op in (Op.SUM, Op.AVG, Op.PRODUCT):
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.complex64):
            if not (op is Op.PRODUCT and dtype.is_complex):  # torch refuses it
                dist.all_reduce(torch.randn(1000).mul(100).to(dtype), op)
    tensor = values(rank)
    if rank == WRONG:
        spoil(dist.group.WORLD, tensor)
    try:
        dist.all_reduce(tensor)
    except phalanx.WrongResult as error:
        return error.ranks, error.index


def test_a_group_on_two_hosts_is_verified(run_fresh_ranks, tmp_path):
    assert run_fresh_ranks(on_two_hosts, 3, str(tmp_path), init=False) == [((WRONG,), (AT,))] * 3


def die_while_verifying(rank, size):
    os.environ["PHALANX_VERIFY"] = "gloo"
    dist.init_process_group("phalanx")
    if rank == 1:
        dist.group.WORLD._operations.proof._oracle.most = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.RankFailed) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.ranks == (1,)


def test_a_rank_that_dies_while_a_result_is_verified_is_named(run_fresh_ranks):
    first, _, last = run_fresh_ranks(die_while_verifying, 3, init=False, expect_failures=True)
    assert [str(ending).rpartition(") ")[2] for ending in (first, last)] == ["returned"] * 2


def refuse(rank, size, words):
    os.environ["PHALANX_VERIFY"] = words[rank]
    try:
        dist.init_process_group("phalanx")
    except (ValueError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("word", ["nccl", "gloo:0", "gloo:", "gloo:ten", "1"])
def test_another_word_is_refused_on_every_rank(run_fresh_ranks, word):
    for told in run_fresh_ranks(refuse, 2, [word, "gloo"], init=False):
        assert "PHALANX_VERIFY must be gloo, or gloo:K" in told
        assert word in told


def test_ranks_that_differ_are_refused_on_every_rank(run_fresh_ranks):
    for told in run_fresh_ranks(refuse, 2, ["gloo:2", ""], init=False):
        assert "different values of PHALANX_VERIFY: none on rank 1, gloo:2 on rank 0" in told


def test_a_call_is_made_again_from_its_folder(run_ranks, tmp_path):
    path = run_ranks(show_one, 2, str(tmp_path))[0][3]
    words = ["-m", "phalanx", "run", "--nproc-per-node", "2", "-m", "phalanx.backend.verify.replay", path]
    environ = {**os.environ, "PHALANX_WARM": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all_reduce #1 of group '1'" in done.stdout
    assert "the result is right this time" in done.stdout


def find_two(rank, size, folder, most_bytes):
    """Return the errors of two wrong results in a row, on a disk that takes files of that size only."""
    os.chdir(folder)
    group = verified_group()
    limits, found = resource.getrlimit(resource.RLIMIT_FSIZE), []
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        for _ in range(2):
            tensor = values(rank)
            if rank == WRONG:
                spoil(group, tensor)
            with pytest.raises(phalanx.WrongResult) as caught:
                dist.all_reduce(tensor, group=group)
            found.append((str(caught.value), caught.value.path))
            if rank == WRONG:
                heal(group)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


def test_a_full_disk_does_not_hide_a_wrong_result(run_ranks, tmp_path):
    for found in run_ranks(find_two, 2, str(tmp_path), 100):
        for text, path in found:
            assert f"The inputs of this rank could not be written to {path}: [Errno 27]" in text
            assert os.listdir(tmp_path / path) == []


def test_each_wrong_result_has_a_folder_of_its_own(run_ranks, tmp_path):
    (_, first), (_, second) = run_ranks(find_two, 2, str(tmp_path), 1 << 20)[0]
    for path in first, second:
        assert sorted(os.listdir(tmp_path / path)) == ["rank_0.pt", "rank_1.pt"]
    assert first != second


def replay_nonsense(rank, size, folder):
    with pytest.raises(UsageError) as caught:
        replay._replay(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.txt", b"", "holds no inputs of a call (rank_0.pt and so on)"),
        ("rank_x.pt", b"", "holds no inputs of a call (rank_0.pt and so on)"),
        ("rank_0.pt", b"nonsense", "rank_0.pt' can't be read: "),
        ("rank_0.pt", b"", "rank_0.pt' can't be read: "),
    ],
)
def test_a_folder_without_inputs_is_refused(run_ranks, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    for text in run_ranks(replay_nonsense, 2, str(tmp_path)):
        assert words in text


def test_the_flag_reaches_the_ranks(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import os\nprint(os.environ['PHALANX_VERIFY'])\n")
    words = ["-m", "phalanx", "run", "--nproc-per-node", "1", "--no-preload", "--verify", "gloo:7", str(script)]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "gloo:7" in done.stdout, done.stderr
    wrong = subprocess.run(
        [sys.executable, *words[:-2], "gloo:x", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "--verify must be gloo, or gloo:K" in wrong.stderr


_SUMS = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1], init_method="file://" + sys.argv[2], rank=int(sys.argv[3]), world_size=2)
for _ in range(4):
    dist.all_reduce(torch.ones(3))
(dist.recv if dist.get_rank() == 0 else dist.send)(torch.ones(3), 1 - dist.get_rank())
if dist.get_backend() == "gloo":  # without it, torch's Gloo now and then aborts a process at its exit
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backend", "word", "line"),
    [
        ("phalanx", "gloo:2", "PHALANX_VERIFY: rank 0 repeated 2 of 5 operations on Gloo; every result agreed"),
        ("gloo", "gloo", "PHALANX_VERIFY: a group of torch's own Gloo is not verified"),
        ("gloo", "glo", "PHALANX_VERIFY: must be gloo, or gloo:K for every K-th call with K at least 1, or empty, got"),
    ],
)
def test_a_script_says_what_was_verified(forked, tmp_path, backend, word, line):
    words, environ = ["-c", _SUMS, backend, str(tmp_path / "store")], {**os.environ, "PHALANX_VERIFY": word}
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(forked.start(*words, rank, env=environ)) for rank in range(2)]
        printed = "".join(rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    assert printed.count("PHALANX_VERIFY") == printed.count(line) == 1, printed
