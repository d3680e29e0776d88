"""A small GPT, trained as many scripts do it with DDP: gradients accumulate, and only the last pass synchronizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.integration._compare import Comparison

VOCABULARY, LENGTH, WIDTH, NUM_HEADS = 32, 16, 32, 4
NUM_STEPS, WARMUP, RATE = 6, 2, 3e-3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, rows):
        heads = self.queries_keys_values(self.norms[0](rows)).unflatten(-1, (3, NUM_HEADS, -1)).unbind(2)
        queries, keys, values = (one.transpose(1, 2) for one in heads)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        rows = rows + self.mix(mixed.transpose(1, 2).flatten(2))
        return rows + self.wide(self.norms[1](rows))


class SmallGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH, bias=False))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(random):
    """Return tokens of a text that can be learned, and the tokens after them."""
    starts = torch.randint(0, VOCABULARY, (4, 1), generator=random)
    text = (starts + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def rate_at(step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (NUM_STEPS - WARMUP))))


def optimizer_of(net):
    decayed = [p for p in net.parameters() if p.dim() >= 2]
    others = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def train(rank, world_size, num_accumulated, dtype, stops_at=NUM_STEPS, saved=None):
    """Train from the beginning or from what `train` has returned; each rank draws with a seed of its own."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1337 + rank)
    random = torch.Generator().manual_seed(1337 + rank)
    raw = SmallGPT()
    optimizer = optimizer_of(raw)
    first = 0
    if saved is not None:
        first = saved["step"]
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for _ in range(first * num_accumulated):
            batch(random)
    net = DistributedDataParallel(raw)
    losses, norms = [], []
    for step in range(first, stops_at):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        for part in range(num_accumulated):
            net.require_backward_grad_sync = part == num_accumulated - 1
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                _, loss = net(*batch(random))
            (loss / num_accumulated).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return losses, norms, {"step": stops_at, "model": raw.state_dict(), "optimizer": optimizer.state_dict()}


def train_and_resume(rank, world_size):
    *_, whole = train(rank, world_size, 2, torch.float32)
    *_, half = train(rank, world_size, 2, torch.float32, stops_at=3)
    boxes = [half if rank == 0 else None]  # what rank 0 has saved
    dist.broadcast_object_list(boxes)
    torch.manual_seed(0)
    losses, norms, resumed = train(rank, world_size, 2, torch.float32, saved=boxes[0])
    return losses, norms, whole["model"], resumed["model"]


PROGRAMS = {
    "once": (train, (1, torch.float32)),
    "accumulated": (train, (4, torch.float32)),
    "bfloat16": (train, (2, torch.bfloat16)),
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return Comparison(2, tmp_path_factory.mktemp("gpt"), PROGRAMS | {"resumed": (train_and_resume, ())})


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gpt_trains_to_gloos_bits(comparison, name):
    (losses, norms, ours), (other_losses, other_norms, theirs) = comparison.same_on_gloo(name)
    assert losses != other_losses, "the ranks saw the same batches"
    assert norms == other_norms
    assert all(torch.equal(value, theirs["model"][key]) for key, value in ours["model"].items())
    assert losses[-1] < losses[0]


def test_a_gpt_resumes_to_gloos_bits(comparison):
    results = comparison.same_on_gloo("resumed")
    assert all(torch.equal(value, results[1][3][key]) for key, value in results[0][3].items())
