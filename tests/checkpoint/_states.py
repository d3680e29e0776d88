"""Behaviours: states of every kind come back as they were, on every rank."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import os
import pathlib
import random
import re
import warnings
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import phalanx
import phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from phalanx._text import named
from tests.checkpoint._tools import assert_same, behaviour, behaviour_once, bits, copy_of, model, save, step

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
]  # fmt: skip


class Point(NamedTuple):
    x: Any
    y: Any


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits that the dtype has, NaNs among them."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).view(shape)


def round_trip(folder: str, state: dict[str, Any]) -> dict[str, Any]:
    save(folder, state)
    loaded = dict.fromkeys(state)
    assert ckpt.load(folder, loaded) == ckpt.Loaded(1, "disk")
    return loaded


@behaviour
def plain_values_come_back_with_their_types(rank, world_size, folder):
    state = {
        "scalars": [None, True, False, 0, -1, 2**100, 1.5, -0.0, float("inf"), float("-inf"), float("nan"), 1e-310],
        "text": ["", "straße", "\ud800", '"\\\n\0'],
        "complex": [1 + 2j, complex("nan+infj"), -0j],
        "bytes": [b"", b"\0\xff", bytearray(b"x"), bytes(range(256)) * 20, bytearray(5000)],
        "nested": {"a": {"b": [{"c": ()}, (1, [2, (3,)])]}, "": {}},
        "keys": {1: "a", "1": "b", -2.5: "c", None: "d", (1, ("x", True)): "e", float("inf"): "f"},
        "sets": [{1, 2}, frozenset({"x"}), set()],
        "kinds": [collections.OrderedDict(b=1, a=2), collections.Counter("hello"), collections.deque([1, 2], 5)],
        "torch": [torch.Size([2, 0]), torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
        "path": pathlib.Path("/a/b"),
        "looks like ours": {"tensor": "x", "float": "nan", "dict": [["a", 1]], "bytes": 3},
        "per rank": [rank, {"seed": 17 * rank}],
    }
    assert_same(round_trip(folder, state), state)


@behaviour
def a_deque_keeps_its_limit(rank, world_size, folder):
    assert round_trip(folder, {"losses": collections.deque([1.0], maxlen=3)})["losses"].maxlen == 3


@behaviour
def a_named_tuple_is_restored_where_there_is_one(rank, world_size, folder):
    save(folder, {"point": Point(torch.ones(2), 7)})
    state = {"point": Point(torch.zeros(2), 0)}
    ckpt.load(folder, state)
    assert_same(state["point"], Point(torch.ones(2), 7))


class OwnDict(dict):
    """A mapping that nobody else can make."""


class Holder:
    """An object whose state has containers of all kinds."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@behaviour
def containers_come_back_as_what_they_were(rank, world_size, folder):
    point = Point(1, [2.5])
    factories = {factory: collections.defaultdict(factory, {"a": 3}) for factory in (None, int, list, dict)}
    state = {"point": point, "nested": {"points": [point]}, "defaults": list(factories.values())}
    save(folder, state)
    loaded = {"point": Point(0, None), "nested": None, "defaults": None}
    ckpt.load(folder, loaded)
    assert_same(loaded["point"], point)
    assert type(loaded["point"]) is Point
    [again] = loaded["nested"]["points"]
    assert (again, again.x, again._fields, type(again).__name__) == (point, 1, point._fields, "Point")
    assert [(type(one), one.default_factory, one) for one in loaded["defaults"]] == [
        (collections.defaultdict, factory, one) for factory, one in factories.items()
    ]
    save(folder, loaded, 2)  # what was made here is saved like any other
    nested = {"nested": None}
    ckpt.load(folder, nested, 2)
    assert type(nested["nested"]["points"][0]) is type(again)


@behaviour
def a_mapping_that_only_the_script_can_make_needs_one_in_its_place(rank, world_size, folder):
    def make(**items):
        return collections.defaultdict(lambda: "made", **items)

    save(folder, {"own": OwnDict(a=[1]), "made": make(a=2), "object": Holder({"x": OwnDict(a=3)})})
    loaded = {"own": OwnDict(b=5), "made": make(), "object": Holder(None)}
    before = loaded["own"]
    ckpt.load(folder, loaded)
    assert (type(loaded["own"]), loaded["own"], before) == (OwnDict, {"a": [1]}, {"b": 5})
    assert (loaded["made"], loaded["made"]["z"]) == ({"a": 2, "z": "made"}, "made")
    assert (type(loaded["object"].state["x"]), loaded["object"].state["x"]) == (dict, {"a": 3})
    for name, kind in (("own", "OwnDict"), ("made", "defaultdict")):
        with pytest.raises(CheckpointError, match=f"{name}: the checkpoint has a {kind}, which load can't create"):
            ckpt.load(folder, {name: None})
        loaded = {name: {}}
        ckpt.load(folder, loaded)
        assert type(loaded[name]) is dict


@behaviour
def a_tensor_is_filled_without_a_loss_or_refused(rank, world_size, folder):
    save(folder, {"x": torch.tensor([300, 2]), "y": torch.tensor([1.5]), "z": True})
    for name, into, said in (
        ("x", torch.zeros(3, dtype=torch.int64), r"int64\[2\] in the checkpoint and int64\[3\] here"),
        ("x", torch.zeros(2, dtype=torch.uint8), r"int64\[2\] in the checkpoint and uint8\[2\] here"),
        ("x", torch.zeros(2), "put None in its place to get the saved one"),
        ("y", torch.zeros(1, dtype=torch.float16), "float16"),
        ("y", torch.zeros(1, dtype=torch.int64), "int64"),
        ("z", torch.zeros(()), "the checkpoint has True where a tensor is"),
    ):
        state = {name: into}
        with pytest.raises(CheckpointError, match=said):
            ckpt.load(folder, state)
        assert state[name] is into
        assert not into.any()
    double = torch.zeros(1, dtype=torch.float64)
    ckpt.load(folder, {"y": double})
    assert double.item() == 1.5


@behaviour
def a_parameter_of_its_own_is_filled_in_place(rank, world_size, folder):
    save(folder, {"scale": nn.Parameter(torch.ones(3)), "list": [torch.ones(2, requires_grad=True)]})
    scale, leaf = nn.Parameter(torch.zeros(3)), torch.zeros(2, requires_grad=True)
    state = {"scale": scale, "list": [leaf]}
    ckpt.load(folder, state)
    assert state["scale"] is scale
    assert state["list"][0] is leaf
    assert scale.eq(1).all()
    assert leaf.eq(1).all()
    assert scale.requires_grad
    assert leaf.requires_grad


@behaviour
def tensors_that_shared_memory_do_so_again(rank, world_size, folder):
    base = torch.arange(6.0)
    state = {"base": base, "same": base, "view": base[2:4].view(2, 1), "apart": base.clone()}
    state["column"] = base.view(3, 2)[:, 0]  # is no range of it, and comes back apart
    save(folder, state)
    for names in (list(state), list(reversed(state))[:2], ["same", "base"], ["base", "view"]):
        loaded = dict.fromkeys(names)
        ckpt.load(folder, loaded)
        assert_same(loaded, {name: state[name] for name in names})
        if "base" in names:
            loaded["base"][2] = 7
            places = {"same": 2, "view": 0}
            assert all(loaded[name].flatten()[places[name]] == 7 for name in names if name in places)
            assert loaded.get("apart", state["apart"])[2] == 2
    alone = {"view": None}
    ckpt.load(folder, alone)
    assert_same(alone["view"], state["view"])
    with pytest.raises(CheckpointError, match="base: it shared memory with 'view' when it was saved"):
        ckpt.load(folder, {"view": None, "base": None})
    own = torch.zeros(6)
    filled = {"view": own[2:4].view(2, 1), "base": own}
    ckpt.load(folder, filled)
    assert_same(own, base)


@behaviour
def arrays_and_scalars_of_numpy_come_back_with_their_types(rank, world_size, folder):
    rng = numpy.random.default_rng(rank)  # each rank's own, large or small
    kinds = ["f8", "f4", "f2", ">i4", "i8", "u1", "?", "c8", "c16", "U5", "S3", "M8[ns]", "m8[s]"]
    state = {
        "arrays": [rng.integers(0, 2, (3, 5)).astype(kind) for kind in kinds],
        "large": rng.random((100, 200)),
        "views": [rng.random((4, 6)).T, rng.random(10)[::3], numpy.asfortranarray(rng.random((3, 4)))],
        "shapes": [numpy.zeros((0, 3)), numpy.array(2.5), numpy.zeros(())],
        "scalars": [numpy.float64(0.1), numpy.float32("nan"), numpy.int64(-3), numpy.bool_(True), numpy.complex128(1j)],
    }
    loaded = round_trip(folder, state)
    assert_same(loaded, state)
    loaded["large"][0, 0] = 1.0  # is not read-only


@behaviour
def tensors_of_every_dtype_keep_every_bit(rank, world_size, folder):
    shapes = [(), (0,), (3, 0, 2), (7,), (5, 3), (200, 331)]  # the last is divided among the ranks
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    state = {str(dtype): [random_bits(shape, dtype) for shape in shapes] for dtype in DTYPES}
    assert_same(round_trip(folder, state), state)


@behaviour
def small_tensors_are_each_ranks_own(rank, world_size, folder):
    state = {"mine": random_bits((5,), torch.float32, seed=rank), "number": torch.tensor(rank)}
    assert_same(round_trip(folder, state), state)


@behaviour
def memory_layout_does_not_matter(rank, world_size, folder):
    base = random_bits((60, 80, 6, 10), torch.float32)
    real = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    state = {
        "transposed": base.transpose(0, 1),
        "steps": base[::2, 1::3],
        "channels_last": base.clone(memory_format=torch.channels_last),
        "expanded": base[:1].expand(50, -1, -1, -1),
        "conjugate": torch.complex(real, real).conj(),
        "negative": torch.complex(real, real).conj().imag,
        "flipped": base.flip(0),
        "part": base[10:11, 3:4],
        "parameter": nn.Parameter(base.to(torch.float64)),
    }
    wanted = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in state.items()}
    assert_same(round_trip(folder, state), wanted)
    places = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != "expanded"}
    strides = {name: tensor.stride() for name, tensor in places.items()}
    given = dict(places)
    ckpt.load(folder, given)
    for name, tensor in places.items():
        assert given[name] is tensor, f"{name} was not loaded in place"
        assert tensor.stride() == strides[name]
        assert bits(tensor) == bits(wanted[name])


@behaviour
def equal_paths_are_different_tensors(rank, world_size, folder):
    size = 20_000
    tensors = [torch.full((size,), float(i)) for i in range(6)]
    state = {
        "a.b": tensors[0], "a": {"b": tensors[1]}, 1: tensors[2], "1": tensors[3], "__metadata__": tensors[4],
        f"a.b@{size // 2}": tensors[5],
    }  # fmt: skip
    assert_same(round_trip(folder, state), state)


@behaviour
def what_would_have_to_be_pickled_is_named_on_every_rank(rank, world_size, folder):
    for value in (object(), lambda: 0, torch.Generator(), numpy.array([object()]), range(3), {b"k": 1}):
        with pytest.raises(CheckpointError, match=r"ranks? 0.*: model\.2\.thing.*can't be saved"):
            ckpt.save(folder, {"model": [0, 0, {"thing": value}]}, 1)
    with pytest.raises(CheckpointError, match=r"thing is a tensor that is torch\.sparse_coo"):
        ckpt.save(folder, {"thing": torch.ones(2, 2).to_sparse()}, 1)
    with pytest.raises(CheckpointError, match=r"thing is a tensor that is a TwoTensor around others"):
        ckpt.save(folder, {"thing": TwoTensor(torch.ones(2), torch.ones(2))}, 1)
    with pytest.raises(CheckpointError, match=r"thing is a tensor that is on the meta device"):
        ckpt.save(folder, {"thing": torch.ones(2, device="meta")}, 1)
    for dtype in (torch.int4, torch.uint2):
        with pytest.raises(CheckpointError, match=r"thing is a tensor of u?int[24], which can't be loaded"):
            ckpt.save(folder, {"thing": torch.zeros(8, dtype=torch.uint8).view(dtype)}, 1)
    assert not ckpt.list_checkpoints(folder)


class Hollow(torch.Tensor):
    """A tensor of torch's dispatcher, around nothing."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls()


class Liar(torch.Tensor):
    """A tensor that names another size and place than its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("data_ptr", "numel", "element_size"):
            return 1 << 20
        return super().__torch_function__(func, types, args, kwargs or {})


def resized(num_elems: int, size_bytes: int) -> torch.Tensor:
    tensor = torch.ones(num_elems)
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


@behaviour
def a_tensor_without_its_memory_is_named_on_every_rank(rank, world_size, folder):
    with FakeTensorMode():
        fake = torch.ones(100_000)
    mesh = init_device_mesh("cpu", (world_size,))
    for value, said in (
        (resized(100_000, 0), "is a tensor whose storage holds 0 bytes, too few for its shape"),
        (resized(100_000, 4096), "is a tensor whose storage holds 4096 bytes, too few for its shape"),
        (DTensor.from_local(resized(100, 0), mesh, [Shard(0)]), "is a tensor whose storage holds 0 bytes, too few"),
        (fake, "is a FakeTensor without memory of its own"),
        (Hollow(), "is a Hollow without memory of its own"),
        (torch._to_functional_tensor(torch.ones(100_000)), "is a Tensor without memory of its own"),
    ):
        mine = value if rank == world_size - 1 else torch.ones(2)
        with pytest.raises(CheckpointError, match=f"rank {world_size - 1}: model.thing {said}"):
            ckpt.save(folder, {"model": {"thing": mine}}, 1)
    with pytest.raises(CheckpointError, match=r"thing is a Tensor without memory of its own"):
        torch.func.vmap(lambda x: ckpt.save(folder, {"thing": x}, 1))(torch.ones(2, 3))
    assert not ckpt.list_checkpoints(folder)


@behaviour
def a_subclass_is_saved_as_the_memory_that_it_has(rank, world_size, folder):
    state = {"large": torch.randn(100_000), "small": torch.randn(3)}
    found = round_trip(folder, {name: tensor.as_subclass(Liar) for name, tensor in state.items()})
    assert_same(found, state)


@behaviour
def what_one_rank_cannot_save_is_named_on_every_rank(rank, world_size, folder):
    mine = object() if rank == world_size - 1 else 0
    with pytest.raises(CheckpointError, match=f"rank {world_size - 1}: thing is a object") as caught:
        ckpt.save(folder, {"thing": mine}, 1)
    assert caught.value.ranks == (world_size - 1,)
    save(folder, {"thing": 0})  # and the next is as ever


@behaviour
def modules_are_restored_in_place(rank, world_size, folder):
    module = model()
    module.train()(torch.randn(8, 20) + rank)  # running statistics differ by rank
    wanted = copy_of(module)
    save(folder, {"model": module})
    fresh = model()
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    places = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()}
    state = {"model": fresh}
    ckpt.load(folder, state)
    assert state["model"] is fresh
    assert_same(copy_of(fresh), wanted)
    assert {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()} == places


@behaviour
def a_state_dict_itself_is_loaded_in_place_too(rank, world_size, folder):
    module, fresh = model(), nn.Sequential(*model())
    save(folder, {"model": module.state_dict()})
    nn.init.zeros_(fresh[0].weight)
    ckpt.load(folder, {"model": fresh.state_dict()})
    assert_same(copy_of(fresh), copy_of(module))


@behaviour_once
def wrappers_make_no_difference_to_names(rank, world_size, folder):
    compiled = functools.partial(torch.compile, backend="eager")
    wrappers = [lambda m: m, compiled, phalanx.DistributedDataParallel, DistributedDataParallel, nn.DataParallel]
    wrappers.append(lambda m: phalanx.DistributedDataParallel(compiled(m)))
    for number, wrap in enumerate(wrappers):
        module = model()
        nn.init.constant_(module[0].weight, float(number))
        save(folder, {"model": wrap(module)}, number)
        for other in wrappers:
            fresh = model()
            ckpt.load(folder, {"model": other(fresh)})
            assert_same(copy_of(fresh), copy_of(module))


@behaviour
def tied_parameters_stay_tied(rank, world_size, folder):
    def tied(value):
        module = nn.Sequential(nn.Linear(150, 150), nn.Linear(150, 150))
        module[1].weight = module[0].weight
        nn.init.constant_(module[0].weight, value)
        return module

    save(folder, {"model": tied(1.0)})
    fresh = tied(0.0)
    ckpt.load(folder, {"model": fresh})
    assert fresh[1].weight is fresh[0].weight
    assert (fresh[0].weight == 1.0).all()


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam, amsgrad, foreach": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, rate in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.01, max_iter=2),
    "groups": lambda p: optim.Adam([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "weight_decay": 0.1}]),
    "named": lambda p: optim.Adam([(f"p{i}", parameter) for i, parameter in enumerate(p)]),
}


def optimizer_goes_on(make, rank, folder, number):
    """Compare training without a break with training from a checkpoint."""

    def fresh():
        module = model()
        return module, make(list(module.parameters()))

    def train(module, optimizer, steps):
        for i in steps:
            if isinstance(optimizer, optim.LBFGS):
                optimizer.step(functools.partial(closure, module, optimizer, i))
            else:
                step(module, optimizer, i)

    module, optimizer = fresh()
    train(module, optimizer, range(3))
    save(folder, {"model": module, "optimizer": optimizer}, number)
    train(module, optimizer, range(3, 5))
    other, other_optimizer = fresh()
    ckpt.load(folder, {"model": other, "optimizer": other_optimizer}, number)
    train(other, other_optimizer, range(3, 5))
    assert_same(copy_of(other), copy_of(module))
    return other_optimizer


def closure(module, optimizer, number):
    optimizer.zero_grad()
    images = torch.randn(6, 20, generator=torch.Generator().manual_seed(number))
    loss = module(images).square().mean()
    loss.backward()
    return loss


@behaviour
def every_optimizer_goes_on_bit_for_bit(rank, world_size, folder):
    for number, make in enumerate(OPTIMIZERS.values()):
        optimizer_goes_on(make, rank, folder, number)


@behaviour
def a_sharded_optimizer_goes_on_bit_for_bit(rank, world_size, folder):
    def sharded(parameters):
        return phalanx.ZeroRedundancyOptimizer(parameters, optim.AdamW, lr=0.01)

    optimizer_goes_on(sharded, rank, folder, 1)
    module = model()  # and its checkpoint is the plain optimizer's
    plain = optim.AdamW(module.parameters(), lr=0.01)
    ckpt.load(folder, {"model": module, "optimizer": plain})
    assert len(plain.state_dict()["state"]) == len(list(module.parameters()))


@behaviour
def an_optimizer_that_has_not_stepped_comes_back_as_such(rank, world_size, folder):
    module = model()
    save(folder, {"optimizer": optim.Adam(module.parameters(), lr=0.5)})
    optimizer = optim.Adam(module.parameters(), lr=0.1)
    step(module, optimizer, 0)
    ckpt.load(folder, {"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state_dict()["state"]


SCHEDULERS = {
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "MultiStepLR": lambda o: optim.lr_scheduler.MultiStepLR(o, [2, 5, 5, 9], gamma=0.5),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4), optim.lr_scheduler.CosineAnnealingLR(o, 10)], [4]
    ),
    "ChainedScheduler": lambda o: optim.lr_scheduler.ChainedScheduler(
        [optim.lr_scheduler.ConstantLR(o, 0.1, total_iters=4), optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@behaviour
def every_scheduler_goes_on_with_the_same_rates(rank, world_size, folder):
    for number, (name, make) in enumerate(SCHEDULERS.items()):

        def fresh(make=make):
            optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
            return optimizer, make(optimizer)

        def rates(optimizer, scheduler, num_steps, name=name):
            seen = []
            for _ in range(num_steps):
                optimizer.step()
                scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
                seen.append(optimizer.param_groups[0]["lr"])
            return seen

        optimizer, scheduler = fresh()
        rates(optimizer, scheduler, 3)
        save(folder, {"optimizer": optimizer, "scheduler": scheduler}, number)
        wanted = rates(optimizer, scheduler, 8)
        optimizer, scheduler = fresh()
        ckpt.load(folder, {"optimizer": optimizer, "scheduler": scheduler}, number)
        assert rates(optimizer, scheduler, 8) == wanted, name


@behaviour
def the_gradient_scaler_comes_back(rank, world_size, folder):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    save(folder, {"scaler": scaler})
    fresh = torch.amp.GradScaler("cpu")
    ckpt.load(folder, {"scaler": fresh})
    assert fresh.state_dict() == scaler.state_dict()


@behaviour
def samplers_and_loaders_go_on_in_mid_epoch(rank, world_size, folder):
    data = torch.arange(40)

    def fresh():
        loader = phalanx.DataLoader(data, batch_size=2, shuffle=True, num_workers=0)
        sampler = phalanx.DistributedSampler(data, seed=3)
        loader.set_epoch(0)
        sampler.set_epoch(0)
        return loader, sampler

    loader, sampler = fresh()
    batches, numbers = iter(loader), iter(sampler)
    for _ in range(3):
        next(batches), next(numbers)
    save(folder, {"loader": loader, "sampler": sampler})
    wanted = [batch.tolist() for batch in batches], list(numbers)
    loader, sampler = fresh()
    ckpt.load(folder, {"loader": loader, "sampler": sampler})
    assert ([batch.tolist() for batch in loader], list(sampler)) == wanted


@behaviour
def random_numbers_go_on_on_every_rank(rank, world_size, folder):
    def draw():
        numbers = [random.random(), random.gauss(0, 1), numpy.random.random(), numpy.random.normal()]
        return [*numbers, torch.rand(()).item(), torch.randn(3).tolist()]

    phalanx.seed_everything(5, per_rank=True)
    random.gauss(0, 1)  # each leaves a second number behind
    numpy.random.normal()
    draw()
    save(folder, {"random": phalanx.RandomState()})
    wanted = draw()
    phalanx.seed_everything(6)
    ckpt.load(folder, {"random": phalanx.RandomState()})
    assert draw() == wanted
    every = [None] * world_size
    dist.all_gather_object(every, wanted)
    assert len({str(numbers) for numbers in every}) == world_size, "every rank has a stream of its own"


@behaviour
def plain_values_at_the_top_are_replaced(rank, world_size, folder):
    save(folder, {"epoch": 3, "names": ["a"], "best": {"loss": 0.5}})
    state = {"epoch": 0, "names": [], "best": {}}
    ckpt.load(folder, state)
    assert state == {"epoch": 3, "names": ["a"], "best": {"loss": 0.5}}


@behaviour
def only_what_is_asked_for_is_loaded(rank, world_size, folder):
    save(folder, {"model": model(), "optimizer": {"lr": 1.0}, "epoch": 3})
    state = {"epoch": 0}
    ckpt.load(folder, state)
    assert state == {"epoch": 3}


@behaviour
def an_entry_that_the_checkpoint_lacks_is_refused_unless_told(rank, world_size, folder):
    save(folder, {"epoch": 3, "part": {"weight": torch.ones(2)}})
    with pytest.raises(
        CheckpointError, match=f"of step 1 from {folder}: .*the checkpoint has no 'lr'; it has 'epoch', 'part'"
    ):
        ckpt.load(folder, {"epoch": 0, "lr": 1.0})
    with pytest.raises(CheckpointError, match="part: the checkpoint has no 'bias'; it has 'weight'"):
        ckpt.load(folder, {"part": {"weight": torch.ones(2), "bias": torch.ones(2)}})
    state = {"epoch": 0, "lr": 1.0}
    ckpt.load(folder, state, strict=False)
    assert state == {"epoch": 3, "lr": 1.0}


@behaviour
def another_model_is_refused_on_every_rank(rank, world_size, folder):
    save(folder, {"model": nn.Linear(3, 3)})
    mine = nn.Linear(3, 4) if rank == world_size - 1 else nn.Linear(3, 3)
    told = f"of step 1 from {folder}: rank {world_size - 1}: model: 2 of another shape (weight is float32[3, 3] in the "
    with pytest.raises(CheckpointError, match=re.escape(told)):
        ckpt.load(folder, {"model": mine})
    for wrong in ({"model": [torch.ones(1)]}, {"model": {"weight": {"x": torch.ones(1)}}}):
        with pytest.raises(CheckpointError, match=r"where a (list of 1|mapping) is wanted"):
            ckpt.load(folder, wrong)


@behaviour
def what_does_not_fit_is_told_once_with_counts_and_the_first_names(rank, world_size, folder):
    def layers(first, last):
        return nn.ModuleDict({f"l{i}": nn.Linear(2, 2, bias=False) for i in range(first, last)})

    state = {"a": {"model": layers(0, 4)}, "optimizer": torch.optim.SGD(layers(0, 4).parameters())}
    save(folder, state, 3)
    ranks = named("rank", range(world_size))
    with pytest.raises(CheckpointError) as caught:
        ckpt.load(folder, {"a": {"model": layers(3, 10)}})
    assert str(caught.value) == (
        f"checkpoint.load of step 3 from {folder}: {ranks}: a: model: "
        "6 missing from the checkpoint (l4.weight, l5.weight, l6.weight, l7.weight, l8.weight and 1 more), "
        "3 unexpected in it (l0.weight, l1.weight, l2.weight); "
        "make the model as it was when it was saved, or pass strict=False (phalanx explain checkpoint-not-loaded)"
    )
    with pytest.raises(
        CheckpointError,
        match=r"optimizer: the checkpoint has groups of \[4\] parameters, this optimizer of \[7\]; make",
    ):
        ckpt.load(folder, {"optimizer": torch.optim.SGD(layers(3, 10).parameters())})


@behaviour
def tensors_of_inference_mode_come_back_in_either_mode(rank, world_size, folder):
    with torch.inference_mode():
        linear, mine = nn.Linear(3, 3), torch.arange(5.0)
        save(folder, {"model": linear, "x": mine, "y": mine + 1})
        weight = linear.weight.clone()
        linear.weight.zero_()
        mine.zero_()
        new = {"model": nn.Linear(3, 3), "y": None}
        ckpt.load(folder, new)
        assert torch.equal(new["model"].weight, weight)
    state = {"model": linear, "x": mine, "y": torch.zeros(5)}
    ckpt.load(folder, state)
    assert torch.equal(linear.weight, weight)
    assert state["x"] is mine
    assert mine.tolist() == [0, 1, 2, 3, 4]
    assert not state["y"].is_inference()
    assert not new["y"].is_inference()  # whatever mode it was loaded in
    plain = nn.Linear(3, 3)
    ckpt.load(folder, {"model": plain})
    plain(torch.ones(3)).sum().backward()
    assert torch.equal(plain.weight, weight)


@behaviour
def the_state_may_change_as_soon_as_save_returns(rank, world_size, folder):
    large, small, plain = torch.ones(3_000_000), torch.ones(10), [1]
    ckpt.save(folder, {"large": large, "small": small, "plain": plain}, 1)
    large.zero_()
    small.zero_()
    plain.append(2)
    ckpt.wait()
    state = {"large": None, "small": None, "plain": None}
    ckpt.load(folder, state)
    assert state["large"].eq(1).all()
    assert state["small"].eq(1).all()
    assert state["plain"] == [1]


@behaviour
def saves_follow_each_other_without_wait(rank, world_size, folder):
    for number in range(5):
        ckpt.save(folder, {"x": torch.full((100_000,), float(number))}, number)
    ckpt.wait()
    for number in range(5):
        state = {"x": None}
        assert ckpt.load(folder, state, number) == ckpt.Loaded(number, "disk")
        assert state["x"].eq(number).all()


@behaviour
def saving_a_step_again_replaces_it(rank, world_size, folder):
    for value in (1.0, 2.0):
        save(folder, {"x": torch.full((50_000,), value)}, 7)
    state = {"x": None}
    assert ckpt.load(folder, state).step == 7
    assert state["x"].eq(2).all()
    assert ckpt.verify(folder) == []
    assert sorted(path.name for path in pathlib.Path(folder).iterdir()) == ["latest", "step-00000007"]


@behaviour
def nothing_yet_is_no_error_but_a_line_unless_it_is_to_be_one(rank, world_size, folder):
    def said(**options):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert ckpt.load(folder, {"x": 0}, **options) is None
        return printed.getvalue()

    for told in (f"'{folder}' is not a folder", f"'{folder}' holds no checkpoint"):
        assert said() == (f"phalanx: checkpoint.load: {told}: starting from the beginning\n" if rank == 0 else "")
        assert said(missing="ignore") == ""
        with pytest.raises(CheckpointError, match=f"{told}: name the folder of a run or of its checkpoints"):
            ckpt.load(folder, {"x": 0}, missing="error")
        if world_size > 1:
            dist.barrier()
        os.makedirs(folder, exist_ok=True)
        if world_size > 1:
            dist.barrier()
    with pytest.raises(ValueError, match="missing must be"):
        ckpt.load(folder, {"x": 0}, missing="fail")
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has steps none"):
        ckpt.load(folder, {"x": 0}, 3)


@behaviour
def the_folder_of_a_run_stands_for_its_checkpoints(rank, world_size, folder):
    save(f"{folder}/checkpoints", {"x": 5}, 2)
    state = {"x": 0}
    assert ckpt.load(folder, state, missing="error") == ckpt.Loaded(2, "disk")
    assert state == {"x": 5}
    assert ckpt.load(folder, state, 2) == ckpt.Loaded(2, "disk")
    save(folder, {"x": 6}, 1)  # its own come first
    assert ckpt.load(folder, state) == ckpt.Loaded(1, "disk")
