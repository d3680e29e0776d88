"""Decides when a rank is slower than the others, and not by chance.

**The rule.** A rank's *excess* in a step is the time that it computes, minus the median of the others' times in the
same step, as a fraction of the median step. A rank is named if its mean excess is at least `LEAST_COST`, and more than
z standard errors above 0. The mean leaves out a fifth of the steps at each end, so that single pauses count for
nothing. Its standard error is Yuen's, computed from the winsorized steps and widened by their autocorrelation, because
another program that takes a core slows several steps in a row. z is chosen so that, over all ranks, a fraction
`FALSE_ALARMS` of the decisions names a rank by chance. To find pauses that recur, but only in few steps, the same rule
is applied to sums of `BLOCK` steps.

**Why.** A rank is compared with the median of the others, because with one slow rank of four, the mean would make the
three others look fast. Means are trimmed, because step times have heavy tails. In 120 simulated runs of 1,000 steps
with independent jitter of 3 and 8 %, judged every 50 steps, no rank was named. If the noise of successive steps is
correlated by 0.9, one run in ten names a rank that was slow for some dozens of steps.

**Tried: the lower tenth of the times** instead of the mean, since interruptions only add time. Two ranks with equal
work were recorded and compared in stretches of 50 steps. With the lower tenth, the spread of their difference was 1.3 %
instead of 1.9 % on a quiet machine, 3.6 % instead of 2.4 % beside other programs, and the same on an idle machine. The
spread that remains is not noise: cores do differ in speed for dozens of steps (``python -m bench.stragglers``), and a
stricter rule would find slow ranks later.

Source of mean and error: K. K. Yuen, "The two-sample trimmed t for unequal population variances", Biometrika 61, 1974.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_COST = 0.025
"""Smallest mean excess, as a fraction of a step, for which a rank is named."""
LEAST_STEPS = 30
"""Number of steps needed before a rank is named."""
FALSE_ALARMS = 1e-5
"""Fraction of decisions, over all ranks, in which a rank may be named by mere chance."""
BLOCK = 10
"""Number of steps that are summed to find recurring pauses."""
LEAST_BLOCKS = 20
"""Number of sums of `BLOCK` steps needed before a rank is named."""

_TRIMMED = 0.2  # fraction of the steps that the mean leaves out at each end


def over_others(times: Sequence[float]) -> list[float]:
    """Return each time minus the median of all others. At least two times are needed."""
    order = sorted(range(len(times)), key=times.__getitem__)
    middle, is_even = divmod(len(times) - 1, 2)[0], len(times) % 2 == 1
    found = [0.0] * len(times)
    for place, index in enumerate(order):
        upper = times[order[middle + (place <= middle)]]
        lower = times[order[middle - 1 + (place <= middle - 1)]] if is_even else upper
        found[index] = times[index] - (upper + lower) / 2
    return found


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without a fifth of the values at each end."""
    kept = sorted(values)
    cut = int(_TRIMMED * len(kept))
    return statistics.fmean(kept[cut : len(kept) - cut])


def excesses(times: Sequence[Sequence[float]], step_ns: float) -> list[list[float]]:
    """Return the excess of each rank in each step, from the times of all ranks in each step."""
    rows = [over_others(row) for row in times]
    return [[row[place] / step_ns for row in rows] for place in range(len(rows[0]))]


def is_clear(values: Sequence[float], num_ranks: int) -> bool:
    """Whether a rank's excesses in successive steps can't be explained by chance; see the rule of this module."""
    mean = trimmed_mean(values)
    if mean < LEAST_COST:
        return False
    z = statistics.NormalDist().inv_cdf(1 - FALSE_ALARMS / num_ranks)
    return mean > z * _error(values)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the trimmed mean of successive values."""
    ordered = sorted(values)
    cut = int(_TRIMMED * len(ordered))
    low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
    bounded = [min(max(value, low), high) for value in values]
    mean = statistics.fmean(bounded)
    off = [value - mean for value in bounded]
    squares = sum(one * one for one in off)
    if not squares:
        return 0.0
    repeats = sum(map(float.__mul__, off, off[1:])) / squares
    repeats = min(0.95, max(0.0, repeats + (1 + 4 * repeats) / len(off)))  # the bias of short series: Kendall 1954
    error = math.sqrt(squares / (len(off) - 1) / len(off)) / (1 - 2 * _TRIMMED)
    return error * math.sqrt((1 + repeats) / (1 - repeats))
