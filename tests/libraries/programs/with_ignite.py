"""Ignite's engine, metrics and auto_* helpers."""

import ignite.distributed as idist
import torch
from _told import model, samples, tell
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss


def train(local_rank):
    net = idist.auto_model(model())
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1))
    loader = idist.auto_dataloader(samples(), batch_size=8, shuffle=False)
    criterion = torch.nn.CrossEntropyLoss()
    create_supervised_trainer(net, optimizer, criterion).run(loader, max_epochs=2)
    evaluator = create_supervised_evaluator(net, {"accuracy": Accuracy(), "loss": Loss(criterion)})
    metrics = evaluator.run(loader).metrics
    tell(net, **metrics)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
