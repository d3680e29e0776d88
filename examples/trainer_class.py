"""A training that may be stopped at any step and goes on where it was, on any number of ranks.

Start it, stop it with Ctrl-C or by --stop-after, and start it again; or let the launcher start it again:

    phalanx run --nproc-per-node 2 examples/trainer_class.py
    phalanx run --nproc-per-node 2 --max-restarts 3 examples/trainer_class.py
    torchrun --nproc-per-node 2 examples/trainer_class.py
    python examples/trainer_class.py                                   # a world of one
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import phalanx


class Trainer:
    """Trains a model on the data of a loader, and keeps a snapshot from which it goes on.

    Args:
        session: This rank's, from `phalanx.init`.
        snapshot: The file; if there is one, training goes on from it.
        save_every: Steps from one snapshot to the next; what comes after the last is lost when the job is stopped.
    """

    def __init__(self, session, model, optimizer, loader, snapshot, save_every):
        self.session, self.loader, self.snapshot, self.save_every = session, loader, snapshot, save_every
        self.model = phalanx.DistributedDataParallel(model.to(session.device))
        self.optimizer = optimizer
        self.num_steps = 0  # in all epochs
        if snapshot.exists():
            self.load()

    def load(self):
        """Every rank reads the file: model and optimizer are the same on all."""
        state = torch.load(self.snapshot, map_location=self.session.device, weights_only=True)
        self.model.module.load_state_dict(state["model"])  # without the wrapper: for any world, and for inference
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.num_steps = state["num_steps"]
        if self.session.rank == 0:
            print(f"resumed from {self.snapshot} after step {self.num_steps}")

    def save(self):
        """Rank 0 writes; a file under the final name is always a whole one."""
        if self.session.rank != 0:
            return
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),  # epoch and place in it
            "num_steps": self.num_steps,
        }
        part = self.snapshot.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.snapshot)

    def train(self, num_epochs, stop_after=math.inf):
        """Train to the end of epoch `num_epochs`, or for `stop_after` steps from here."""
        last_step = self.num_steps + stop_after
        for epoch in range(self.loader.sampler.epoch, num_epochs):
            self.loader.set_epoch(epoch)  # another order in each; one that was left half done goes on
            for x, y in self.loader:
                loss = F.mse_loss(self.model(x.to(self.session.device)), y.to(self.session.device))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.num_steps += 1
                if self.num_steps % self.save_every == 0 or self.num_steps == last_step:
                    self.save()
                if self.num_steps == last_step:
                    return
            self.save()
            if self.session.rank == 0:
                print(f"epoch {epoch + 1}: {self.num_steps} steps, loss {loss.item():.6f} on rank 0")


def make_data(num_samples):
    """Return inputs and noisy linear functions of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 20, generator=generator)
    y = x @ torch.randn(20, 1, generator=generator) + 0.1 * torch.randn(num_samples, 1, generator=generator)
    return TensorDataset(x, y)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="in total")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--stop-after", type=int, default=math.inf, help="steps")
    parser.add_argument("--snapshot", type=Path, default=Path("runs/trainer/snapshot.pt"))
    args = parser.parse_args()

    with phalanx.init() as session:
        args.snapshot.parent.mkdir(parents=True, exist_ok=True)
        phalanx.seed_everything(0)
        # Divided among the ranks: each has its part of every epoch.
        loader = phalanx.DataLoader(make_data(2048), args.batch_size, shuffle=True, num_workers=0)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        trainer = Trainer(session, model, optimizer, loader, args.snapshot, args.save_every)
        trainer.train(args.epochs, args.stop_after)
        if session.rank == 0:
            print(f"{trainer.num_steps} steps done; start me again to go on from {args.snapshot}")


if __name__ == "__main__":
    main()
