"""What torch reads in C++ of our works and futures: communication hooks, the Reducer, coalescing, RPC, functionals.

The same program on Gloo says what comes out, to the bit.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.futures import Future, collect_all, wait_all
from torch.nn.parallel import DistributedDataParallel

from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS

BUILT_IN = dist.BuiltinCommHookType


def train(prepare=lambda model: None, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), **options)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((3, 4), dist.get_rank() + 1.0 + step)).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def with_hook(hook, make_state=lambda: None):
    return lambda: train(lambda model: model.register_comm_hook(make_state(), hook))


def power_sgd():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def post_local_sgd():
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return post_localSGD_hook.PostLocalSGDState(None, alone, 1)


def future(num=2, dtype=torch.float32):
    return dist.all_reduce(torch.ones(num, dtype=dtype), async_op=True).get_future()


def coalesced(async_ops):
    tensors = [torch.ones(2), torch.ones(3)]
    with c10d._coalescing_manager(async_ops=async_ops) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if async_ops:
        works.wait()
    return tensors


def join():
    model = DistributedDataParallel(nn.Linear(4, 2))
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(3, 4)).sum().backward()
    return [p.grad for p in model.parameters()]


def with_rpc():
    """Wait for a future of RPC and one of ours together."""
    peer = 1 - dist.get_rank()
    remote: Future = rpc.rpc_async(f"rank{peer}", torch.add, args=(torch.ones(2), 1))
    both = collect_all([remote, future()]).wait()
    return [both[0].value(), *both[1].value()]


READERS = {
    "built-in hook": lambda: train(lambda model: model._register_builtin_comm_hook(BUILT_IN.ALLREDUCE)),
    "built-in FP16 hook": lambda: train(lambda model: model._register_builtin_comm_hook(BUILT_IN.FP16_COMPRESS)),
    "allreduce_hook": with_hook(default_hooks.allreduce_hook),
    "fp16_compress_hook": with_hook(default_hooks.fp16_compress_hook),
    **(
        {"bf16_compress_hook": with_hook(default_hooks.bf16_compress_hook)} if HAS_PYTHON_BACKENDS else {}
    ),  # not on CPUs
    "fp16_compress_wrapper": with_hook(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "PowerSGD": with_hook(powerSGD_hook.powerSGD_hook, power_sgd),
    "post-local SGD": with_hook(post_localSGD_hook.post_localSGD_hook, post_local_sgd),
    "Reducer": train,
    "Reducer, unused": lambda: train(find_unused_parameters=True),
    "Reducer, static graph": lambda: train(static_graph=True),
    "Reducer, many buckets": lambda: train(bucket_cap_mb=0.0001, gradient_as_bucket_view=True),
    "Reducer, join": join,
    "functional": lambda: [
        funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1,
        funcol.broadcast(torch.ones(3), 1, dist.group.WORLD) + 1,
        funcol.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD) + 1,
        *funcol.all_reduce_coalesced([torch.ones(3), torch.ones(2)], "sum", dist.group.WORLD),
    ],
    "coalesced": lambda: coalesced(async_ops=False),
    "coalesced later": lambda: coalesced(async_ops=True),
    "collect_all": lambda: [one.value()[0] for one in collect_all([future(), future(3)]).wait()],
    "wait_all": lambda: [value[0] for value in wait_all([future(), future(3)])],
    "then": lambda: [future().then(lambda f: f.value()[0] * 2).then(lambda f: f.wait() + 1).wait()],
    "future of halves": lambda: future(3, torch.float16).wait(),
    "RPC": with_rpc,
}


def read(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about functions that it will remove
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
        results = {name: run() for name, run in READERS.items()}
        rpc.shutdown()
    return {name: [tensor.tolist() for tensor in tensors] for name, tensors in results.items()}


@pytest.mark.filterwarnings("ignore")
def test_every_reader_in_torchs_c_plus_plus_gets_what_it_gets_from_gloo(run_ranks):
    wanted = run_ranks(read, 2, backend="gloo", init_method="env")
    for backend, env in (("phalanx", {}), ("gloo", {"PHALANX_REPLACE": "gloo"})):
        for rank, seen in enumerate(run_ranks(read, 2, backend=backend, init_method="env", env=env)):
            assert list(seen) == list(READERS)
            for name, tensors in seen.items():
                assert tensors == wanted[rank][name], (backend, rank, name)


def ask_as_c_plus_plus(rank, world_size):
    """The built-in hook's future fails with the operation's own error."""
    tensor = torch.ones(2 + rank, dtype=torch.float16)
    work = dist.all_reduce(tensor, async_op=True)
    getattr(work, "get_future")().wait()  # noqa: B009 C++ looks methods up by their names, too


def test_c_plus_plus_gets_the_operations_own_error(run_ranks):
    for outcome in run_ranks(ask_as_c_plus_plus, 2, expect_failures=True):
        assert "CollectiveMismatch: rank" in str(outcome.error)
        assert "TorchScript" in str(outcome.error), "the future was not C++'s"
