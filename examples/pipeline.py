"""Pipeline parallelism: each rank holds some layers, and small batches flow through; torch's `PipelineStage`.

Start it with any number of ranks, up to eight:

    phalanx run --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py
    python examples/pipeline.py                                        # a world of one

It trains the same model in one piece beside it, and ends with an error if the two part.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import phalanx

WIDTH = 32
SCHEDULES = {  # and stages on each rank
    "GPipe": (ScheduleGPipe, 1),  # all small batches forward, then all backward: keeps the activations of all
    "1F1B": (Schedule1F1B, 1),  # backward as soon as there is one: keeps those of as many as there are stages
    "interleaved": (ScheduleInterleaved1F1B, 2),  # several thinner stages a rank: less waiting, more messages
}


def build_layers():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(16))


def build_stages(session, per_rank):
    """Return this rank's stages: number r of the first `world_size`, of the next, and so on."""
    num_stages = per_rank * session.world_size
    pieces = torch.arange(16).tensor_split(num_stages)
    layers = build_layers()
    return [
        PipelineStage(nn.Sequential(*(layers[i] for i in pieces[number])), number, num_stages, torch.device("cpu"))
        for number in range(session.rank, num_stages, session.world_size)
    ]


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 16, WIDTH, generator=generator)


def train_whole(steps):
    """Return the loss of each step, and the parameters of each layer."""
    model = nn.Sequential(*build_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [list(layer.parameters()) for layer in model]


def train_in_stages(session, name, args):
    """Return the same of the pipeline: losses, on the rank of the last stage alone, and this rank's stages."""
    schedule_class, per_rank = SCHEDULES[name]
    stages = build_stages(session, per_rank)
    # The loss of a small batch is a mean; the schedule divides gradients by the number of small batches.
    schedule = schedule_class(stages if per_rank > 1 else stages[0], args.micro_batches, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.5)
    losses = []
    for step in range(args.steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        of_micro_batches = []
        inputs = [x] if any(stage.is_first for stage in stages) else []
        wanted = {"target": y, "losses": of_micro_batches} if any(stage.is_last for stage in stages) else {}
        schedule.step(*inputs, **wanted)
        optimizer.step()
        losses += [torch.stack(of_micro_batches).mean().item()] if of_micro_batches else []
    return losses, stages


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8, help="that a batch of 16 is cut into")
    args = parser.parse_args()

    with phalanx.init(device="cpu") as session:
        want_losses, want_layers = train_whole(args.steps)
        for name, (_, per_rank) in SCHEDULES.items():
            losses, stages = train_in_stages(session, name, args)
            pieces = torch.arange(16).tensor_split(per_rank * session.world_size)
            for stage in stages:
                want = [p for i in pieces[stage.stage_index] for p in want_layers[i]]
                for parameter, other in zip(stage.submod.parameters(), want, strict=True):
                    torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)
            if losses:
                torch.testing.assert_close(losses, want_losses, rtol=1e-4, atol=1e-6)
                print(
                    f"{name}: {per_rank} of {per_rank * session.world_size} stages on each rank, loss "
                    f"{losses[-1]:.6f}, in one piece {want_losses[-1]:.6f}; the same parameters"
                )


if __name__ == "__main__":
    main()
