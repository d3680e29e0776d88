"""Train a small CNN on handwritten digits with several ranks.

Start it in one of these ways:

    phalanx run --nproc-per-node 2 examples/train_digits.py
    phalanx run --nproc-per-node 2 examples/train_digits.py --data FOLDER  # MNIST's IDX files
    python examples/train_digits.py                                        # a world of one
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_data
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import phalanx


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(8),  # 8x8 from any size
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model, dataset):
    """Return the accuracy on `dataset`: every image counted once, on one of the ranks."""
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (tensor[rank::world_size] for tensor in dataset.tensors)
    correct = torch.tensor(0)
    for x, y in zip(images.split(256), labels.split(256), strict=True):
        correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(dataset)


def train(args, console):
    """Train, and return the model, the test set and the accuracy after each epoch."""
    train_set, test_set = load_data(args.data)
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(build_model())
    loader = phalanx.DataLoader(train_set, args.batch_size, shuffle=True, num_workers=0)  # divided among the ranks
    num_steps = args.epochs * len(loader)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_steps)
    history = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=num_steps)
        for epoch in range(args.epochs):
            model.train()
            loader.set_epoch(epoch)  # another order in each epoch
            total = torch.tensor(0.0)
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.detach()
                progress.advance(task)
            dist.all_reduce(total)
            loss = total.item() / len(loader) / dist.get_world_size()
            history.append(evaluate(model.module, test_set))
            line = f"epoch {epoch + 1:2}: loss {loss:.3f}, test accuracy {history[-1]:.2%}"
            progress.update(task, description=line)
            if not console.is_terminal:
                console.print(line)
    return model.module, test_set, history


def save_and_reload(path, model, test_set):
    """Save on rank 0; return the accuracy of a new model that every rank loads from the file."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # never a torn file under the final name
    dist.barrier()
    loaded = build_model()
    loaded.load_state_dict(torch.load(path, weights_only=True))
    return evaluate(loaded, test_set)


def plot(path, history):
    epochs = range(1, len(history) + 1)
    figure = Figure(figsize=(6, 4))  # without pyplot: no window, no display
    axes = figure.subplots()
    axes.plot(epochs, [100 * accuracy for accuracy in history], "o-", color="tab:blue")
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", title="Handwritten digits")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of MNIST's IDX files (default: 8x8 digits)")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="results' folder")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--backend", default="phalanx")
    args = parser.parse_args()

    phalanx.init(args.backend)  # finds its rank, whoever started it; nobody: a world of one
    console = Console(quiet=dist.get_rank() != 0)
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    model, test_set, history = train(args, console)
    seconds = time.perf_counter() - begin
    reloaded = save_and_reload(args.out / "model.pt", model, test_set)
    if reloaded != history[-1]:
        sys.exit(f"the checkpoint scores {reloaded:.2%}, the model {history[-1]:.2%}")
    if dist.get_rank() == 0:
        plot(args.out / "accuracy.png", history)
        table = Table("result", "value")
        for name, value in {
            "ranks": f"{dist.get_world_size()} over {dist.get_backend()}",
            "training": f"{args.epochs} epochs in {seconds:.1f} s",
            "test accuracy": f"{history[-1]:.2%} of {len(test_set):,} images",
            "checkpoint": f"{args.out / 'model.pt'}, reloads to {reloaded:.2%}",
            "plot": str(args.out / "accuracy.png"),
        }.items():
            table.add_row(name, value)
        console.print(table)
    phalanx.shutdown()


if __name__ == "__main__":
    main()
