"""For any model, gradients are those of one process, and None where torch's DistributedDataParallel has None."""

from __future__ import annotations

import functools
import hashlib
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.testing import run_ranks
from tests.checkpoint._tools import group_of
from tests.parallel._ddp_models import CASES, Case

pytestmark = pytest.mark.kept_ranks

NUM_STEPS = 3
SETUPS = {
    "phalanx, 3": ("phalanx", 3, {}),
    "gloo, 3, a bucket for each parameter": ("gloo", 3, {"bucket_cap_mb": 1e-6}),
    "gloo, 2, copies": ("gloo", 2, {"bucket_cap_mb": 1e-3, "gradient_as_bucket_view": False}),
}
Gradients = list[dict[str, torch.Tensor | None]]


def gradients(case: Case, wrap: Callable[[nn.Module], Any], ranks: range) -> Gradients:
    """Train a few steps on what these ranks have; return the gradients of each step."""
    torch.manual_seed(0)
    module = case.build()
    model = wrap(module)
    steps = []
    for step in range(NUM_STEPS):
        case.before_step(module, step)
        module.zero_grad()
        (sum(case.loss(model, step, rank) for rank in ranks) / len(ranks)).backward()
        steps.append({n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()})
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)
    return steps


def assert_alike(case: Case, got: Gradients, want: Gradients, whose: str) -> None:
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for name in ours:
            where = f"step {step}, {name}, {whose}"
            one, other = ours[name], theirs[name]
            assert (one is None) == (other is None), f"{where}: {one} {other}"
            if one is None or other is None:
                continue
            assert (one.dtype, one.shape) == (other.dtype, other.shape), where
            one, other = one.to_dense(), other.to_dense()
            scale = float(other.abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(
                one, other, rtol=0, atol=case.rtol * max(scale, 1e-3), msg=lambda text, where=where: f"{where}: {text}"
            )


@functools.cache
def references(case: Case, rank: int, world_size: int) -> dict[str, Gradients]:
    """Return what the gradients must be, by whose they are; every setup with as many ranks compares with the same."""
    found = {"one process": gradients(case, lambda module: module, range(world_size))}
    if case.torch_options is not None:

        def theirs(module: nn.Module) -> nn.Module:
            return nn.parallel.DistributedDataParallel(module, **case.torch_options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found["torch's"] = gradients(case, theirs, range(rank, rank + 1))
    return found


def run_case(case: Case, rank: int, world_size: int, options: dict[str, Any]) -> str:
    """Compare, return a digest of our gradients."""

    def ours(module: nn.Module) -> nn.Module:
        return phalanx.DistributedDataParallel(module, find_unused_parameters=True, **options)

    got = gradients(case, ours, range(rank, rank + 1))
    for whose, want in references(case, rank, world_size).items():
        assert_alike(case, got, want, whose)
    digest = hashlib.sha256()
    for gradient in (gradient for step in got for gradient in step.values() if gradient is not None):
        flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient.to_dense()
        digest.update(bytes(flat.contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def run_cases(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return for each case our gradients' digest, and what is wrong."""
    results = {}
    for name, case in CASES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", message="(Sparse invariant|ComplexHalf|.*torch.jit)")
                results[name] = (run_case(case, rank, world_size, options), "")
        except Exception:
            results[name] = ("", traceback.format_exc())
    return results


def run_setups(rank: int, _: int, folder: str) -> dict[str, dict[str, tuple[str, str]]]:
    results = {}
    for setup, (backend, size, options) in SETUPS.items():
        with group_of(size, rank, f"{folder}/{setup}", backend) as is_in:
            if is_in:
                results[setup] = run_cases(rank, size, options)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(run_setups, 3, str(tmp_path_factory.mktemp("models")), init=False, timeout_s=300)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process_and_of_torch(results, setup, name):
    first = results[0][setup][name][0]
    for rank, result in enumerate(results[: SETUPS[setup][1]]):
        digest, problem = result[setup][name]
        assert not problem, f"rank {rank}: {problem}"
        assert digest == first, f"rank {rank} has other bits than rank 0"
