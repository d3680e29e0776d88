"""Hugging Face datasets: each rank streams its own part."""

import torch
import torch.distributed as dist
from _told import model, samples, tell
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel

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
tell(net, seen=int(seen))
dist.destroy_process_group()
