"""Hosts with a slow link between them: how many bytes cross, and what accuracy is reached, from DDP to DiLoCo.

Start it with any number of ranks; two hosts are played by two halves of them:

    phalanx run --nproc-per-node 4 examples/local_sgd.py
    torchrun --nproc-per-node 4 examples/local_sgd.py
    python examples/local_sgd.py                                       # a world of one
    phalanx run --nnodes 2 --node-rank 0 --master-addr host0 examples/local_sgd.py --real-hosts  # and 1 on the other

It ends with an error if ranks part, if a way is less accurate than DDP by more than --margin, or if it sends more than
it should.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_data
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import phalanx
from phalanx.parallel import Bf16State, bf16_feedback_hook, bridge_hook


def bridged(groups, hook_state, hook):
    """Gradients averaged over all ranks at every step: exactly on a host, by the hook between hosts."""

    def wrap(model):
        ddp = phalanx.DistributedDataParallel(model)
        ddp.register_comm_hook(None, bridge_hook(groups, hook_state, hook))
        return ddp, None

    return wrap


def meeting(groups, **options):
    """Gradients averaged on each host; the hosts meet every so many steps."""

    def wrap(model):
        ddp = phalanx.DistributedDataParallel(model, process_group=groups.host)
        return ddp, phalanx.LocalSGD(model.parameters(), process_group=groups, **options)

    return wrap


def train(wrap, args, train_set):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp, outer = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch_size = args.batch_size // dist.get_world_size()
    loader = phalanx.DataLoader(train_set, batch_size, shuffle=True, drop_last=True)  # equally many on all ranks
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            if outer:
                outer.step()
    if outer:
        outer.sync()  # or the hosts would end with models of their own
    return model


@contextlib.contextmanager
def counting(groups):
    """Count the bytes that this rank hands to all_reduce between hosts. Ranks of a host each carry a part."""
    all_reduce, counts = dist.all_reduce, [0]

    def count(tensor, *args, group=None, **kwargs):
        if group is not None and group is groups.across:
            counts[0] += tensor.numel() * tensor.element_size()
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = count
    try:
        yield counts
    finally:
        dist.all_reduce = all_reduce


def accuracy(model, dataset):
    images, labels = dataset.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def assert_same(model):
    """Fail if any rank has other parameters."""
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    assert all(torch.equal(other, own) for other in every), "the ranks have parted"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--every", type=int, default=16, help="steps from one meeting to the next")
    parser.add_argument("--margin", type=float, default=0.03)
    parser.add_argument("--real-hosts", action="store_true")
    args = parser.parse_args()

    with phalanx.init(device="cpu") as session:
        torch.set_num_threads(1)  # the model is too small for more
        half = f"half {2 * session.rank // session.world_size}"
        groups = phalanx.host_groups(None if args.real_hosts else half)
        power_sgd = PowerSGDState(groups.across, matrix_approximation_rank=4, start_powerSGD_iter=10)
        ways = {  # and what part of DDP's bytes may cross at most
            "DDP": (bridged(groups, groups.across, allreduce_hook), 1),
            "DDP, bf16": (bridged(groups, Bf16State(groups.across), bf16_feedback_hook), 0.5),
            "DDP, PowerSGD": (bridged(groups, power_sgd, powerSGD_hook), 0.5),
            "local SGD": (meeting(groups, every=args.every, outer_optimizer=None), 1.5 / args.every),
            "DiLoCo": (meeting(groups, every=args.every), 1.5 / args.every),
            "DiLoCo, bf16": (meeting(groups, every=args.every, compress="bf16"), 0.75 / args.every),
        }
        train_set, test_set = load_data(None)
        of_ddp = None
        for name, (wrap, most) in ways.items():
            with counting(groups) as counts:
                model = train(wrap, args, train_set)
            assert_same(model)
            sent = torch.tensor(counts)
            dist.all_reduce(sent, group=groups.host)
            crossed, reached = sent.item(), accuracy(model, test_set)
            of_ddp = of_ddp or (crossed, reached)
            assert crossed <= most * of_ddp[0], f"{name} sent {crossed} bytes, DDP {of_ddp[0]}"
            assert reached >= of_ddp[1] - args.margin, f"{name} reached {reached:.2%}, DDP {of_ddp[1]:.2%}"
            if session.rank == 0:
                print(
                    f"{name:14} {crossed / 1000:9,.1f} kB from each host crossed, DDP's divided by "
                    f"{of_ddp[0] / crossed:5.1f}; test accuracy {reached:.2%}"
                )


if __name__ == "__main__":
    main()
