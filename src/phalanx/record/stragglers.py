"""The straggler ledger: which rank the others wait for, how long, in which phase, and whether that may be chance.

The launcher (which does not import torch), the report and the commands use the ledger. To read a collective costs 7 us;
a decision over 1,000 steps of 4 ranks costs 34 ms. So the launcher reads at most 2,000 events per second, and decides
every 10 s. `stages` and `excess` describe the method.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from phalanx._text import counted, enumerated
from phalanx.record.box import Box
from phalanx.record.excess import BLOCK, LEAST_BLOCKS, LEAST_STEPS, excesses, is_clear, over_others, trimmed_mean
from phalanx.record.stages import NO_STEP, Stage, Stages

MOST_STEPS = 1000
"""Number of steps that a ledger remembers."""

_MAX_STAGES = 8 * MOST_STEPS
_JITTER = 0.05  # if ranks wait for more than this fraction of their time, that is reported even without a slow rank
_REST = "outside of phases"
_WHAT = {
    "load data": "data loading", "forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step",
    "checkpoint": "saving of checkpoints", "snapshot": "saving of snapshots", "evaluate": "evaluation",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Account:
    """The cost of one rank to the others.

    Attributes:
        cost: Compute time beyond the median of the others, as a fraction of a step; may be negative.
        awaited_s: Total seconds that the others waited for this rank.
        phase: Phase in which a named rank loses the most time, or "before OP at LINE" if no phase is recorded; empty if
            the rank is not named.
        ratio: The rank's time in that phase, divided by the median of the others' times; infinite if the median is 0.
        is_named: Whether the rank is slower, and not by chance; see `excess`.
    """

    rank: int
    host: str
    cost: float
    awaited_s: float
    phase: str
    ratio: float
    is_named: bool

    @property
    def what_is_slow(self) -> str:
        """Phrase such as ``data loading takes 2.1x the others'``; "" if no phase is slow."""
        if not self.phase:
            return ""
        ratio = "occurs on this rank only"
        if self.ratio < 100:
            ratio = f"takes {self.ratio:{'.2f' if self.ratio < 1.15 else '.2g'}}x the others'"
        return f"{_WHAT.get(self.phase, f'time {self.phase}')} {ratio}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of a ledger for the steps that it remembers.

    Attributes:
        kind: "rank" (one), "ranks" (several), "host" (all of one host), "jitter" (ranks wait, for a different rank each
            time), "even" (no long waits), "unknown" (too few steps, or a single rank).
        cost: Highest cost of a named rank; with "jitter", the fraction of their time that ranks wait.
        num_steps: Number of steps covered: optimizer steps if they are recorded, otherwise see `stages`.
        step_s: Median duration of a step, in seconds.
        accounts: Account of each rank, in rank order.
    """

    kind: str
    cost: float
    num_steps: int
    step_s: float
    accounts: tuple[Account, ...]

    @property
    def named(self) -> tuple[Account, ...]:
        """Accounts of the ranks that are named, the most expensive first."""
        return tuple(sorted((one for one in self.accounts if one.is_named), key=lambda one: -one.cost))

    def __str__(self) -> str:
        """Sentence such as ``rank 2 has cost 9% of the last 1,000 steps; its forward pass takes 2.1x the others'``."""
        steps = f"the last {counted(self.num_steps, 'step')}"
        if self.kind == "unknown":
            steps, ranks = counted(self.num_steps, "step"), counted(len(self.accounts), "rank")
            return f"{steps} of {ranks}: too few to tell who is slow"
        if self.kind == "even":
            return f"no rank was clearly slower than the others in {steps}"
        if self.kind == "jitter":
            return f"ranks waited {self.cost:.0%} of {steps} for one another, each time for a different one"
        worst = self.named[0]
        whose = f"{enumerated('rank', [one.rank for one in self.named])} have each cost up to"
        if len(self.named) == 1:
            whose = f"rank {worst.rank} has cost"
        if self.kind == "host":
            whose = f"each rank of host {worst.host} has cost up to"
        owner = "its" if len(self.named) == 1 else f"rank {worst.rank}'s"
        why = f"; {owner} {worst.what_is_slow}" if worst.phase else ""
        return f"{whose} {self.cost:.0%} of {steps}{why}"


@dataclasses.dataclass
class _Step:
    """The times of all ranks in one step, in nanoseconds; each list has one time for each rank."""

    busy: list[int]
    phases: dict[str, list[int]]
    span: int

    @classmethod
    def of(cls, stage: Stage) -> _Step:
        op, _, site = stage.ends_with
        phases = stage.phases_ns or {f"before {op}{site and f' at {site}'}": stage.busy_ns}
        return cls([*stage.busy_ns], {name: [*times] for name, times in phases.items()}, stage.span_ns)

    def __add__(self, other: _Step) -> _Step:
        nothing = [0] * len(self.busy)
        names = {**self.phases, **other.phases}
        phases = {name: _sums(self.phases.get(name, nothing), other.phases.get(name, nothing)) for name in names}
        return _Step(_sums(self.busy, other.busy), phases, self.span + other.span)

    def time_in(self, phase: str) -> Sequence[int]:
        if phase == _REST:
            return [max(0, busy - sum(parts)) for busy, *parts in zip(self.busy, *self.phases.values(), strict=True)]
        return self.phases.get(phase) or [0] * len(self.busy)


class Ledger:
    """Accumulates which ranks wait for which, from boxes that may be read at any intervals.

    Args:
        window_s: Length of the time covered, back from the newest step.
    """

    def __init__(self, window_s: float = math.inf) -> None:
        self._window_ns = window_s * 1e9
        self._begin_anew(())

    def _begin_anew(self, boxes: Sequence[Box]) -> None:
        self._processes = [(box.rank, box.pid, box.start_time) for box in boxes]
        self._ranks = [(box.rank, box.host) for box in boxes]
        self._hosts = [host for _, host in self._ranks]
        self._stages = Stages(boxes)
        self._kept: deque[Stage] = deque(maxlen=_MAX_STAGES)

    def add(self, boxes: Iterable[Box]) -> None:
        """Add the new events in the boxes of all ranks; start over if the boxes are of other processes than before.

        Args:
            boxes: Boxes of the ranks of one host or of several, whole or as `Tail` reads them.
        """
        given = sorted(boxes, key=lambda box: box.rank)
        if self._processes != [(box.rank, box.pid, box.start_time) for box in given]:
            self._begin_anew(given)
        self._kept.extend(self._stages.add(given))

    def summary(self) -> Summary:
        """Return the recent cost of each rank, and which ranks are slow."""
        stages = self._recent()
        steps = list(_steps(stages))[-MOST_STEPS:]
        step_ns = statistics.median(step.span for step in steps) if steps else 0
        if len(self._ranks) < 2 or len(steps) < LEAST_STEPS or step_ns <= 0:
            nothing = tuple(Account(rank, host, 0.0, 0.0, "", 1.0, is_named=False) for rank, host in self._ranks)
            return Summary("unknown", 0.0, len(steps), step_ns / 1e9, nothing)
        steady = _Look(steps, step_ns)
        in_blocks = _Look(_added_up(steps), step_ns * BLOCK) if len(steps) >= BLOCK * LEAST_BLOCKS else steady
        slow_host = self._slow_host(steady)
        awaited, lost = _awaited(stages)
        accounts = []
        for place, (rank, host) in enumerate(self._ranks):
            look = in_blocks if in_blocks.is_slow(place) and not steady.is_slow(place) else steady
            is_named = look.is_slow(place) if slow_host is None else host == slow_host
            phase, ratio = look.slow_phase(place) if is_named else ("", 1.0)
            accounts.append(Account(rank, host, look.costs[place], awaited[place], phase, ratio, is_named))
        costs = [account.cost for account in accounts if account.is_named]
        kind = "host" if slow_host is not None else "rank" if len(costs) == 1 else "ranks"
        if not costs:
            kind, costs = ("jitter", [lost]) if lost >= _JITTER else ("even", [0.0])
        return Summary(kind, max(costs), len(steps), step_ns / 1e9, tuple(accounts))

    def _recent(self) -> list[Stage]:
        since = self._kept[-1].ended_ns - self._window_ns if self._kept else 0
        return [stage for stage in self._kept if stage.ended_ns >= since]

    def _slow_host(self, look: _Look) -> str | None:
        """Return the host whose ranks are all slower than those of other hosts; None if there is none."""
        hosts = Counter(self._hosts)
        if len(hosts) < 2 or len(hosts) == len(self._ranks):
            return None
        places = [[place for place, one in enumerate(self._hosts) if one == host] for host in hosts]
        medians = [[statistics.median(step.busy[place] for place in on) for on in places] for step in look.steps]
        for host, on, values in zip(hosts, places, excesses(medians, look.step_ns), strict=True):
            half = trimmed_mean(values) / 2
            if is_clear(values, len(hosts)) and all(look.costs[place] >= half for place in on):
                return host
        return None


class _Look:
    """A comparison of all ranks over successive steps, or over sums of steps.

    Attributes:
        costs: Mean excess of each rank.
    """

    def __init__(self, steps: Sequence[_Step], step_ns: float) -> None:
        self.steps, self.step_ns = steps, step_ns
        self._by_rank = excesses([step.busy for step in steps], step_ns)
        self.costs = [trimmed_mean(values) for values in self._by_rank]

    def is_slow(self, place: int) -> bool:
        return is_clear(self._by_rank[place], len(self._by_rank))

    def slow_phase(self, place: int) -> tuple[str, float]:
        """Return the phase in which a rank loses the most time, and the ratio of its time there to the others' time."""
        names = dict.fromkeys(name for step in self.steps for name in step.phases)
        if any(not name.startswith("before ") for name in names):
            names[_REST] = None
        lost = {}
        for name in names:
            times = [step.time_in(name) for step in self.steps]
            own = trimmed_mean([row[place] for row in times])
            excess = trimmed_mean([over_others(row)[place] for row in times])
            lost[name] = (excess, own / (own - excess) if own > excess else math.inf)
        worst = max(lost, key=lambda name: lost[name][0])
        return worst, lost[worst][1]


def _added_up(steps: Sequence[_Step]) -> list[_Step]:
    """Return the sums of successive groups of `BLOCK` steps, without the remainder at the beginning."""
    first = len(steps) % BLOCK
    return [sum(steps[at + 1 : at + BLOCK], steps[at]) for at in range(first, len(steps), BLOCK)]


def _awaited(stages: Sequence[Stage]) -> tuple[list[float], float]:
    """Return the seconds that others waited for each rank, and the fraction of their time that ranks waited."""
    num_ranks = len(stages[0].busy_ns)
    awaited_ns, span_ns = [0] * num_ranks, 0
    for stage in stages:
        last = max(stage.busy_ns)
        awaited_ns[stage.busy_ns.index(last)] += num_ranks * last - sum(stage.busy_ns)
        span_ns += stage.span_ns
    return [waited / 1e9 for waited in awaited_ns], sum(awaited_ns) / max(1, span_ns * num_ranks)


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _steps(stages: Sequence[Stage]) -> Iterator[_Step]:
    """Yield the steps that are known from beginning to end.

    If no steps are recorded, a step ends with the collective before which ranks compute the most.
    """
    is_numbered = any(stage.step != NO_STEP for stage in stages)
    work: Counter[tuple[str, int, str]] = Counter()
    for stage in stages:
        work[stage.ends_with] += sum(stage.busy_ns)
    heaviest = max(work, key=work.__getitem__) if work else None
    step: _Step | None = None  # the step so far; None while its beginning is not known
    for before, stage in itertools.pairwise(stages):
        is_first = stage.step != before.step if is_numbered else before.ends_with == heaviest
        if is_first and step is not None and not stage.is_after_gap:
            yield step
        if stage.is_after_gap:
            step = None
        elif is_first:
            step = _Step.of(stage)
        elif step is not None:
            step += _Step.of(stage)
