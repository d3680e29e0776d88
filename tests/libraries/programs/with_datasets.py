"""Hugging Face datasets: each rank streams its own part; then a shuffled stream goes on from a loader's state."""

from itertools import islice

import torch
import torch.distributed as dist
from _told import model, samples, tell
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel

import phalanx

dist.init_process_group("gloo")
rows = [{"inputs": inputs.tolist(), "target": target} for inputs, target in samples()]
whole = Dataset.from_list(rows).with_format("torch").to_iterable_dataset(num_shards=4)
loader = torch.utils.data.DataLoader(split_dataset_by_node(whole, dist.get_rank(), dist.get_world_size()), batch_size=4)
net = DistributedDataParallel(model())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
seen = torch.zeros(1)
for batch in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(batch["inputs"]), batch["target"]).backward()
    optimizer.step()
    seen += len(batch["target"])
dist.all_reduce(seen)


def new_loader():
    return phalanx.DataLoader(phalanx.shard_iterable(whole.shuffle(seed=3, buffer_size=8)), 4, num_workers=1)


first = new_loader()
batches = iter(first)
before = [batch["target"].tolist() for batch in islice(batches, 2)]
state = first.state_dict()
rest = [batch["target"].tolist() for batch in batches]
second = new_loader()
second.load_state_dict(state)
assert [batch["target"].tolist() for batch in second] == rest
tell(net, seen=int(seen), targets=before + rest)
dist.destroy_process_group()
