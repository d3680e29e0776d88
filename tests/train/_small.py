"""Train a small model with `phalanx.Trainer`: the script of tests that start whole jobs."""

import argparse
import threading

import torch
from torch import nn

import phalanx

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--forgets", action="store_true", help="train on something that no checkpoint has")
parser.add_argument("--shout-at", type=int, help="say when that step is done")
parser.add_argument("--never-saved", action="store_true", help="say when a checkpoint was saved, and wait for ever")
args = parser.parse_args()

phalanx.seed_everything(0)
inputs = torch.randn(320, 6)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())


class Callback:
    num_calls = 0

    def on_step(self, trainer):
        if args.forgets:
            self.num_calls += 1  # no process is kept with what it can't set back
            with torch.no_grad():
                trainer.module[0].bias += 1e-3 * self.num_calls
        if trainer.step == args.shout_at:
            print(f"step {trainer.step} done", flush=True)

    def on_save(self, trainer):
        if args.never_saved:
            print("saving", flush=True)
            threading.Event().wait()


trainer = phalanx.Trainer(
    model,
    optimizer,
    nn.functional.mse_loss,
    max_epochs=args.epochs,
    global_batch_size=8,
    num_workers=args.num_workers,
    log_every=1,
    snapshot_every=1,
    callbacks=(Callback(),),
)
trainer.fit(data)
