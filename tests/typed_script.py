"""A user's script, which `mypy --strict` reads and nobody runs: every public name has a type, and the right one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.checkpoint import Checkpoint, Loaded


def by_hand(session: phalanx.Session, data: TensorDataset) -> Loaded | None:
    sampler = phalanx.DistributedSampler(data, shuffle=True, seed=1)
    loader = phalanx.DataLoader(data, batch_size=8, sampler=sampler)
    model = phalanx.DistributedDataParallel(nn.Linear(8, 1).to(session.device))
    optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "random": phalanx.RandomState()}
    loaded = phalanx.checkpoint.load("runs/loop", state)
    for inputs, targets in loader:
        with session.autocast("bf16"):
            loss: Tensor = nn.functional.mse_loss(model(inputs), targets)
        torch.autograd.backward(loss)
        norm: Tensor = model.grad_norm()
        optimizer.step()
        session.print(f"gradient norm {norm:.3f}")
    phalanx.checkpoint.save("runs/loop", state, step=1, metric=0.5)
    phalanx.checkpoint.wait()
    return loaded


def newest(checkpoints: list[Checkpoint]) -> int:
    return max(checkpoint.step for checkpoint in checkpoints)


def trained(model: nn.Module, data: TensorDataset) -> dict[str, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, max_epochs=2, loggers="tensorboard")
    phalanx.Trainer(
        model, optimizer, nn.functional.mse_loss, max_steps=100, folder=Path("runs"), precision="bf16", clip_norm=1,
        num_workers=0, mode="min", patience=3, min_delta=1e-3, deterministic=None,
    )  # fmt: skip
    trainer.settings.max_epochs = 3
    values: dict[str, float] = trainer.fit(data, data)
    step: int = trainer.step
    return {**values, "steps": float(step), "batch": float(trainer.settings.global_batch_size)}


def work(rank: int, scale: float) -> float:
    with phalanx.init(device="cpu", timeout=30) as session:
        total = session.gather(torch.ones(1) * scale)
        return float(total.sum()) if session.is_main else 0.0


def main() -> None:
    phalanx.seed_everything(0)
    print(phalanx.spawn(work, args=(2.0,), nprocs=2))
    print(newest(phalanx.checkpoint.list_checkpoints("runs/loop")))
    try:
        print(phalanx.testing.run_ranks(work, 2, 3.0, timeout_s=20))
    except phalanx.RankError as error:
        print(error.rank, error.traceback, error.outcomes)
    except phalanx.CollectiveTimeout as error:
        print(error.op, error.missing)


# Mistakes are seen: each of these lines must need its comment.
print(phalanx.Tariner)  # type: ignore[attr-defined]
print(phalanx.train.Setings)  # type: ignore[attr-defined]
phalanx.seed_everything("zero")  # type: ignore[arg-type]
phalanx.checkpoint.load("runs/loop", {}, missing="maybe")  # type: ignore[arg-type]
SGD = torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=0.1)
phalanx.Trainer(nn.Linear(8, 1), SGD, nn.functional.mse_loss, max_epoch=2)  # type: ignore[call-arg]
phalanx.Trainer(nn.Linear(8, 1), SGD, nn.functional.mse_loss, max_epochs="2")  # type: ignore[arg-type]
phalanx.Trainer(nn.Linear(8, 1), SGD, nn.functional.mse_loss, precision="bf16-mixed")  # type: ignore[arg-type]
