"""Records the collectives of torch's own Gloo in the box of a rank. This needs torch 2.14, whose groups have hooks.

A hook reports when a collective is called, and `Work.wait` shows when a caller has waited for it. A collective that a
program or DDP starts and waits for later is recorded as a "call", an event without an end. Whether a rank waits for
such a collective can be seen only from the rank's stack, so the straggler ledger does not judge jobs with such calls.
Messages are not recorded, because it is not known whether they had to wait.

A callback on the work's future would report every end, but Gloo runs the callback in a thread of its own, even after
Python has ended: of sixteen jobs in which a rank left while a collective ran, seven crashed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from phalanx import _torch
from phalanx.record import sites, writer

_WORLD = "default"
_HOOK = 0x7068616C  # our number for hooks: torch identifies hooks by numbers, and others use small ones
_OPS = {
    "ALLREDUCE": "all_reduce", "ALLREDUCE_COALESCED": "all_reduce", "BARRIER": "barrier", "BROADCAST": "broadcast",
    "REDUCE": "reduce", "REDUCE_SCATTER": "reduce_scatter", "REDUCE_SCATTER_BASE": "reduce_scatter",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter", "ALLGATHER": "all_gather", "ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather", "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather", "GATHER": "gather",
    "SCATTER": "scatter", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip

_awaited: dict[int, tuple[Any, int]] = {}
"""Event of each work for which a blocking call waits, by the identity of the work."""


@functools.cache
def watch() -> None:
    """Record the collectives of all groups of Gloo that this process creates from now on."""
    from torch.distributed import ProcessGroup, Work, is_available

    if is_available() and hasattr(ProcessGroup, "register_pre_hook"):
        _torch.wrap_making_of_groups(_recorded)
        Work.wait = _ending(Work.wait)  # type: ignore[method-assign]


def _ending(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Work.wait` that also ends the event of the call that waits."""

    @functools.wraps(wait)
    def ended(work: Any, *args: Any, **named: Any) -> Any:
        key = id(work)
        try:
            done = wait(work, *args, **named)
        except BaseException:  # the event stays open, and shows where the rank was
            _awaited.pop(key, None)
            raise
        finally:
            del work  # a traceback may keep this frame, and must not keep the work and Gloo's threads
        if (found := _awaited.pop(key, None)) is not None:
            writer.end(found[1])
        return done

    return ended


def _recorded(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def new_process_group_helper(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        with contextlib.suppress(Exception):  # an error of the record must not fail the job
            asked = signature.bind(*args, **named).arguments
            if _is_gloo(made[0]):
                ranks = list(asked["global_ranks_in_group"])
                rank, size = asked["group_rank"], asked["group_size"]
                writer.begin(ranks[rank] if ranks else rank, size)
                _Group(str(asked["group_name"]) if ranks else _WORLD).record(made[0])
        return made

    return new_process_group_helper


def _is_gloo(group: Any) -> bool:
    """Whether all collectives of a group are Gloo's, and the group is torch's own."""
    import torch
    import torch.distributed as dist

    if type(group) is not dist.ProcessGroup:  # phalanx made the group, or this rank is not in it
        return False
    backends = {part.rpartition(":")[2] for part in str(dist.get_backend_config(group)).split(",")}
    return backends == {"gloo"} and isinstance(_torch.get_backend(group, torch.device("cpu")), dist.ProcessGroupGloo)


class _Group:
    """Records the collectives of one group, numbered from 1 in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_calls = 0
        self._called: dict[int, int] = {}  # events of calls that torch is about to make, by torch's operation ids

    def record(self, group: Any) -> None:
        writer.end(writer.begin_collective("join", 0, self._name, 0, 0, ""))  # shows readers that this rank is a member
        group.register_pre_hook(_HOOK, self._begin)
        group.register_post_hook(_HOOK, self._end)
        atexit.register(_leave, weakref.ref(group))

    def _begin(self, call: Any) -> None:
        op = _OPS.get(call.name.name)
        if op is None:
            return
        _end_what_is_over()
        self._num_calls += 1
        num_elems = sum(tensor.numel() for tensor in call.input_tensors)
        site = sites.call_site()
        if call.async_op:
            writer.note_call(op, self._name, self._num_calls, num_elems, site)
        else:
            self._called[call.op_id] = writer.begin_collective(op, 0, self._name, self._num_calls, num_elems, site)

    def _end(self, call: Any) -> None:
        event = self._called.pop(call.op_id, 0)
        if call.work is None:
            writer.end(event)
        elif event:
            _awaited[id(call.work)] = call.work, event


def _end_what_is_over() -> None:
    """End the events of finished calls whose wait ran in native code, so that `_ending` did not see the wait end."""
    for work, event in [*_awaited.values()]:
        if work.is_completed():
            _awaited.pop(id(work), None)
            writer.end(event)


def _leave(group: Callable[[], Any]) -> None:
    """Remove the hooks from a group, if it still exists: torch frees some groups only after Python has ended."""
    _awaited.clear()
    if (found := group()) is not None:
        found.unregister_pre_hook(_HOOK)
        found.unregister_post_hook(_HOOK)
