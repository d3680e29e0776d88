"""Evaluation and training take what people have: loaders, batches of any kind, steps and metrics of their own."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import phalanx
from tests.train._programs import make_data, make_model, mean_squares, quietly, state_of

LENGTH = 23


class Named(Dataset):
    """The usual data as dictionaries, whose targets are called "labels"."""

    def __init__(self, length=LENGTH, key="x"):
        self._data, self._key = make_data(length), key

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        inputs, targets = self._data[index]
        return {self._key: inputs, "labels": targets}


class Keywords(nn.Module):
    """Takes its inputs by keyword alone."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, *, x):
        return self.inner(x)


class Counts:
    """A metric as those of torchmetrics: its state is summed over the ranks when it is computed."""

    def __init__(self, *, syncs=True):
        self._syncs = syncs
        self.reset()

    def reset(self):
        self._sums = torch.zeros(2, dtype=torch.float64)

    def update(self, outputs, targets):
        self._sums += torch.tensor([(outputs - targets).abs().sum().item(), len(targets)], dtype=torch.float64)

    def compute(self):
        sums = self._sums.clone()
        if self._syncs and dist.is_initialized():
            dist.all_reduce(sums)
        return {"mean": sums[0] / sums[1], "num": sums[1]}


def make_trainer(folder, loss=mean_squares, model=None, **options):
    model = make_model() if model is None else model
    options = {"max_epochs": 1, "global_batch_size": 8, "folder": folder, **options}
    return phalanx.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, **options)


def distance(outputs, targets):
    return (outputs - targets).abs().squeeze(1)


def refused(fn, *args, **kwargs):
    try:
        quietly(fn, *args, **kwargs)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def run_programs(rank, size, folder):
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers
    return {program.__name__: program(f"{folder}/{program.__name__}") for program in PROGRAMS}


def loaders(folder):
    """Evaluate the same samples from everything that gives them."""
    data = make_data(LENGTH)
    trainer = make_trainer(folder, metrics={"distance": distance})
    halves = torch_data.BatchSampler(torch_data.RandomSampler(data), 5, drop_last=False)

    def pairs(samples):
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    sampler = phalanx.DistributedSampler(data, shuffle=False, pad=False)
    every = {
        "dataset": data,
        "loader": DataLoader(data, batch_size=4),
        "shuffled": DataLoader(data, batch_size=3, shuffle=True),
        "workers": DataLoader(data, batch_size=4, num_workers=1),
        "batch sampler": DataLoader(data, batch_sampler=halves, collate_fn=pairs),
        "phalanx": phalanx.DataLoader(data, 4, num_workers=0),
        "divided": DataLoader(data, batch_size=4, sampler=sampler),
        "own batches": list(DataLoader(data, batch_size=4, sampler=sampler)),
    }
    torch.manual_seed(torch.initial_seed() + (dist.get_rank() if dist.is_initialized() else 0))  # ranks draw otherwise
    before = torch.get_rng_state()
    values = {name: trainer.evaluate(given) for name, given in every.items()}
    return values, torch.equal(before, torch.get_rng_state())


def own_parts(folder):
    """Evaluate and train on torch's loaders of parts that ranks have made themselves; return what each has seen."""
    data, size = make_data(24), world_size()
    rank = dist.get_rank() if dist.is_initialized() else 0
    part = Subset(data, range(rank, 24, size))
    halves = Subset(Subset(data, range(rank, 24, size)), range(0, len(part), 2))
    parts = {
        "a subset": Subset(data, torch.arange(rank, 24, size)),
        "half of a subset": halves,
        "some twice": Subset(data, [*part.indices, rank]),
        "a partition": phalanx.data.Partition(data, part.indices),
        "its own": torch_data.TensorDataset(*(tensor[: 9 + rank] for tensor in data.tensors)),
    }
    seen = {}
    for name, own in parts.items():
        taken = []

        def step(model, batch, taken=taken):
            taken.extend(batch[0][:, 0].tolist())
            return mean_squares(model(batch[0]), batch[1])

        want = sorted(inputs[0].item() for inputs, _ in own)
        trainer = make_trainer(f"{folder}/{name}", None, training_step=step, global_batch_size=size)
        trainer.evaluate(DataLoader(own, batch_size=2))
        is_evaluated = sorted(taken) == want
        taken.clear()
        quietly(trainer.fit, DataLoader(own, batch_size=1, shuffle=True))
        seen[name] = is_evaluated, len(taken), set(taken) <= set(want)
    overlapping = DataLoader(Subset(data, range(rank, rank + 10)), batch_size=2)
    trainer = make_trainer(f"{folder}/overlapping")
    return seen, refused(trainer.evaluate, overlapping), refused(trainer.fit, overlapping)


def padding(folder):
    data = make_data(LENGTH)
    loader = DataLoader(data, batch_size=4, sampler=torch_data.DistributedSampler(data, world_size(), 0, shuffle=False))
    trainer = make_trainer(folder)
    if world_size() == 1:
        return ""
    if dist.get_rank() > 0:
        trainer.evaluate(loader)
        return ""
    with pytest.warns(UserWarning, match="so 1 sample would be counted twice"):
        trainer.evaluate(loader)
    return "warned"


def streams(folder):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*make_data(LENGTH).tensors, strict=True)

    loader = phalanx.DataLoader(Stream(), 4, num_workers=0, is_own_part=False)
    return make_trainer(folder).evaluate(loader)


def steps_of_ones_own(folder):
    def evaluation_step(model, batch):
        outputs = model(x=batch["x"])
        counts.update(outputs, batch["labels"])
        return {"loss": mean_squares(outputs, batch["labels"]), "distance": distance(outputs, batch["labels"])}

    def training_step(model, batch):
        loss = mean_squares(model(x=batch["x"]), batch["labels"])
        penalty = sum(p.square().sum() for p in model.parameters())
        return {"loss": loss + 0 * penalty, "penalty": penalty, "one": 1.0}

    counts = Counts()
    options = {"training_step": training_step, "model": Keywords(), "metrics": {"counts": counts}, "log_every": 2}
    trainer = make_trainer(folder, None, evaluation_step=evaluation_step, **options)
    quietly(trainer.fit, Named(), Named(11))
    records = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]  # noqa: SIM115
    return trainer.evaluation, [(r["step"], r["one"], r["penalty"] > 0) for r in records if r["kind"] == "step"]


def metrics_with_a_state(folder):
    trainer = make_trainer(folder, metrics={"counts": Counts(), "distance": distance})
    first, again = trainer.evaluate(make_data(LENGTH)), trainer.evaluate(make_data(LENGTH))
    few = DataLoader(make_data(3), batch_size=3)
    assert trainer.evaluate(few)["counts_num"] == 3
    if world_size() > 1:
        assert "rank 0 has no sample" in refused(trainer.evaluate, make_data(1))
    alone = make_trainer(f"{folder}2", metrics={"counts": Counts(syncs=False)})
    return first, again, refused(alone.evaluate, make_data(LENGTH))


def batches_of_any_kind(folder):
    """Return how the same training ends on tuples, dictionaries, and samples that a function makes batches of."""

    def collate(samples):
        return {"inputs": torch.stack([a for a, _ in samples]), "labels": torch.stack([b for _, b in samples])}

    def trained(name, data, model=None, **options):
        trainer = make_trainer(f"{folder}/{name}", model=model, metrics={"distance": distance}, **options)
        quietly(trainer.fit, data, data)
        predicted = trainer.predict(data)
        state = state_of(trainer.model)
        return {key.removeprefix("inner."): value for key, value in state.items()}, trainer.evaluation, predicted

    return [
        trained("tuples", make_data(LENGTH)),
        trained("keywords", Named(), Keywords()),
        trained("positions", Named(key="inputs")),
        trained("collated", make_data(LENGTH), collate_fn=collate, micro_batch_size=2),
        trained("in workers", make_data(LENGTH), collate_fn=collate, num_workers=1),
    ]


class ByLength:
    """Batches of 1 to 6 samples, in another order each time."""

    def __init__(self, generator=None):
        self._generator = generator

    def __iter__(self):
        order = torch.randperm(LENGTH, generator=self._generator).tolist()
        yield from (order[size * (size - 1) // 2 : size * (size + 1) // 2] for size in range(1, 7))


def batch_samplers(folder):
    """Train whole and in two parts; return what is trained on, and with what result."""

    def trained(name, **options):
        taken = []

        def step(model, batch):
            taken.extend(batch[0][:, 0].tolist())
            return mean_squares(model(batch[0]), batch[1])

        trainer = make_trainer(f"{folder}/{name}", None, training_step=step, **options)
        quietly(trainer.fit, make_data(LENGTH), batch_sampler=ByLength())
        return trainer, taken

    whole, taken = trained("whole", max_epochs=2)
    trained("parts", max_epochs=2, max_steps=8)
    resumed, _ = trained("parts", max_epochs=2, micro_batch_size=2)
    return taken, whole.step, state_of(whole.model), state_of(resumed.model)


def without_first(samples):
    return torch_data.default_collate(samples[1:] or samples)


def without_positive(samples):
    inputs, targets = torch_data.default_collate(samples)
    keep = inputs[:, 0] <= 0
    return inputs[keep], targets[keep]


def left_out(folder):
    """Evaluate, with a mean and with one number for each sample, where a function leaves samples out."""
    trainer = make_trainer(folder, metrics={"distance": distance}, collate_fn=without_positive)
    loader = DataLoader(make_data(LENGTH), batch_size=4, collate_fn=without_positive)
    return trainer.evaluate(make_data(LENGTH)), trainer.evaluate(loader)


def refusals(folder):
    data = make_data(LENGTH)
    wrong = make_trainer(f"{folder}/1", metrics={"accuracy": lambda outputs, targets: outputs.new_zeros(3)})
    triples = torch_data.TensorDataset(*data.tensors, data.tensors[0])
    unnamed = DataLoader(Named(key="label"), batch_size=4)
    nothing = make_trainer(f"{folder}/2", None, training_step=lambda model, batch: None)
    taken = make_trainer(f"{folder}/3", None, evaluation_step=lambda m, b: {"lr": b[0].sum()}, training_step=max)
    plain = make_trainer(f"{folder}/4", collate_fn=list)
    each = make_trainer(f"{folder}/10", metrics={"distance": distance}, max_epochs=2, collate_fn=without_first)
    batches = [*DataLoader(data, batch_size=4)]
    once = (batch for batch in batches)
    make_trainer(f"{folder}/11").evaluate(once)
    return {
        "length": refused(wrong.evaluate, data),
        "triples": refused(make_trainer(f"{folder}/8").fit, triples),
        "two labels": refused(make_trainer(f"{folder}/5").evaluate, unnamed),
        "nothing": refused(nothing.fit, data),
        "reserved": refused(taken.evaluate, data),
        "collate_fn": refused(plain.fit, [1, 2]),
        "predict": refused(plain.predict, unnamed),
        "empty": refused(make_trainer(f"{folder}/6").evaluate, make_data(0)),
        "predict empty": refused(make_trainer(f"{folder}/13").predict, make_data(0)),
        "no lists": refused(plain.fit, data, batch_sampler=[1, 2]),
        "not again": refused(plain.fit, data, batch_sampler=ByLength(torch.Generator())),
        "twice": refused(make_trainer(f"{folder}/9").fit, list(data), batch_sampler=[[1]]),
        "left out": refused(each.predict, data),
        "generator": refused(each.fit, data, (batch for batch in batches)),
        "used up": refused(each.evaluate, once),
        "used up in training": refused(make_trainer(f"{folder}/12", max_epochs=2).fit, (b for b in batches)),
        "undivided": refused(make_trainer(f"{folder}/7").fit, DataLoader(data, batch_sampler=[[1, 2], [3]])),
    }


def orders_of_torchs_sampler(folder):
    """Train on loaders whose sampler nobody tells the epoch; return whether the second one has another order."""
    results = []
    for in_batches in (False, True):
        orders = []

        def step(model, batch, orders=orders):
            orders.append(batch[0][:, 0].tolist())
            return mean_squares(model(batch[0]), batch[1])

        data = make_data(24)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sampler = torch_data.DistributedSampler(data, size, rank, shuffle=True)
        batches = torch_data.BatchSampler(sampler, 4, drop_last=False)
        loader = DataLoader(data, batch_sampler=batches) if in_batches else DataLoader(data, 4, sampler=sampler)
        trainer = make_trainer(
            f"{folder}/{in_batches}", None, training_step=step, max_epochs=2, global_batch_size=4 * size
        )
        quietly(trainer.fit, loader)
        half = len(orders) // 2
        results.append((orders[:half] != orders[half:], trainer.step, sampler.epoch))
    return results


PROGRAMS = (
    batch_samplers, loaders, own_parts, padding, streams, steps_of_ones_own, metrics_with_a_state, batches_of_any_kind,
    refusals, left_out, orders_of_torchs_sampler,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """What each rank returned from each program, by world size."""
    return {
        size: run_ranks(run_programs, size, str(tmp_path_factory.mktemp("evaluation")), timeout_s=300)
        for size in (1, 2, 3)
    }


def expected(data=None):
    inputs, targets = make_data(LENGTH).tensors if data is None else data
    model = make_model().eval()
    with torch.no_grad():
        outputs = model(inputs)
        return float(mean_squares(outputs, targets)), float(distance(outputs, targets).mean())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_kind_of_loader_evaluates_each_sample_once(results, world_size):
    loss, mean = expected()
    for of_rank in results[world_size]:
        values, draws_nothing = of_rank["loaders"]
        assert draws_nothing
        for name, value in values.items():
            assert value == pytest.approx({"loss": loss, "distance": mean}, rel=1e-5), name
        assert of_rank["streams"]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_that_a_function_leaves_out_of_a_batch_do_not_count(results, world_size):
    loss, mean = expected(without_positive(list(make_data(LENGTH))))
    for of_rank in results[world_size]:
        for value in of_rank["left_out"]:
            assert value == pytest.approx({"loss": loss, "distance": mean}, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plain_loader_of_a_ranks_own_part_is_evaluated_and_trained_on_whole(results, world_size):
    lengths = {"a subset": 24 // world_size, "half of a subset": 12 // world_size, "a partition": 24 // world_size}
    lengths |= {"some twice": 24 // world_size + 1}
    for rank, of_rank in enumerate(results[world_size]):
        seen, evaluated, trained = of_rank["own_parts"]
        # A rank that runs out goes along with two samples in each of the longest rank's further steps.
        lengths["its own"] = 9 + rank + 2 * (world_size - 1 - rank)
        assert seen == {name: (True, length, True) for name, length in lengths.items()}
        for refusal in (evaluated, trained) if world_size > 1 else ():
            assert "some samples are in several of them" in refusal


def test_a_sampler_that_pads_is_named(results):
    assert [of_rank["padding"] for of_rank in results[2]] == ["warned", ""]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_of_ones_own_are_evaluated_and_their_parts_logged(results, world_size):
    for of_rank in results[world_size]:
        evaluation, logged = of_rank["steps_of_ones_own"]
        assert evaluation == pytest.approx(results[1][0]["steps_of_ones_own"][0], rel=1e-4)
        assert evaluation["counts_mean"] == pytest.approx(evaluation["distance"], rel=1e-5)
        assert evaluation["counts_num"] == 11
        assert logged == [(2, pytest.approx(1.0), True), (3, pytest.approx(1.0), True)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_metrics_with_a_state_see_each_sample_once_and_must_combine_the_ranks(results, world_size):
    for of_rank in results[world_size]:
        first, again, problem = of_rank["metrics_with_a_state"]
        assert first == again
        assert first["counts_num"] == LENGTH
        assert first["counts_mean"] == pytest.approx(expected()[1], rel=1e-5)
        assert ("metric 'counts' computed different values on the ranks" in problem) == (world_size > 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tuples_and_dictionaries_train_to_the_same_weights(results, world_size):
    for of_rank in results[world_size]:
        (state, evaluation, predicted), *others = of_rank["batches_of_any_kind"]
        for other, other_evaluation, other_predicted in others:
            torch.testing.assert_close(other, state)
            torch.testing.assert_close(other_predicted, predicted)
            assert other_evaluation == pytest.approx(evaluation, rel=1e-4)
        torch.testing.assert_close(state, results[1][0]["batches_of_any_kind"][0][0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_makes_no_sense_is_refused_on_every_rank_with_the_right_call(results, world_size):
    for of_rank in results[world_size]:
        texts = of_rank["refusals"]
        assert "'accuracy' has 3 values (shape (3,)) for a batch of" in texts["length"]
        assert "the batch is list of" in texts["triples"]
        assert "'label', 'labels', of which exactly one must be in" in texts["two labels"]
        assert 'return {"loss": loss, "penalty": penalty}; it returned NoneType' in texts["nothing"]
        assert "'lr' has a meaning of its own" in texts["reserved"]
        assert "a loader has its own: pass it there" in texts["collate_fn"]
        assert "torch.utils.data.BatchSampler(sampler, batch_size=32" in texts["no lists"]
        assert "yields different batches for the same epoch" in texts["not again"]
        assert "batch_sampler divides a dataset; a loader has its own" in texts["twice"]
        assert "trainer.predict(loader.dataset)" in texts["predict"]
        assert "Trainer.evaluate: the data has no samples" in texts["empty"]
        assert "Trainer.predict: the data has no samples" in texts["predict empty"]
        assert "Subset(dataset, indices)" in texts["left out"]
        assert "such as [*batches]" in texts["generator"]
        assert "an iterator that is used up" in texts["used up"]
        assert "data is needed in each epoch, and an iterator (generator) is used up" in texts["used up in training"]
        assert ("batch_sampler=batch_sampler, is_own_part=True" in texts["undivided"]) == (world_size > 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_sampler_is_told_the_epoch(results, world_size):
    steps = 2 * -(-24 // world_size // 4)
    for of_rank in results[world_size]:
        assert of_rank["orders_of_torchs_sampler"] == [(True, steps, 2)] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_batch_sampler_makes_the_batches_of_all_ranks_and_resumes(results, world_size):
    taken, num_steps, want, _ = results[1][0]["batch_samplers"]
    every = [of_rank["batch_samplers"] for of_rank in results[world_size]]
    assert num_steps == 12
    assert taken[:21] != taken[21:]
    for _, num, whole, resumed in every:
        assert num == num_steps
        torch.testing.assert_close(whole, want)
        torch.testing.assert_close(resumed, want)
