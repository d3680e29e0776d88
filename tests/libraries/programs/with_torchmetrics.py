"""torchmetrics, whose states are gathered over the ranks."""

import torch
import torch.distributed as dist
from _told import model, samples, tell
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

dist.init_process_group("gloo")
net = model()
metrics = MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3, thresholds=None), MulticlassConfusionMatrix(3)])
mean = MeanMetric()
mine = samples()[dist.get_rank() :: dist.get_world_size()][: 20 - 5 * dist.get_rank()]  # not equally many
for inputs, target in mine:
    scores = net(inputs[None]).softmax(1)
    metrics.update(scores, torch.tensor([target]))
    mean.update(scores.max().detach())
tell(net, mean=float(mean.compute()), **{name: value.tolist() for name, value in metrics.compute().items()})
dist.destroy_process_group()
