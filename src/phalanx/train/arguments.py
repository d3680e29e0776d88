"""What a `Trainer` is given beside its settings: each mistake is named at once, with the right call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from phalanx._env import nearest
from phalanx.train.callbacks import check_callbacks
from phalanx.train.settings import ENDS, Settings

_LOSS = "nn.functional.cross_entropy or nn.CrossEntropyLoss()"
_OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=0.1)"
_OTHER_ATTRIBUTES = {  # under which other trainers know what this one has
    "should_stop": "trainer.stop()", "stop_training": "trainer.stop()", "should_training_stop": "trainer.stop()",
    "should_epoch_stop": "trainer.stop()",
}  # fmt: skip
_FIXED = ("module", "optimizer", "settings", "folder", "checkpoints")  # of which a Trainer is made
_METRICS = 'metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()}'


def check_arguments(model: Any, optimizer: Any, scheduler: Any, callbacks: Any, **functions: Any) -> None:
    """Refuse a model, optimizer, schedule, callbacks or functions that are something else.

    Raises:
        TypeError: An argument is something else, such as a class instead of an object.
        ValueError: The optimizer or the schedule is another model's, or the loss is no mean.
    """
    _refuse_class("model", model, "model = {}(...)")
    if not isinstance(model, nn.Module):
        raise _wrong("model", "a torch.nn.Module", model, "Trainer(model, optimizer, loss)")
    _refuse_class("optimizer", optimizer, "{}(model.parameters(), lr=0.1)")
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        raise _wrong("optimizer", "an optimizer", optimizer, _OPTIMIZER)
    if isinstance(optimizer, torch.optim.LBFGS) or isinstance(getattr(optimizer, "optim", None), torch.optim.LBFGS):
        raise ValueError(
            "Trainer: LBFGS computes the loss several times in a step, and the Trainer once: write the loop yourself, "
            "with phalanx.DistributedDataParallel and optimizer.step(closure)"
        )
    _refuse_class("scheduler", scheduler, "{}(optimizer, ...)")
    if scheduler is not None and (hasattr(scheduler, "step") or not callable(scheduler)):
        check_schedule(scheduler)
    elif scheduler is not None and not _takes(scheduler, optimizer, 1):  # a function for LambdaLR
        raise _wrong("scheduler", "a schedule", scheduler, "torch.optim.lr_scheduler.LambdaLR(optimizer, function)")
    own = {id(parameter) for parameter in model.parameters()}
    if own and own.isdisjoint(_parameters_of(optimizer)):
        raise ValueError(
            "Trainer: the optimizer has no parameter of this model, so nothing would be trained; right: "
            f"Trainer(model, {_OPTIMIZER}, loss)"
        )
    scheduled = getattr(scheduler, "optimizer", None)
    if own and hasattr(scheduled, "param_groups") and own.isdisjoint(_parameters_of(scheduled)):
        raise ValueError(
            "Trainer: the scheduler is that of another optimizer, which trains nothing here; right: "
            f"{type(scheduler).__name__}(optimizer, ...) with the optimizer that the Trainer gets"
        )
    _check_callbacks(callbacks)
    for name, function in functions.items():
        _check_function(name, function)


def check_schedule(scheduler: Any, function: Any = None) -> None:
    """Refuse what is no learning rate scheduler.

    Args:
        function: Function that has made it; None: it was passed.

    Raises:
        TypeError: It is something else.
        ValueError: The function has made a ReduceLROnPlateau, which goes by evaluations and not by a length.
    """
    right = "lambda optimizer, num_steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)"
    if not hasattr(scheduler, "step"):
        name = "scheduler" if function is None else "what the function scheduler(optimizer, num_steps) returns"
        raise _wrong(name, "a schedule", scheduler, f"scheduler={right}")
    if function is not None and isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "Trainer: ReduceLROnPlateau needs no number of steps: pass the schedule itself, not a function"
        )


def check_fit(data: Any, validation_data: Any, s: Settings, given: Collection[str], *, is_plateau: bool) -> None:
    """Refuse data that can't be trained on, and settings that go by an evaluation where there is none.

    Raises:
        TypeError: `data` or `validation_data` is neither a dataset nor something that gives batches.
        ValueError: A setting needs validation data, or a generator is needed more than once.
    """
    _check_data("data", data)
    if validation_data is not None:
        _check_data("validation_data", validation_data)
    judges = {"patience": s.patience, "monitor": "monitor" in given, "ReduceLROnPlateau": is_plateau}
    for name in [name for name, is_given in judges.items() if is_given] if validation_data is None else ():
        raise ValueError(f"Trainer: {name} needs validation_data to judge by: fit(data, validation_data)")
    has_epochs = (s.max_epochs or 1) > 1
    for name, given, is_again in (
        ("data", data, has_epochs and s.max_steps is None),
        ("validation_data", validation_data, has_epochs),
    ):
        if isinstance(given, types.GeneratorType) and is_again:
            raise ValueError(
                f"Trainer: {name} is needed in each epoch, and a generator is used up after one: pass a dataset, a "
                "loader or a list of batches, such as [*generator]"
            )


def check_attribute(trainer: Any, name: str, value: Any, *, is_subclass: bool) -> None:
    """Refuse an attribute that a script sets on its trainer, and that would mean nothing.

    Args:
        is_subclass: Whether the trainer's class is the script's, which may have attributes of its own.

    Raises:
        AttributeError: There is no such attribute, or it is a method.
    """
    own = getattr(trainer, name, None)
    if name in _FIXED and value is not own:
        raise AttributeError(
            f"Trainer: setting {name} now would not change what trains: make the Trainer anew. Of its settings, "
            f"{' and '.join(f'trainer.settings.{end}' for end in ENDS)} may change, to train longer"
        )
    if hasattr(trainer, name) and (callable(value) or not callable(own) or isinstance(own, nn.Module)):
        return
    meant = _OTHER_ATTRIBUTES.get(name, f"trainer.{name}()" if callable(own) else "")
    if not meant and is_subclass:
        return
    known = sorted(attribute for attribute in vars(trainer) if not attribute.startswith("_"))
    if name in Settings.__dataclass_fields__:
        meant = f"trainer.settings.{name} = ..." if name in ENDS else f"Trainer({name}=...)"
    elif not meant and (near := nearest(name, known)):
        meant = f"trainer.{near}"
    raise AttributeError(
        f"Trainer: setting {name} would change nothing{f'; right: {meant}' if meant else ''}. The attributes of a "
        f"trainer are {', '.join(known)}; keep values of your own in a callback"
    )


def check_metrics(metrics: Any) -> dict[str, Any]:
    """Return the metrics by name.

    Raises:
        TypeError: They have no names, or one is neither a function nor an object with a state.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise _wrong("metrics", "a dictionary of functions by name", metrics, _METRICS)
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise _wrong("a name in metrics", "a text", name, _METRICS)
        _refuse_class(f"metrics[{name!r}]", metric, "{}()")
        if not callable(metric) and not has_state(metric):
            wanted = "a function, or an object with update, compute and reset"
            raise _wrong(f"metrics[{name!r}]", wanted, metric, _METRICS)
    return dict(metrics)


def has_state(metric: Any) -> bool:
    """Return whether a metric is an object that sees batches and computes its value at the end."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _check_data(name: str, data: Any) -> None:
    _refuse_class(name, data, "{}(...)")
    is_iterable = hasattr(data, "__iter__") or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    if isinstance(data, str | Mapping) or not is_iterable:
        raise _wrong(
            name, "a dataset with __getitem__ and __len__, or a loader", data, "trainer.fit(dataset, held_back)"
        )


def _check_callbacks(callbacks: Any) -> None:
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise _wrong("callbacks", "a list of objects", callbacks, "callbacks=[callback]")
    for callback in callbacks:
        _refuse_class("callbacks", callback, "callbacks=[{}()]")
    check_callbacks(callbacks)


def _check_function(name: str, function: Any) -> None:
    if function is None:
        return
    if name != "collate_fn":  # which may be a class, such as list
        _refuse_class(name, function, f"{name}={{}}()")
    if not callable(function):
        raise _wrong(name, "a function", function, f"loss={_LOSS}" if name == "loss" else f"{name}=function")
    inner = function.keywords if isinstance(function, functools.partial) else getattr(function, "__dict__", {})
    if name == "loss" and inner.get("reduction") == "none":
        raise ValueError(
            'Trainer: the loss has reduction="none", which gives a value for each sample; it must return their mean: '
            'leave reduction="none" out'
        )


def _takes(function: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it tells no signature
        return True
    return True


def _refuse_class(name: str, value: Any, right: str) -> None:
    if isinstance(value, type):
        called = _called(value)
        raise TypeError(f"Trainer: {name} is the class {called} itself; make an object of it: {right.format(called)}")


def _called(value: type) -> str:
    """Return the name of a class as a script would write it."""
    module = value.__module__
    for package, short in (("torch.nn.", "nn"), ("torch.optim.lr_scheduler", "lr_scheduler")):
        module = short if module.startswith(package) else module
    module = "torch.optim" if module.startswith("torch.optim.") else module
    return value.__qualname__ if module in ("__main__", "builtins") else f"{module}.{value.__qualname__}"


def _wrong(name: str, wanted: str, value: Any, right: str) -> TypeError:
    shown = repr(value) if isinstance(value, str | int | float) else f"an object of type {type(value).__name__}"
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        shown = repr(value)
    return TypeError(f"Trainer: {name} must be {wanted}, got {shown[:60]}; right: {right}")


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
