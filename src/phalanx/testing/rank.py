"""The side of the rank: its process group, and the points at which the test steps it."""

from __future__ import annotations

import dataclasses
import pickle
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from typing import Any

from phalanx import _env
from phalanx.launch.worker import Function, channel_to_parent, load_function


def reached(point: str, payload: Any = None) -> None:
    """Tell the test that this rank has come to `point`; it meets it in `wait_until_reached`."""
    channel_to_parent().send_bytes(pickle.dumps(("reached", point, payload)))


def await_release(point: str, timeout_s: float = 30.0) -> Any:
    """Wait until the test calls ``release(point)`` and return its payload.

    Raises:
        TimeoutError: It did not within `timeout_s`.
    """
    parent = channel_to_parent()
    deadline = time.monotonic() + timeout_s
    while parent.poll(max(0.0, deadline - time.monotonic())):
        _, name, payload = pickle.loads(parent.recv_bytes())
        if name == point:
            return payload
    raise TimeoutError(f"the test did not call release({point!r}) within {timeout_s:g} s")


@dataclasses.dataclass
class Group:
    """How the ranks of one run meet; without a `backend` they do not.

    Attributes:
        init_method: ``"file"``, ``"tcp"``, ``"env"`` or any URL that torch takes.
        folder: Private to the run.
        hosts: How many ranks each host is taken to have, where one host stands for several.
    """

    backend: str | None
    init_method: str
    timeout_s: float | None
    folder: str
    world_size: int
    hosts: tuple[int, ...] = ()

    def take_host(self, rank: int) -> None:
        """Share memory with the ranks of this one's host alone."""
        for number, last in enumerate(accumulate(self.hosts)):
            if rank < last:
                _env.export({"PHALANX_HOST": f"host-{number}"})
                return

    def init(self, rank: int) -> None:
        import torch.distributed as dist

        own_addresses = {
            "file": f"file://{self.folder}/rendezvous",
            "tcp": f"tcp://127.0.0.1:{_env.environment()['MASTER_PORT']}",
            "env": "env://",
        }
        dist.init_process_group(
            self.backend,
            init_method=own_addresses.get(self.init_method, self.init_method),
            rank=rank,
            world_size=self.world_size,
            timeout=None if self.timeout_s is None else timedelta(seconds=self.timeout_s),
        )


def run_in_group(rank: int, group: Group, function: Function | Callable[..., Any], *args: Any) -> Any:
    """Return what the test's function returns on `rank`, inside the process group that it asked for."""
    import torch.distributed as dist

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fn = load_function(function)
    group.take_host(rank)
    if group.backend is not None:
        group.init(rank)
    value = fn(rank, group.world_size, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value
