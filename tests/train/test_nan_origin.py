"""Where a loss that is not finite began, as a second forward pass of the same batch tells."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

from phalanx.train.step.nan_origin import Replay
from phalanx.train.step.objective import Objective
from tests.train._programs import mean_squares


class DividesByZeroOnce(nn.Module):
    """An annealing schedule that divides by zero in its third pass; it counts in an attribute or in a buffer."""

    def __init__(self, counts_in_buffer):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        if counts_in_buffer:
            self.register_buffer("num_passes", torch.zeros(()))
        else:
            self.num_passes = 0

    def forward(self, x):
        self.num_passes += 1
        return self.layer(x) / (self.num_passes - 3)


def bad_loss(outputs, targets):
    return mean_squares(outputs, targets) * math.nan


def interrupted(model, batch):
    raise RuntimeError("outside of fit")


BATCH = torch.ones(4, 6), torch.zeros(4, 1)


def origin(model, objective):
    return Replay(model, objective, contextlib.nullcontext()).origin_of_loss(BATCH)


@pytest.mark.parametrize("counts_in_buffer", [False, True])
def test_a_second_pass_that_is_finite_acquits_no_module(counts_in_buffer):
    model, objective = DividesByZeroOnce(counts_in_buffer), Objective(mean_squares)
    losses = [objective.loss_of(model, BATCH)[0] for _ in range(3)]
    assert not losses[-1].isfinite()
    found = origin(model, objective)
    assert "so was a second forward pass of the same batch: the pass does not repeat itself" in found.words
    assert "outputs are finite" not in found.words
    assert (found.tensor, found.module) == ("", "")


def test_modules_are_acquitted_only_by_a_second_loss_that_is_not_finite():
    found = origin(nn.Linear(6, 1), Objective(bad_loss))
    assert found.words == "The batch, the parameters and all modules' outputs are finite: the loss is not"


def test_a_model_that_cannot_be_called_again_is_not_acquitted():
    assert origin(nn.Linear(6, 1), Objective(None, interrupted)).words == "The batch and the parameters are finite"
