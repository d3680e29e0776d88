"""`Settings`: arguments of a `Trainer` besides model, optimizer and data, and the batch sizes that follow from them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict

from phalanx._env import did_you_mean, nearest
from phalanx.train.other_names import wrong_argument

_MODES: dict[str, Literal["min", "max"]] = {
    **dict.fromkeys(("loss", "err", "error", "mae", "mse", "nll", "perplexity", "ppl", "rmse"), "min"),
    **dict.fromkeys(
        ("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "miou", "precision", "r2", "recall"), "max"
    ),
}  # whether a lower or a higher value is better, by a word in the value's name
_TURNING = frozenset(  # words that may reverse which value is better
    ("change", "decrease", "delta", "diff", "drop", "gain", "gap", "improvement", "increase", "inverse", "neg",
     "negative", "reduction", "std", "var", "variance")
)  # fmt: skip

_CHOICES = {
    "on_resize": ("keep", "scale"), "precision": ("fp32", "bf16", "fp16"), "resume": ("auto", "never", "force"),
    "scheduler_interval": ("step", "epoch"), "deterministic": (None, "world"), "on_nan": ("raise", "warn", "ignore"),
    "divide_optimizer": ("auto", "always", "never"), "mode": (None, "min", "max"),
}  # fmt: skip
_OTHER_VALUES = {  # for each setting, wrong values, each with the value that is probably meant
    "resume": {"True": '"auto"', "False": '"never"'}, "deterministic": {"True": '"world"', "False": "None"},
    "divide_optimizer": {"True": '"always"', "False": '"never"'},
    "scheduler_interval": {"batch": '"step"', "iteration": '"step"'}, "on_nan": {"error": '"raise"'},
    "mode": {"lower": '"min"', "minimize": '"min"', "higher": '"max"', "maximize": '"max"', "auto": "None"},
}  # fmt: skip
_LEAST = {  # the smallest value of each setting that is a whole number
    "max_epochs": 1, "max_steps": 1, "micro_batch_size": 1, "patience": 1, "save_every": 1, "global_batch_size": 1,
    "keep_last": 1, "log_every": 1, "virtual_shards": 1, "num_workers": 0, "snapshot_every": 0, "compare_every": 0,
    "seed": 0,
}  # fmt: skip
_CAN_BE_AUTO = ("snapshot_every", "compare_every")
ENDS = ("max_epochs", "max_steps")
"""Settings that may change once the Trainer is made, to train longer."""


class GivenSettings(TypedDict, total=False):
    """Names and types of `Settings`, so that editors and type checkers know the ``**settings`` of `Trainer`."""

    max_epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int | None
    on_resize: Literal["keep", "scale"]
    seed: int
    num_workers: int
    drop_last: bool
    precision: Literal["fp32", "bf16", "fp16"]
    channels_last: bool
    divide_optimizer: Literal["auto", "always", "never"]
    clip_norm: float | None
    on_nan: Literal["raise", "warn", "ignore"]
    compare_every: int | Literal["auto"]
    scheduler_interval: Literal["step", "epoch"]
    monitor: str
    mode: Literal["min", "max"] | None
    patience: int | None
    min_delta: float
    folder: str | os.PathLike[str] | None
    resume: Literal["auto", "never", "force"]
    save_every: int | None
    keep_last: int
    snapshot_every: int | Literal["auto"]
    log_every: int
    deterministic: Literal["world"] | None
    virtual_shards: int


@dataclasses.dataclass(kw_only=True)
class Settings:
    """Settings of a `Trainer`; each is an argument of its constructor.

    Attributes:
        max_epochs: Number of passes over the training data; training ends at this number or at `max_steps`, whichever
            is reached first.
        max_steps: Number of optimizer steps.
        global_batch_size: Number of samples in an optimizer step, over all ranks and accumulated passes.
        micro_batch_size: Largest number of samples in one forward pass of a rank; None: unlimited.
        on_resize: Global batch size after a change of the number of ranks: "keep" it, or "scale" it with the number of
            ranks.
        seed: Seed for shuffling and for the data-loading workers; `seed_everything` covers the rest, such as dropout.
        num_workers: Number of data-loading processes of each rank; ``phalanx tune`` measures whether more are faster.
            The samples are the same for any number above 0; with 0, augmentation draws from the rank's own random
            numbers.
        drop_last: Whether samples at the end of an epoch that do not fill a global batch are left out.
        precision: Precision of the forward pass and the loss, through torch.autocast: "fp32", "bf16" or "fp16" (with a
            gradient scaler).
        channels_last: Whether weights and images of four dimensions use torch.channels_last, which makes most
            convolutions on a CPU faster. Checkpoints are the same either way.
        divide_optimizer: Whether the ranks divide the optimizer's step, so that each rank steps a part of the
            parameters and receives the other parts: "auto" divides if the first steps show that this is faster, but not
            with callbacks, because they may change the optimizer's state; "always" divides whenever possible; "never"
            does not. Dividing is possible on one host, on the CPU with one thread, in phalanx's
            DistributedDataParallel, with those optimizers of torch.optim that treat each element separately. Bits and
            checkpoints do not change. While the step is divided, the ranks share the memory of the optimizer's state:
            code may replace or fill its tensors, but if every rank calls ``mul_`` on one, that tensor is multiplied
            several times.
        clip_norm: Largest norm of the gradient; None: unlimited.
        on_nan: Reaction to a loss, gradient or parameter that is not finite: "raise" an error on every rank, "warn"
            once, or "ignore" it. In any case, a state with such a parameter or buffer is never saved, unless that
            tensor was not finite when `fit` began.
        compare_every: Number of steps over which the ranks' copies of all parameters and optimizer state are compared
            once, slice by slice; an error on every rank names the first tensor that differs. "auto": the smallest
            number for which comparing takes at most 0.5 % of the time; 0: never.
        scheduler_interval: Interval at which the learning rate scheduler steps: "step" or "epoch".
        monitor: Name of the evaluated value that decides which checkpoint is best.
        mode: Whether a lower value of `monitor` is better, "min", or a higher one, "max". None: derived from a word in
            the name, such as loss, error, perplexity or rmse, or accuracy, auc, f1 or recall; any other name is an
            error. Once the Trainer is made, `mode` is never None.
        patience: Number of evaluations without an improvement after which training stops; None: unlimited.
        min_delta: Size up to which `patience` ignores an improvement of `monitor`; small improvements add up until they
            exceed it. The best checkpoint is always the one with the best value.
        folder: Folder of the run; None: ``runs/<script>``. PHALANX_RUN_FOLDER overrides it.
        resume: Treatment of an earlier run in the folder: "auto" resumes from its newest checkpoint, and refuses a
            checkpoint of another run; "never" starts over and sets the old run aside; "force" resumes with the weights
            and counters of another run and this script's settings.
        save_every: Number of steps between checkpoints on disk; None: one at the end of each epoch, or at most one in
            10 minutes if the memory of at least two hosts holds the state.
        keep_last: Number of newest checkpoints to keep on disk, in addition to the best one.
        snapshot_every: Number of steps between snapshots in memory, under ``phalanx run``; "auto": the smallest number
            for which snapshots take at most 3 % of the training time; 0: no snapshots.
        log_every: Number of steps between two "step" records of metrics.jsonl.
        deterministic: "world" for the same weights, bit for bit, on 1, 2, 4, ... ranks; None: no such guarantee.
        virtual_shards: Number of parts of a batch under `deterministic`: a power of two, at least the number of ranks.

    Example:
        >>> settings = phalanx.train.Settings(max_epochs=1, global_batch_size=32, on_resize="scale")
        >>> settings.batch_size_for(world_size=4, first_world_size=2)
        64
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    on_resize: Literal["keep", "scale"] = "keep"
    seed: int = 0
    num_workers: int = 0
    drop_last: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    divide_optimizer: Literal["auto", "always", "never"] = "auto"
    clip_norm: float | None = None
    on_nan: Literal["raise", "warn", "ignore"] = "raise"
    compare_every: int | Literal["auto"] = "auto"
    scheduler_interval: Literal["step", "epoch"] = "step"
    monitor: str = "loss"
    mode: Literal["min", "max"] | None = None
    patience: int | None = None
    min_delta: float = 0.0
    folder: str | os.PathLike[str] | None = None
    resume: Literal["auto", "never", "force"] = "auto"
    save_every: int | None = None
    keep_last: int = 3
    snapshot_every: int | Literal["auto"] = "auto"
    log_every: int = 10
    deterministic: Literal["world"] | None = None
    virtual_shards: int = 8

    _is_made = False  # once True, changes that would have no effect are refused

    @classmethod
    def of(cls, given: Mapping[str, Any], known: Collection[str]) -> Settings:
        """Return `Settings` made of keyword arguments of `Trainer`.

        Args:
            given: Settings by name.
            known: Names of all arguments of `Trainer`, to suggest one of them for an unknown name.

        Raises:
            TypeError: There is no such argument; the message names the argument that is probably meant.
        """
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise wrong_argument("Trainer", name, known, known)
        return cls(**given)

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                value = getattr(self, name)
                hint = f"; right: {name}={right}" if (right := _choice_meant(name, value)) else ""
                raise ValueError(f"Trainer: {name} must be one of {allowed}, got {value!r}{hint}")
        for name, least in _LEAST.items():
            setattr(self, name, self._whole(name, least))
        if self.clip_norm is not None:
            if not _is_real(self.clip_norm):
                raise _wrong_type("clip_norm", "a number", self.clip_norm)
            if not self.clip_norm > 0:
                raise ValueError(f"Trainer: clip_norm must be above 0, got {self.clip_norm}")
        if not _is_real(self.min_delta):
            raise _wrong_type("min_delta", "a number", self.min_delta)
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(f"Trainer: min_delta must be at least 0 and finite, got {self.min_delta}")
        if self.min_delta and self.patience is None:
            raise ValueError("Trainer: min_delta is for early stopping: patience=3 says when")
        for name in ("drop_last", "channels_last"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, "True or False", getattr(self, name))
        if not isinstance(self.monitor, str):
            raise _wrong_type("monitor", "the name of a value of the evaluation", self.monitor)
        self.mode = self.mode or mode_of(self.monitor)
        if self.mode is None:
            raise ValueError(
                f'Trainer: monitor={self.monitor!r}: is lower or higher better? Say mode="min" or mode="max"'
            )
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike):
                raise _wrong_type("folder", "a path", self.folder)
            self.folder = os.fspath(self.folder)
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError("Trainer: say when to stop: max_epochs=10 or max_steps=1000")
        if self.virtual_shards & (self.virtual_shards - 1):
            raise ValueError(f"Trainer: virtual_shards must be a power of two, got {self.virtual_shards}")
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made:
            if name not in ENDS:
                hint = "" if name in self.__dataclass_fields__ else did_you_mean(name, self.__dataclass_fields__)
                raise AttributeError(
                    f"Trainer: setting {name} now would change nothing{hint}: make the Trainer anew, with "
                    f"{name}={value!r}. Only {' and '.join(ENDS)} may change, to train longer"
                )
            value = getattr(dataclasses.replace(self, **{name: value}), name)  # checked by replace()
        super().__setattr__(name, value)

    def _whole(self, name: str, least: int) -> Any:
        """Return a setting as a whole number; None or "auto" as it is, if allowed.

        Raises:
            TypeError: The setting is not a whole number.
            ValueError: The setting is smaller than `least`.
        """
        value = getattr(self, name)
        default, can_be_auto = type(self).__dataclass_fields__[name].default, name in _CAN_BE_AUTO
        if value is default is None or (can_be_auto and value == "auto"):
            return value
        if not _is_real(value) or not math.isfinite(value) or value != int(value):
            raise _wrong_type(name, 'a whole number, or "auto"' if can_be_auto else "a whole number", value)
        if value < least:
            raise ValueError(f"Trainer: {name} must be at least {least}, got {value}")
        return int(value)

    def batch_size_for(self, world_size: int, first_world_size: int) -> int:
        """Return the global batch size on `world_size` ranks in a run that began on `first_world_size` ranks."""
        if self.on_resize == "keep":
            return self.global_batch_size
        return max(world_size, self.global_batch_size * world_size // first_world_size)


class SignatureWithSettings:
    """Signature of a class for `help` and notebooks, with each setting in place of ``**settings``."""

    def __init__(self, constructor: Callable[..., None]) -> None:
        self._constructor = constructor

    def __get__(self, _instance: object, owner: Any) -> inspect.Signature:
        if owner.__init__ is not self._constructor:  # a subclass with a constructor of its own
            raise AttributeError("__signature__")
        _, *own, _ = inspect.signature(self._constructor).parameters.values()
        return inspect.Signature([*own, *inspect.signature(Settings).parameters.values()])


def mode_of(name: str) -> Literal["min", "max"] | None:
    """Return "min" or "max" if a value's name, such as ``val_mae`` or ``top1_acc``, shows which value is better.

    The last word with a known direction decides, as in ``dice_loss``. Return None if there is no such word, or if
    another word may reverse the meaning.
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    known = [_MODES[word] for word in words if word in _MODES]
    return known[-1] if known and _TURNING.isdisjoint(words) else None


def _choice_meant(name: str, value: object) -> str:
    """Return the choice that is meant, as a script writes it; empty if unknown."""
    if name == "precision":
        from phalanx.session.loop import right_precision  # imported only for an error

        return right_precision(value)
    near = nearest(value, filter(None, _CHOICES[name])) if isinstance(value, str) else ""
    return _OTHER_VALUES.get(name, {}).get(str(value)) or (f'"{near}"' if near else "")


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _wrong_type(name: str, wanted: str, value: object) -> TypeError:
    hint = f"; right: {name}={value}" if isinstance(value, str) and value.isdecimal() else ""
    return TypeError(f"Trainer: {name} must be {wanted}, got {value!r} ({type(value).__name__}){hint}")
