"""Tensor parallelism: each layer divided among the ranks, which all see the same batch; torch's `parallelize_module`.

Start it with 1, 2 or 4 ranks:

    phalanx run --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    python examples/tensor_parallel.py                                 # a world of one

It trains the same model undivided beside it, and ends with an error if the two part.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import phalanx

WIDTH, NUM_HEADS, LENGTH = 32, 4, 8


class Block(nn.Module):
    """A transformer's block: (batch, length, width) -> the same."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        # -1: however many heads this rank has, of the same size.
        heads = [layer(x).unflatten(-1, (-1, WIDTH // NUM_HEADS)) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*(head.transpose(1, 2) for head in heads), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# Columns, then rows: what a rank has computed in the first layer is all that it needs for its part of the second, so
# attention and MLP exchange data once each, when the parts of their results are added.
IN_COLUMNS, IN_ROWS = ("query", "key", "value", "up"), ("out", "down")


def divide(model, mesh):
    """Divide each block's matrices; what lies between them, and the last layer, all ranks compute alike."""
    plan = {**dict.fromkeys(IN_COLUMNS, ColwiseParallel()), **dict.fromkeys(IN_ROWS, RowwiseParallel())}
    for block in list(model)[:-1]:
        parallelize_module(block, mesh, plan)


def divide_sequence_too(model, mesh):
    """The same, and between the matrices each rank keeps a part of the sequence, so activations are divided as well.

    What was one all_reduce becomes a reduce_scatter before the norm and an all_gather behind it.
    """
    by_token = Shard(1)  # of (batch, length, width)
    plan = {
        **dict.fromkeys(("norm", "norm2"), SequenceParallel()),
        **dict.fromkeys(IN_COLUMNS, ColwiseParallel(input_layouts=by_token)),
        **dict.fromkeys(IN_ROWS, RowwiseParallel(output_layouts=by_token, use_local_output=False)),
    }
    for block in list(model)[:-1]:
        parallelize_module(block, mesh, plan)
    ends = {
        "0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=by_token),
        str(len(model) - 1): ColwiseParallel(input_layouts=by_token, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 10))


def train(model, steps):
    """Train on the same batches on every rank; return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # not all parameters are DTensors
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, LENGTH, WIDTH, generator=generator)
        y = torch.randint(10, (4, LENGTH), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
    return loss.item()


def whole(parameter):
    """Return the tensor that a DTensor is a part of."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def own_elems(model):
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    with phalanx.init(device="cpu") as session:
        mesh = init_device_mesh("cpu", (session.world_size,))
        undivided = build_model()
        loss = train(undivided, args.steps)
        for way in (divide, divide_sequence_too):
            model = build_model()
            way(model, mesh)
            own_loss = train(model, args.steps)
            for parameter, want in zip(model.parameters(), undivided.parameters(), strict=True):
                torch.testing.assert_close(whole(parameter), want, rtol=1e-4, atol=1e-6)
            if session.rank == 0:
                share = own_elems(model) / own_elems(undivided)
                print(
                    f"{way.__name__}: loss {own_loss:.6f}, undivided {loss:.6f}; the same parameters, "
                    f"{share:.0%} of them on each rank"
                )


if __name__ == "__main__":
    main()
