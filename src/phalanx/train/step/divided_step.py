"""`DividedStep`: divides an optimizer's step among the ranks if a trial in the first steps shows that this is faster.

The first five steps are plain, the next five divided. Then all ranks keep whichever way took less time on the slowest
rank; the time includes averaging the gradients. An optimizer with hooks is not divided. Hooks added later are called
before and after the divided step, where they see whole parameters. torch's fused Adam, AdamW and Adagrad are faster
still but round differently, so the user has to ask for ``fused=True``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn, optim

from phalanx import checkpoint
from phalanx.parallel import DistributedDataParallel
from phalanx.parallel.pieces import ELEMENTWISE
from phalanx.session.session import Session
from phalanx.train.step.shards import Shards, divisible, has_hooks, has_room
from phalanx.train.wrapper import is_sharded
from phalanx.wire.rank_group import RankGroup

_NUM_TRIED, _NUM_COUNTED = 5, 3  # steps tried each way, of which the last few are timed: the first allocate memory
_LEAST_S = 1e-3  # if a plain step is faster than this, no trial is worthwhile
_LEAST_GAIN = 1.05


class DividedStep:
    """Steps an optimizer; every rank must call `step`, after the ranks have averaged the gradients.

    In a divided step, each rank steps one part of the parameters and gets the other parts from the other ranks. The
    parameters get the same bits as in a plain step. The object is also the `Division` that the model's averaging
    uses: if each rank steps only its part and nothing else reads the gradients, each rank needs only the means of that
    part.

    Args:
        optimizer: Optimizer of the model's parameters.
        model: Model in its wrapper.
        session: Session of this rank.
        how: `Settings.divide_optimizer`: "auto" divides if that is faster, "always" if it is possible, or "never".
        say: Function that shows a line to the user.
        clips: Whether gradients are clipped, so that each rank reads all of them before the step.

    Attributes:
        is_next: Whether only `step` reads the gradients that the ranks are averaging.
    """

    is_next = False

    def __init__(
        self,
        optimizer: optim.Optimizer,
        model: nn.Module,
        session: Session,
        how: str,
        say: Callable[[str], None],
        *,
        clips: bool,
    ) -> None:
        self._optimizer, self._how, self._say = optimizer, how, say
        self._model, self._clips = model, clips
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._group = None if self._ddp is None else self._ddp.process_group
        self._ranks = RankGroup()
        self._is_local = session.local_world_size == session.world_size
        self._is_decided = how == "never"
        self._shards: Shards | None = None
        self._times_s: list[float] = []
        self._undivided_s = 0.0

    def length(self, parameter: nn.Parameter) -> int:
        """Return how many elements of a parameter each rank steps, without the remainder; 0: every rank steps all."""
        return 0 if self._shards is None else self._shards.length(parameter)

    def needs_whole(self) -> bool:
        """Return whether anything on this rank reads all of the gradients that the ranks are about to average."""
        return not self.is_next or self._shards is None or self._shards.needs_whole()

    def step(self, step: Callable[[], object], averaging_s: float = 0.0) -> None:
        """Step the optimizer by calling `step`, on this rank's part of the parameters or on all of them.

        Args:
            step: Function that steps the optimizer.
            averaging_s: Time that averaging took, which a division shortens, too.
        """
        begin_s = time.perf_counter() - averaging_s
        if self._shards is None:
            step()
        else:
            self._shards.step(step)
        if not self._is_decided:
            self._times_s.append(time.perf_counter() - begin_s)
            if self._shards is None and (self._how == "always" or len(self._times_s) == _NUM_TRIED):
                self._divide()
            elif len(self._times_s) == _NUM_TRIED:
                self._decide()

    def end(self) -> None:
        """Undo the division: give the optimizer of this rank a private copy of the state again."""
        if self._shards is not None:
            self._shards.end()
            self._shards = None
            self._divide_averaging(None)

    def _divide_averaging(self, division: DividedStep | None) -> None:
        if self._ddp is not None and not self._clips:
            self._ddp.divide_averaging(division)

    def _divide(self) -> None:
        """Divide the following steps if all ranks can do so, and if dividing may be faster."""
        parameters = self._divisible()
        has = has_room(parameters, self._optimizer)
        every = self._ranks.gather(([p.numel() for p in parameters], has, self._take_s()))
        self._undivided_s = max(undivided_s for _, _, undivided_s in every)
        can = bool(parameters) and all(sizes == every[0][0] and has for sizes, has, _ in every)
        tries = can and (self._how == "always" or self._undivided_s >= _LEAST_S)
        self._is_decided = not tries or self._how == "always"
        if tries:
            try:
                self._shards = Shards(self._optimizer, parameters, self._group)
                self._divide_averaging(self)
            except RuntimeError as error:  # raised on every rank
                self._is_decided = True
                self._say(f"each rank steps the whole optimizer: {error}")

    def _divisible(self) -> list[nn.Parameter]:
        """Return the parameters that can be divided on this rank."""
        optimizer, num_alike = self._optimizer, 1 if self._group is None else dist.get_world_size(self._group)
        if (
            not self._is_local
            or num_alike != self._ranks.world_size
            or is_sharded(self._model)
            or type(optimizer) not in ELEMENTWISE
            or torch.get_num_threads() != 1  # several threads would split a parameter elsewhere: bits may differ
            or has_hooks(optimizer)  # hooks would see pieces of parameters
        ):
            return []
        parameters = dict(checkpoint.unwrap(self._model).named_parameters())
        ignored: set[str] = getattr(self._model, "parameters_to_ignore", set())  # parameters that are not averaged
        return divisible(optimizer, [p for name, p in parameters.items() if name not in ignored])

    def _decide(self) -> None:
        """Keep the division or undo it, whichever was faster on the slowest rank."""
        self._is_decided = True
        divided_s = max(self._ranks.gather(self._take_s()))
        if divided_s * _LEAST_GAIN > self._undivided_s:
            self.end()
            return
        how, what = "the optimizer steps in blocks", "a step"
        if self._group is not None:
            how, what = "each rank steps its part of the optimizer", "for averaging and the step"
        self._say(f"{how}: {divided_s * 1e3:.1f} ms {what} instead of {self._undivided_s * 1e3:.1f} ms")

    def _take_s(self) -> float:
        """Return the median time of the last steps, and reset the times."""
        taken, self._times_s = self._times_s, []
        return statistics.median(taken[-_NUM_COUNTED:])
