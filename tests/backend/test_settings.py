"""Settings and timeouts at and beyond their limits: refused with name, range and value on all ranks, or harmless."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import phalanx
from phalanx import _env, _settings
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.testing import await_release, reached
from tests.backend.test_failures import caught

NUMBERS = [setting for setting in dataclasses.fields(_settings.Settings) if setting.type != "str"]
NO_NUMBERS = ("", "ten", "nan", "inf", "-inf", "-1", "1e400", "-1e-9", "0x10", "9" * 400)
LONG = timedelta(days=36_500_000)


def limits_of(setting):
    least, most = setting.metadata["range"]
    return [str(int(value) if setting.type == "int" else value) for value in (least, most)]


def beyond(setting):
    least, most = setting.metadata["range"]
    step = 1 if setting.type == "int" else 1e-3
    return [str(most * 2 + step), *([str(least - step)] if least > 0 else [])]


def join(rank, world_size, variables, url, timeout=None):
    _env.withdraw(variables[rank])
    _env.export(variables[rank])
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=world_size, timeout=timeout)
    return sums()


def join_alone(rank, world_size, url, timeout):
    """Join so that no two ranks are there at once: they might meet within any timeout."""
    if rank == 1:
        await_release("come")
    try:
        return join(rank, world_size, [{}] * world_size, url, timeout)
    finally:
        reached("given up")


def sums():
    """Sums of 1 to as many elements as take each algorithm, of the smallest and the largest element."""
    wrong = 0
    for num in (1, 100, 20_000, 100_000):
        for dtype in (torch.uint8, torch.complex128):
            tensor = (torch.arange(num) % 100).to(dtype)
            dist.all_reduce(tensor)
            wrong += int((tensor != (torch.arange(num) % 100 * dist.get_world_size()).to(dtype)).sum())
            gathered = [torch.empty(num, dtype=dtype) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, tensor)
            wrong += sum(int((other != tensor).sum()) for other in gathered)
    return wrong


def tune_the_core(rank, world_size):
    wrong = 0
    for one_shot, chunk in ((0, 0), (0, 1), (7, 7), (1 << 40, 1 << 40), (0, 1_000_000)):
        dist.group.WORLD._operations._core.tune(one_shot, chunk)
        wrong += sums()
    return wrong


def wait_with_every_timeout(rank, world_size):
    group = dist.group.WORLD
    for timeout in (timedelta.max, LONG, timedelta(0)):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work.wait(timeout)
        request = dist.isend(torch.ones(1), 1) if rank == 0 else dist.irecv(torch.ones(1), 0)
        assert request.wait(timeout)
        dist.monitored_barrier(timeout=timeout) if timeout else dist.barrier()
        if timeout:
            group.set_timeout(timeout)
        dist.all_reduce(torch.ones(4))
    for timeout in (timedelta(seconds=-5), timedelta(0)):
        with pytest.raises(ValueError, match="timeout must be more than 0 s, got"):
            group.set_timeout(timeout)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(ValueError, match=r"timeout must be at least 0 s \(0: forever\), got -5 s"):
        work.wait(timedelta(seconds=-5))
    work.wait()
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if rank == 0:
        with pytest.raises(TimeoutError, match="is still running after 1e-06 s"):
            work.wait(timedelta(microseconds=1))
        dist.send(torch.ones(1), 1)
    work.wait()
    return True


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_every_number_has_a_range_and_what_is_beyond_is_refused(setting):
    name = _settings.variable_of(setting.name)
    least, most = setting.metadata["range"]
    assert -math.inf < least <= setting.default <= most < math.inf
    for text in limits_of(setting):
        value = getattr(_settings.read_settings({name: text}), setting.name)
        assert value == float(text)
    for text in (*NO_NUMBERS, *beyond(setting)):
        with pytest.raises(ValueError, match=rf"^{name} must be a (whole )?number in \[.*\], got ") as error:
            _settings.read_settings({name: text})
        assert f"[{least:.12g}, {most:.12g}], got {text!r}" in str(error.value)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e30])
def test_an_option_of_a_group_is_held_to_the_same_range(value):
    with pytest.raises(ValueError, match=r"^GroupOptions: silence_s must be a number in \[0.1, 86400\], got "):
        phalanx.GroupOptions(silence_s=value).over(_settings.Settings())


@pytest.mark.parametrize("value", ["1", True, [1.0]])
def test_an_option_of_a_group_has_a_type(value):
    with pytest.raises(TypeError, match=r"^GroupOptions: silence_s must be a number, got "):
        phalanx.GroupOptions(silence_s=value).over(_settings.Settings())


@pytest.mark.parametrize("at", [0, 1], ids=["least", "most"])
def test_the_sums_are_right_at_the_limits(run_ranks, tmp_path, at):
    variables = {_settings.variable_of(setting.name): limits_of(setting)[at] for setting in NUMBERS}
    variables["PHALANX_SPIN_US"] = str(1000 * at)  # more is right as well, and slow where ranks share CPUs
    assert run_ranks(join, 3, [variables] * 3, f"file://{tmp_path}/meet", init=False) == [0] * 3


def test_the_core_bounds_what_it_is_given(run_ranks):
    assert run_ranks(tune_the_core, 2) == [0] * 2
    assert run_ranks(tune_the_core, 3) == [0] * 3


@pytest.mark.parametrize("name", ["PHALANX_CHUNK_BYTES", "PHALANX_ONE_SHOT_BYTES"])
def test_values_that_differ_between_ranks_are_named_on_all(run_ranks, tmp_path, name):
    given = [{}, {name: "8192"}, {}]
    outcomes = run_ranks(join, 3, given, f"file://{tmp_path}/meet", init=False, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, phalanx.PhalanxError), outcome
        assert f"different values of {name}: 8192 on rank 1, 65536 on rank 0" in str(outcome.error)


def test_a_value_that_one_rank_may_not_have_is_told_on_all(run_ranks, tmp_path):
    given = [{}, {"PHALANX_CHUNK_BYTES": "7"}, {}]
    outcomes = run_ranks(join, 3, given, f"file://{tmp_path}/meet", init=False, timeout_s=20, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, ValueError if outcome.rank == 1 else phalanx.PhalanxError), outcome
        assert "PHALANX_CHUNK_BYTES must be a whole number in [4096, 65536], got '7'" in str(outcome.error)
        assert outcome.rank == 1 or "rank 1 could not join" in str(outcome.error)


@pytest.mark.parametrize("timeout", [timedelta.max, LONG], ids=["max", "long"])
def test_the_longest_timeouts_are_for_ever(run_ranks, tmp_path, timeout):
    assert run_ranks(join, 2, [{}] * 2, f"file://{tmp_path}/meet", timeout, init=False) == [0, 0]


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-5)], ids=["zero", "negative"])
def test_a_timeout_that_is_none_is_refused(run_ranks, tmp_path, timeout):
    given = join, 2, [{}] * 2, f"file://{tmp_path}/meet", timeout
    for outcome in run_ranks(*given, init=False, expect_failures=True):
        assert isinstance(outcome.error, ValueError), outcome
        assert str(outcome.error) == f"timeout must be more than 0 s, got {timeout.total_seconds():g} s"


@pytest.mark.parametrize("timeout_us", [1, 1000])
def test_a_timeout_that_is_too_short_is_one(spawn_ranks, tmp_path, timeout_us):
    url, timeout = f"file://{tmp_path}/meet", timedelta(microseconds=timeout_us)
    with spawn_ranks(join_alone, 2, url, timeout, init=False) as ranks:
        ranks.wait_until_reached("given up", ranks=[0])
        ranks.release("come", ranks=[1])
        for outcome in ranks.join(20):
            assert isinstance(outcome.error, phalanx.PhalanxError), outcome


CPU = torch.device("cpu")
SHORT = timedelta(seconds=0.3)
ALONE = {  # what rank 0 begins and no other rank does, in a group of its own
    "all_reduce": lambda group, model: dist.all_reduce(torch.ones(4), group=group),
    "all_reduce later": lambda group, model: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
    "recv": lambda group, model: dist.recv(torch.ones(4), group=group, group_src=1),
    "communicator": lambda group, model: phalanx.communicator(group).barrier(),
    "DistributedDataParallel": lambda group, model: model(torch.ones(2, 3)).sum().backward(),
    "monitored_barrier": lambda group, model: group.monitored_barrier(),
    **(
        {"monitored_barrier of the backend": lambda group, model: group._get_backend(CPU).monitored_barrier()}
        if HAS_PYTHON_BACKENDS
        else {}
    ),
}


def change_the_timeout(rank, world_size, backend):
    """Change the timeouts of groups, through torch, and begin each operation on one rank alone."""
    dist.init_process_group(backend)
    groups = {name: dist.new_group() for name in ALONE}
    model = phalanx.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=groups["DistributedDataParallel"])
    for group in groups.values():
        c10d._set_pg_timeout(SHORT, group)
    errors = {}
    if rank == 0:
        for name, call in ALONE.items():
            errors[name] = caught(phalanx.CollectiveTimeout, lambda call=call, name=name: call(groups[name], model))
    dist.barrier()
    later = timedelta(seconds=77)
    c10d._set_pg_timeout(later)
    world = dist.group.WORLD
    seen = [world.timeout, world.split_group([0, 1]).timeout, phalanx.host_groups().across.timeout]
    if HAS_PYTHON_BACKENDS:
        seen.append(world._get_backend(CPU).options._timeout)
    return errors, seen == [later] * len(seen)


@pytest.mark.filterwarnings("ignore:.*_set_pg_timeout:FutureWarning")
@pytest.mark.parametrize(("backend", "hosts"), [("phalanx", ()), ("gloo", (1, 1))], ids=["own", "place of Gloo, hosts"])
def test_a_changed_timeout_reaches_everything(run_ranks, backend, hosts):
    results = run_ranks(change_the_timeout, 2, backend, init=False, hosts=hosts, env={"PHALANX_REPLACE": "gloo"})
    assert [does_reach for _, does_reach in results] == [True, True]
    errors = results[0][0]
    assert list(errors) == list(ALONE)
    for name, error in errors.items():
        if name.startswith("monitored_barrier"):
            assert "failed to pass monitoredBarrier in 300 ms" in str(error), name
        else:
            assert error.failure.timeout_s == SHORT.total_seconds(), name


def test_timeouts_of_operations(run_ranks):
    assert run_ranks(wait_with_every_timeout, 2) == [True, True]


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, timedelta(0)])
def test_init_refuses_a_timeout_that_is_none(timeout):
    with pytest.raises(ValueError, match="timeout must be more than 0 s, got"):
        phalanx.init(timeout=timeout)


def nothing(rank):
    return rank


def test_spawned_ranks_are_awaited_for_ever_or_refused():
    context = phalanx.spawn(nothing, nprocs=2, join=False)
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError, match="timeout must be at least 0 s"):
            context.join(timeout=timeout)
    assert context.join(timeout=math.inf)
    assert context.results == [0, 1]
