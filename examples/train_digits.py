"""Train a small CNN on handwritten digits with several ranks; kill one, and it goes on.

    phalanx run --nproc-per-node 2 examples/train_digits.py
    phalanx run --max-restarts 3 examples/train_digits.py --epochs 100 --out runs/long
    kill -9 PID  # in another terminal, one of the processes that it names: the ranks go on from the last snapshot

Started again it goes on from the newest checkpoint in the run's folder, runs/train_digits or --out; --fresh begins
anew. Another number of --epochs changes the schedule of the learning rate, which makes another run: that needs
another --out. torchrun and plain python start it as well, and go on from the newest checkpoint, too.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from digits import load_data
from torch import nn

import phalanx

EPOCHS = "passes over the data (default: 12); another number is another run, which needs another --out, or --fresh"


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(8),  # 8x8 from any size
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def is_correct(outputs, targets):
    return outputs.argmax(1) == targets


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of MNIST's IDX files (default: 8x8 digits)")
    parser.add_argument("--out", help="folder of the run: checkpoints, metrics and report (default: runs/train_digits)")
    parser.add_argument("--epochs", type=int, default=12, help=EPOCHS)
    parser.add_argument("--fresh", action="store_true", help="begin anew; what --out holds from before is set aside")
    args = parser.parse_args()

    phalanx.seed_everything(0)
    train_set, test_set = load_data(args.data)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    num_steps = args.epochs * -(-len(train_set) // 64)

    def up_and_down(step):  # of this start: a run that goes on for more epochs follows the longer curve
        return max(0.0, math.sin(math.pi * (step + 1) / (num_steps + 1)))

    trainer = phalanx.Trainer(
        model, optimizer, F.cross_entropy, metrics={"accuracy": is_correct},
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, up_and_down),
        max_epochs=args.epochs, global_batch_size=64, monitor="accuracy",
        folder=args.out, resume="never" if args.fresh else "auto",
    )  # fmt: skip
    trainer.fit(train_set, test_set)


if __name__ == "__main__":
    main()
