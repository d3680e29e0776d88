"""A program that knows nothing of phalanx: it asks for gloo, and prints what it got as JSON.

Run by a launcher, or with the argument ``spawn`` by torch.multiprocessing; with ``ddp`` it trains a step, too, and for
that torch imports much.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def gradient_of_ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    return model.module.weight.grad.tolist()


def num_ranks():
    return int(os.environ.get("WORLD_SIZE", "2"))


def main(rank=None, port=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks()), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
    total = torch.arange(4.0) + dist.get_rank()
    dist.all_reduce(total)
    inside = torch.ones(1)
    dist.all_reduce(inside, group=dist.new_group(backend="gloo"))
    gradient = gradient_of_ddp() if "ddp" in sys.argv else None
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    world = dist.group.WORLD
    got = {
        "group": type(world).__name__,
        "backend": dist.get_backend(),
        "name": world._get_backend_name(),
        "is_gloo": isinstance(world._get_backend(torch.device("cpu")), dist.ProcessGroupGloo),
        "total": total.tolist(),
        "inside": inside.item(),
        "gradient": gradient,
        "ranks": [one["rank"] for one in objects],
    }
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(got), flush=True)


if __name__ == "__main__":
    if "spawn" in sys.argv:
        if "function" in sys.argv:
            import phalanx

            phalanx.replace_gloo()
        mp.spawn(main, (os.environ["MASTER_PORT"],), nprocs=num_ranks())
    else:
        main()
