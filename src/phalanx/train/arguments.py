"""Checks the arguments of a `Trainer` that are not settings. Each error names the mistake and shows the right call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils import data as torch_data

from phalanx._env import nearest
from phalanx.train.callbacks import check_callbacks
from phalanx.train.other_names import attribute_meant
from phalanx.train.settings import ENDS, Settings

_LOSS = "nn.functional.cross_entropy or nn.CrossEntropyLoss()"
_OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=0.1)"
_SCHEDULER = "scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)"
_OF_PLATEAU = "Trainer: ReduceLROnPlateau needs no number of steps: pass the schedule itself, not a function"
_LENGTHS = ("total_steps", "T_max", "total_iters")  # names that torch's schedules give to the number of steps
_FIXED = ("model", "module", "optimizer", "scheduler", "settings", "folder", "checkpoints")  # can't be set on a Trainer
_RESERVED = {
    "time", "kind", "attempt", "step", "epoch", "lr", "samples_per_s", "grad_norm", "phases_s", "phases_by_rank",
    "spread",
}  # fmt: skip
_METRICS = 'metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()}'


def check_arguments(model: Any, optimizer: Any, scheduler: Any, callbacks: Any, **functions: Any) -> None:
    """Refuse arguments of the wrong kind.

    Raises:
        TypeError: An argument is of the wrong kind, such as a class instead of an object.
        ValueError: The optimizer or the schedule belongs to another model, or the loss is not the mean of a batch.
    """
    _refuse_class("model", model, "model = {}(...)")
    if not isinstance(model, nn.Module):
        raise _wrong("model", "a torch.nn.Module", model, "Trainer(model, optimizer, loss)")
    _refuse_class("optimizer", optimizer, "{}(model.parameters(), lr=0.1)")
    if not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        raise _wrong("optimizer", "an optimizer", optimizer, _right_optimizer(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS) or isinstance(getattr(optimizer, "optim", None), torch.optim.LBFGS):
        raise ValueError(
            "Trainer: LBFGS computes the loss several times in a step, and the Trainer once: write the loop yourself, "
            "with phalanx.DistributedDataParallel and optimizer.step(closure)"
        )
    _refuse_class("scheduler", scheduler, "{}(optimizer, ...)")
    if scheduler is not None and (hasattr(scheduler, "step") or not callable(scheduler)):
        check_schedule(scheduler)
    elif scheduler is not None:
        _check_function_of_length(scheduler)
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
    """Refuse anything but a learning rate scheduler.

    Args:
        scheduler: Scheduler to check.
        function: Function that made the scheduler; None if the script passed the scheduler itself.

    Raises:
        TypeError: `scheduler` is not a scheduler.
        ValueError: The function has made a ReduceLROnPlateau, which depends on evaluations, not on a number of steps.
    """
    if not hasattr(scheduler, "step"):
        name = "scheduler" if function is None else "what the function scheduler(optimizer, num_steps) returns"
        raise _wrong(name, "a schedule", scheduler, _SCHEDULER)
    if function is not None and isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise ValueError(_OF_PLATEAU)


def check_plateau(scheduler: lr_scheduler.ReduceLROnPlateau, s: Settings) -> None:
    """Refuse a schedule that mistakes a better evaluation for a worse one.

    Raises:
        ValueError: The schedule's mode differs from the settings' mode.
    """
    if scheduler.mode != s.mode:
        raise ValueError(
            f'Trainer: {"a lower" if s.mode == "min" else "a higher"} {s.monitor} is better (mode="{s.mode}"), and '
            f'the schedule treats it as worse: ReduceLROnPlateau(optimizer, mode="{s.mode}")'
        )


def check_fit(
    data: Any,
    validation_data: Any,
    batch_sampler: Any,
    s: Settings,
    given: Collection[str],
    *,
    is_plateau: bool,
    needs_pairs: bool,
) -> None:
    """Refuse data that can't be trained on, and settings that need an evaluation if there is no validation data.

    Args:
        data: Training data.
        validation_data: Data to evaluate, or None.
        batch_sampler: Batches of the training data, or None.
        s: Settings of the trainer.
        given: Names of the settings that the script has set.
        is_plateau: Whether the schedule is a ReduceLROnPlateau.
        needs_pairs: Whether samples must be pairs of inputs and targets.

    Raises:
        TypeError: `data` or `validation_data` is neither a dataset nor an iterable of batches.
        ValueError: A setting needs validation data, or an iterator is passed where data is iterated more than once.
    """
    _check_data("data", data)
    if validation_data is not None:
        _check_data("validation_data", validation_data)
    _refuse_arrays(data, validation_data, needs_pairs=needs_pairs)
    judges = {"patience": s.patience, "monitor": "monitor" in given, "ReduceLROnPlateau": is_plateau}
    for name in [name for name, is_given in judges.items() if is_given] if validation_data is None else ():
        raise ValueError(f"Trainer: {name} needs validation_data to judge by: fit(data, validation_data)")
    has_epochs = (s.max_epochs or 1) > 1
    for name, given, is_again, instead in (
        ("data", data, has_epochs and s.max_steps is None, "a dataset, the loader itself"),
        ("validation_data", validation_data, has_epochs, "a dataset, the loader itself"),
        ("batch_sampler", batch_sampler, True, "a BatchSampler"),
    ):
        if isinstance(given, Iterator) and is_again and not hasattr(given, "reset"):  # reset() starts it over
            raise ValueError(
                f"Trainer: {name} is needed in each epoch, and an iterator ({type(given).__name__}) is used up after "
                f"one: pass {instead}, or a list of batches, such as [*batches]"
            )


def check_attribute(trainer: Any, name: str, value: Any, *, is_subclass: bool) -> None:
    """Refuse to set an attribute of a trainer if that would have no effect.

    Args:
        trainer: Trainer whose attribute is set.
        name: Name of the attribute.
        value: Value of the attribute.
        is_subclass: Whether the trainer's class is a subclass that the script defines, which may have attributes of its
            own.

    Raises:
        AttributeError: There is no such attribute, or the attribute is a method, or it can't be changed.
    """
    own = getattr(trainer, name, None)
    if name in _FIXED and value is not own:
        raise AttributeError(
            f"Trainer: setting {name} now would not change what trains: make the Trainer anew. Of its settings, "
            f"{' and '.join(f'trainer.settings.{end}' for end in ENDS)} may change, to train longer"
        )
    if hasattr(trainer, name) and (callable(value) or not callable(own) or isinstance(own, nn.Module)):
        return
    meant = f"trainer.{name}()" if callable(own) else attribute_meant(trainer, name)
    if is_subclass and not meant.endswith("()"):  # a subclass may use names that other trainers use
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
        TypeError: The metrics have no names, or a metric is neither a function nor an object with a state.
        ValueError: A name is reserved, or a metric is a sum over a batch.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise _wrong("metrics", "a dictionary of functions by name", metrics, _METRICS)
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise _wrong("a name in metrics", "a text", name, _METRICS)
        if name == "loss":
            raise ValueError(
                "Trainer: metrics has a 'loss', but that is the loss's own name: give the metric another name"
            )
        refuse_reserved([name])
        _refuse_class(f"metrics[{name!r}]", metric, "{}()")
        if not has_state(metric):
            _refuse_sum(f"metrics[{name!r}]", metric)
        if not callable(metric) and not has_state(metric):
            wanted = "a function, or an object with update, compute and reset"
            raise _wrong(f"metrics[{name!r}]", wanted, metric, _METRICS)
    return dict(metrics)


def refuse_reserved(names: Iterable[str]) -> None:
    """Refuse values whose names are fields of metrics.jsonl.

    Raises:
        ValueError: A name is such a field.
    """
    if taken := sorted(_RESERVED.intersection(names)):
        raise ValueError(
            f"Trainer: {taken[0]!r} has a meaning of its own in metrics.jsonl: give the value another name"
        )


def has_state(metric: Any) -> bool:
    """Return whether a metric is an object that is updated batch by batch and computes its value at the end."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _check_data(name: str, data: Any) -> None:
    _refuse_class(name, data, "{}(...)")
    is_iterable = hasattr(data, "__iter__") or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    if isinstance(data, str | Mapping) or not is_iterable:
        raise _wrong(
            name, "a dataset with __getitem__ and __len__, or a loader", data, "trainer.fit(dataset, held_back)"
        )


def _refuse_arrays(data: Any, validation_data: Any, *, needs_pairs: bool) -> None:
    """Refuse inputs and targets as separate arrays, as in ``fit(X, Y)``."""
    shapes: list[Any] = [getattr(one, "shape", None) if _is_array(one) else None for one in (data, validation_data)]
    are_apart = None not in shapes and shapes[0][1:] != shapes[1][1:]
    for name, shape in zip(("data", "validation_data"), shapes, strict=True):
        if shape is not None and (needs_pairs or are_apart):
            raise TypeError(
                f"Trainer: {name} must have inputs and targets in each sample, got an array of shape {tuple(shape)}; "
                "right: trainer.fit(torch.utils.data.TensorDataset(X, Y)), of tensors; the second argument of fit is "
                "validation_data"
            )


def _is_array(data: Any) -> bool:
    return isinstance(data, Tensor) or (hasattr(data, "__array__") and not isinstance(data, torch_data.Dataset))


def _check_function_of_length(function: Any) -> None:
    """Refuse a function that can't make a schedule from the optimizer and the number of steps.

    Raises:
        TypeError: The function takes other arguments.
    """
    kind = function.func if isinstance(function, functools.partial) else None
    if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
        _check_partial_schedule(function, kind)
    elif not _takes(function, 1, 1) and _takes(function, 1) and _first_name(function).startswith("opt"):
        raise TypeError(
            "Trainer: scheduler is called as scheduler(optimizer, num_steps), and this function takes the optimizer "
            f"alone; right: scheduler=lambda {_first_name(function)}, num_steps: ..."
        )
    elif not _takes(function, 1, 1):  # a function for LambdaLR
        right = f"torch.optim.lr_scheduler.LambdaLR(optimizer, function) for a factor of each step, or {_SCHEDULER}"
        raise _wrong("scheduler", "a schedule, or a function of the optimizer and the number of steps", function, right)


def _check_partial_schedule(function: functools.partial[Any], kind: type) -> None:
    """Refuse a ``functools.partial`` of a schedule class that would take the number of steps for something else.

    Raises:
        TypeError: The number of steps would be passed as an argument that has another meaning.
        ValueError: The class is ReduceLROnPlateau.
    """
    if issubclass(kind, lr_scheduler.ReduceLROnPlateau):
        raise ValueError(_OF_PLATEAU)
    positional = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(positional) > 1 and positional[1] in _LENGTHS:
        return
    signature, called = inspect.signature(kind), _called(kind)
    given = signature.bind_partial(*function.args, **function.keywords).arguments
    arguments = ["optimizer"]
    for name, parameter in [*signature.parameters.items()][1:]:
        if name in given:
            shown = repr(given[name])
            arguments.append(f"{name}={'...' if shown.startswith('<') else shown}")
        elif name in _LENGTHS:
            arguments.append(f"{name}=num_steps")
        elif parameter.default is parameter.empty:
            arguments.append(f"{name}=...")
    raise TypeError(
        f"Trainer: scheduler is called as scheduler(optimizer, num_steps), and functools.partial({called}, ...) does "
        f"not take the number of steps there; right: scheduler=lambda optimizer, num_steps: "
        f"{called}({', '.join(arguments)})"
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
    if name != "collate_fn":  # a collate_fn may be a class, such as list
        _refuse_class(name, function, f"{name}={{}}()")
    if not callable(function):
        raise _wrong(name, "a function", function, f"loss={_LOSS}" if name == "loss" else f"{name}=function")
    if name == "loss" and _reduction_of(function) == "none":
        raise ValueError(
            'Trainer: the loss has reduction="none", which gives a value for each sample; it must return their mean: '
            'leave reduction="none" out'
        )
    if name == "loss":
        _refuse_sum("the loss", function)


def _refuse_sum(who: str, function: Any) -> None:
    if _reduction_of(function) == "sum":
        raise ValueError(
            f'Trainer: {who} has reduction="sum", so what it returns grows with the batch, and the result would depend '
            'on the number of ranks; it must return a mean: leave reduction="sum" out'
        )


def _reduction_of(function: Any) -> Any:
    """Return the reduction of one of torch's losses, if the module or the partial object shows it."""
    if isinstance(function, functools.partial):
        return function.keywords.get("reduction") or _reduction_of(function.func)
    return getattr(function, "__dict__", {}).get("reduction")


def _takes(function: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # the signature is unknown
        return True
    return True


def _first_name(function: Any) -> str:
    return next(iter(inspect.signature(function).parameters), "")


def _refuse_class(name: str, value: Any, right: str) -> None:
    if isinstance(value, type):
        called = _called(value)
        raise TypeError(f"Trainer: {name} is the class {called} itself; make an object of it: {right.format(called)}")


def _called(value: type) -> str:
    """Return the name of a class as a script writes it."""
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


def _right_optimizer(given: Any) -> str:
    """Return the call that makes the optimizer with a given name, in any spelling; if there is none, an example."""
    text = given.lower().replace("_", "") if isinstance(given, str) else ""
    classes = (name for name, value in vars(torch.optim).items() if isinstance(value, type))
    name = next((name for name in classes if name.lower() == text != "sgd"), "")
    return f"torch.optim.{name}(model.parameters())" if name else _OPTIMIZER


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
