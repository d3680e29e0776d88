"""A job whose ranks divide the optimizer's step, or do not; rank 1 is killed behind a step of the first attempt."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import nn

import phalanx


class Kill:
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, trainer: phalanx.Trainer) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["RANK"] == "1" and trainer.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, killed_at: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(256, 64)
    trainer = phalanx.Trainer(
        model, optimizer, nn.functional.mse_loss, callbacks=[Kill(killed_at)], max_steps=14, global_batch_size=16,
        divide_optimizer=how, snapshot_every=4, folder=how,
    )  # fmt: skip
    trainer.fit(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    bits = hashlib.sha256()
    for value in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
        bits.update(torch.as_tensor(value).detach().numpy().tobytes())
    print("BITS", bits.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
