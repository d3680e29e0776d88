"""What a script has got wrong is said before the first step, with the right call, alike on every rank."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader

import phalanx
from phalanx.train.arguments import check_arguments, check_fit
from phalanx.train.settings import Settings
from phalanx.train.step.objective import Objective
from tests.train._programs import Seen, make_data, make_model, mean_squares, quietly

LIMIT_S = 100


def distance(outputs, targets):
    return (outputs - targets).abs().squeeze(1)


SUMS = (
    nn.CrossEntropyLoss(reduction="sum"),
    functools.partial(nn.functional.cross_entropy, reduction="sum"),
    functools.partial(nn.MSELoss(reduction="sum")),
)


class Arguments:
    """Arguments of a `Trainer` that is right, and of one with something else in the place of some."""

    def __init__(self):
        model = make_model()
        self.right = {
            "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "scheduler": None,
            "callbacks": (), "loss": mean_squares,
        }  # fmt: skip

    def check(self, **wrong):
        check_arguments(**(self.right | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": nn.Linear}, r"model is the class nn\.Linear itself; make an object of it: model = nn\.Linear\("),
        (
            {"model": len},
            r"model must be a torch\.nn\.Module, got an object of type builtin_function_or_method; right: Trainer\(",
        ),
        ({"optimizer": torch.optim.SGD}, r"the class torch\.optim\.SGD .*torch\.optim\.SGD\(model\.parameters\(\), "),
        ({"optimizer": "sgd"}, r"optimizer must be an optimizer, got 'sgd'; right: torch\.optim\.SGD\(model\.param"),
        ({"optimizer": mean_squares}, "optimizer must be an optimizer, got an object of type function"),
        ({"optimizer": "adamw"}, r"got 'adamw'; right: torch\.optim\.AdamW\(model\.parameters\(\)\)"),
        ({"loss": nn.CrossEntropyLoss}, r"loss is the class .*: loss=nn\.CrossEntropyLoss\(\)"),
        ({"loss": "mse"}, r"loss must be a function, got 'mse'; right: loss=nn\.functional\.cross_entropy or"),
        ({"scheduler": lr_scheduler.StepLR}, r"the class lr_scheduler\.StepLR itself.*StepLR\(optimizer, \.\.\.\)"),
        ({"scheduler": lambda step: 1.0}, r"scheduler must be a schedule.*LambdaLR\(optimizer, function\)"),
        (
            {"scheduler": lambda optimizer: lr_scheduler.StepLR(optimizer, 3)},
            r"^Trainer: scheduler is called as scheduler\(optimizer, num_steps\), and this function takes the "
            r"optimizer alone; right: scheduler=lambda optimizer, num_steps: \.\.\.$",
        ),
        (
            {"scheduler": "cosine"},
            r"got 'cosine'; right: scheduler=lambda optimizer, num_steps: torch\.optim\.lr_scheduler\.CosineAnnea",
        ),
        (
            {"scheduler": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1)},
            r"right: scheduler=lambda optimizer, num_steps: "
            r"lr_scheduler\.OneCycleLR\(optimizer, max_lr=0\.1, total_steps=num_steps\)",
        ),
        (  # the number of steps would be its step_size
            {"scheduler": functools.partial(lr_scheduler.StepLR, gamma=0.5)},
            r"take the number of steps there; right: .*lr_scheduler\.StepLR\(optimizer, step_size=\.\.\., gamma=0\.5\)",
        ),
        (
            {"callbacks": Seen()},
            r"callbacks must be a list of objects, got an object of type Seen; right: callbacks=\[callback\]",
        ),
        ({"callbacks": [Seen]}, r"callbacks is the class .*Seen itself"),
        ({"collate_fn": 3}, "collate_fn must be a function, got 3"),
    ],
)
def test_a_class_or_a_name_instead_of_an_object_is_a_type_error_with_the_right_call(wrong, message):
    Arguments().check(collate_fn=list)
    with pytest.raises(TypeError, match=message):
        Arguments().check(**wrong)


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(lr_scheduler.CosineAnnealingLR, eta_min=1e-5),
        lambda optimizer, num_steps: lr_scheduler.StepLR(optimizer, num_steps // 3),
    ],
)
def test_what_takes_the_optimizer_and_the_number_of_steps_makes_the_schedule(function):
    Arguments().check(scheduler=function)


def test_an_optimizer_that_calls_the_model_itself_is_refused():
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS computes the loss several times in a step"):
        phalanx.Trainer(model, torch.optim.LBFGS(model.parameters()), mean_squares, max_epochs=1)


def test_a_loss_without_a_mean_and_an_optimizer_or_schedule_of_another_model_are_refused():
    others = torch.optim.SGD(make_model().parameters(), lr=0.1)
    for wrong, message in (
        ({"loss": nn.MSELoss(reduction="none")}, 'reduction="none", which gives a value for each sample'),
        *(({"loss": loss}, 'the loss has reduction="sum", .* would depend on the number of ranks') for loss in SUMS),
        ({"optimizer": others}, "the optimizer has no parameter of this model"),
        ({"scheduler": lr_scheduler.StepLR(others, 1)}, "the scheduler is that of another optimizer"),
        ({"scheduler": functools.partial(lr_scheduler.ReduceLROnPlateau, patience=3)}, "needs no number of steps"),
    ):
        with pytest.raises(ValueError, match=message):
            Arguments().check(**wrong)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["accuracy"], r"metrics must be a dictionary of functions by name, got \['accuracy'\]; right: metrics=\{"),
        (distance, r"metrics must be a dictionary of functions by name, got an object of type function; right"),
        ({"accuracy": "accuracy"}, r"metrics\['accuracy'\] must be a function, or an object with update"),
        ({"accuracy": Seen}, r"metrics\['accuracy'\] is the class .*Seen itself"),
        ({3: distance}, "a name in metrics must be a text, got 3"),
    ],
)
def test_metrics_without_names_or_functions_are_a_type_error(metrics, message):
    with pytest.raises(TypeError, match=message):
        Objective(mean_squares, metrics=metrics)


@pytest.mark.parametrize("name", ["loss", "epoch", "lr", "kind"])
def test_a_metric_of_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}'.* give .* another"):
        Objective(mean_squares, metrics={"distance": distance, name: distance})


@pytest.mark.parametrize("metric", SUMS)
def test_a_metric_that_is_a_sum_over_the_batch_is_refused(metric):
    with pytest.raises(ValueError, match=r"metrics\['total'\] has reduction=\"sum\""):
        Objective(mean_squares, metrics={"total": metric})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": "3"}, r"max_epochs must be a whole number, got '3' \(str\); right: max_epochs=3"),
        ({"max_steps": 0.5}, r"max_steps must be a whole number, got 0\.5"),
        ({"patience": True}, r"patience must be a whole number, got True \(bool\)"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"global_batch_size": [8]}, r"global_batch_size must be a whole number, got \[8\] \(list\)"),
        ({"snapshot_every": "all"}, 'snapshot_every must be a whole number, or "auto", got'),
        ({"clip_norm": "1"}, r"clip_norm must be a number, got '1' \(str\); right: clip_norm=1"),
        ({"drop_last": "no"}, r"drop_last must be True or False, got 'no'"),
        ({"monitor": None}, "monitor must be the name of a value"),
        ({"folder": 3}, "folder must be a path, got 3"),
    ],
)
def test_a_setting_of_another_type_is_a_type_error_that_names_it(settings, message):
    with pytest.raises(TypeError, match=message):
        Settings(**({"max_epochs": 1} | settings))


@pytest.mark.parametrize(
    ("name", "given", "right"),
    [
        ("precision", "bf16-mixed", '"bf16"'), ("precision", "16-mixed", '"fp16"'), ("precision", "32", '"fp32"'),
        ("precision", 16, '"fp16"'), ("precision", torch.bfloat16, '"bf16"'), ("precision", None, '"fp32"'),
        ("precision", "bf16-true", '"fp32" and model.to(torch.bfloat16), because this changes the weights too'),
        ("resume", True, '"auto"'), ("resume", False, '"never"'), ("deterministic", True, '"world"'),
        ("deterministic", False, "None"), ("on_nan", "warning", '"warn"'), ("scheduler_interval", "batch", '"step"'),
        ("divide_optimizer", False, '"never"'),
    ],
)  # fmt: skip
def test_another_librarys_word_for_a_choice_is_told_the_one_that_is_meant(name, given, right):
    with pytest.raises(ValueError, match=re.escape(f"got {given!r}; right: {name}={right}") + "$"):
        Settings(max_epochs=1, **{name: given})


def refusal(data, validation_data=None, batch_sampler=None, *, needs_pairs=True, **settings):
    """Return the error for such data, if there is one."""
    s = Settings(**(settings or {"max_epochs": 2}))
    try:
        check_fit(data, validation_data, batch_sampler, s, (), is_plateau=False, needs_pairs=needs_pairs)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


BATCHES = [make_data(2).tensors] * 2


@pytest.mark.parametrize(
    "make",
    [lambda: map(tuple, BATCHES), lambda: iter(BATCHES), lambda: iter(loader(4)), lambda: (batch for batch in BATCHES)],
    ids=["map", "iter", "loader", "generator"],
)
def test_an_iterator_is_refused_where_it_would_be_needed_again(make):
    kind = type(make()).__name__
    for name, said in {
        "data": refusal(make()), "validation_data": refusal(BATCHES, make()),
        "batch_sampler": refusal(make_data(), batch_sampler=make(), max_epochs=1),
    }.items():  # fmt: skip
        assert f"ValueError: Trainer: {name} is needed in each epoch, and an iterator ({kind}) is used up after" in said
        assert said.endswith("or a list of batches, such as [*batches]")
    assert refusal(make(), make(), max_epochs=1) == refusal(make(), max_epochs=2, max_steps=1) == ""


def test_inputs_and_targets_that_are_apart_are_refused_and_arrays_that_are_data_are_taken():
    inputs, targets = make_data().tensors
    right = r"got an array of shape \(\d+, 6\); right: trainer\.fit\(torch\.utils\.data\.TensorDataset\(X, Y\)\)"
    for data, validation in (
        (inputs, targets),
        (inputs.numpy(), targets.numpy()),
        (inputs, None),
        (make_data(), inputs),
    ):
        assert re.match(f"TypeError: Trainer: (validation_)?data must have inputs.*{right}", refusal(data, validation))
    assert re.search(right, refusal(inputs, targets, needs_pairs=False))
    assert refusal(inputs, inputs[:8], needs_pairs=False) == refusal(inputs, needs_pairs=False) == ""


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("metric", "metrics"), ("callback", "callbacks"), ("schedulers", "scheduler"), ("losss", "loss"),
        ("trainingstep", "training_step"), ("logger", "loggers"), ("lr_scheduler", "scheduler"),
        ("max_epoch", "max_epochs"), ("epochs", "max_epochs"), ("colate_fn", "collate_fn"),
        ("eval_step", "evaluation_step"),
    ],
)  # fmt: skip
def test_a_misspelled_argument_is_named_with_the_one_that_is_meant_and_no_other(wrong, meant):
    arguments = Arguments().right
    with pytest.raises(TypeError, match=f"^Trainer: there is no argument {wrong}, did you mean {meant}\\?$"):
        phalanx.Trainer(arguments["model"], arguments["optimizer"], **{wrong: 1, "max_epochs": 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("learning_rate", r"; right: torch\.optim\.SGD\(model\.parameters\(\), lr=0\.1\), as the optimizer"),
        ("lr", "; right: torch\\.optim\\.SGD"),
        ("devices", "; right: phalanx run --nproc-per-node N script.py"),
        ("accelerator", "; right: phalanx run --nproc-per-node N"),
        ("strategy", "; right: phalanx run --nproc-per-node N"),
        ("num_nodes", "; right: phalanx run --nnodes N"),
        ("train_dataset", r"; right: trainer\.fit\(data, validation_data\)"),
        ("ckpt_path", r"; right: trainer\.fit\(data\), which resumes from the newest checkpoint"),
        ("shuffle", "; right: leave it out"),
        ("warmup_steps", r"; help\(phalanx\.Trainer\) lists all$"),
        ("tokenizer", r"; help\(phalanx\.Trainer\) lists all$"),
    ],
)
def test_what_other_trainers_take_is_told_the_right_place_or_no_bad_guess(wrong, said):
    arguments = Arguments().right
    with pytest.raises(TypeError, match=f"^Trainer: there is no argument {wrong}{said}"):
        phalanx.Trainer(arguments["model"], arguments["optimizer"], **{wrong: 1, "max_epochs": 1})


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    arguments = Arguments().right
    with phalanx.init():
        yield phalanx.Trainer(
            arguments["model"], arguments["optimizer"], mean_squares, max_epochs=1,
            folder=tmp_path_factory.mktemp("run"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "wrong", "said"),
    [
        ("fit", "train_dataloaders", r"; right: trainer\.fit\(data, validation_data\)$"),
        ("fit", "ckpt_path", r"; right: trainer\.fit\(data\), which resumes"),
        ("fit", "epochs", r"; right: Trainer\(max_epochs=\.\.\.\)$"),
        ("fit", "max_steps", r"; right: Trainer\(max_steps=\.\.\.\)$"),
        ("fit", "validation_dat", r", did you mean validation_data\?$"),
        ("fit", "xyz", r"\. It takes data, validation_data, batch_sampler$"),
        ("evaluate", "dataloaders", r"\. It takes data$"),
        ("predict", "batch_size", r"; right: Trainer\(global_batch_size=\.\.\.\)$"),
    ],
)
def test_an_argument_that_a_method_of_the_trainer_lacks_is_told_its_place(trainer, method, wrong, said):
    with pytest.raises(TypeError, match=f"^Trainer\\.{method}: there is no argument {wrong}{said}"):
        getattr(trainer, method)(make_data(), **{wrong: 1})


@pytest.mark.parametrize(
    ("other", "right"),
    [
        ("validate", "trainer.evaluate(data)"), ("test", "trainer.evaluate(data)"), ("current_epoch", "trainer.epoch"),
        ("global_step", "trainer.step"), ("should_stop", "trainer.stop()"),
        ("max_epochs", "trainer.settings.max_epochs"), ("epochs", "trainer.settings.max_epochs"),
        ("lr_scheduler", "trainer.scheduler"),
        ("world_size", "trainer.session.world_size"),
    ],
)  # fmt: skip
def test_another_trainers_attribute_is_told_the_one_that_is_meant_and_is_none(trainer, other, right):
    with pytest.raises(AttributeError, match=f"^Trainer: there is no attribute {other}; right: {re.escape(right)}$"):
        getattr(trainer, other)
    assert getattr(trainer, other, None) is None


def test_another_attribute_that_is_missing_is_pythons_own_error_also_within_a_property():
    class Own(phalanx.Trainer):
        def __init__(self):
            self._is_made = True

        @property
        def test(self):
            return self.nowhere

    with pytest.raises(AttributeError, match="'Own' object has no attribute 'nowhere'"):
        _ = Own().test
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'elsewhere'"):
        _ = Own().elsewhere
    with phalanx.init():
        own = Own()
        own.world_size = 3  # a subclass may have any
        assert own.world_size == 3


def test_a_whole_number_of_another_type_and_a_path_are_taken(tmp_path):
    settings = Settings(max_steps=1e4, max_epochs=torch.ones(2, dtype=torch.int64).numpy()[0], folder=tmp_path)
    assert (type(settings.max_steps), type(settings.max_epochs), settings.folder) == (int, int, str(tmp_path))


# ---- on ranks ------------------------------------------------------------------------------------------------------


class Steps:
    """A callback that counts steps."""

    def __init__(self):
        self.num = 0

    def on_step(self, trainer):
        self.num += 1


def fit(base, loss=mean_squares, *, model=None, data=None, validation=None, schedule=None, batches=None, **options):
    """Train; return what was said, or the error and how many steps came before it."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = Steps()
    options = {"max_epochs": 2, "callbacks": [steps], "folder": f"{base}/{fit.num}", **options}
    fit.num += 1
    try:
        trainer = phalanx.Trainer(model, optimizer, loss, scheduler=schedule and schedule(optimizer), **options)
        data = make_data() if data is None else data
        return quietly(trainer.fit, data, validation, batch_sampler=batches)[1]
    except Exception as error:
        return type(error).__name__, str(error), steps.num


fit.num = 0


class OfImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, pixels):
        return self.linear(pixels)


def evaluate_without(model, batch):
    return {"distance": distance(model(batch[0]), batch[1])}


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)


def warm_up_then(schedule):
    """Make a schedule that takes the place of a constant one after a step."""

    def make(optimizer):
        parts = [lr_scheduler.ConstantLR(optimizer), schedule(optimizer)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])

    return make


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer), one_cycle(optimizer)])


def one_cycle_at_first(optimizer):
    parts = [one_cycle(optimizer), lr_scheduler.ConstantLR(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def loader(batch_size):
    sampler = phalanx.DistributedSampler(make_data())
    return DataLoader(make_data(), batch_size=batch_size, sampler=sampler)


def sampler(batch_size):
    return BatchSampler(range(50), batch_size, drop_last=False)


def make_mistakes(rank, world_size, folder):
    named = [{"image": inputs, "label": targets} for inputs, targets in zip(*make_data(8).tensors, strict=True)]
    step = {"loss": None, "training_step": lambda model, batch: mean_squares(model(batch[0]), batch[1])}
    with_dict = {"metrics": {"distance": lambda outputs, targets: {"mean": 1.0}}}
    with_matrix = {"metrics": {"distance": lambda outputs, targets: torch.ones(3, 3)}}
    return {
        "loader of another size": fit(folder, data=loader(4), global_batch_size=64),
        "loader of that size": fit(folder, data=loader(4), global_batch_size=4 * world_size),
        "sampler of another size": fit(folder, batches=sampler(4), global_batch_size=64),
        "sampler of that size": fit(folder, batches=sampler(10), global_batch_size=10),
        "sampler of any size": fit(folder, batches=[[0, 1], [2, 3, 4]], global_batch_size=64),
        "batches": fit(folder, data=[make_data(2).tensors], global_batch_size=64, drop_last=True),
        "monitor": fit(folder, validation=make_data(8), monitor="accuracy", metrics={"distance": distance}),
        "monitor of a step": fit(
            folder, validation=make_data(8), monitor="accuracy", evaluation_step=evaluate_without, **step
        ),
        "one cycle": fit(folder, schedule=one_cycle),
        "one cycle by epoch": fit(folder, schedule=one_cycle, scheduler_interval="epoch"),
        "one cycle after a warm-up": fit(folder, schedule=warm_up_then(one_cycle)),
        "one cycle in a chain": fit(folder, schedule=chained),
        "one cycle that ends in time": fit(folder, schedule=one_cycle_at_first),
        "cosine": fit(folder, schedule=cosine),
        "cosine after a warm-up": fit(folder, schedule=warm_up_then(cosine)),
        "monitor of nothing": fit(folder, monitor="loss"),
        "plateau": fit(folder, schedule=lr_scheduler.ReduceLROnPlateau, scheduler_interval="epoch"),
        "closed": fit(folder, folder="/sys/kernel"),  # where nobody can make a folder, root neither
        "dict": fit(folder, validation=make_data(8), **with_dict),
        "matrix": fit(folder, validation=make_data(8), **with_matrix),
        "values": fit(folder, lambda outputs, targets: (outputs - targets) ** 2),
        "number": fit(folder, lambda outputs, targets: mean_squares(outputs, targets).item()),
        "detached": fit(folder, lambda outputs, targets: mean_squares(outputs, targets).detach()),
        "names": fit(folder, model=OfImages(), data=Samples(named)),
        "none": fit(folder, data="data/train"),
        "not held back": fit(folder, validation=8),
        "few": fit(folder, data=make_data(1)),
        "none at all": fit(folder, data=make_data(0)),
        "clipped on one rank": fit(folder, clip_norm=1.0 if rank else None),
        "longer on one rank": fit(folder, max_epochs=2 + rank),
        "judged on one rank": fit(folder, validation=make_data(8) if rank else None),
        "small batch": fit(folder, global_batch_size=1),
        "apart": fit(folder, data=make_data().tensors[0], validation=make_data().tensors[1]),
        "in a tuple": fit(folder, data=make_data().tensors),
        "few parts": fit(folder, deterministic="world", virtual_shards=1),
    }


class Samples(torch.utils.data.Dataset):
    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


EXPECTED = {
    "loader of another size": ("ValueError", "global_batch_size=64, but a step takes the loader's batches of all "),
    "sampler of another size": ("ValueError", "global_batch_size=64, but batch_sampler makes batches of 4 samples"),
    "monitor": ("ValueError", "monitor='accuracy' is not a value of the evaluation, which has loss, distance"),
    "monitor of a step": ("ValueError", "monitor='accuracy' is not a value of the evaluation, which has distance"),
    "one cycle": ("ValueError", "OneCycleLR ends after 2 steps, and this run steps it 4 times, once each step: make"),
    "one cycle after a warm-up": ("ValueError", "OneCycleLR ends after 2 steps, and this run steps it 3 times, once"),
    "one cycle in a chain": ("ValueError", "OneCycleLR ends after 2 steps, and this run steps it 4 times, once each"),
    "monitor of nothing": ("ValueError", "monitor needs validation_data to judge by: fit(data, validation_data)"),
    "plateau": ("ValueError", "ReduceLROnPlateau needs validation_data to judge by"),
    "closed": ("CheckpointError", "rank 0: Trainer.fit: no checkpoint can be saved in /sys/kernel/checkpoints: "),
    "dict": ("ValueError", "'distance' is a dict; it must be one number for each sample, or their mean"),
    "matrix": ("ValueError", "'distance' has 9 values (shape (3, 3)) for a batch of "),
    "values": ("ValueError", 'their mean: loss.mean(), or a loss without reduction="none"'),
    "number": ("TypeError", "loss must return a tensor, and it returned float"),
    "detached": ("ValueError", "loss returned a loss without a gradient"),
    "names": ("TypeError", "the batch's entries 'image' are not what the model takes, forward(pixels): "),
    "none": (
        "TypeError",
        "data must be a dataset with __getitem__ and __len__, or a loader, got 'data/train'; right: ",
    ),
    "not held back": (
        "TypeError",
        "validation_data must be a dataset with __getitem__ and __len__, or a loader, got 8; ",
    ),
    "none at all": ("ValueError", "the dataset has no samples; its len() is 0"),
    "few": ("ValueError", "the dataset has 1 sample, fewer than the 2 ranks, each of which needs at least one"),
    "clipped on one rank": ("ValueError", "rank 0 and rank 1 would train in different ways: clip_norm None and 1: "),
    "longer on one rank": ("ValueError", "rank 0 and rank 1 would train in different ways: max_epochs 2 and 3: "),
    "judged on one rank": ("ValueError", "different ways: validation_data not given and given: make the same"),
    "small batch": (
        "ValueError",
        "global_batch_size=1 is too small for 2 ranks, each of which takes a part of a batch: ",
    ),
    "apart": ("TypeError", "data must have inputs and targets in each sample, got an array of shape (50, 6); right: "),
    "in a tuple": (
        "ValueError",
        "the batch is Tensor, not (inputs, targets) or a dictionary. Put them together: torch.u",
    ),
    "few parts": ("ValueError", "in virtual_shards=1 parts, which 2 ranks can't share alike: start 1, 2, 4 or another"),
}


def test_mistakes_are_errors_on_every_rank_before_the_first_step(run_ranks, tmp_path):
    results = run_ranks(make_mistakes, 2, str(tmp_path), timeout_s=LIMIT_S)
    for name, (kind, message) in EXPECTED.items():
        for of_rank in results:
            said = of_rank[name]
            assert isinstance(said, tuple), (name, said)
            assert said[0] == kind, said
            assert said[1].startswith(("Trainer", "rank 0: Trainer")), said
            assert message in said[1]
            assert said[2] == 0, said
        assert results[0][name] == results[1][name]
    said, other = results[0], results[1]
    assert "batches as the loader gives them; 7 steps an epoch" in said["loader of that size"]
    assert "5 steps an epoch, with the global batches that the batch sampler makes; 10" in said["sampler of that size"]
    assert "the batch sampler makes, whatever global_batch_size says; 4 in all" in said["sampler of any size"]
    assert "them, whatever global_batch_size, drop_last says; 1 step an epoch" in said["batches"]
    assert "samples, 2 steps an epoch, 4 in all" in said["one cycle by epoch"]
    assert "CosineAnnealingLR(T_max=2) rises again after 2 of 4 steps: count in steps, T_max=4" in said["cosine"]
    assert "CosineAnnealingLR(T_max=2) rises again after 2 of 3 steps: count" in said["cosine after a warm-up"]
    assert "samples, 2 steps an epoch, 4 in all" in said["one cycle that ends in time"]
    assert not any(text for text in other.values() if isinstance(text, str)), "only rank 0 speaks"


class Spare(nn.Module):
    """A model of which one layer takes no part."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs):
        return self.used(inputs)


def train_with_a_spare_layer(rank, world_size, folder):
    def warnings_of(model, name):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = phalanx.Trainer(model, optimizer, mean_squares, max_epochs=1, folder=f"{folder}/{name}")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.fit(make_data())
        return [said for warning in warned if "no gradient reached" in (said := str(warning.message))]

    own = warnings_of(Spare(), "own")
    return own, warnings_of(phalanx.DistributedDataParallel(Spare(), find_unused_parameters=True), "wrapped")


def test_the_advice_about_an_unused_parameter_can_be_followed_with_a_trainer(run_ranks, tmp_path):
    for own, wrapped in run_ranks(train_with_a_spare_layer, 2, str(tmp_path), timeout_s=LIMIT_S):
        [said] = own
        assert "DistributedDataParallel(model, find_unused_parameters=True), which a Trainer takes, too" in said
        assert not wrapped
