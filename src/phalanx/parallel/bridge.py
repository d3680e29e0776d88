"""Communication hooks for the link between hosts alone: `bridge_hook`, and bf16 with error feedback for it."""

# No `from __future__ import annotations`: torch's DistributedDataParallel compares a hook's annotations with types.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.buckets import CommHook, GradBucket
from phalanx.parallel.hosts import HostGroups, share_out


def bridge_hook(groups: HostGroups, hook_state: Any, hook: CommHook) -> CommHook:
    """Return a communication hook that averages exactly within hosts, and by `hook` between them.

    For DistributedDataParallel, torch's or ours, over all ranks of the hosts::

        groups = phalanx.host_groups()
        state = PowerSGDState(groups.across, matrix_approximation_rank=2, start_powerSGD_iter=10)
        ddp.register_comm_hook(None, phalanx.parallel.bridge_hook(groups, state, powerSGD_hook))

    Ranks of a host add their gradients; each rail runs `hook` on some of the bucket's gradients, whole ones, so hooks
    that look at matrices see them; then the host's ranks share what came. So one copy for each host crosses, and all
    ranks of a host get the same bits. The result is the mean over all ranks, also where hosts have different numbers
    of them. While one bucket crosses, backward goes on.

    Args:
        groups: What `host_groups` returned.
        hook_state: The first argument of `hook`; it averages over ``groups.across``.
        hook: One of torch's, such as ``powerSGD_hook``, `bf16_feedback_hook`, or your own.

    Raises:
        ValueError: `hook_state` names another group.
    """
    group = getattr(hook_state, "process_group", hook_state)
    if (group is None or isinstance(group, dist.ProcessGroup)) and group is not groups.across:
        raise ValueError(
            f"rank {dist.get_rank()}: bridge_hook: the hook's state must average over groups.across, such as "
            "bridge_hook(groups, PowerSGDState(groups.across), powerSGD_hook) or "
            "bridge_hook(groups, groups.across, bf16_compress_hook)"
        )
    crossing: list[_Crossing] = []  # at most one: a hook of several rounds would else mix those of two buckets

    def finish() -> None:
        while crossing:
            crossing.pop().finish(groups)

    def bridge(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        finish()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(
                f"rank {dist.get_rank()}: bridge_hook: takes dense gradients, got a sparse one; "
                "make the embedding with sparse=False"
            )
        if groups.host is not None:
            dist.all_reduce(buffer, group=groups.host)
        buffer.mul_(groups.num_hosts / groups.num_ranks)  # then the mean over hosts is that over ranks
        parts = _parts_of(bucket, groups.num_rails)
        future = None
        if groups.across is not None:
            future = hook(hook_state, parts[groups.rail])  # called for an empty part too: hooks count buckets
        crossing.append(
            _Crossing(buffer, [part.buffer() for part in parts], groups.rail, future, _Late(finish, buffer.device))
        )
        result = crossing[0].result
        if bucket.is_last():
            finish()
        return result

    return bridge


class _Late(torch.futures.Future):
    """The future of a bucket; whoever waits for it in Python has it finished first."""

    def __init__(self, finish: Callable[[], None], device: torch.device) -> None:
        super().__init__(devices=[device] if device.type == "cuda" else [])
        self._finish = finish

    def wait(self) -> Any:
        self._finish()
        return super().wait()


class _Crossing:
    """A bucket whose parts are on their way between hosts."""

    def __init__(
        self, buffer: Tensor, parts: list[Tensor], rail: int, future: torch.futures.Future | None, result: _Late
    ) -> None:
        self.result = result
        self._buffer = buffer
        self._parts = parts
        self._rail = rail
        self._future = future

    @torch.no_grad()
    def finish(self, groups: HostGroups) -> None:
        """Wait for this rail's part, share all of them on the host, hand over the bucket."""
        if self._future is not None:
            value = self._future.wait()
            mean = value[0] if isinstance(value, list | tuple) else value
            if mean.data_ptr() != self._parts[self._rail].data_ptr():
                self._parts[self._rail].copy_(mean)
        share_out(self._parts, groups)
        self.result.set_result(self._buffer)


def _parts_of(bucket: Any, num_rails: int) -> list[GradBucket]:
    """Divide a bucket between gradients into parts of about equal size, one for each rail."""
    buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
    sizes = [g.numel() * (2 if g.is_complex() else 1) for g in gradients]
    total = sum(sizes)
    assert total == buffer.numel(), "gradients fill their bucket"
    rails: list[list[int]] = [[] for _ in range(num_rails)]
    begin = 0
    for i, size in enumerate(sizes):
        rails[min((2 * begin + size) * num_rails // (2 * total), num_rails - 1) if total else 0].append(i)
        begin += size
    parts = []
    begin = 0
    for members in rails:
        end = begin + sum(sizes[i] for i in members)
        some = [gradients[i] for i in members], [parameters[i] for i in members]
        parts.append(GradBucket(bucket.index(), buffer[begin:end], *some, bucket.is_last()))
        begin = end
    return parts


class Bf16State:
    """State of `bf16_feedback_hook`: who averages, and what rounding has left out of each gradient so far.

    It is not saved: after a restart it begins with nothing left out.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.left_out: dict[int, tuple[list[Tensor], Tensor]] = {}
        """By index of the bucket: its parameters, and a flat tensor."""


def bf16_feedback_hook(state: Bf16State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bf16, half of float32's bytes; what rounding leaves out is added to the next gradients.

    torch's ``bf16_compress_hook`` without feedback loses it: updates too small for bf16 never come through.
    Source: Seide et al. 2014, Karimireddy et al. 2019 (error feedback).
    """
    group = state.process_group or dist.group.WORLD
    assert group is not None
    buffer, parameters = bucket.buffer(), list(bucket.parameters())
    known, left_out = state.left_out.get(bucket.index(), ([], buffer))
    # torch's DistributedDataParallel makes its buckets anew after the first pass.
    if len(known) == len(parameters) and all(a is b for a, b in zip(known, parameters, strict=True)) and known:
        buffer.add_(left_out)
    rounded = buffer.bfloat16()
    state.left_out[bucket.index()] = parameters, buffer - rounded

    def widen(done: torch.futures.Future) -> Tensor:
        return buffer.copy_(done.value()[0]).div_(group.size())

    return dist.all_reduce(rounded, group=group, async_op=True).get_future().then(widen)
