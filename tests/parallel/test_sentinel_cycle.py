"""However the number of steps between two looks changes, a difference shows within the interval."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.parallel.divergence.sentinel import LEAST_OF_A_CYCLE, Sentinel
from tests.train._programs import make_model


def two_copies(every: int) -> list[tuple[nn.Module, Sentinel]]:
    copies = []
    for _ in range(2):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = dist.ProcessGroup(0, 1)  # in which nothing is sent
        copies.append((model, Sentinel(model, optimizer, group, every, lambda _: False, 0)))
    return copies


def steps_until_seen(draw: random.Random, every: int) -> int:
    """Return how many steps after a change of one copy the copies' numbers first differ."""
    copies = two_copies(every)
    most_between = max(1, every // LEAST_OF_A_CYCLE)

    def differ(step: int) -> bool:
        return len({tuple(sentinel.look(step)[:2]) for _, sentinel in copies}) > 1

    step, change_at, pace = 0, draw.randrange(1, 3 * every + 1), 1
    while step < change_at:  # rows of small gaps and of large ones: a tensor may be passed over where the pace changes
        step += pace
        assert not differ(step)
        pace = draw.choice([pace, pace, 1, most_between, draw.randint(1, most_between)])
    with torch.no_grad():
        draw.choice(list(copies[1][0].parameters())).view(-1)[-1] += 1
    changed_at = step
    while step <= changed_at + every:
        step += pace
        if differ(step):
            break
        pace = draw.choice([pace, pace, 1, most_between])
    return step - changed_at


@pytest.mark.parametrize("every", [1, 2, 3, 5, 20, 21, 100])
def test_a_difference_shows_within_the_interval_whatever_the_steps_between_looks(every):
    draw = random.Random(every)
    assert max(steps_until_seen(draw, every) for _ in range(60)) <= every


def test_all_is_compared_in_every_look_if_the_steps_between_them_are_as_many_as_the_interval():
    copies = two_copies(10)
    for step in (10, 20, 30):
        with torch.no_grad():
            copies[1][0][0].bias += 1
        assert len({tuple(sentinel.look(step)[:2]) for _, sentinel in copies}) == 2
