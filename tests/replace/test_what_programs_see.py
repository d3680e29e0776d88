"""What a program sees that runs on phalanx in the place of Gloo: Gloo's names, tables, classes and errors."""

from __future__ import annotations

import io
import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import phalanx
from phalanx._torch import version
from phalanx.backend.calls.arguments import Arguments
from phalanx.backend.calls.memory import OtherDevice
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from tests.backend.test_observers import needs_flight_recorder, needs_python_backends, record_flight

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Gloo = dist.ProcessGroupGloo  # as a program would have imported it, before anything is replaced


def summed(group=None):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return type(group or dist.group.WORLD).__name__, tensor[0].item()


def tables():
    backend = dist.Backend
    maps = (backend.backend_type_map, backend.backend_capability, backend.default_device_backend_map)
    return [*(dict(one)["gloo" if "gloo" in one else "cpu"] for one in maps), backend.GLOO, backend("GLOO")]


def options():
    given = Gloo._Options()
    given._timeout = timedelta(seconds=20)
    return given


GROUPS = {
    "new_group": lambda: dist.new_group(backend="gloo"),
    "new_group of the default": dist.new_group,
    "new_group of a class's constant": lambda: dist.new_group([0, 1], backend=dist.Backend.GLOO),
    "new_group with options": lambda: dist.new_group(backend="gloo", pg_options=options()),
    "new_group of devices": lambda: dist.new_group(backend="cpu:gloo,cuda:gloo"),
    "new_group of the CPU alone": lambda: dist.new_group(backend="cpu:gloo"),
    "new_group beside another": lambda: dist.new_group(backend="cpu:gloo,cuda:fake"),
    "new_group behind another": lambda: dist.new_group(backend="cuda:fake,cpu:gloo"),
    "device mesh": lambda: init_device_mesh("cpu", (2,)).get_group(),
} | ({"split_group": lambda: dist.split_group(split_ranks=[[0, 1]])} if version() >= (2, 15) else {})


def look(rank, world_size):
    before = tables()
    phalanx.replace_gloo()
    phalanx.replace_gloo()
    dist.init_process_group(timeout=timedelta(seconds=30))  # torch's default on the CPU
    world = dist.group.WORLD
    backend = world._get_backend(CPU)
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    dist.barrier()
    log = io.StringIO()
    logging.getLogger("phalanx").addHandler(logging.StreamHandler(log))
    logging.getLogger("phalanx").setLevel(logging.DEBUG)
    direct = Gloo(dist.PrefixStore("direct", dist.distributed_c10d._get_default_store()), rank, world_size)
    direct.allreduce([total := torch.ones(2)]).wait()
    seen = {
        "tables": tables() == before,
        "name": world._get_backend_name(),
        "class": isinstance(backend, dist.ProcessGroupGloo),
        "timeout": backend.options._timeout,
        "groups": {name: summed(make()) for name, make in GROUPS.items()},
        "world": summed(),
        "direct": (type(direct) is Gloo, total.tolist(), "makes a ProcessGroupGloo by name" in log.getvalue()),
    }
    if HAS_PYTHON_BACKENDS:
        ended = dist.new_group(backend="gloo")._get_backend(CPU)
        dist.barrier()
        ended.abort()
        seen["error after an abort"] = ended.get_error().name
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    seen["backend"] = dist.get_backend()
    seen["devices"] = sorted(device.type for device in dist.group.WORLD._device_types)
    return seen


def test_programs_see_gloo(run_ranks):
    expected = {
        "tables": True,
        "name": "gloo",
        "class": True,
        "timeout": timedelta(seconds=30),
        "groups": dict.fromkeys(GROUPS, ("PhalanxGroup", 2.0)),
        "world": ("PhalanxGroup", 2.0),
        "direct": (True, [2.0, 2.0], True),
        "backend": "gloo",
        "devices": ["cpu", "cuda"],
    }
    if HAS_PYTHON_BACKENDS:
        expected["error after an abort"] = "SUCCESS"
    for seen in run_ranks(look, 2, init=False):
        assert seen == expected


def use_gloo_for_a_gpu(rank, world_size):
    """Call the backend of the other device directly, as torch's dispatcher would."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    backend = group._get_backend(CUDA)
    inner = backend.gloo() if HAS_PYTHON_BACKENDS else backend
    inner.allreduce([total := torch.full((2,), rank + 1.0)]).wait()
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        dist.all_reduce(torch.empty(2, device="meta"))
    before = summed()
    Arguments.check = refuse_as_if_on_a_gpu
    dist.all_reduce(total, async_op=True).wait()  # a blocking call would not be checked there
    return issubclass(type(inner), Gloo), total.tolist(), before


def refuse_as_if_on_a_gpu(self, tensor):
    raise OtherDevice("on a GPU", "cuda")


def test_tensors_of_a_gpu_have_gloo_itself(run_ranks):
    env = {"PHALANX_REPLACE": "gloo"}
    results = run_ranks(use_gloo_for_a_gpu, 2, init=False, env=env)
    assert results == [(True, [6.0, 6.0], ("PhalanxGroup", 2.0))] * 2


def gloo_for_one_rank(rank, world_size):
    """Only rank 0 asks for Gloo itself."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    if rank == 0:
        dist.group.WORLD._get_backend(CUDA).gloo()
    else:
        dist.all_reduce(torch.ones(1))


@needs_python_backends
def test_ranks_that_disagree_about_the_device_are_told(spawn_ranks):
    with spawn_ranks(gloo_for_one_rank, 2, init=False, env={"PHALANX_REPLACE": "gloo"}) as ranks:
        for outcome in ranks.join(30):
            assert isinstance(outcome.error, phalanx.CollectiveMismatch)


def sum_everywhere(rank, world_size, debug):
    dist.set_debug_level(debug)
    dist.init_process_group("gloo")
    order = {"sort_ranks": False} if version() >= (2, 12) else {}
    sums = summed(), summed(dist.new_group([1, 0], backend="gloo", **order))
    kind = type(dist.group.WORLD._get_backend(CPU)).__name__
    dist.destroy_process_group()
    return sums, kind


@pytest.mark.parametrize(
    ("debug", "hosts", "kind"),
    [(dist.DebugLevel.DETAIL, (), "_ProcessGroupWrapper"), (dist.DebugLevel.OFF, (1, 1), "GlooShaped")],
    ids=["debug", "hosts"],
)
def test_it_holds(run_ranks, debug, hosts, kind):
    results = run_ranks(sum_everywhere, 2, debug, init=False, env={"PHALANX_REPLACE": "gloo"}, hosts=hosts)
    kind = kind if HAS_PYTHON_BACKENDS else "InnerGloo"
    assert results == [((("PhalanxGroup", 2.0),) * 2, kind)] * 2


def profile(rank, world_size):
    with torch.autograd.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(3))
    return {event.name for event in profiler.function_events if event.name.endswith(":all_reduce")}


def test_profilers_see_gloo(run_ranks):
    assert run_ranks(profile, 2, backend="gloo", env={"PHALANX_REPLACE": "gloo"}) == [{"gloo:all_reduce"}] * 2


@needs_flight_recorder
def test_the_flight_recorder_sees_the_group_if_asked(run_ranks):
    env = {"PHALANX_REPLACE": "gloo", "TORCH_FR_BUFFER_SIZE": "100"}
    for entries in run_ranks(record_flight, 2, backend="gloo", env=env):
        assert [name.split(":")[-1] for name, _, _ in entries] == ["all_reduce", "broadcast", "barrier"]
