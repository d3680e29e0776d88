"""Batch normalization over the batch of all ranks, on any device and backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx import _torch
from phalanx._torch import BatchNorm


class SyncBatchNorm(BatchNorm):
    """torch's SyncBatchNorm, on the CPU too: it normalizes with the statistics of all ranks' samples.

    Up to rounding, forward and backward equal those of ``BatchNorm*d`` in one process on the whole batch, even if the
    ranks' batches differ in size or are empty. Inputs have shape (N, C, ...). Statistics are computed in float32 or
    wider. As in torch, gradients of weight and bias are those of this rank's samples, and DistributedDataParallel
    averages them. The class does not derive from torch's SyncBatchNorm, because torch's DistributedDataParallel refuses
    that class on a CPU.

    Args:
        num_features: Number of channels C.
        eps: Number added to the variance, for stability.
        momentum: Weight of a batch in the running statistics; with None the running statistics are the mean over all
            batches.
        affine: Whether the layer has a trainable weight and, unless `bias` is False, a trainable bias.
        track_running_stats: Whether running statistics are kept for evaluation.
        process_group: Group of the ranks that normalize together; by default all ranks.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        bias: Whether an affine layer has a bias; False requires a version of torch whose BatchNorm accepts `bias`.

    Raises:
        ValueError: In ``forward()``: the input has fewer than two dimensions, or all ranks together have only one value
            for each channel.

    Example:
        >>> layer = phalanx.SyncBatchNorm(3)
        >>> layer(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])

    Source: Chan, Golub, LeVeque 1979 for joining the statistics of the ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        options = {} if bias else {"bias": False}  # not every version of torch accepts the argument
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group

    _check_input_dim: Any = _torch.check_input_dim
    _check_non_zero_input_channels: Any = _torch.check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if not self.training or group is None or dist.get_world_size(group) == 1:
            return super().forward(input)
        if input.is_cuda:
            return nn.SyncBatchNorm.forward(self, input)  # torch's own kernels
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, group)
        if self.track_running_stats:
            self._track(mean, var * (count / (count - 1)))
        return output

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics; with ``momentum=None`` they are the mean over all batches."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, batch in ((self.running_mean, mean), (self.running_var, var)):
            running.lerp_(batch.to(running.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Return the module with every BatchNorm layer replaced by one of this class, with the same tensors.

        Args:
            module: Module to convert in place, unless it is a BatchNorm layer itself.
            process_group: Group of the ranks that normalize together; by default all ranks.
        """
        converted: dict[nn.Module, nn.Module] = {}
        for path, child in [*module.named_modules(remove_duplicate=False)]:  # a layer may have several names
            if isinstance(child, BatchNorm) and not isinstance(child, SyncBatchNorm):
                if child not in converted:
                    converted[child] = cls._replacement(child, process_group)
                if path:
                    module.set_submodule(path, converted[child])
        return converted.get(module, module)

    @classmethod
    def _replacement(cls, norm: BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
        sync = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            process_group or getattr(norm, "process_group", None),  # only torch's SyncBatchNorm has a group
        )
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(sync, name, getattr(norm, name))
        sync.training = norm.training
        return sync


def convert_sync_batchnorm(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Return the module with every BatchNorm layer replaced: `SyncBatchNorm.convert_sync_batchnorm` as a function.

    Args:
        module: Module to convert in place, unless it is a BatchNorm layer itself.
        process_group: Group of the ranks that normalize together; by default all ranks.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
        >>> type(phalanx.convert_sync_batchnorm(model)[1]).__name__
        'SyncBatchNorm'
    """
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """View values of shape (C,) so that they broadcast over (N, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalizes with the statistics of all ranks; also returns mean and biased variance, both (C,), and the count."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, var, count = _global_statistics(wide, group)
        if count.item() <= 1:
            raise ValueError(
                f"rank {dist.get_rank()}: SyncBatchNorm: expected more than 1 value per channel in all ranks together "
                f"when training, got {int(count.item())}; feed a larger batch or call eval()"
            )
        invstd = torch.rsqrt(var + eps)
        normalized = (wide - _by_channel(mean, wide)) * _by_channel(invstd, wide)
        output = normalized
        if weight is not None:
            output = output * _by_channel(weight, wide).to(wide.dtype)
        if bias is not None:
            output = output + _by_channel(bias, wide).to(wide.dtype)
        ctx.save_for_backward(input, weight, mean, invstd, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(input.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, count = ctx.saved_tensors
        dims = [d for d in range(input.dim()) if d != 1]
        wide = grad.to(mean.dtype)
        normalized = (input.to(mean.dtype) - _by_channel(mean, wide)) * _by_channel(invstd, wide)
        sums = torch.stack([wide.sum(dims), (wide * normalized).sum(dims)])
        own_sum, own_dot = sums.clone() if ctx.needs_input_grad[0] else sums
        grad_input = None
        if ctx.needs_input_grad[0]:
            dist.all_reduce(sums, group=ctx.group)
            total_sum, total_dot = sums / count
            grad_input = wide - _by_channel(total_sum, wide) - normalized * _by_channel(total_dot, wide)
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            grad_input = (grad_input * _by_channel(scale, wide)).to(input.dtype)
        grad_weight = own_dot.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = own_sum.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None


def _global_statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of each channel over all ranks, (C,) each, and the number of values, ().

    Each rank's mean and sum of squared deviations are joined in rank order, so all ranks get the same bits.
    """
    num_channels = input.shape[1]
    own = input.new_zeros(2 * num_channels + 1)
    if input.numel():
        dims = [d for d in range(input.dim()) if d != 1]
        own[-1] = input.numel() // num_channels
        var, mean = torch.var_mean(input, dims, correction=0)
        own[:num_channels], own[num_channels:-1] = mean, var * own[-1]
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    joined = torch.stack(every)
    means, squares, counts = joined[:, :num_channels], joined[:, num_channels:-1], joined[:, -1:]
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    var = (squares + counts * (means - mean) ** 2).sum(0) / count
    return mean, var, count
