"""Makes phalanx groups in place of Gloo groups in torch 2.11 to 2.13, where Gloo is not yet a plugin.

In these versions, `_new_process_group_helper` calls `ProcessGroupGloo`, a global of its module. While that function
runs, the global is a stand-in, which makes phalanx's group; `isinstance` with the stand-in accepts that group. Torch's
tables and the class `ProcessGroupGloo` do not change.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from phalanx._torch.lookup import wrap_making_of_groups


def install(make: Callable[[Any, Any], Any]) -> None:
    """Make torch call `make` for every group for which it would use Gloo.

    Args:
        make: Function that takes a group's options and the user's ``pg_options``. It returns the group, or None if
            torch should make a Gloo group.
    """

    def wrap(torchs: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(torchs)

        def new_process_group_helper(*args: Any, **named: Any) -> Any:
            from torch.distributed import ProcessGroupGloo

            asked = signature.bind(*args, **named).arguments
            options = SimpleNamespace(
                group_id=asked["group_name"], global_ranks_in_group=asked["global_ranks_in_group"]
            )
            with _found_as_gloo(_StandIn(ProcessGroupGloo, options, asked.get("backend_options"), make)):
                return torchs(*args, **named)

        return new_process_group_helper

    wrap_making_of_groups(wrap)


class _StandIn:
    """Takes the place of `ProcessGroupGloo` while torch makes a group; a call of the stand-in makes phalanx's group.

    Args:
        gloo: torch's class.
        options: Fields of torch's ``_DistributedBackendOptions`` that are known before the group is made.
        backend_options: The user's ``pg_options``.
        make: Maker of phalanx's group, see `install`.
    """

    def __init__(self, gloo: Any, options: SimpleNamespace, backend_options: Any, make: Callable[..., Any]) -> None:
        self._gloo, self._options, self._backend_options, self._make = gloo, options, backend_options, make

    def __call__(self, store: Any, rank: int, size: int, *, timeout: Any) -> Any:
        options = SimpleNamespace(store=store, group_rank=rank, group_size=size, timeout=timeout, **vars(self._options))
        with _found_as_gloo(self._gloo):  # phalanx's group may contain a real Gloo
            group = self._make(options, self._backend_options)
        if group is None:
            return self._gloo(store, rank, size, timeout=timeout)
        group.options = SimpleNamespace()  # torch writes ranks and name into it
        return group

    def __instancecheck__(self, instance: object) -> bool:
        """Return True, so that torch accepts the group of phalanx as a `ProcessGroupGloo`."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


@contextlib.contextmanager
def _found_as_gloo(found: Any) -> Iterator[None]:
    """Let torch find `found` under the name of ProcessGroupGloo."""
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    before, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, found
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = before
