"""DataParallel without a GPU runs the module, and hints at what is faster."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import phalanx

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def test_it_says_once_what_is_faster():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = phalanx.DataParallel(nn.Linear(3, 2))
        model(torch.ones(4, 3)).sum().backward()
        model(torch.ones(4, 3))
    assert len(warned) == 1
    assert warned[0].filename == __file__
    for part in ("the CPU", "phalanx.DistributedDataParallel(module)", "phalanx run"):
        assert part in str(warned[0].message)


def test_it_runs_the_module():
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match="one device"):
        model = phalanx.DataParallel(module, dim=0)
    assert isinstance(model, nn.DataParallel)
    assert model.module is module
    x = torch.randn(4, 3)
    assert torch.equal(model(x), module(x))
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()]


def test_a_scripts_arguments_for_gpus_do_no_harm():
    with pytest.warns(UserWarning, match="one device"):
        model = phalanx.DataParallel(nn.Linear(3, 2), device_ids=[0, 1], output_device=0)
    assert model(torch.ones(1, 3)).shape == (1, 2)
