"""Communication hooks for the link between hosts: `bridge_hook`, and bf16 with error feedback to use with it.

`bridge_hook` first adds up a bucket on each host, then sends it over rails (see `phalanx.parallel.hosts`). The bucket
is cut between gradients, because PowerSGD needs whole matrices. While one bucket crosses between hosts, backward
computes the gradients of the next one. Two buckets never cross at once, because PowerSGD starts its rounds from
callbacks, whose order would then differ between ranks.
"""

# No `from __future__ import annotations`: torch's DistributedDataParallel compares a hook's annotations with types.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.ddp.grad_bucket import CommHook, GradBucket, checked_future, tensor_of
from phalanx.parallel.hosts import HostGroups, share_out
from phalanx.parallel.layout import num_reals


def bridge_hook(groups: HostGroups, hook_state: Any, hook: CommHook) -> CommHook:
    """Return a communication hook that averages exactly within each host, and uses `hook` between hosts.

    Register it with DistributedDataParallel, torch's or ours, over all ranks of all hosts::

        groups = phalanx.host_groups()
        state = PowerSGDState(groups.across, matrix_approximation_rank=2, start_powerSGD_iter=10)
        ddp.register_comm_hook(None, phalanx.parallel.bridge_hook(groups, state, powerSGD_hook))

    The ranks of a host first add up their gradients. Each rail then runs `hook` on its share of the bucket. A share
    consists of whole gradients, because some hooks need matrices. Finally, the ranks of the host share the results. So
    each host sends one copy of the gradients, and all its ranks get the same bits. The result is the mean over all
    ranks, even if hosts have different numbers of ranks. Backward continues while a bucket crosses.

    Args:
        groups: Groups of this rank, from `host_groups`.
        hook_state: First argument of `hook`; it must make `hook` average over ``groups.across``.
        hook: Communication hook to use between hosts: `bf16_feedback_hook`, one of torch's such as
            ``powerSGD_hook``, or your own.

    Raises:
        ValueError: `hook_state` averages over another group.

    Example:
        >>> groups = phalanx.host_groups()
        >>> state = phalanx.parallel.Bf16State(groups.across)
        >>> hook = phalanx.parallel.bridge_hook(groups, state, phalanx.parallel.bf16_feedback_hook)
        >>> ddp = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        >>> ddp.register_comm_hook(None, hook)
    """
    group = getattr(hook_state, "process_group", hook_state)
    if (group is None or isinstance(group, dist.ProcessGroup)) and group is not groups.across:
        raise ValueError(
            f"rank {dist.get_rank()}: bridge_hook: the hook's state must average over groups.across, such as "
            "bridge_hook(groups, PowerSGDState(groups.across), powerSGD_hook) or "
            "bridge_hook(groups, groups.across, bf16_compress_hook)"
        )
    crossing: list[_Crossing] = []  # at most one bucket: the hook's rounds for two buckets would interleave

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
        buffer.mul_(groups.num_hosts / groups.num_ranks)  # so that the mean over hosts becomes the mean over ranks
        parts = _parts_of(bucket, groups.num_rails)
        future = None
        if groups.across is not None:
            future = checked_future(hook(hook_state, parts[groups.rail]))  # even for an empty part: hooks count buckets
        crossing.append(
            _Crossing(buffer, [part.buffer() for part in parts], groups.rail, future, _Late(finish, buffer.device))
        )
        result = crossing[0].result
        if bucket.is_last():
            finish()
        return result

    return bridge


class _Late(torch.futures.Future):
    """The future of a bucket; ``wait()`` in Python finishes the bucket before it waits."""

    def __init__(self, finish: Callable[[], None], device: torch.device) -> None:
        super().__init__(devices=[device] if device.type == "cuda" else [])
        self._finish = finish

    def wait(self) -> Any:
        self._finish()
        return super().wait()


class _Crossing:
    """A bucket whose parts are crossing between hosts."""

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
        """Wait for this rail's part, share all parts among the host's ranks, and complete the future."""
        if self._future is not None:
            mean = tensor_of(self._future, self._parts[self._rail])
            if mean.data_ptr() != self._parts[self._rail].data_ptr():
                self._parts[self._rail].copy_(mean)
        share_out(self._parts, groups)
        self.result.set_result(self._buffer)


def _parts_of(bucket: Any, num_rails: int) -> list[GradBucket]:
    """Divide a bucket into parts of whole gradients and about equal size, one for each rail."""
    buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
    sizes = [num_reals(g) for g in gradients]
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
    """State of `bf16_feedback_hook`: the residual of each bucket, which rounding to bf16 has left out so far.

    The residuals are not saved; they begin at zero after a restart.

    Args:
        process_group: Ranks to average over; None means all.

    Example:
        >>> ddp = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        >>> ddp.register_comm_hook(phalanx.parallel.Bf16State(None), phalanx.parallel.bf16_feedback_hook)
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.left_out: dict[int, tuple[list[Tensor], Tensor]] = {}
        """Parameters and residual (a flat tensor) of each bucket, by the bucket's index."""


def bf16_feedback_hook(state: Bf16State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bf16, which takes half the bytes of float32, and add the residual to the next gradients.

    The residual is what rounding to bf16 leaves out. torch's ``bf16_compress_hook`` drops it, so updates that are too
    small for bf16 are lost.

    Args:
        state: State of the hook, one for each model.
        bucket: Bucket of gradients to average.

    Returns:
        Future of the averaged ``bucket.buffer()``.

    Example:
        >>> ddp = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        >>> ddp.register_comm_hook(phalanx.parallel.Bf16State(None), phalanx.parallel.bf16_feedback_hook)
        >>> ddp(torch.ones(4, 2)).mean().backward()

    Source: Seide et al. 2014, Karimireddy et al. 2019 (error feedback).
    """
    group = state.process_group or dist.group.WORLD
    assert group is not None
    buffer, parameters = bucket.buffer(), list(bucket.parameters())
    known, left_out = state.left_out.get(bucket.index(), ([], buffer))
    # torch's DistributedDataParallel rebuilds its buckets after the first pass, so an index may then stand for other
    # parameters.
    if len(known) == len(parameters) and all(a is b for a, b in zip(known, parameters, strict=True)) and known:
        buffer.add_(left_out)
    rounded = buffer.bfloat16()
    state.left_out[bucket.index()] = parameters, buffer - rounded

    def widen(done: torch.futures.Future) -> Tensor:
        return buffer.copy_(done.value()[0]).div_(group.size())

    return dist.all_reduce(rounded, group=group, async_op=True).get_future().then(widen)
