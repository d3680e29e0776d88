"""The rank's side of ``phalanx tune`` and ``phalanx check``: takes optimizer steps on request.

A trial compares several jobs. The jobs run side by side and take turns, so that other load on the machine slows all of
them alike. Requests and answers are files in a folder and not messages of a process group, because a script may have
any group, or none. A waiting rank checks 100 times a second whether the file of requests has changed. In an earlier
version, each waiting rank read the file 500 times a second, and thirteen of them halved the speed of the job that was
being measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx import _env
from phalanx.wire.files import read_json, write_whole
from phalanx.wire.messages import read_value, understand

WARM_UP_STEPS = 3
"""Number of steps that a rank takes before its first report; these steps allocate memory and choose kernels."""
COMPILE = "compile"
"""Name of the change that compiles the model; a Trainer has no setting for this."""
_PAUSE_S = 0.01
_WITH_FUSED_FORM = ("SGD", "Adam", "AdamW", "Adagrad")  # optimizers with a fused form on the CPU
_ENDLESS = 10**9

_current: Trial | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A request to the ranks of one job to take some steps.

    Attributes:
        serial: Number of the turn, from 1.
        steps: Number of steps to measure.
        skip: Number of unmeasured steps before the measured ones.
        threads: Number of threads per operation.
        fused: Whether the optimizer steps in its fused form.
    """

    serial: int
    steps: int
    skip: int
    threads: int = 1
    fused: bool = False


def asked_file(folder: str) -> str:
    """Return the path of the file that requests the next turn from a job's ranks."""
    return os.path.join(folder, "asked.json")


def told_file(folder: str, serial: int, rank: int) -> str:
    """Return the path of a rank's report on a turn; the report on turn 0 describes the rank itself."""
    return os.path.join(folder, f"told_{serial}_{rank}.json")


def multiprocess_file(folder: str) -> str:
    """Return the path of a marker file; if it exists, a rank trains in several processes, so it can't be measured."""
    return os.path.join(folder, "multiprocess")


def variables(folder: str, changes: Mapping[str, Any], first_steps: int = WARM_UP_STEPS) -> dict[str, str]:
    """Return the variables that make ranks part of a trial.

    Args:
        folder: Folder for requests and reports.
        changes: Settings of the Trainer to try. Without a Trainer, ``num_workers`` applies to every DataLoader that has
            no workers.
        first_steps: Number of steps that a rank takes before its first report and its first wait.
    """
    return {_env.TRIAL_VARIABLE: json.dumps({"folder": folder, "changes": {**changes}, "first_steps": first_steps})}


def begin() -> None:
    """Become part of a trial if this rank was started for a trial. torch must have been imported."""
    global _current
    text = _env.environment().get(_env.TRIAL_VARIABLE)
    if text and _current is None:
        _current = Trial(**understand(text, dict))
        _current.watch()


def of_trainer(given: Mapping[str, Any], model: Any) -> tuple[dict[str, Any], Trial]:
    """Return the settings that a Trainer uses in this trial, in place of the settings that it was given.

    The second value is a callback, which the Trainer calls after each step.
    """
    assert _current is not None
    return _current.settings_over(given, model), _current


def is_on() -> bool:
    """Return whether this rank is part of a trial."""
    return _current is not None


def counted(batches: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the same batches that counts samples if this rank is part of a trial."""
    return batches if _current is None else _Counted(batches, _current)


class Trial:
    """This rank's part in a trial."""

    def __init__(self, folder: str, changes: Mapping[str, Any], first_steps: int) -> None:
        self._folder, self._changes, self._first_steps = folder, dict(changes), first_steps
        self._given: dict[str, Any] | None = None  # settings that the script gave to its Trainer
        self._has_stream = False
        self._optimizer: Any = None  # the first optimizer that steps
        self._hook: Any = None
        self._can_fuse = False
        self._num_steps = 0
        self._turn: Turn | None = None
        self._to_skip = 0
        self._steps: list[tuple[float, int, float]] = []  # for each step: seconds, samples, seconds of loading
        self._began_s = 0.0
        self._num_samples, self._loading_s = 0, 0.0
        self._warm_up_samples: list[int] = []  # samples of each warm-up step

    def settings_over(self, given: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """Return the settings to try. They make training endless: the trial ends the job after measuring it."""
        self._given = {**given}
        if self._changes.pop(COMPILE, False):
            model.compile()
        self._hook.remove()  # a Trainer may step the optimizer in several parts, and calls `on_step` after the last
        endless = {"max_epochs": _ENDLESS, "max_steps": None, "patience": None, "resume": "never"}
        unsaved = {"save_every": _ENDLESS, "snapshot_every": 0}
        uncompared = {"compare_every": 0}  # ranks may change their number of threads at different steps, and so differ
        return {**given, **endless, **unsaved, **uncompared, **self._changes}

    def watch(self) -> None:
        """Time every step of the first optimizer, and count the samples that loaders yield for each step."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader, IterableDataset

        self._hook = register_optimizer_step_post_hook(self._after_step)
        begin_epoch = DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            self._has_stream |= isinstance(loader.dataset, IterableDataset)
            return counted(begin_epoch(loader))

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        if "num_workers" in self._changes:
            self._give_workers(DataLoader)

    def _give_workers(self, loader_class: Any) -> None:
        """Give every loader without workers the number of workers to try."""
        make, num_workers = loader_class.__init__, self._changes["num_workers"]
        signature = inspect.signature(make)

        def make_with_workers(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            if self._given is None and not given.arguments.get("num_workers"):
                given.arguments |= {"num_workers": num_workers, "persistent_workers": True}
            make(*given.args, **given.kwargs)

        loader_class.__init__ = make_with_workers

    def count(self, batch: Any, loading_s: float) -> None:
        """Count the samples of a batch: the first dimension of its first tensor."""
        from phalanx._torch.nested import tensors_in

        first = next(tensors_in(batch), None)
        self._num_samples += len(first[1]) if first is not None and first[1].dim() else 0
        self._loading_s += loading_s

    def on_step(self, trainer: Any) -> None:
        """Handle a finished step, as a callback of a Trainer."""
        self._after_step(trainer.optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        now = time.perf_counter()
        self._num_steps += 1
        if self._turn is None:
            self._warm_up_samples.append(self._num_samples)
            self._num_samples = 0
            if self._num_steps >= self._first_steps:
                self._can_fuse = _can_fuse(self._optimizer)
                self._refuse_multiprocess()
                self._tell(0, self._facts())
                self._take_turn(1)
            return
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._steps.append((now - self._began_s, self._num_samples, self._loading_s))
            if len(self._steps) == self._turn.steps:
                self._tell(self._turn.serial, {"steps": self._steps})
                self._take_turn(self._turn.serial + 1)
        self._num_samples, self._loading_s = 0, 0.0
        self._began_s = time.perf_counter()

    def _refuse_multiprocess(self) -> None:
        """Raise if another process of this rank already takes part: both would answer the same requests.

        Raises:
            RuntimeError: Another process takes part, and `multiprocess_file` now says so.
        """
        try:
            with open(os.path.join(self._folder, f"rank_{self._rank}"), "x"):
                pass
        except FileExistsError:
            what = f"takes optimizer steps in several processes of rank {self._rank}"
            write_whole(multiprocess_file(self._folder), what)
            raise RuntimeError(f"{what}, which phalanx tune can't measure") from None

    @property
    def _rank(self) -> int:
        return int(_env.environment().get("RANK", "0"))  # not read at import, which may happen before the fork

    def _tell(self, serial: int, what: Mapping[str, Any]) -> None:
        write_whole(told_file(self._folder, serial, self._rank), json.dumps(what))

    def _take_turn(self, serial: int) -> None:
        """Wait for request number `serial`, and apply the settings that it asks for."""
        import torch

        from phalanx.wire.waiting import wait_until

        asked, last = asked_file(self._folder), None

        def look() -> Turn | None:
            nonlocal last
            with contextlib.suppress(FileNotFoundError):
                now = os.stat(asked)
                if (now.st_ino, now.st_mtime_ns) != last:  # read only after a change, to leave the CPUs to others
                    last = now.st_ino, now.st_mtime_ns
                    turn = read_value(read_json(asked), Turn)
                    return turn if turn.serial == serial else None
            return None

        turn = wait_until(look, math.inf, most_s=_PAUSE_S)
        assert turn is not None
        self._turn, self._to_skip, self._steps = turn, turn.skip, []
        torch.set_num_threads(turn.threads)
        if self._can_fuse:
            for group in self._optimizer.param_groups:
                group["fused"] = turn.fused or None

    def _facts(self) -> dict[str, Any]:
        """Return the facts that decide which settings can be tried with this script."""
        import torch.distributed as dist

        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {
            "optimizer": type(self._optimizer).__name__,
            "can_fuse": self._can_fuse,
            "device": str(parameters[0].device) if parameters else "cpu",
            "has_group": dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1,
            "has_convolutions": any(p.dim() == 4 for p in parameters),
            "samples": statistics.mean(self._warm_up_samples) if all(self._warm_up_samples) else 0,
            "has_stream": self._has_stream,
            "trainer": None if self._given is None else [*self._given],
        }


class _Counted:
    """Iterator over a loader's batches that counts their samples; it forwards all else to the loader's own iterator."""

    def __init__(self, batches: Iterator[Any], trial: Trial) -> None:
        self._batches, self._trial = batches, trial

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        began_s = time.perf_counter()
        batch = next(self._batches)
        self._trial.count(batch, time.perf_counter() - began_s)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _can_fuse(optimizer: Any) -> bool:
    """Return whether the script leaves the optimizer's form to torch, and torch has a fused form for this optimizer."""
    import torch

    kind = type(optimizer)
    if kind.__name__ not in _WITH_FUSED_FORM or kind is not getattr(torch.optim, kind.__name__):
        return False
    return all(
        group.get("fused", False) is None
        and not group.get("foreach")
        and not group.get("differentiable")
        and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in group["params"])
        and all(p.grad is None or p.grad.layout is torch.strided for p in group["params"])
        for group in optimizer.param_groups
    )
