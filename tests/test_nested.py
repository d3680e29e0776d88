"""Tensors in nested containers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from phalanx._torch.nested import tensors_in


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    more: object
    label: int = dataclasses.field(init=False)


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def test_tensors_are_found_with_their_places():
    a, b, c, d = torch.arange(4.0)
    batch = {"pair": Pair(a, b), "sample": Sample(c, [1, None, d]), "class": Sample}
    assert [*tensors_in(batch, "batch")] == [
        ("batch['pair'][0]", a),
        ("batch['pair'][1]", b),
        ("batch['sample'].image", c),
        ("batch['sample'].more[2]", d),
    ]
    assert [*tensors_in(a, "batch")] == [("batch", a)]
    assert [*tensors_in("text")] == []
