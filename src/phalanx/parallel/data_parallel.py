"""torch's DataParallel, which uses several GPUs from one process; ours warns if there is only one device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn


class DataParallel(nn.DataParallel[nn.Module]):
    """torch's DataParallel. With one device, it only runs the module, and warns: DistributedDataParallel is faster.

    Inputs are divided among the devices, and outputs are collected on one of them.

    Args:
        module: Model to run.
        device_ids: GPUs to use; by default all.
        output_device: GPU that collects the outputs; by default the first of `device_ids`.
        dim: Dimension along which inputs are divided.

    Example:
        >>> model = phalanx.DataParallel(nn.Linear(8, 1))
        >>> model(torch.ones(4, 8)).shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__(module, device_ids, output_device, dim)
        if len(self.device_ids) <= 1:
            where = f"cuda:{self.device_ids[0]}" if self.device_ids else "the CPU"
            warnings.warn(
                f"DataParallel has one device here, {where}, and only runs the module. To train on all cores or GPUs "
                "use phalanx.DistributedDataParallel(module) in a script started by: phalanx run script.py",
                stacklevel=2,
            )
