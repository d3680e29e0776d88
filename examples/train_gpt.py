"""Train a small GPT on text, letter by letter, and fine-tune it on another text.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/train_gpt.py
    phalanx run --nproc-per-node 2 examples/train_gpt.py --data book.txt --tune poems.txt --steps 5000
    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py                                       # a world of one

Without files it reads what every Python brings along: its reference manual, then the Zen of Python.
"""

import argparse
import codecs
import contextlib
import io
import itertools
from pathlib import Path
from pydoc_data.topics import topics  # what help("if") shows

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import phalanx

CONTEXT = 48  # letters that the model looks back


class GPT(nn.Module):
    """Predicts the next byte from each one and those before it: (batch, length) -> (batch, length, 256)."""

    def __init__(self, width=64, num_layers=2, num_heads=2):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text):
        length = text.shape[1]
        x = self.tokens(text) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length], is_causal=True)  # nobody sees what comes after
        return self.head(x)

    @torch.no_grad()
    def write(self, start, length):
        """Return `start` gone on by `length` letters, each drawn from what the model thinks likely."""
        self.eval()
        text = torch.tensor([list(start.encode())], device=self.mask.device)
        for _ in range(length):
            chances = F.softmax(self(text[:, -CONTEXT:])[0, -1] / 0.7, dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1)[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def zen():
    with contextlib.redirect_stdout(io.StringIO()):
        import this  # prints itself
    return codecs.decode(this.s, "rot13")


def forever(loader):
    """Yield batches epoch after epoch, each in another order."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def train(model, text, args, num_steps, learning_rate, device):
    """Train on windows of the text, shuffled and divided among the ranks; print the mean loss of all ranks."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    windows = data.unfold(0, CONTEXT + 1, CONTEXT // 8)  # a view: (number of windows, CONTEXT + 1)
    loader = phalanx.DataLoader(windows, args.batch_size, shuffle=True, num_workers=0)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, num_steps)
    model.train()
    for step, batch in enumerate(itertools.islice(forever(loader), num_steps), 1):
        batch = batch.to(device, torch.int64)
        loss = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, num_steps // 5) == 0:
            loss = loss.detach()
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {step:4}: loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="text to train on (default: Python's reference manual)")
    parser.add_argument("--tune", type=Path, help="text to fine-tune on (default: the Zen of Python)")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--tune-steps", type=int, default=100, help="of fine-tuning")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank, in windows of text")
    parser.add_argument("--device", help="default: this rank's GPU, or the CPU")
    args = parser.parse_args()

    with phalanx.init(device=args.device) as session:
        torch.manual_seed(0)
        gpt = GPT().to(session.device)
        model = phalanx.DistributedDataParallel(gpt)
        for name, path, default, num_steps, learning_rate in (
            ("training", args.data, "\n".join(topics.values()), args.steps, 1e-2),
            ("fine-tuning", args.tune, zen(), args.tune_steps, 3e-3),
        ):
            text = path.read_text(errors="replace") if path else default
            if session.rank == 0:
                print(f"{name} on {len(text):,} letters")
            train(model, text, args, num_steps, learning_rate, session.device)
            if session.rank == 0:
                print(f"after {name}:", *gpt.write("If ", 200).splitlines(), sep="\n    ")


if __name__ == "__main__":
    main()
