"""torchdata's StatefulDataLoader: half of an epoch, then the other half from its state."""

import torch
import torch.distributed as dist
from _told import model, samples, tell
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

dist.init_process_group("gloo")


def new_loader():
    data = samples()
    return StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=1)


net = DistributedDataParallel(model())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
seen = []


def train(batches, most):
    for _, (inputs, targets) in zip(range(most), batches, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        seen.append(inputs.sum().item())


first = new_loader()
train(first, 3)
state = first.state_dict()
second = new_loader()
second.load_state_dict(state)
train(second, 100)
everywhere = [None] * dist.get_world_size()
dist.all_gather_object(everywhere, seen)
tell(net, seen=everywhere)
dist.destroy_process_group()
