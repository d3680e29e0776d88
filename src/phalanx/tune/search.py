"""The search of ``phalanx tune`` for the fastest setup. It judges each gain against the noise.

The search first compares numbers of ranks and threads, all with plain python. Then it tries each further change alone,
on top of the best numbers of ranks and threads. Finally, it combines all changes that gained something. Each comparison
is a race: in every round, each setup has a turn of 0.3 s.

- A turn measures the times from one optimizer step to the next, and counts the samples that loaders have yielded. The
  slowest tenth of the steps does not count, because an evaluation or a new epoch may fall into it. Speeds are compared
  within a round; every second round runs the setups in reverse order.
- A race ends when the differences are clear, or too small to matter; setups that are far behind drop out. A change
  counts only if it gains more than twice the standard error of its ratio, and more than 1 %.
- A turn may take a quarter of the time left for the search, or 10 s if that is more; a start may take four times as
  long as the longest start so far, or 30 s if that is more. A job that fails or hangs gets a line in the table, and the
  search continues with the other jobs.
- If a script reuses the batches that it has loaded, each later step counts the mean number of samples that the first
  steps loaded.
- If no samples were ever loaded, all speeds are in steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx._text import counted, joined, plural
from phalanx.host.cpus import Machine
from phalanx.tune.offers import Offer, offers
from phalanx.tune.trials import Failed, Setup, Trials

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_LEAST_GAIN = 0.01  # a smaller gain is not worth another flag
_HOPELESS = 0.85  # a setup slower than this fraction of the fastest, in every round so far, drops out
_LEAST_START_S = 60.0  # the first jobs may take this long to start, however little time is left
_TURN_WITH_ALL_S = 0.6  # duration of a turn, including its overhead
_SHARE_OF_RANKS = 0.3  # fraction of the time left, for the race between numbers of ranks and threads


@dataclasses.dataclass(frozen=True)
class Gain:
    """Gain in speed of one setup over another.

    Attributes:
        ratio: Speed divided by the other setup's speed; the median over the rounds.
        noise: Twice the standard error of the logarithm of `ratio`.
    """

    ratio: float
    noise: float

    @property
    def is_certain(self) -> bool:
        """Whether the gain exceeds the noise, and is large enough to matter."""
        return math.log(self.ratio) > max(self.noise, _LEAST_GAIN)


@dataclasses.dataclass(frozen=True)
class Step:
    """A line of the table: a setup, and its gain over another setup.

    Attributes:
        name: The change, as the user would write it.
        rate: Speed, in samples or steps a second.
        gain: Effect of the change; None for the setup that the others are compared with.
        is_taken: Whether the change is part of the best command.
        why: Reason why the change could not be measured; empty if it was measured.
        note: Reason why the change is not taken although it is faster.
    """

    name: str
    rate: float = 0.0
    gain: Gain | None = None
    is_taken: bool = False
    why: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the search.

    Attributes:
        ranks: Numbers of ranks to try.
        memories: Values of ``--memory`` to try.
        machine: Machine whose cores are divided.
        threads: Number of threads that the user has set for each rank; 0: not set, so the search chooses it.
        deadline: Time on the monotonic clock at which the search ends.
    """

    ranks: Sequence[int]
    memories: Sequence[str]
    machine: Machine
    threads: int
    deadline: float

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


def race(
    setups: Sequence[Setup], rate: Callable[[Setup], float | None], deadline: float, *, drops: bool = True
) -> dict[Setup, list[float]]:
    """Let setups take turns until their differences are clear or within the noise; return their speeds.

    Every second round runs the setups in reverse order, which cancels a steady drift of the machine's speed. Setups
    that are far behind drop out. Setups that fail are missing from the result.

    Args:
        setups: Setups to compare.
        rate: Function that measures a setup's speed once; it returns None if the setup has failed.
        deadline: Time on the monotonic clock after which no further round begins, once the least number of rounds is
            done.
        drops: Whether setups may drop out and the race may end early; otherwise all setups take part in every round.
    """
    found: dict[Setup, list[float]] = {setup: [] for setup in setups}
    racing = [*setups]
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and (time.monotonic() > deadline or len(racing) < 2):
            break
        for setup in racing[:: -1 if number % 2 else 1]:
            speed = rate(setup)
            if speed is None:
                del found[setup]
                racing.remove(setup)
            else:
                found[setup].append(speed)
        if number + 1 < _LEAST_ROUNDS or not drops or not found:
            continue
        best = fastest(found)
        racing = [one for one in racing if max(gains(found[one], found[best])) > _HOPELESS]
        if all(_is_settled(compare(found[one], found[best])) for one in racing if one != best):
            break
    return found


def gains(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two setups' speeds, for each round in which both took part."""
    return [speed / other for speed, other in zip(speeds, others, strict=False)]


def compare(speeds: Sequence[float], others: Sequence[float]) -> Gain:
    """Return the gain of `speeds` over `others`, compared round by round."""
    ratios = gains(speeds, others)
    spread = statistics.stdev(map(math.log, ratios)) if len(ratios) > 1 else math.inf
    return Gain(statistics.median(ratios), 2 * 1.25 * spread / math.sqrt(len(ratios)))  # 2 standard errors of a median


def fastest(found: Mapping[Setup, Sequence[float]]) -> Setup:
    """Return the setup with the highest median speed."""
    return max(found, key=lambda setup: statistics.median(found[setup]))


def _is_settled(gain: Gain) -> bool:
    """Return whether more rounds are unnecessary: the difference is clear, or certainly too small to matter."""
    return abs(math.log(gain.ratio)) > 2 * gain.noise or gain.noise < _LEAST_GAIN


class Search:
    """Finds the best setup of a script, one decision after another.

    Args:
        trials: Jobs of the script.
        limits: Limits of the search.
        tell: Function that shows the user what is being tried.

    Attributes:
        best: Fastest setup so far.
        steps: Lines of the table.
        unit: Unit of the speeds: "samples" or "steps" a second.
        facts: Facts that rank 0 has reported about the script.
        limits: Limits of the search.
    """

    def __init__(self, trials: Trials, limits: Limits, tell: Callable[[str], None]) -> None:
        self._trials, self.limits, self._tell = trials, limits, tell
        self.steps: list[Step] = []
        self.unit = "samples"
        self.best: Setup
        self.facts: Mapping[str, Any] = {}
        self.plain = Setup(ranks=1, threads=limits.threads or limits.machine.num_cores, memory="default")

    def run(self) -> None:
        """Find the best setup, and write the table's lines.

        Raises:
            Failed: The script can't be measured with any number of ranks.
        """
        self._choose_ranks()
        self._improve()

    def _choose_ranks(self) -> None:
        limits = self.limits
        setups = [
            Setup(ranks=ranks, threads=threads, memory=limits.memories[0])
            for ranks in limits.ranks
            for threads in ([limits.threads] if limits.threads else threads_to_try(limits.machine, ranks))
        ]
        wanted = [self.plain, *setups] if 1 in limits.ranks else setups
        self._tell(f"starting the script with {_words([*limits.ranks], 'rank')}")
        failed = self._start(wanted)
        there = [setup for setup in wanted if setup not in failed]
        if not [setup for setup in setups if setup in there]:
            raise next(iter(failed.values()))
        self._tell(
            f"taking turns: {counted(len(there), 'way')} to divide {limits.machine.describe()} among ranks and threads"
        )
        found = race(there, self._trials.rate, time.monotonic() + limits.left_s() * _SHARE_OF_RANKS)
        ours = {setup: speeds for setup, speeds in found.items() if setup != self.plain}
        if not ours:
            raise self._trials.failure_of(setups[0])
        self.best = fastest(ours)
        self.facts = self._trials.of(self.best).facts
        self.unit = "samples" if self._trials.counts_samples else "steps"
        first = self.plain if self.plain in found else min(ours, key=lambda one: (one.ranks, one.threads))
        names = {setup: _divided(setup, is_plain=setup == self.plain) for setup in wanted}
        for setup, speeds in found.items():
            gain = None if setup == first else compare(speeds, found[first])
            self.steps.append(Step(names[setup], statistics.median(speeds), gain, setup == self.best))
        self.steps += [Step(names[s], why=str(self._trials.failure_of(s))) for s in wanted if s not in found]

    def _improve(self) -> None:
        """Try changes to the best setup so far, and take the changes whose gain is clear."""
        base = self.best
        every = offers(base, self.facts, self._trials.of(base).loading_share, self.limits.memories)
        tried: list[Offer] = []
        late: list[Offer] = []
        failed: dict[Setup, Failed] = {}
        for offer in every:
            needed_s = self._trials.start_s + _LEAST_ROUNDS * _TURN_WITH_ALL_S * (len(tried) + 2)
            if self.limits.left_s() < max(offer.needs_s, needed_s):
                late.append(offer)
                continue
            self._tell(f"trying {offer.name}")
            failed |= self._start([offer.setup], offer.needs_s)
            tried.append(offer)
        if tried:
            self._try(base, tried, failed)
        self.steps += [Step(offer.name, why="takes longer than was left; --seconds gives it more") for offer in late]

    def _start(self, setups: Sequence[Setup], more_s: float = 0.0) -> dict[Setup, Failed]:
        """Start the setups' jobs, and wait until they are ready; return the setups that can't be measured."""
        return self._trials.start(setups, max(_LEAST_START_S, self.limits.left_s()), more_s)

    def _try(self, base: Setup, tried: Sequence[Offer], failed: Mapping[Setup, Failed]) -> None:
        there = [offer.setup for offer in tried if offer.setup not in failed]
        found = race([base, *there], self._trials.rate, self.limits.deadline)
        taken = []
        for offer in tried:
            setup = offer.setup
            if setup not in found or base not in found:
                why = self._trials.failure_of(base if setup in found else setup)
                self.steps.append(Step(offer.name, why=str(why)))
                continue
            gain = compare(found[setup], found[base])
            is_taken = gain.is_certain and not offer.note
            note = offer.note if gain.is_certain else ""
            self.steps.append(Step(offer.name, statistics.median(found[setup]), gain, is_taken, note=note))
            taken += [setup] if is_taken else []
        if len(taken) == 1:
            (self.best,) = taken
        elif taken:
            self._combine(base, taken)

    def _combine(self, base: Setup, taken: Sequence[Setup]) -> None:
        """Measure one setup with all changes that gained something, and keep the fastest setup."""
        together = dataclasses.replace(
            base,
            memory=next((setup.memory for setup in taken if setup.memory != base.memory), base.memory),
            fused=any(setup.fused for setup in taken),
            changes=tuple(dict.fromkeys(pair for setup in taken for pair in setup.changes)),
        )
        failed = self._start([together])
        found = race([base, *taken, *([] if failed else [together])], self._trials.rate, self.limits.deadline)
        self.best = fastest(found) if found else base
        if {together, base} <= found.keys():
            gain = compare(found[together], found[base])
            self.steps.append(Step("all of these", statistics.median(found[together]), gain, self.best == together))


def threads_to_try(machine: Machine, ranks: int) -> list[int]:
    """Return the numbers of threads to try for each rank: one, half of a rank's share of the cores, and all of it."""
    share = machine.num_cores // ranks
    return sorted({1, max(1, share // 2), max(1, share)})


def _divided(setup: Setup, *, is_plain: bool = False) -> str:
    divided = f"{counted(setup.ranks, 'rank')} x {counted(setup.threads, 'thread')}"
    return f"plain python: {divided}" if is_plain else divided


def _words(numbers: Sequence[int], noun: str) -> str:
    return f"{joined(numbers)} {plural(numbers[-1], noun)}"


def default_ranks(machine: Machine) -> list[int]:
    """Return the numbers of ranks to try on a machine: 1, 2, 4 and so on, and the number of cores."""
    cores = machine.num_cores
    return sorted({1, cores, *(2**power for power in range(1, 12) if 2**power <= cores)})
