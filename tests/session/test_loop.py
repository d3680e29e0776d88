"""What a session offers to a hand-written training loop."""

from __future__ import annotations

import collections
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import phalanx

pytestmark = pytest.mark.kept_ranks

Pair = collections.namedtuple("Pair", "mean count")


def use_all(rank, world_size, folder):
    session = phalanx.init()
    names = (
        "printing",
        "gathering",
        "gathering_in_order",
        "mismatches",
        "going_first",
        "failing_first",
        "accumulating",
    )
    return {name: globals()[name](session, folder) for name in (*names, "half_precision")}


def printing(session, folder):
    said = io.StringIO()
    session.print("loss", 0.5, sep="=", end="!", file=said)
    session.barrier()
    return session.is_main, said.getvalue()


def gathering(session, folder):
    rank = session.rank
    rows = torch.arange(rank + 1) + 10 * rank  # as many as the rank's number, and one
    value = {"rows": rows, "pair": Pair(torch.tensor(float(rank)), [rank, torch.ones(0, 3), "text"])}
    return session.gather(value)


def gathering_in_order(session, folder):
    """Everything of an epoch, through both samplers; and batch by batch."""
    data = TensorDataset(torch.arange(10))
    results = []
    for pad in (True, False):
        sampler = phalanx.DistributedSampler(data, shuffle=False, pad=pad)
        own = torch.cat([batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)])
        results.append(session.gather(own, total=len(data)).tolist())
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    seen = []
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler):
        left = len(data) - len(seen)
        seen += session.gather(batch, total=min(left, len(batch) * session.world_size)).tolist()
    return [*results, seen]


def mismatches(session, folder):
    errors = []
    with pytest.raises(ValueError, match=r"a list of numbers .* torch.tensor\(numbers\)"):
        session.gather({"batches": [[4, 7][: 1 + session.rank % 2], [3, 0], [6]]})
    assert session.gather((4, 7)) == ([4] * session.world_size, [7] * session.world_size)
    if session.world_size > 1:
        for value, total in ((torch.ones(2, 2 + session.rank), None), (torch.ones(2), 100)):
            with pytest.raises(ValueError, match="gather: ") as caught:
                session.gather(value, total)
            errors.append(str(caught.value))
    return errors


def going_first(session, folder):
    for number, per_host in enumerate((False, True)):
        path = f"{folder}/order-{session.world_size}-{number}"
        with session.main_process_first(per_host=per_host), open(path, "a") as file:
            file.write(f"{session.rank} ")
    session.barrier()
    with open(f"{folder}/order-{session.world_size}-0") as file:
        return file.read().split()[0]


def failing_first(session, folder):
    ran = False
    with pytest.raises((FileNotFoundError, phalanx.PhalanxError)) as caught, session.main_process_first():
        ran = True
        raise FileNotFoundError("no data here")
    session.barrier()  # the group goes on
    return ran, type(caught.value).__name__, str(caught.value), getattr(caught.value, "is_victim", None)


def accumulating(session, folder):
    """Gradients of three passes, the last two of which make a step that is shorter: those of a whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    ddp = phalanx.DistributedDataParallel(model) if session.world_size > 1 else model
    inputs = torch.arange(20.0).reshape(5, 4) + session.rank
    flags = []
    for step, row in enumerate(inputs):
        with session.accumulate(ddp, step, every=3, num_steps=len(inputs)) as is_last:
            ddp(row).sum().backward()
        flags.append(is_last)
        if is_last:
            grad = model.weight.grad.clone()
            model.weight.grad = None
    ranks = range(session.world_size)
    want = sum(inputs[3:].sum(0) + 2 * (rank - session.rank) for rank in ranks) / session.world_size
    return flags, torch.equal(grad[0], want)


def half_precision(session, folder):
    model, dtypes = nn.Linear(4, 1), []
    for precision in ("fp32", "bf16", "fp16"):
        scaler = session.grad_scaler(precision)
        with session.autocast(precision):
            loss = model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        dtypes.append((str(model(torch.ones(4)).dtype), scaler.is_enabled()))
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, got 'fp8'"):
        session.autocast("fp8")
    with pytest.raises(ValueError, match=r"got 'bf16-mixed'; right: autocast\(\"bf16\"\)"):
        session.autocast("bf16-mixed")
    with pytest.raises(ValueError, match=r"grad_scaler: .* got '16-mixed'; right: grad_scaler\(\"fp16\"\)"):
        session.grad_scaler("16-mixed")
    return dtypes


@pytest.fixture(scope="module", params=[1, 4])
def results(request, run_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("loop"))
    return run_ranks(use_all, request.param, folder, init=False)


def test_only_rank_0_prints(results):
    assert [of_rank["printing"] for of_rank in results] == [(True, "loss=0.5!"), *[(False, "")] * (len(results) - 1)]


def test_gather_returns_the_rows_of_all_ranks_however_many_each_has_and_however_they_are_nested(results):
    ranks = range(len(results))
    for of_rank in results:
        got = of_rank["gathering"]
        assert got["rows"].tolist() == [10 * rank + number for rank in ranks for number in range(rank + 1)]
        assert isinstance(got["pair"], Pair)
        assert got["pair"].mean.tolist() == [float(rank) for rank in ranks]
        numbers, empty, texts = got["pair"].count
        assert (numbers, empty.shape, texts) == ([*ranks], (0, 3), ["text"] * len(results))


def test_gather_puts_rows_into_the_samplers_order_and_drops_its_padding(results):
    assert [of_rank["gathering_in_order"] for of_rank in results] == [[[*range(10)]] * 3] * len(results)


def test_gather_of_values_that_differ_raises_on_every_rank(results):
    for of_rank in results if len(results) > 1 else ():
        unlike, too_few = of_rank["mismatches"]
        assert "rank 0 has" in unlike
        assert "total=100 needs at least [25, 25, 25, 25] rows from the ranks, got [2, 2, 2, 2]" in too_few


def test_rank_0_goes_first_and_its_error_releases_the_others(results):
    assert [of_rank["going_first"] for of_rank in results] == ["0"] * len(results)
    first, *others = (of_rank["failing_first"] for of_rank in results)
    assert first == (True, "FileNotFoundError", "no data here", None)
    for ran, kind, message, is_victim in others:
        assert (ran, kind, is_victim) == (False, "PhalanxError", True)  # the launcher names rank 0
        assert "rank 0 went first and failed with FileNotFoundError: no data here" in message


def test_gradients_add_up_and_are_averaged_in_the_last_pass(results):
    expected = ([False, False, True, False, True], True)
    assert [of_rank["accumulating"] for of_rank in results] == [expected] * len(results)


def test_autocast_and_scaler_are_torchs_and_nothing_for_fp32(results):
    for of_rank in results:
        assert [enabled for _, enabled in of_rank["half_precision"]] == [False, False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: phalanx.init(timeot=3), r"phalanx.init: there is no argument timeot, did you mean timeout\?"),
        (lambda: phalanx.init(nprocs=3), r"phalanx.init: .*nprocs, did you mean world_size\?"),
        (
            lambda: phalanx.Trainer(None, None, epochs=3),
            r"Trainer: there is no argument epochs, did you mean max_epochs\?$",
        ),
        (lambda: phalanx.Trainer(None, None, batch_size=3), r"did you mean global_batch_size\?"),
        (lambda: phalanx.Trainer(None, None, snapshot_evry=3), r"did you mean snapshot_every\?"),
        (lambda: phalanx.Trainer(None, None, lambda: 0, xyz=3), r"no argument xyz; help\(phalanx.Trainer\) lists all$"),
        (lambda: phalanx.init(xyz=3), r"phalanx.init: there is no argument xyz. It takes backend, device, timeout, "),
    ],
)
def test_an_unknown_argument_is_named_with_the_one_that_is_meant(call, message):
    with pytest.raises(TypeError, match=message):
        call()
    assert not dist.is_initialized()
