"""The identity of the run that a folder holds: stored in the run's checkpoints, compared when the run is started again.

The identity is a list of facts. A fact is a name and a text, such as ``optimizer.lr`` and ``0.01``. Facts describe what
the script passed to the trainer. For the optimizer and the scheduler, these are classes and hyperparameters. For the
model, they are names, shapes and dtypes of tensors, classes of modules and, for torch's own modules, their settings.
Other facts are the arguments of a loss module, the length of the data, and the settings that affect the result. Facts
are collected when the trainer is made, before a scheduler or a checkpoint has changed anything, and rank 0's facts
count on all ranks. The facts in a checkpoint are compared before the rest of the checkpoint is restored, so the
checkpoint of another run is refused before anything changes.

- **Not compared** are settings that may change from one start to the next: ``max_epochs`` and ``max_steps`` (if the
  length affects the result, the scheduler's facts contain it), the number of ranks, ``micro_batch_size``,
  ``num_workers``, ``patience``, what is saved and logged and where. Samples are not compared, because augmentation
  makes new ones.
- **A fact that only one side has** does not count as a difference; otherwise each new version of torch would cause one.
  Modules are compared only if both sides have the same torch; a wrapper or `SyncBatchNorm` makes no difference. If a
  callback of this run has a state and the checkpoint has none for it, that is a difference.
- **Functions.** For a function of a `LambdaLR`, the numbers that the function reads, and its defaults, are facts;
  texts, clock readings and process ids are not. For a lambda and for a loss that is a local function, the compiled code
  is a fact, because their names say nothing. The same holds for a function that makes the schedule, because the
  schedule itself depends on the length of the run, which is not compared. Code is compared only under the same version
  of Python. Other functions are compared by name: one more line of logging in a training step does not make another
  run.
- **With ``resume="force"``**, the script's hyperparameters are set again after loading, and a new scheduler is stepped
  to the run's position, because no other way works for every class. Both are also done if a function makes the schedule
  and the length of the run has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import data as torch_data

from phalanx._errors import CheckpointError, printable
from phalanx._text import counted, listed, shortened
from phalanx._torch import SCHEDULER_COUNTERS
from phalanx.checkpoint.state.unpacking import form_of
from phalanx.data.shards import Shard
from phalanx.host.proc_stat import stat_fields
from phalanx.train.report.metrics import read_metrics
from phalanx.train.report.origin import command_line
from phalanx.train.settings import Settings
from phalanx.wire.rank_group import RankGroup

Facts = dict[str, str]

_SETTINGS = ("on_resize", "seed", "drop_last", "precision", "clip_norm", "monitor", "mode", "deterministic")
_NO_HYPERPARAMETERS = {
    "params", "param_names", "initial_lr",
    "foreach", "fused", "capturable", "differentiable",  # they change how a step is computed, not its result
}  # fmt: skip
_COUNTERS = {"base_lrs", "last_epoch", *SCHEDULER_COUNTERS}
_MODEL = "model."
_MODULE = "module."
_TORCH = "torch"  # modules are compared only under the same version
_PYTHON = "python"  # code is compared only under the same version
_CODE = "objective.code"
_CODE_OF_SCHEDULE = "scheduler.code"
_WRAPPERS = {"CheckpointWrapper", "OffloadWrapper", "OptimizedModule"}  # they don't change what is computed
_OF_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)(\.|$)")
_INPLACE = re.compile(r",? ?inplace=(True|False)")
_BATCH_NORM = re.compile(r"(Sync)?BatchNorm(\d)?d?")  # being synchronized makes no difference
_TENSOR_LISTS = (nn.ParameterList, nn.ParameterDict)  # left out: their extra_repr names devices
_PARAMETERS = ".parameters"
_CLOCK_S = 2.0**30  # a larger number with a fraction is taken for a time of day
_LAUNCH_S = 60.0  # a launcher may have read a clock this long before this process began
_IMPORTED_S = time.monotonic()
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_MAX_ITEMS = 16  # a longer list is represented by its hash
_MAX_DEPTH = 4
_MAX_LINES = 12
_MAX_NAMED = 4  # most differences between ranks that a message lists
_MAY_DIFFER = ("folder", "num_workers")  # settings that may differ between ranks; all use rank 0's folder


def facts_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    objective: Any,
    s: Settings,
    *,
    is_step: bool = False,
) -> Facts:
    """Return the facts of a run, at the time when its trainer is made.

    Args:
        module: Model without its wrapper.
        optimizer: Optimizer of the model's parameters.
        scheduler: Learning rate scheduler; None if there is none.
        objective: Loss or training step.
        s: Settings of the trainer.
        is_step: Whether the objective is a training step.
    """
    facts = {
        "objective": _name_of(objective),
        **_code_of(objective, is_step),
        **{name: _text_of(getattr(s, name)) for name in _SETTINGS},
    }
    if s.deterministic:
        facts["virtual_shards"] = _text_of(s.virtual_shards)
    facts |= _facts_of_loss(objective) if isinstance(objective, nn.Module) else {}
    facts |= _facts_of_optimizer(optimizer)
    facts["scheduler"] = "None" if scheduler is None else _name_of(type(scheduler))
    if scheduler is not None and not hasattr(scheduler, "step"):  # a function that makes the scheduler
        facts |= {"scheduler": _name_of(scheduler), "scheduler_interval": s.scheduler_interval}
        if inspect.isfunction(scheduler):  # its code counts, because the schedule depends on the length of the run
            facts |= {_PYTHON: _python(), _CODE_OF_SCHEDULE: _digest_of(scheduler)}
    elif scheduler is not None:
        facts |= {"scheduler_interval": s.scheduler_interval, **dict(_flat("scheduler", scheduler, 0))}
    facts |= {_TORCH: torch.__version__, **_facts_of_modules(module)}
    state = module.state_dict()
    return facts | {f"{_MODEL}{name}": _form_of(value) for name, value in state.items() if isinstance(value, Tensor)}


def refuse_differences(facts: Facts, settings: Settings, *, evaluates: bool, ranks: RankGroup) -> None:
    """Refuse ranks that would train in different ways; every rank must call this.

    Facts that may legitimately differ between ranks, such as the training step, are not compared.

    Raises:
        ValueError: The ranks would train in different ways; every rank raises the error.
    """
    own = {name: text for name, text in facts.items() if name.startswith(("optimizer", "scheduler"))}
    own |= {name: _text_of(value) for name, value in dataclasses.asdict(settings).items() if name not in _MAY_DIFFER}
    own["validation_data"] = "given" if evaluates else "not given"
    every = ranks.gather(own)
    rank = next((rank for rank, other in enumerate(every) if other != every[0]), 0)
    if rank == 0:
        return
    first, other = every[0], every[rank]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    differ = [f"{name} {first.get(name, 'missing')} and {other.get(name, 'missing')}" for name in names]
    raise ValueError(
        f"Trainer.fit: rank 0 and rank {rank} would train in different ways: {listed(differ, _MAX_NAMED)}: make the "
        "same Trainer, and give it the same kinds of data, on every rank"
    )


def with_data(facts: Facts, data: Any, settings: Settings, ranks: RankGroup) -> Facts:
    """Return the facts of a run and of its data, as rank 0 has them.

    Every rank must call this, with its own loader if the data is a loader.
    """
    facts = facts | _facts_of_data(data, settings, ranks)
    return ranks.gather(facts if ranks.rank == 0 else None)[0]


def _facts_of_data(data: Any, settings: Settings, ranks: RankGroup) -> Facts:
    if isinstance(data, torch_data.Dataset) and not isinstance(data, torch_data.IterableDataset):
        length: int = len(data)  # type: ignore[arg-type]
        return {"data.samples": str(length), "global_batch_size": str(settings.global_batch_size)}
    dataset, size = getattr(data, "dataset", None), getattr(data, "batch_size", None)
    has_length = hasattr(dataset, "__len__") and not isinstance(dataset, Shard)  # a part depends on the ranks
    lengths = ranks.gather(len(dataset) if has_length else None)  # type: ignore[arg-type]
    facts = {} if size is None else {f"batch_size of {counted(ranks.world_size, 'rank')}": str(size)}
    if None not in lengths:
        length = sum(lengths) if getattr(data, "is_own_part", False) else lengths[0]
        facts["data.samples"] = str(length)
    return facts


class Identity:
    """Compares this run with the run of a checkpoint; the result is the same on all ranks.

    Args:
        folder: Folder of the run.
        facts: Facts of this run, from rank 0.
        is_known: Whether the job was in the folder before; then this is a restart, which resumes despite differences.
        may_force: Whether a checkpoint of another run may be loaded.
        is_own: Whether the trainer has trained before, so that the checkpoint belongs to the trainer's own run.

    Attributes:
        may_force: Whether a checkpoint of another run may be loaded.
        changed: Names of the facts that differ from the checkpoint's.
        is_forced: Whether the checkpoint belongs to another run, and this script's settings take precedence.
        news: Message for the user about the comparison; empty if there is none.
    """

    def __init__(
        self, folder: str, facts: Facts, *, is_known: bool = False, may_force: bool = False, is_own: bool = False
    ) -> None:
        self._folder, self._facts, self._is_own = folder, facts, is_own
        self._is_known, self.may_force = is_known, may_force
        self._text = json.dumps(facts)
        self.changed: frozenset[str] = frozenset()
        self.is_forced: bool = False
        self.news: str = ""

    def state(self) -> str:
        """Return the facts as a checkpoint holds them."""
        return self._text

    def check(self, saved: str | None, step: int, callbacks: tuple[str, str] | None = None) -> None:
        """Compare this run with the one that the checkpoint of `step` describes.

        Args:
            saved: Facts in the checkpoint; None if the checkpoint was written by a version that recorded no facts.
            step: Step of the checkpoint.
            callbacks: Names of the callbacks with a state in the checkpoint and in this run, if the checkpoint lacks
                some; otherwise None.

        Raises:
            CheckpointError: The checkpoint belongs to another run.
        """
        if saved is None:
            self.is_forced = self.may_force
            self.news = f"the checkpoint of step {step} does not say which run it belongs to: resumed without comparing"
            return
        theirs: Facts = json.loads(saved)
        changed = differences(theirs, self._facts)
        if callbacks is not None:
            changed["callbacks with state"] = callbacks
        self.changed = frozenset(changed)
        if not changed:
            return
        can_be_forced = not any(name.startswith(_MODEL) or name.endswith(_PARAMETERS) for name in changed)
        if self.may_force and can_be_forced:
            self.is_forced = True
            self.news = f'resume="force": weights and counters of step {step}; changed: {"; ".join(_lines(changed))}'
        elif not self._is_known:
            raise CheckpointError(
                _refusal(self._folder, changed, can_be_forced, self._is_own), op="load", entry="another-run"
            )


def differences(theirs: Facts, ours: Facts) -> dict[str, tuple[str, str]]:
    """Return the facts that have changed, each with both texts.

    If only one side has a fact, this is a change only if the fact describes the model: the other side may come from a
    version of torch or of phalanx that records other facts. Modules are compared only if both sides have the same
    version of torch, which may describe its modules differently in another version. Code is compared only under the
    same version of Python.
    """
    has_modules = ours.get(_TORCH) == theirs.get(_TORCH, "")
    has_code = ours.get(_PYTHON) == theirs.get(_PYTHON, "")
    whole = (_MODEL, _MODULE) if has_modules else (_MODEL,)
    names = [name for name in {**ours, **theirs} if name.startswith(whole) or (name in ours and name in theirs)]
    names = [name for name in names if name != _TORCH and (has_modules or not name.startswith(_MODULE))]
    names = [name for name in names if name != _PYTHON and (has_code or name not in (_CODE, _CODE_OF_SCHEDULE))]
    pairs = ((name, theirs.get(name, "nothing"), ours.get(name, "nothing")) for name in names)
    return {name: (before, now) for name, before, now in pairs if before != now}


def _refusal(folder: str, changed: Mapping[str, tuple[str, str]], can_be_forced: bool, is_own: bool) -> str:
    """Return the rest of the error for a checkpoint of another run.

    The error begins with the checkpoint's step and folder.
    """
    ways = ['resume="never" starts over here, and sets aside what is there', "folder=... trains elsewhere"]
    if is_own:
        ways[0] = f"{ways[0]}, in a new Trainer: a second fit() of the same Trainer continues its own run"
    if command := _command_before(folder):
        ways.insert(0, f"the other run's command resumes it: {command}")
    ways.append(
        'resume="force" keeps the weights and the counters, and takes the settings of this script'
        if can_be_forced
        else "only the model and the parameter groups that the script had before can resume, even with force"
    )
    return "\n  ".join(
        ("the folder holds another run:", *_lines(changed), "What you can do:", *(f"- {w}" for w in ways))
    )


def _command_before(folder: str) -> str:
    """Return the command that last trained in a folder; empty if it is unknown, or is this run's command."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        last = [record for record in read_metrics(folder) if record["kind"] == "start"][-1:]
        command = "".join(str(record["origin"]["command"]) for record in last)
        return "" if command == command_line() else printable(command)
    return ""


def _lines(changed: Mapping[str, tuple[str, str]]) -> list[str]:
    ordered = sorted(changed.items(), key=lambda item: item[0].startswith(_MODEL))
    lines = [printable(f"{name} {shortened(before)} -> {shortened(now)}") for name, (before, now) in ordered]
    left = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"and {left} more"] if left > 1 else lines


# ---- facts -------------------------------------------------------------------------------------------------------


def _facts_of_optimizer(optimizer: torch.optim.Optimizer) -> Facts:
    inner = getattr(optimizer, "optim", None)  # a ZeroRedundancyOptimizer saves the plain optimizer's state
    facts = {"optimizer": _name_of(type(inner if isinstance(inner, torch.optim.Optimizer) else optimizer))}
    for number, group in enumerate(optimizer.param_groups):
        name = "optimizer" if len(optimizer.param_groups) == 1 else f"optimizer.group {number}"
        given = {**group, "lr": group.get("initial_lr", group.get("lr"))}  # the rate before a scheduler changed it
        facts[f"{name}{_PARAMETERS}"] = str(len(group["params"]))
        for key in given.keys() - _NO_HYPERPARAMETERS:
            facts |= dict(_flat(f"{name}.{key}", given[key], 0))
    return dict(sorted(facts.items()))


def _facts_of_loss(loss: nn.Module) -> Facts:
    """Return the settings of a loss module, such as ``reduction``; checkpoints do not hold its tensors."""
    given = {name: value for name, value in vars(loss).items() if not name.startswith("_") and name != "training"}
    of_torch = type(loss).__module__.startswith("torch.nn.")
    plain = (bool, int, float, str, type(None)) if of_torch else (bool, int, float)
    return {f"objective.{name}": _text_of(value) for name, value in given.items() if isinstance(value, plain)}


def _facts_of_modules(model: nn.Module) -> Facts:
    """Return the class of each module, and the settings of torch's own modules; wrappers are left out."""
    facts = {}
    for name, module in model.named_modules():
        if type(module).__name__ not in _WRAPPERS:
            facts[_MODULE + (_OF_WRAPPERS.sub("", name).rstrip(".") or "(whole)")] = _description_of(module)
    return facts


def _description_of(module: nn.Module) -> str:
    name = type(module).__name__
    if any(base.__name__ == "FSDPModule" for base in type(module).__bases__):  # fully_shard has made this class
        name = name.removeprefix("FSDP")
    origin = str(getattr(module.extra_repr, "__module__", ""))
    text = ""
    if origin.startswith("torch.nn.") and not isinstance(module, _TENSOR_LISTS):  # other modules may report any values
        with contextlib.suppress(Exception):  # a subclass may lack an attribute that extra_repr reads
            text = _INPLACE.sub("", module.extra_repr())
    return f"{'BatchNorm' if _BATCH_NORM.fullmatch(name) else name}({text})"


def _form_of(tensor: Tensor) -> str:
    return "lazy" if is_lazy(tensor) else form_of(tensor)


def _name_of(value: Any) -> str:
    """Return the name of a function or a class; for any other value, the name of its class."""
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the facts in a value: plain values, and those in lists, mappings, functions and objects."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() <= _MAX_ITEMS else _form_of(value)
    items: Mapping[Any, Any] | None = None
    if isinstance(value, (bool, int, float, str, type(None))):
        yield name, _text_of(value)
    elif depth == _MAX_DEPTH or isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return
    elif isinstance(value, (list, tuple)):
        if len(value) > _MAX_ITEMS:
            facts = itertools.chain.from_iterable(_flat(str(i), item, depth + 1) for i, item in enumerate(value))
            digest = hashlib.blake2b(repr(list(facts)).encode(), digest_size=4).hexdigest()
            yield name, f"{len(value)} values ({digest})"
        elif all(isinstance(item, (bool, int, float, str)) for item in value):
            yield name, f"({', '.join(map(_text_of, value))})"
        else:
            items = dict(enumerate(value))
    elif isinstance(value, Mapping):
        items = value
    elif isinstance(value, functools.partial):
        items = {"function": value.func, "args": value.args, **value.keywords}
    elif inspect.isfunction(value):
        items = _values_in(value)
    else:
        items = {key: item for key, item in getattr(value, "__dict__", {}).items() if key not in _COUNTERS}
    for key, item in (items or {}).items():
        yield from _flat(f"{name}.{key}", item, depth + 1)


def _values_in(function: Any) -> dict[str, Any]:
    """Return the numbers that a function reads from its closure, globals and defaults.

    Texts and times are left out, because they may be new on each start. A number that the script draws at random
    counts: it may matter.
    """
    try:
        outside = inspect.getclosurevars(function)
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    except (ValueError, TypeError):  # a variable is not set yet, or there is no signature
        return {}
    found = {**outside.globals, **outside.nonlocals, **defaults}
    return {
        name: value
        for name, value in sorted(found.items())
        if isinstance(value, (bool, int, float)) and not _is_of_this_start(value)
    }


def _is_of_this_start(value: float) -> bool:
    """Return whether a number is a clock reading, in seconds or nanoseconds, or this process's id."""
    if isinstance(value, bool) or (isinstance(value, float) and value > _CLOCK_S):
        return isinstance(value, float)
    age_s = _age_s() + _LAUNCH_S
    for clock in _CLOCKS:
        can_be_seconds = clock is time.time or not float(value).is_integer()  # a whole number is more likely a step
        ages = [clock() - value if can_be_seconds else -1.0, clock() - value / 1e9 if isinstance(value, int) else -1.0]
        if any(0 <= age < age_s for age in ages):
            return True
    return value == os.getpid()


def _age_s() -> float:
    """Return the age of this process in seconds; outside Linux, the time since this module was imported."""
    if sys.platform != "linux":
        return time.monotonic() - _IMPORTED_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat_fields()[22]) / os.sysconf("SC_CLK_TCK")


def _code_of(objective: Any, is_step: bool) -> Facts:
    """Return a digest of a lambda or a local loss, whose name says little; other functions count by name.

    The digest covers the compiled code without comments and line numbers, so moving the function does not change it,
    but another version of Python does. Values around the function are left out, since they may be new on each start.
    """
    while isinstance(objective, functools.partial):
        objective = objective.func
    name = objective.__qualname__ if inspect.isfunction(objective) else ""
    # The code of a named training step does not count: changing the step does not make another run.
    if not name.endswith("<lambda>") and (is_step or "<locals>" not in name):
        return {}
    return {_PYTHON: _python(), _CODE: _digest_of(objective)}


def _python() -> str:
    return f"{sys.version} optimized {sys.flags.optimize}"


def _digest_of(function: types.FunctionType) -> str:
    code = function.__code__
    if function.__doc__ is not None:
        code = code.replace(co_consts=(None, *code.co_consts[1:]))
    return hashlib.blake2b(repr(_compiled(code)).encode(), digest_size=4).hexdigest()


def _compiled(code: types.CodeType) -> tuple[object, ...]:
    plain = [_compiled(item) if isinstance(item, types.CodeType) else _ordered(item) for item in code.co_consts]
    return code.co_code, plain, code.co_names, code.co_varnames, code.co_freevars


def _ordered(constant: object) -> str:
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _text_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # 1 and 1.0 are the same learning rate
    return value if isinstance(value, str) else repr(value)
