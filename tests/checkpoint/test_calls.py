"""A state that is not a dictionary is refused with an example of the right call, before anything is changed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from phalanx import checkpoint

MODEL = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (MODEL, "model"), (nn.Sequential(nn.Linear(2, 1)), "model"), (nn.ModuleDict({"a": MODEL}), "model"),
        (torch.optim.SGD(MODEL.parameters()), "optimizer"), ([MODEL], "state"), (None, "state"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("call", "more"), [(checkpoint.load, ""), (checkpoint.save, ", step"), (checkpoint.snapshot, ", step")]
)
def test_a_state_without_names_is_refused_with_the_right_call(tmp_path, call, more, state, name):
    right = f'checkpoint.{call.__name__}(folder, {{"{name}": {name}}}{more})'
    with pytest.raises(
        TypeError, match=rf"must be a dictionary, got .*{type(state).__name__}; right: {re.escape(right)}$"
    ):
        call(tmp_path, state, *([3] if more else []))
