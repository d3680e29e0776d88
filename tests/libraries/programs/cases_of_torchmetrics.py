"""torchmetrics' metrics as its own tests run them under DDP: every rank sees other batches, and computes the same."""

import functools
import pickle

import torch
import torch.distributed as dist
import torchmetrics as tm
from _told import Cases
from torchmetrics import audio, classification, clustering, image, nominal, regression, retrieval, text
from torchmetrics.utilities.distributed import gather_all_tensors

NUM_BATCHES, SIZE, NUM_CLASSES = 6, 16, 4


def of(rank):
    """The batches of a rank: the last of them is shorter on rank 1."""
    return [(batch, SIZE - 3 * rank * (batch == NUM_BATCHES - 1)) for batch in range(rank, NUM_BATCHES, 2)]


def drawn(batch, size, kind):
    """Predictions and targets of a batch."""
    random = torch.Generator().manual_seed(100 + batch)

    def rand(*shape):
        return torch.rand(*shape, generator=random)

    def randint(high, *shape):
        return torch.randint(0, high, shape, generator=random)

    return {
        "binary": lambda: (rand(size), randint(2, size)),
        "classes": lambda: (rand(size, NUM_CLASSES).softmax(1), randint(NUM_CLASSES, size)),
        "labels": lambda: (rand(size, NUM_CLASSES), randint(2, size, NUM_CLASSES)),
        "numbers": lambda: (rand(size) + 0.1, rand(size) + 0.1),
        "several": lambda: (rand(size, 3) + 0.1, rand(size, 3) + 0.1),
        "images": lambda: (rand(size, 3, 16, 16), rand(size, 3, 16, 16)),
        "sounds": lambda: (rand(size, 64), rand(size, 64)),
        "names": lambda: (randint(NUM_CLASSES, size), randint(NUM_CLASSES, size)),
        "points": lambda: (rand(size, 5), randint(3, size)),
        "sentences": lambda: (
            [f"a {['cat', 'dog', 'owl', 'bat'][n]} sat" for n in randint(4, size)],
            [f"a {['cat', 'dog', 'owl', 'bat'][n]} sits" for n in randint(4, size)],
        ),
    }[kind]()


def updated(make, kind, ranks, *, on_step=False):
    """Return a metric that has seen the batches of these ranks, and what it has returned for each."""
    metric = pickle.loads(pickle.dumps(make(dist_sync_on_step=on_step)))
    steps = [metric(*drawn(batch, size, kind)) for rank in ranks for batch, size in of(rank)]
    return metric, steps


def on_one_rank():
    return False


def whole(make, kind):
    """Updated on all ranks, computed over all: as on one rank that sees all batches, its own first."""
    metric, steps = updated(make, kind, [dist.get_rank()])
    result = metric.compute()
    before = [value for value in metric.metric_state.values() if isinstance(value, torch.Tensor)]
    with metric.sync_context():
        synced = [value for value in metric.metric_state.values() if isinstance(value, torch.Tensor)]
    alone, _ = updated(functools.partial(make, distributed_available_fn=on_one_rank), kind, range(2))
    torch.testing.assert_close(result, alone.compute(), rtol=1e-4, atol=1e-5, equal_nan=True)
    metric.reset()
    return [steps, result, before, synced]


def on_step(make, kind):
    metric, steps = updated(make, kind, [dist.get_rank()], on_step=True)
    return [steps, metric.compute()]


def retrieved(make, on_step=False):
    metric = make(dist_sync_on_step=on_step)
    for batch, size in of(dist.get_rank()):
        scores, target = drawn(batch, size, "binary")
        metric.update(scores, target, indexes=torch.arange(size) % 3 + batch)
    return metric.compute()


def aggregated(make):
    metric = make()
    for batch, size in of(dist.get_rank()):
        metric.update(drawn(batch, size, "numbers")[0])
    return metric.compute()


def gathered(shape):
    """Tensors of a shape of its own on each rank."""
    return gather_all_tensors(
        torch.full([side + dist.get_rank() * (side > 1) for side in shape], dist.get_rank() + 0.5)
    )


def collected(compute_groups):
    metrics = tm.MetricCollection(
        [make(num_classes=NUM_CLASSES, average="macro") for make in (
            classification.MulticlassPrecision, classification.MulticlassRecall, classification.MulticlassF1Score
        )],
        compute_groups=compute_groups,
    )  # fmt: skip
    for batch, size in of(dist.get_rank()):
        metrics.update(*drawn(batch, size, "classes"))
    return metrics.compute()


def composed():
    one, other = regression.MeanSquaredError(), regression.MeanAbsoluteError()
    both = one + 2 * other
    for batch, size in of(dist.get_rank()):
        both.update(*drawn(batch, size, "numbers"))
    return both.compute()


def saved():
    """The state that is saved inside `sync_context` is that of all ranks."""
    metric, _ = updated(regression.MeanSquaredError, "numbers", [dist.get_rank()])
    metric.persistent(True)
    with metric.sync_context():
        state = {name: value.clone() for name, value in metric.state_dict().items()}
    own = metric.state_dict()
    metric.sync()
    metric.unsync()
    return [state, own, metric.compute()]


def in_a_group():
    group = dist.new_group([0, 1])
    metric = classification.MulticlassAccuracy(NUM_CLASSES, process_group=group)
    for batch, size in of(dist.get_rank()):
        metric.update(*drawn(batch, size, "classes"))
    return metric.compute()


def empty_on_one_rank(make):
    metric = make()
    if dist.get_rank() == 0:
        metric.update(torch.tensor([1.0, 2.0]))
    return metric.compute()


def tracked():
    tracker = tm.wrappers.MetricTracker(classification.BinaryAccuracy())
    for batch, size in of(dist.get_rank()):
        tracker.increment()
        tracker.update(*drawn(batch, size, "binary"))
    return [tracker.compute_all(), tracker.best_metric()]


def limits():
    metric = tm.wrappers.MinMaxMetric(classification.BinaryAccuracy())
    for batch, size in of(dist.get_rank()):
        metric.update(*drawn(batch, size, "binary"))
    return metric.compute()


METRICS = {
    "binary": [
        getattr(classification, f"Binary{name}") for name in
        ("Accuracy", "AUROC", "AveragePrecision", "CalibrationError", "CohenKappa", "ConfusionMatrix", "F1Score",
         "HammingDistance", "HingeLoss", "JaccardIndex", "MatthewsCorrCoef", "Precision", "Recall", "Specificity",
         "StatScores")
    ],
    "classes": [
        functools.partial(getattr(classification, f"Multiclass{name}"), num_classes=NUM_CLASSES) for name in
        ("Accuracy", "AUROC", "AveragePrecision", "CalibrationError", "CohenKappa", "ConfusionMatrix",
         "F1Score", "HingeLoss", "JaccardIndex", "MatthewsCorrCoef", "Precision", "Recall", "StatScores")
    ],
    "labels": [
        functools.partial(getattr(classification, f"Multilabel{name}"), num_labels=NUM_CLASSES) for name in
        ("Accuracy", "AUROC", "AveragePrecision", "ConfusionMatrix", "CoverageError", "ExactMatch", "F1Score",
         "RankingAveragePrecision", "RankingLoss", "StatScores")
    ],
    "numbers": [
        getattr(regression, name) for name in
        ("ConcordanceCorrCoef", "ExplainedVariance", "KendallRankCorrCoef", "LogCoshError", "MeanAbsoluteError",
         "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogError", "PearsonCorrCoef", "R2Score",
         "RelativeSquaredError", "SpearmanCorrCoef", "TweedieDevianceScore", "WeightedMeanAbsolutePercentageError")
    ],
    "several": [functools.partial(regression.MeanSquaredError, num_outputs=3), regression.CosineSimilarity],
    "images": [
        functools.partial(image.PeakSignalNoiseRatio, data_range=1.0),
        functools.partial(image.StructuralSimilarityIndexMeasure, data_range=1.0),
        image.UniversalImageQualityIndex, image.SpectralAngleMapper,
    ],
    "sounds": [audio.ScaleInvariantSignalNoiseRatio, audio.SignalNoiseRatio],
    "names": [
        functools.partial(nominal.CramersV, num_classes=NUM_CLASSES),
        functools.partial(nominal.TheilsU, num_classes=NUM_CLASSES),
        clustering.MutualInfoScore, clustering.RandScore, clustering.VMeasureScore,
    ],
    "points": [clustering.CalinskiHarabaszScore, clustering.DaviesBouldinScore],
    "sentences": [text.BLEUScore, text.CHRFScore, text.CharErrorRate, text.WordErrorRate, text.TranslationEditRate],
}  # fmt: skip

dist.init_process_group("gloo")
cases = Cases()
for kind, makes in METRICS.items():
    for make in makes:
        name = f"{kind}, {type(make()).__name__}"
        cases.run(name, whole, make, kind)
        cases.run(f"{name}, on each step", on_step, make, kind)
for name in ("MAP", "MRR", "NormalizedDCG", "Precision", "Recall", "HitRate"):
    for each in (False, True):
        cases.run(f"Retrieval{name}{', on each step' * each}", retrieved, getattr(retrieval, f"Retrieval{name}"), each)
for make in (tm.SumMetric, tm.MeanMetric, tm.MaxMetric, tm.MinMetric, tm.CatMetric):
    cases.run(f"aggregation, {make.__name__}", aggregated, make)
    if make is not tm.CatMetric:
        cases.run(f"aggregation, {make.__name__}, empty on one rank", empty_on_one_rank, make)
for shape in ((), (1,), (3,), (4, 2), (2, 3, 2)):
    cases.run(f"gather_all_tensors, {shape}", gathered, shape)
for compute_groups in (False, True):
    cases.run(f"a collection{', compute groups' * compute_groups}", collected, compute_groups)
cases.run("composed", composed)
cases.run("saved", saved)
cases.run("in a group", in_a_group)
cases.run("tracked", tracked)
cases.run("smallest and largest", limits)
cases.tell()
dist.destroy_process_group()
