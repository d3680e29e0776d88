"""Detects ranks that train without each other by mistake.

When such a rank ends, it reports the mistake to its launcher.

A rank without a group has trained alone if its optimizer has stepped. A rank in a group has trained apart if its
optimizer has stepped twice, and nothing but barriers ran in any group since the first optimizer was made. (One step is
not enough, because its data may have been exchanged before the optimizer was made.) The launcher warns if all its ranks
report the same.

**A correct program must never cause a warning.** A process reports nothing if some of its exchanges can't be counted,
that is, if it has a group of another backend, RPC, a GPU in use, or a torch before 2.14 (where some calls bypass
Python). A single all_reduce of a loss suffices to prevent the warning, since evolution strategies exchange no more than
that. Groups count collectives in the core anyway; barriers and messages are counted where Python starts them.

torch calls `Optimizer.profile_hook_step` when it makes the first optimizer of a class, so this module replaces that
function to see optimizers and their steps. A hook on an optimizer would show the steps, too, but a Trainer does not
divide the step of an optimizer with hooks among the ranks.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from phalanx import _env
from phalanx.rendezvous.launched import Launch

_wants_others = False
_has_uncounted = False  # whether there is a group of another backend, or RPC
_has_devices = False  # whether there is a group in which another backend handles the tensors of other devices
_num_exchanges: Callable[[], int] | None = None


def wants_others() -> None:
    """Note that this process is about to meet other ranks."""
    global _wants_others
    _wants_others = True


def exchanges_uncounted() -> None:
    """Note that this process may exchange tensors that are not counted here."""
    global _has_uncounted
    _has_uncounted = True


def count_exchanges(count: Callable[[], int]) -> None:
    """Register a function that counts the operations with data in all phalanx groups that this process has had."""
    global _num_exchanges
    _num_exchanges = count


def watch() -> None:
    """When this rank ends, report to the launcher if it has trained alone or apart although there were other ranks."""
    launch = Launch.of(_env.environment().get(_env.LAUNCH_VARIABLE, ""))
    if launch is None or launch.world_size == 1 or not _env.is_rank():
        return
    from phalanx import _torch  # here, because the supervisor imports this module and must not import torch

    training = _Training()
    training.watch()
    if sys.modules["torch.distributed"].is_available():
        _torch.wrap_making_of_groups(_noted)
    atexit.register(_tell, launch, os.getpid(), training)


class _Training:
    """Steps that the optimizers of this process have taken.

    Attributes:
        has_begun: Whether an optimizer has stepped.
        goes_on: Whether the same optimizer has stepped twice.
        was_in_group: Whether there was a group of several ranks at the second step.
        num_before: Number of operations with data when the first optimizer was made.
    """

    def __init__(self) -> None:
        self.has_begun: bool = False
        self.goes_on: bool = False
        self.was_in_group: bool = False
        self.num_before: int | None = None
        self._first: Callable[[], Any] = lambda: None

    def watch(self) -> None:
        """Wrap `step` of each optimizer class when torch hooks that step: when the class makes its first optimizer."""
        from torch.compiler import is_dynamo_compiling
        from torch.optim import Optimizer

        torchs = Optimizer.profile_hook_step

        def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
            if self.num_before is None:
                self.num_before = _num_exchanges() if _num_exchanges is not None else 0
            hooked = torchs(step)

            @functools.wraps(hooked)
            def noted(optimizer: Any, *args: Any, **named: Any) -> Any:
                if not self.goes_on and not is_dynamo_compiling():
                    self._note(optimizer)
                return hooked(optimizer, *args, **named)

            return noted

        Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[method-assign, assignment]

    def _note(self, optimizer: Any) -> None:
        self.has_begun = True
        first = self._first()
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is optimizer:
            from torch import distributed

            self.goes_on = True
            self.was_in_group = _has_group() and distributed.get_world_size() > 1

    def was_apart(self) -> bool:
        """Return whether this process has trained in a group and has certainly exchanged nothing while it trained."""
        if not self.was_in_group or _num_exchanges is None or _has_uncounted or (_has_devices and _uses_accelerator()):
            return False
        return _num_exchanges() == self.num_before


def _noted(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new_process_group_helper(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        _note_group(made[0])
        return made

    return new_process_group_helper


def _note_group(group: Any) -> None:
    global _has_devices
    from torch import distributed

    is_member = isinstance(group, distributed.ProcessGroup)
    if not is_member or group.size() == 1:
        return
    if not hasattr(group, "num_collectives"):
        exchanges_uncounted()
    elif group.other_devices:
        _has_devices = True


def _tell(launch: Launch, pid: int, training: _Training) -> None:
    if os.getpid() != pid or not training.has_begun:
        return
    if not (_wants_others or _has_group()):
        launch.note_solo()
    elif training.was_apart():
        launch.note_apart()


def _has_group() -> bool:
    distributed = sys.modules["torch.distributed"]
    return bool(distributed.is_available() and distributed.is_initialized())


def _uses_accelerator() -> bool:
    import torch

    device = torch.accelerator.current_accelerator()
    return device is not None and torch.get_device_module(device).is_initialized()
