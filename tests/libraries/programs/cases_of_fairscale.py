"""fairscale's optimizers: OSS, which shards an optimizer's state, alone and under ShardedDataParallel; AdaScale."""

import torch
import torch.distributed as dist
from _told import Cases, model, samples
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS, AdaScale
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 5


def batch(step):
    rows = samples()[(step * 8 + 4 * dist.get_rank()) % 40 :][:4]
    return torch.stack([row for row, _ in rows]), torch.tensor([target for _, target in rows])


def loss_of(net, step):
    inputs, target = batch(step)
    return nn.functional.cross_entropy(net(inputs), target)


def trained(net, optimizer, num_accumulated=1):
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(num_accumulated):
            loss = loss_of(net, step * num_accumulated + part)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, net.state_dict()]


def averaged_by_hand(kind, *, buffer_size=-1, force_object=False, **settings):
    """OSS alone: gradients are reduced by hand, as its documentation does without a wrapper."""
    net = model()
    optimizer = OSS(
        net.parameters(), optim=kind, broadcast_buffer_size=buffer_size, force_broadcast_object=force_object, **settings
    )
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    optimizer.consolidate_state_dict(recipient_rank=0)
    state = optimizer.state_dict() if dist.get_rank() == 0 else {}
    return [net.state_dict(), state]


def under_ddp(kind, **settings):
    net = DistributedDataParallel(model())
    return trained(net, OSS(net.parameters(), optim=kind, **settings))


def under_sharded_ddp(kind, *, wrapped=None, clip=None, **settings):
    net = model()
    optimizer = OSS(net.parameters(), optim=kind, **settings)
    sharded = ShardedDataParallel(net, optimizer, **(wrapped or {}))
    if clip is None:
        return trained(sharded, optimizer)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(sharded, step).backward()
        norms.append(optimizer.clip_grad_norm(clip))
        optimizer.step()
    return [norms, sharded.state_dict()]


def accumulated_without_sync():
    net = model()
    optimizer = OSS(net.parameters(), optim=torch.optim.SGD, lr=0.1)
    sharded = ShardedDataParallel(net, optimizer)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with sharded.no_sync():
            loss_of(sharded, 2 * step).backward()
        loss_of(sharded, 2 * step + 1).backward()
        optimizer.step()
    return sharded.state_dict()


def state_taken_up():
    """The consolidated state of one optimizer is loaded into another, which goes on the same."""
    net = model()
    optimizer = OSS(net.parameters(), optim=torch.optim.Adam, lr=0.01)
    sharded = ShardedDataParallel(net, optimizer)
    trained(sharded, optimizer)
    optimizer.consolidate_state_dict(recipient_rank=0)
    states = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states, src=0)
    again = model()
    again.load_state_dict(net.state_dict())
    other = OSS(again.parameters(), optim=torch.optim.Adam, lr=0.01)
    other.load_state_dict(states[0])
    return [trained(sharded, optimizer), trained(ShardedDataParallel(again, other), other)]


def groups_of_parameters():
    net = model()
    first, *rest = net.parameters()
    optimizer = OSS([{"params": [first], "lr": 0.2}], optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": rest})
    return trained(DistributedDataParallel(net), optimizer)


def frozen_and_thawed():
    net = model()
    net[0].weight.requires_grad = False
    optimizer = OSS(net.parameters(), optim=torch.optim.SGD, lr=0.1)
    sharded = ShardedDataParallel(net, optimizer)
    before = trained(sharded, optimizer)
    net[0].weight.requires_grad = True
    optimizer.refresh_trainable()
    sharded.refresh_trainable()
    return [before, trained(sharded, optimizer)]


def in_a_group():
    group = dist.new_group([0, 1])
    net = model()
    optimizer = OSS(net.parameters(), optim=torch.optim.SGD, group=group, lr=0.1)
    return trained(ShardedDataParallel(net, optimizer, process_group=group), optimizer)


def adaptive(num_accumulated=1, kind=torch.optim.SGD):
    net = DistributedDataParallel(model())
    optimizer = AdaScale(kind(net.parameters(), lr=0.1), num_gradients_to_accumulate=num_accumulated)
    told = trained(net, optimizer, num_accumulated)
    gain, scale = optimizer.gain(), optimizer.scale
    optimizer.unhook()
    return [told, gain, scale]


def adaptive_and_sharded():
    net = model()
    oss = OSS(net.parameters(), optim=torch.optim.SGD, lr=0.1)
    sharded = DistributedDataParallel(net)
    optimizer = AdaScale(oss)
    told = trained(sharded, optimizer)
    gain = optimizer.gain()
    optimizer.unhook()
    return [told, gain]


dist.init_process_group("gloo")
cases = Cases()
SGD, ADAM, RMS = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop
for kind in (SGD, ADAM, RMS):
    cases.run(f"OSS by hand, {kind.__name__}", averaged_by_hand, kind, lr=0.01)
    cases.run(f"OSS under DDP, {kind.__name__}", under_ddp, kind, lr=0.01)
    cases.run(f"ShardedDataParallel, {kind.__name__}", under_sharded_ddp, kind, lr=0.01)
cases.run("OSS by hand, without buffers", averaged_by_hand, SGD, buffer_size=0, lr=0.1)
cases.run("OSS by hand, states as objects", averaged_by_hand, ADAM, force_object=True, lr=0.01)
cases.run("OSS under DDP, momentum", under_ddp, SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
cases.run("OSS under DDP, 16 bits", under_ddp, SGD, lr=0.1, broadcast_fp16=True)
cases.run("ShardedDataParallel, clipped", under_sharded_ddp, SGD, clip=0.5, lr=0.1)
cases.run("ShardedDataParallel, no buckets", under_sharded_ddp, SGD, wrapped={"reduce_buffer_size": 0}, lr=0.1)
cases.run("ShardedDataParallel, buckets", under_sharded_ddp, SGD, wrapped={"reduce_buffer_size": 2**20}, lr=0.1)
cases.run("ShardedDataParallel, 16 bits", under_sharded_ddp, SGD, wrapped={"reduce_fp16": True}, lr=0.1)
cases.run("ShardedDataParallel, accumulation", accumulated_without_sync)
cases.run("a state is taken up", state_taken_up)
cases.run("groups of parameters", groups_of_parameters)
cases.run("frozen and thawed", frozen_and_thawed)
cases.run("in a group", in_a_group)
cases.run("AdaScale", adaptive)
cases.run("AdaScale, accumulation", adaptive, num_accumulated=3)
cases.run("AdaScale, OSS", adaptive_and_sharded)
cases.tell()
dist.destroy_process_group()
