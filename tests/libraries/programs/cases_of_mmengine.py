"""mmengine's functions over torch.distributed, its wrappers, evaluation and runner, as its own tests call them."""

import os
import tempfile

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # mmengine's checkpoints hold more than weights

import torch
import torch.distributed as dist
from _told import Cases, model, samples
from mmengine import dist as mm
from mmengine.dataset import DefaultSampler, InfiniteSampler, default_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import CheckpointHook
from mmengine.model import BaseModel, MMDistributedDataParallel, MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict, ZeroRedundancyOptimizer
from mmengine.runner import CheckpointLoader, Runner
from torch import nn
from torch.utils.data import DataLoader

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)


def mine(dtype=torch.float32):
    return torch.arange(1, 7).reshape(2, 3).to(dtype) + dist.get_rank()


def reduced(op, dtype):
    data = mine(dtype)
    mm.all_reduce(data, op=op)
    return data


def gathered(dtype):
    return [mm.all_gather(mine(dtype)), mm.gather(mine(dtype), dst=0), mm.gather(mine(dtype), dst=1)]


def broadcast(src, dtype):
    data = mine(dtype)
    mm.broadcast(data, src=src)
    return data


def objects(src):
    data = [{"rank": dist.get_rank(), "text": "x" * (dist.get_rank() + 1)}, dist.get_rank()]
    told = [mm.all_gather_object(data), mm.gather_object(data, dst=1)]
    mm.broadcast_object_list(data, src=src)
    return [*told, data]


def dictionary(op):
    data = {"loss": mine(), "accuracy": mine(torch.float64).sum()}
    mm.all_reduce_dict(data, op=op)
    return data


def parameters(op, *, coalesced, bucket=-1):
    data = [torch.full((size,), float(size + dist.get_rank())) for size in (3, 1, 1000, 7)]
    mm.all_reduce_params(data, coalesce=coalesced, bucket_size_mb=bucket, op=op)
    return data


def collected(device, size, folder):
    part = [{"index": number, "value": torch.tensor(float(number))} for number in range(dist.get_rank(), size, 2)]
    return mm.collect_results(part, size, device=device, tmpdir=folder if device == "cpu" else None)


def about():
    mm.barrier()
    return [
        mm.get_backend(), mm.get_dist_info(), mm.is_main_process(), mm.get_world_size(), mm.get_rank(),
        mm.get_comm_device(), mm.is_distributed(), mm.master_only(lambda: "main")(),
    ]  # fmt: skip


def in_a_group():
    group = dist.new_group([0, 1])
    data = mine()
    mm.all_reduce(data, op="mean", group=group)
    return [data, mm.all_gather(mine(), group=group), mm.get_dist_info(group)]


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, inputs, labels=None, mode="tensor"):
        scores = self.net(inputs)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, labels)}
        return list(scores) if mode == "predict" else scores


def batch(step, of=None):
    rows = samples()[(8 * step + 4 * (dist.get_rank() if of is None else of)) % 40 :][:4]
    return {"inputs": torch.stack([row for row, _ in rows]), "labels": torch.tensor([target for _, target in rows])}


def wrapped(*, num_accumulated=1, sharded=False, clip=None):
    net = MMDistributedDataParallel(module=Classifier())
    if sharded:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_type="Adam", lr=0.01)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wrapper = OptimWrapper(optimizer, accumulative_counts=num_accumulated, clip_grad=clip)
    wrapper.initialize_count_status(net, 0, 6)
    logs = [net.train_step(batch(step), optim_wrapper=wrapper) for step in range(6)]
    return [logs, net.state_dict(), net.val_step(batch(0)), net.test_step(batch(1))]


class Both(BaseModel):
    def __init__(self):
        super().__init__()
        self.first, self.second = model(), model()

    def train_step(self, data, optim_wrapper):
        losses = {}
        for name in ("first", "second"):
            wrapper = optim_wrapper[name]
            with wrapper.optim_context(getattr(self, name)):
                loss = nn.functional.cross_entropy(getattr(self, name)(data["inputs"]), data["labels"])
                wrapper.update_params(loss)
            losses[name] = loss.detach()
        return losses

    def forward(self, inputs, labels=None, mode="tensor"):
        return self.first(inputs) + self.second(inputs)


def wrapped_apart():
    net = MMSeparateDistributedDataParallel(Both(), broadcast_buffers=False, find_unused_parameters=False)
    both = {
        name: OptimWrapper(torch.optim.SGD(getattr(net.module, name).parameters(), lr=0.1))
        for name in ("first", "second")
    }
    wrappers = OptimWrapperDict(**both)
    logs = [net.train_step(batch(step), optim_wrapper=wrappers) for step in range(4)]
    return [logs, net.state_dict()]


class Mean(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [float(sample["value"]) for sample in data_samples]

    def compute_metrics(self, results):
        return {"mean": sum(results) / len(results), "num": len(results), "all": results}


def evaluated(device, folder):
    evaluator = Evaluator(Mean(collect_device=device, collect_dir=folder if device == "cpu" else None))
    rows = [{"value": torch.tensor(number * 0.1)} for number in range(7)]
    own = rows[dist.get_rank() :: 2]
    own += rows[:1] * (4 - len(own))  # as a sampler pads
    evaluator.process(data_samples=own, data_batch=None)
    return evaluator.evaluate(size=7)


def sampled(kind):
    data = list(range(11))
    if kind is InfiniteSampler:
        stream = iter(kind(data, shuffle=True, seed=3))
        return [next(stream) for _ in range(20)]
    sampler = kind(data, shuffle=True, seed=None)  # None: the ranks agree
    torch.manual_seed(0)
    sampler.seed = 7
    sampler.set_epoch(2)
    return [list(sampler), len(sampler)]


class Sums(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [int(scores.argmax()) for scores in data_samples]

    def compute_metrics(self, results):
        return {"sum": sum(results), "num": len(results)}


def runner(folder):
    """A whole run: the loop, its hooks, validation, checkpoints; and one that takes it up again."""
    data = [{"inputs": row, "labels": target} for row, target in samples()]

    def loader(shuffle):
        return DataLoader(data, 8, sampler=DefaultSampler(data, shuffle=shuffle, seed=5), collate_fn=default_collate)

    def trained(num_epochs, resumes, where):
        net = MMDistributedDataParallel(module=Classifier())
        run = Runner(
            model=net, work_dir=where, train_dataloader=loader(True), val_dataloader=loader(False),
            train_cfg={"by_epoch": True, "max_epochs": num_epochs}, val_cfg={}, val_evaluator=Evaluator(Sums()),
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}, resume=resumes,
            default_hooks={"checkpoint": CheckpointHook(interval=1), "logger": None}, randomness={"seed": 3},
            experiment_name=os.path.basename(where), log_level="ERROR",
        )  # fmt: skip
        return run.train().module.state_dict()

    whole = trained(3, False, f"{folder}/whole")
    trained(2, False, f"{folder}/parts")
    resumed = trained(3, True, f"{folder}/parts")
    mm.barrier()
    saved = CheckpointLoader.load_checkpoint(f"{folder}/parts/epoch_3.pth", map_location="cpu")
    return [whole, resumed, saved["state_dict"]]


dist.init_process_group("gloo")
place = [tempfile.mkdtemp(dir=os.path.dirname(os.environ["OUT"])) if dist.get_rank() == 0 else None]
dist.broadcast_object_list(place)
folder = place[0]
cases = Cases()
for dtype in DTYPES:
    name = str(dtype).removeprefix("torch.")
    for op in ("sum", "mean", "min", "max", "product"):
        cases.run(f"all_reduce, {op}, {name}", reduced, op, dtype)
    cases.run(f"all_gather and gather, {name}", gathered, dtype)
    for src in range(2):
        cases.run(f"broadcast from {src}, {name}", broadcast, src, dtype)
for op in ("band", "bor", "bxor"):
    cases.run(f"all_reduce, {op}", reduced, op, torch.int64)
for src in range(2):
    cases.run(f"objects, from {src}", objects, src)
for op in ("sum", "mean"):
    cases.run(f"all_reduce_dict, {op}", dictionary, op)
    for coalesced in (False, True):
        cases.run(f"all_reduce_params, {op}{', coalesced' * coalesced}", parameters, op, coalesced=coalesced)
cases.run("all_reduce_params, buckets", parameters, "mean", coalesced=True, bucket=1)
cases.run("about", about)
cases.run("in a group", in_a_group)
for device in ("cpu", "gpu"):  # "gpu": by collectives, which here are of the CPU; "cpu": by files
    for size in (5, 6):
        cases.run(f"collect_results, {device}, {size}", collected, device, size, f"{folder}/{device}-{size}")
    cases.run(f"evaluated, {device}", evaluated, device, f"{folder}/evaluated-{device}")
for kind in (DefaultSampler, InfiniteSampler):
    cases.run(f"sampled, {kind.__name__}", sampled, kind)
cases.run("MMDistributedDataParallel", wrapped)
cases.run("MMDistributedDataParallel, accumulation", wrapped, num_accumulated=3)
cases.run("MMDistributedDataParallel, clipped", wrapped, clip={"max_norm": 0.5})
cases.run("MMDistributedDataParallel, ZeRO", wrapped, sharded=True)
cases.run("MMSeparateDistributedDataParallel", wrapped_apart)
cases.run("runner", runner, folder)
cases.tell()
dist.destroy_process_group()
