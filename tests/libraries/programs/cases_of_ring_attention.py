"""ring-attention-pytorch: what its own scripts assert, that a sequence over all ranks gives what it gives on one."""

import torch
import torch.distributed as dist
from _told import Cases
from ring_attention_pytorch import RingAttention, RingTransformer, tree_attn_decode
from ring_attention_pytorch.distributed import AllGather, all_gather_variable_dim
from torch.nn.parallel import DistributedDataParallel


def same(one, other):
    return torch.allclose(one, other, atol=1e-4)


def transformer(causal, striped, *, length=31, rotated=True, grouped=1, lookback=None, num_in_batch=2):
    """A transformer in a ring against the same one on this rank alone: logits, and the ring's gradients."""
    bucket = 8
    settings = {
        "num_tokens": 64, "dim": 16, "causal": causal, "depth": 2, "heads": 4, "num_grouped_query_heads": grouped,
        "dim_head": 8, "bucket_size": bucket, "max_lookback_seq_len": lookback, "use_cuda_kernel": False,
    }  # fmt: skip
    # A ring that is shorter than the batch's length: so many ranks are needed.
    per_rank = 2 * bucket
    ring = RingTransformer(ring_attn=True, striped_ring_attn=striped, ring_seq_size=per_rank, **settings)
    alone = RingTransformer(ring_attn=False, **settings)
    alone.load_state_dict(ring.state_dict())
    tokens = torch.randint(0, 64, (num_in_batch, length))
    wrapped = DistributedDataParallel(ring)
    logits = wrapped(tokens)
    assert lookback is not None or same(logits, alone(tokens))  # looking back, it takes whole buckets
    logits.mean().backward()
    return [logits, [parameter.grad for parameter in ring.parameters()]]


def attention(causal, striped):
    length, per_rank = 32, 16
    ring = RingAttention(
        dim=16, dim_head=8, heads=2, causal=causal, auto_shard_seq=True, ring_attn=True, striped_ring_attn=striped,
        ring_seq_size=per_rank, bucket_size=8, use_cuda_kernel=False,
    )  # fmt: skip
    alone = RingAttention(
        dim=16, dim_head=8, heads=2, causal=causal, ring_attn=False, auto_shard_seq=False, bucket_size=8,
        ring_seq_size=per_rank, use_cuda_kernel=False,
    )  # fmt: skip
    alone.load_state_dict(ring.state_dict())
    inputs = torch.randn(2, length, 16, requires_grad=True)
    ours = ring(inputs)
    assert same(ours, alone(inputs))
    ours.sum().backward()
    return [ours, inputs.grad]


def decoding(num_keys):
    queries, keys, values = torch.randn(2, 4, 1, 8), torch.randn(2, 4, num_keys, 8), torch.randn(2, 4, num_keys, 8)
    ours = tree_attn_decode(queries, keys, values)
    weights = (queries @ keys.transpose(-1, -2) / 8**0.5).softmax(-1)
    assert same(ours, weights @ values)
    return ours


def gathered(kind):
    rows = 3 + 2 * dist.get_rank()
    mine = torch.arange(rows * 4.0).reshape(rows, 4) + dist.get_rank()
    if kind == "plain":
        return list(all_gather_variable_dim(mine))
    mine.requires_grad_()
    whole, sizes = AllGather(dim=0)(mine)
    (whole * whole).sum().backward()
    return [whole, sizes, mine.grad]


dist.init_process_group("gloo")
cases = Cases()
for causal in (False, True):
    for striped in (False, True) if causal else (False,):
        name = f"{'causal' if causal else 'whole'}{', striped' if striped else ''}"
        cases.run(f"attention, {name}", attention, causal, striped)
        cases.run(f"transformer, {name}", transformer, causal, striped)
        cases.run(f"transformer, {name}, a length that divides", transformer, causal, striped, length=32)
cases.run("transformer, grouped queries", transformer, True, False, grouped=2)
cases.run("transformer, looks back a little", transformer, True, False, lookback=(16, 32))
cases.run("transformer, a batch of its own on each rank", transformer, True, False, num_in_batch=1 + dist.get_rank())
for num_keys in (1, 2, 31, 64):
    cases.run(f"decoding over {num_keys} keys", decoding, num_keys)
for kind in ("plain", "differentiated"):
    cases.run(f"gathered, {kind}", gathered, kind)
cases.tell()
dist.destroy_process_group()
