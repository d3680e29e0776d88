"""Train under Ray on the phalanx backend.

    python examples/clusters/ray_train.py --num-workers 2

Ray starts the workers, on whichever hosts it has room, and makes the process group; what they train is plain torch.
"""

import argparse

import ray.train
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import phalanx


def train(config):
    with phalanx.init() as session:  # finds the group that Ray has made
        phalanx.seed_everything(0)
        inputs = torch.randn(2000, 8)
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loader = phalanx.DataLoader(data, batch_size=50, shuffle=True)
        model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for epoch in range(config["epochs"]):
            loader.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            loss = loss.detach()
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            ray.train.report({"loss": loss.item()})
        if session.rank == 0:
            print(
                f"{session.world_size} ranks on {session.num_nodes} hosts, {dist.get_backend()}: loss {loss.item():.4f}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        torch_config=TorchConfig(backend="phalanx"),  # with GPUs "cpu:phalanx,cuda:nccl"
    )
    trainer.fit()


if __name__ == "__main__":
    main()
