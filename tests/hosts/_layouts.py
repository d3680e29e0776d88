"""Where the ranks of a test are: how many each host has, or in which order the hosts come."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch.distributed as dist

# One rank each; even; one host smaller than the other; three hosts, the first and last with a rank alone.
LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 2, 1], [1, 1, 1]]


def layout_name(hosts: Sequence[int]) -> str:
    return "+".join(map(str, hosts)) or "one host"


def layouts(*hosts: Sequence[int], slow: Sequence[Sequence[int]] = ()) -> pytest.MarkDecorator:
    """Run a test on these layouts, and with the slow tests on more, which go the same ways with other numbers."""
    cases = [*hosts, *(pytest.param(one, marks=pytest.mark.slow) for one in slow)]
    return pytest.mark.parametrize("hosts", cases, ids=[layout_name(one) for one in (*hosts, *slow)])


def interleaved(rank, world_size, order, function, *args):
    """Run `function` where rank ``r`` is on the host that ``order[r]`` names; for `run_ranks` with ``init=False``."""
    os.environ["PHALANX_HOST"] = f"host-{order[rank]}"
    dist.init_process_group("phalanx")
    return function(rank, world_size, *args)
