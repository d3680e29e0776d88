"""Hugging Face's tensor parallelism: tp_plan="auto" on a small random Llama, which was saved and is loaded in parts."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from _told import Cases
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def config(**changed):
    return LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **changed,
    )  # fmt: skip


def loaded(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tokens():
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(3))


def logits(folder, **options):
    whole, sharded = loaded(folder, **options), loaded(folder, tp_plan="auto", **options)
    with torch.no_grad():
        ours, alone = sharded(tokens()).logits, whole(tokens()).logits
    tolerance = 1e-5 if ours.dtype is torch.float32 else 0.05
    assert torch.allclose(ours, alone, atol=tolerance)
    return ours


def num_sharded(folder):
    """How many parameters this rank holds less of than the whole model has: else nothing was parallel."""
    whole, sharded = loaded(folder), loaded(folder, tp_plan="auto")
    local = {name: getattr(value, "_local_tensor", value) for name, value in sharded.named_parameters()}
    smaller = [name for name, value in whole.named_parameters() if local[name].numel() < value.numel()]
    assert smaller, "no parameter is divided"
    return smaller


def generated(folder):
    sharded = loaded(folder, tp_plan="auto")
    return sharded.generate(tokens(), max_new_tokens=12, do_sample=False, pad_token_id=0)


def gradients(folder):
    sharded = loaded(folder, tp_plan="auto")
    loss = sharded(tokens(), labels=tokens()).loss
    loss.backward()
    grads = [getattr(value.grad, "_local_tensor", value.grad) for value in sharded.parameters()]
    return [loss, grads]


def trained(folder):
    sharded = loaded(folder, tp_plan="auto")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = sharded(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def saved_again(folder):
    sharded = loaded(folder, tp_plan="auto")
    again = f"{folder}-again"
    sharded.save_pretrained(again)
    dist.barrier()
    with torch.no_grad():
        assert torch.equal(loaded(again)(tokens()).logits, loaded(folder)(tokens()).logits)


dist.init_process_group("gloo")
folder = str(Path(os.environ["OUT"]).with_name("llama"))
if dist.get_rank() == 0:
    torch.manual_seed(1)
    for suffix, changed in (("", {}), ("-tied", {"tie_word_embeddings": True})):
        LlamaForCausalLM(config(**changed)).save_pretrained(folder + suffix)
dist.barrier()
cases = Cases()
cases.run("what is divided", num_sharded, folder)
cases.run("logits", logits, folder)
cases.run("logits, tied embeddings", logits, f"{folder}-tied")
cases.run("logits, bfloat16", logits, folder, dtype=torch.bfloat16)
cases.run("generated", generated, folder)
cases.run("gradients", gradients, folder)
cases.run("trained", trained, folder)
cases.run("saved again", saved_again, folder)
cases.tell()
dist.destroy_process_group()
