"""The rank's side: its process group, and the points at which it waits for the test."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

from phalanx import _env
from phalanx.launch.spawn.worker import Function, call, channel_to_parent, load_function
from phalanx.testing.results import make_portable


def reached(point: str, payload: Any = None) -> None:
    """Report to the test, which waits in `Ranks.wait_until_reached`, that this rank has reached `point`.

    Args:
        point: Name of the point.
        payload: Value to send to the test; it must be picklable.
    """
    channel_to_parent().send_bytes(pickle.dumps(("reached", point, payload)))


def await_release(point: str, timeout_s: float = 30.0) -> Any:
    """Wait until the test calls ``release(point, payload)``, and return the payload.

    Args:
        point: Name of the point.
        timeout_s: Maximum number of seconds to wait.

    Raises:
        TimeoutError: The test did not release the point within `timeout_s`.
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
    """Process group of one run.

    Attributes:
        backend: Backend of the group; None if no group is to be made.
        init_method: "file", "tcp", "env" or any URL that torch accepts.
        timeout_s: Timeout of the group; None for the backend's default.
        folder: Private folder of the run.
        world_size: Number of ranks.
        hosts: Number of ranks on each simulated host; empty if all ranks are on one host.
    """

    backend: str | None
    init_method: str
    timeout_s: float | None
    folder: str
    world_size: int
    hosts: tuple[int, ...] = ()

    def take_host(self, rank: int) -> None:
        """Put this rank on its simulated host, so that it shares memory only with the ranks on that host."""
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
        # Gloo's init may return while another rank is still connecting. Without the barrier, the other rank would fail
        # if this rank ended at once.
        lent = _env.export({"TORCH_DIST_INIT_BARRIER": "1"}) if "gloo" in (self.backend or "") else ()
        dist.init_process_group(
            self.backend,
            init_method=own_addresses.get(self.init_method, self.init_method),
            rank=rank,
            world_size=self.world_size,
            timeout=None if self.timeout_s is None else timedelta(seconds=self.timeout_s),
        )
        _env.withdraw(lent)


@contextlib.contextmanager
def group_in_folder(
    world_size: int,
    *,
    backend: str | None,
    init: bool,
    init_method: str | None,
    group_timeout_s: float | None,
    hosts: Sequence[int],
) -> Iterator[Group]:
    """Make the group of one run, with a folder that lasts as long as the block; see `spawn_ranks`."""
    with tempfile.TemporaryDirectory(prefix="phalanx-group-") as folder:
        yield Group(backend if init else None, init_method or "file", group_timeout_s, folder, world_size, tuple(hosts))


def run_in_group(
    rank: int, group: Group, function: Function | Callable[..., Any], kwargs: Mapping[str, Any], *args: Any
) -> Any:
    """Run the test's function on `rank`, inside the process group, and return its result."""
    import torch.distributed as dist

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fn = load_function(function)
    group.take_host(rank)
    if group.backend is not None:
        group.init(rank)
    form = f"rank, world_size, *args{', **kwargs' if kwargs else ''}"
    try:
        value = call(fn, form, rank, group.world_size, *args, **kwargs)
    except BaseException as error:
        make_portable(error)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return value
