"""MONAI's gathering, samplers, metrics, handlers and engines over ranks, as its own distributed tests call them."""

import logging
import os
import tempfile
from pathlib import Path

import monai.handlers as mh
import monai.metrics as mm
import torch
import torch.distributed as dist
from _told import Cases, model, samples
from ignite.engine import Engine, Events
from monai.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    DistributedWeightedRandomSampler,
    partition_dataset,
    partition_dataset_classes,
)
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.inferers import SimpleInferer
from monai.networks.layers import Norm
from monai.networks.nets import BasicUNet
from monai.utils import (
    RankFilter,
    evenly_divisible_all_gather,
    get_dist_device,
    set_determinism,
    string_list_all_gather,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def rank():
    return dist.get_rank()


def gathered(shape, concat, dtype=torch.float32):
    """A tensor of a length of its own on each rank."""
    data = torch.arange(60)[: 4 + 2 * rank()] if len(shape) == 0 else torch.full([3 + rank(), *shape], rank() + 1)
    return evenly_divisible_all_gather(data.to(dtype), concat=concat)


def scalar():
    return evenly_divisible_all_gather(torch.tensor(rank() + 0.5), concat=False)


def strings(delimiter):
    return string_list_all_gather([f"rank {rank()}, number {number}" for number in range(2 + rank())], delimiter)


def sampled(kind, even):
    data = Dataset(list(range(7)))
    if kind == "weighted":
        weights = [0.1, 0.9, 0.3, 0.2, 0.8, 0.4, 0.6]
        sampler = DistributedWeightedRandomSampler(
            data, weights=weights, num_samples_per_rank=5 if even else None, even_divisible=even,
            generator=torch.Generator().manual_seed(3 + rank()),
        )  # fmt: skip
        sampler.set_epoch(1)
        return [list(sampler), len(sampler)]
    sampler = DistributedSampler(data, shuffle=kind == "shuffled", even_divisible=even)
    sampler.set_epoch(1)
    return [list(sampler), len(sampler)]


def partitioned(even, drop_last):
    parts = partition_dataset(
        list(range(11)), num_partitions=2, shuffle=True, seed=3, even_divisible=even, drop_last=drop_last
    )
    by_class = partition_dataset_classes(list(range(12)), [0, 0, 1] * 4, num_partitions=2, even_divisible=even)
    return [parts[rank()], by_class[rank()]]


def averaged():
    average = mm.CumulativeAverage()
    told = []
    for number in range(3 + rank()):
        average.append(torch.tensor([number + rank() * 0.5, 1.0]), count=1 + number)
    told.append(average.aggregate())
    average.reset()
    average.append(rank() + 1.0)
    return [*told, average.aggregate(), average.get_current()]


def accumulated():
    class Sums(mm.Cumulative):
        def aggregate(self):
            self._sync()
            return self._synced_tensors

    sums = Sums()
    for number in range(2 + rank()):
        sums.append(torch.full((3, 2), number + rank() * 0.5), torch.tensor([[number]] * 3))
    before = sums.get_buffer()
    told = sums.aggregate()
    sums.reset()
    return [before, told]


def masks(number, num_classes=3):
    random = torch.Generator().manual_seed(50 + number)
    predicted = torch.randint(0, num_classes, (2 + number % 2, 1, 8, 8), generator=random)
    truth = torch.randint(0, num_classes, predicted.shape, generator=random)
    return [
        nn.functional.one_hot(one[:, 0], num_classes).movedim(-1, 1).float() for one in (predicted, truth)
    ]  # fmt: skip


def metric(make, inputs):
    """Each rank has another number of batches, the last is one shorter."""
    one = make()
    for number in range(rank(), 5, 2):
        one(*inputs(number))
    gathered = one.get_buffer()
    result = one.aggregate()
    one.reset()
    return [gathered, result]


def scores(number):
    random = torch.Generator().manual_seed(70 + number)
    size = 4 + number
    return torch.rand(size, 3, generator=random).softmax(1), nn.functional.one_hot(torch.arange(size) % 3, 3)


def images(number):
    random = torch.Generator().manual_seed(90 + number)
    return [torch.rand(2, 1, 16, 16, generator=random) for _ in range(2)]


def handled(make, name, inputs):
    """A handler of ignite's engine, attached, over an epoch whose batches differ by rank."""
    handler = make()

    def run(_, number):
        pairs = inputs(number)
        return [{"pred": one, "label": other} for one, other in zip(*pairs, strict=True)]

    engine = Engine(run)
    handler.attach(engine, name=name)
    engine.run(range(rank(), 5, 2), max_epochs=1)
    return [engine.state.metrics[name], getattr(engine.state, "metric_details", {})]


def saved_metrics(folder):
    place = Path(folder, "metrics")

    def run(engine, _):
        engine.state.batch = [{"filename_or_obj": f"image {number} of {rank()}"} for number in range(2 + rank())]

    engine = Engine(run)

    @engine.on(Events.EPOCH_COMPLETED)
    def _(engine):
        engine.state.metrics = {"one": 1.0 + rank(), "two": 2.0}
        engine.state.metric_details = {"three": torch.arange(10.0).reshape(5, 2)}  # of all five images

    saver = mh.MetricsSaver(
        save_dir=place, metrics=["one", "two"], metric_details=["three"], batch_transform=lambda batch: batch,
        summary_ops=["mean", "median", "max", "90percentile"], delimiter=",",
    )  # fmt: skip
    saver.attach(engine)
    engine.run([0], max_epochs=1)
    dist.barrier()
    return {path.name: path.read_text().replace(folder, "") for path in sorted(place.iterdir())}


def saved_classes(folder):
    place = Path(folder, "classes")
    saver = mh.ClassificationSaver(
        output_dir=str(place), filename="predictions.csv", save_rank=0,
        batch_transform=lambda batch: batch, output_transform=lambda output: output,
    )  # fmt: skip
    engine = Engine(lambda engine, _: [torch.tensor([engine.state.iteration + rank() * 0.5])] * 2)

    @engine.on(Events.ITERATION_STARTED)
    def _(engine):
        number = engine.state.batch
        engine.state.batch = [{"filename_or_obj": f"image {number} {rank()} {part}"} for part in range(2)]

    saver.attach(engine)
    engine.run(range(2 + rank()), max_epochs=1)
    dist.barrier()
    return {path.name: path.read_text() for path in sorted(place.iterdir())}


def filtered():
    log = logging.getLogger("cases")
    log.addFilter(RankFilter(filter_fn=lambda number: number == 1))
    record = log.makeRecord("cases", logging.INFO, "", 0, "told", (), None)
    return log.filter(record) is not False


class Losses:
    """A callback that keeps what each iteration lost."""

    def __init__(self):
        self.values = []

    def attach(self, engine):
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda one: self.values.append(one.state.output["loss"]))


def workflow(folder):
    """A whole training: DDP, a loader of parts, an evaluator with metrics over ranks, a saver of checkpoints."""
    set_determinism(3)
    data = Dataset([{"image": row, "label": torch.tensor(target)} for row, target in samples()])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True, seed=5))
    validation = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, even_divisible=False))
    net = DistributedDataParallel(model())
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    losses = Losses()

    evaluator = SupervisedEvaluator(
        device=torch.device("cpu"), val_data_loader=validation, network=net, inferer=SimpleInferer(), decollate=False,
        key_val_metric={
            "error": mh.MeanSquaredError(
                output_transform=lambda output: (output["pred"], nn.functional.one_hot(output["label"], 3).float())
            )
        },
    )  # fmt: skip
    trainer = SupervisedTrainer(
        device=torch.device("cpu"), max_epochs=2, train_data_loader=loader, network=net, optimizer=optimizer,
        loss_function=nn.CrossEntropyLoss(), inferer=SimpleInferer(), decollate=False,
        train_handlers=[mh.ValidationHandler(interval=1, validator=evaluator, epoch_level=True), losses],
    )  # fmt: skip
    saver = mh.CheckpointSaver(f"{folder}/saved", {"net": net.module}, save_final=True, save_key_metric=False)
    if rank() == 0:
        saver.attach(trainer)
    trainer.run()
    dist.barrier()
    [path] = Path(folder, "saved").glob("*.pt")
    saved = torch.load(path, weights_only=True)
    return [losses.values, evaluator.state.metrics, net.state_dict(), saved.get("net", saved)]


def segmented(norm):
    """A net with norms under DDP, synchronized or not, trained on another batch on each rank."""
    net = BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 8, 4), norm=norm)
    net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        random = torch.Generator().manual_seed(10 * step + rank())
        inputs, target = torch.rand(2, 1, 32, 32, generator=random), torch.randint(0, 2, (2, 32, 32), generator=random)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, net.state_dict()]


dist.init_process_group("gloo")
place = [tempfile.mkdtemp(dir=os.path.dirname(os.environ["OUT"])) if rank() == 0 else None]
dist.broadcast_object_list(place)
folder = place[0]
cases = Cases()
cases.run("device", get_dist_device)
for concat in (False, True):
    for shape in ((), (2,), (2, 3)):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
            name = f"{len(shape) + 1} dimensions, {dtype}{', concatenated' * concat}".replace("torch.", "")
            cases.run(f"evenly_divisible_all_gather, {name}", gathered, shape, concat, dtype)
cases.run("evenly_divisible_all_gather, a scalar", scalar)
for delimiter in ("\t", "|"):
    cases.run(f"string_list_all_gather, {delimiter!r}", strings, delimiter)
for even in (False, True):
    for kind in ("ordered", "shuffled", "weighted"):
        cases.run(f"sampled, {kind}{', even' * even}", sampled, kind, even)
for even, drop_last in ((False, False), (True, False), (True, True)):
    cases.run(f"partitioned{', even' * even}{', dropped' * drop_last}", partitioned, even, drop_last)
cases.run("averaged", averaged)
cases.run("accumulated", accumulated)
for make, inputs in (
    (mm.DiceMetric, masks),
    (lambda: mm.DiceMetric(include_background=False, reduction="mean_batch", get_not_nans=True), masks),
    (mm.GeneralizedDiceScore, masks),
    (mm.MeanIoU, masks),
    (lambda: mm.ConfusionMatrixMetric(metric_name=["f1 score", "precision"], compute_sample=True), masks),
    (lambda: mm.HausdorffDistanceMetric(include_background=True), masks),
    (lambda: mm.SurfaceDistanceMetric(include_background=True), masks),
    (lambda: mm.ROCAUCMetric(average="macro"), scores),
    (lambda: mm.AveragePrecisionMetric(average="macro"), scores),
    (mm.MSEMetric, images),
    (mm.MAEMetric, images),
    (mm.RMSEMetric, images),
    (lambda: mm.PSNRMetric(max_val=1.0), images),
    (lambda: mm.SSIMMetric(spatial_dims=2, win_size=5), images),
):
    one = make()
    reduction = getattr(one, "reduction", "") or ""
    cases.run(f"metric, {type(one).__name__}, {reduction}", metric, make, inputs)
for make, name, inputs in (
    (lambda: mh.MeanDice(include_background=True, output_transform=mh.from_engine(["pred", "label"])), "dice", masks),
    (lambda: mh.MeanIoUHandler(output_transform=mh.from_engine(["pred", "label"])), "iou", masks),
    (lambda: mh.ConfusionMatrix(output_transform=mh.from_engine(["pred", "label"])), "confusion", masks),
    (lambda: mh.HausdorffDistance(True, output_transform=mh.from_engine(["pred", "label"])), "distance", masks),
    (lambda: mh.SurfaceDistance(True, output_transform=mh.from_engine(["pred", "label"])), "surface", masks),
    (lambda: mh.ROCAUC(output_transform=mh.from_engine(["pred", "label"])), "auc", scores),
    (lambda: mh.MeanSquaredError(output_transform=mh.from_engine(["pred", "label"])), "mse", images),
    (lambda: mh.MeanAbsoluteError(output_transform=mh.from_engine(["pred", "label"])), "mae", images),
    (lambda: mh.RootMeanSquaredError(output_transform=mh.from_engine(["pred", "label"])), "rmse", images),
    (lambda: mh.PeakSignalToNoiseRatio(1.0, output_transform=mh.from_engine(["pred", "label"])), "psnr", images),
):
    cases.run(f"handler, {name}", handled, make, name, inputs)
cases.run("saved metrics", saved_metrics, folder)
cases.run("saved classes", saved_classes, folder)
cases.run("filtered", filtered)
cases.run("workflow", workflow, folder)
for norm in (("instance", {"affine": True}), ("group", {"num_groups": 2}), (Norm.BATCH, {})):
    cases.run(f"segmented, {norm[0]}", segmented, norm)
cases.tell()
dist.destroy_process_group()
