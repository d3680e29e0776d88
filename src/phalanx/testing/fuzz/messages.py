"""The messages that the ranks of a group send each other in one call of the fuzzer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Message:
    """A message from one rank of the group to another; with `any_source`, its receive accepts any source."""

    src: int
    dst: int
    tag: int
    num: int
    any_source: bool = False


def messages_of(call: Any) -> list[Message]:
    """Return messages among the ranks: many have equal tags, sizes are mixed, and some are received from any source."""
    draw = random.Random(call.seed)
    if call.size == 1:
        return []
    num = torch.Size(call.shape).numel()
    found = []
    for i in range(draw.randint(1, 3 * call.size)):
        src, dst = draw.sample(range(call.size), 2)
        found.append(Message(src, dst, draw.randrange(3), draw.choice((num, num, 0, 1, num // 2, i))))
    # For receives from any source, some ranks send one message each to the same rank. These messages have a tag of
    # their own, because such a receive could otherwise match a message of another step that is still on its way.
    if draw.random() < 0.4:
        dst = draw.randrange(call.size)
        others = [r for r in range(call.size) if r != dst]
        for src in draw.sample(others, draw.randint(1, len(others))):
            found.append(Message(src, dst, 1000 + call.seed % 1_000_000, num, True))
    return found
