"""Plots as HTML without scripts or other files: curves over steps, stacked bars. Colours are those of report.css.

Lines are SVG that stretches with the page; labels are HTML beside the SVG, so they keep their size in any window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from phalanx._text import measured
from phalanx.train.report.metrics import PHASES, RECORDED

Point = tuple[int, float]

_SIZE = 1000  # width and height of a plot in the SVG's own coordinates, which the page stretches
_NUM_DRAWN = 600  # most points of a curve, so that the page of a long run stays small
_NUM_HINTS = 100
_LARGEST = 1e300  # the axis of a larger value would overflow a float
_SMALLEST = 1e-300  # the axis of a smaller value would underflow
_LONG_S = 1e10
_NUM_COLOURS = 12  # number of colours that report.css defines
_OF_PHASES = {name: number for number, phase in enumerate(PHASES) for name in (phase, RECORDED.get(phase, phase))}


def number(value: float) -> str:
    """Return `value` in few characters: ``12,345``, ``0.01235``, ``1.2e-05``."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def curve(
    title: str,
    points: Sequence[Point],
    marks: Mapping[int, str],
    *,
    steps: tuple[int, int],
    from_zero: bool = False,
    may_be_log: bool = False,
    is_wide: bool = False,
) -> str:
    """Return a figure of one value over steps.

    Args:
        title: Title of the value.
        points: Pairs of step and value, with ascending steps; the line breaks where a value is not finite.
        marks: Texts of vertical lines, by step.
        steps: First and last step on the axis, the same for all figures of a page.
        from_zero: Whether the axis begins at zero, for values whose ratios matter.
        may_be_log: Whether the axis becomes logarithmic if positive values differ by more than a factor of 50.
        is_wide: Whether the figure takes a whole row.
    """
    finite = [point for point in points if _is_drawn(point[1])]
    frame = _Frame(steps, [value for _, value in finite] or [0.0], from_zero=from_zero, may_be_log=may_be_log)
    x, y = frame.x, frame.y
    stretch = max(1, math.ceil(len(finite) / (_NUM_DRAWN / 2)))
    drawn = [_thinned(segment, stretch) for segment in _segments(points)]
    path = "".join("M" + "L".join(f"{x(step)} {y(value)}" for step, value in segment) for segment in drawn)
    dots = "".join(f"M{x(step)} {y(value)}h0" for step, value in finite) if len(finite) <= 40 else ""
    lines = "".join(
        f'<g><title>{escape(text)}</title><path class="mark" d="M{x(step)} 0V{_SIZE}"/></g>'
        for step, text in marks.items()
    )
    now = f"{number(finite[-1][1])} at step {finite[-1][0]:,}" if finite else "nothing to draw"
    lost = len(points) - len(finite)
    notes = [*(["logarithmic"] if frame.is_log else []), *([f"{lost:,} {_why_lost(points)}"] if lost else [])]
    about = _description(title, finite, marks, notes)
    return (
        f'<figure class="chart{" wide" if is_wide else ""}">'
        f"<figcaption><h3>{escape(title)}</h3><span>{now}{''.join(f' · {note}' for note in notes)}</span></figcaption>"
        f'<div class="plot"><svg role="img" aria-label="{escape(about)}" viewBox="0 0 {_SIZE} {_SIZE}" '
        f'preserveAspectRatio="none"><path class="grid" d="{frame.grid()}"/>{_hints(finite, x)}{lines}'
        f'<path class="line" d="{path}"/><path class="dots" d="{dots}"/></svg>'
        f'<div aria-hidden="true">{frame.labels()}</div></div></figure>'
    )


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], whole: str = "a step") -> str:
    """Return a bar for each row, stacked from the row's parts in seconds, and a legend; all bars have the same scale.

    Args:
        rows: Pairs of a label, and the parts by name.
        whole: Name of the whole that a bar shows.
    """
    names = list(rows[0][1])
    colours = colours_of(names)
    longest = max(sum(parts.values()) for _, parts in rows) or 1.0
    lines = []
    for label, parts in rows:
        total = measured(sum(parts.values()))
        about = f"{label}: {total} {whole}: " + ", ".join(f"{name} {measured(value)}" for name, value in parts.items())
        pieces = "".join(
            f'<i class="{colours[name]}" style="width:{100 * value / longest:.2f}%" '
            f'title="{escape(name)}: {measured(value)}"></i>'
            for name, value in parts.items()
            if value > 0
        )
        lines.append(
            f'<li><span class="who">{escape(label)}</span>'
            f'<span class="bar" role="img" aria-label="{escape(about)}">{pieces}</span>'
            f'<span class="total">{total}</span></li>'
        )
    return f'{legend(colours)}<ul class="bars">{"".join(lines)}</ul>'


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a CSS class, which sets the colour, for each name in a figure.

    A phase has the same colour on the whole page. The names in a figure have different colours; if there are more than
    `_NUM_COLOURS` names, colours are repeated in a paler form.
    """
    names = list(names)
    taken = {_OF_PHASES[name] for name in names if name in _OF_PHASES}
    free = [number for number in (*range(len(PHASES), _NUM_COLOURS), *range(len(PHASES))) if number not in taken]
    others = (free[number % len(free)] for number in range(len(names)))
    found: dict[str, str] = {}
    for name in names:
        colour = f"part{_OF_PHASES[name] if name in _OF_PHASES else next(others)}"
        found[name] = f"{colour} again" if colour in found.values() and name not in _OF_PHASES else colour
    return found


def legend(colours: Mapping[str, str]) -> str:
    """Return the legend of the colours that `colours_of` has chosen."""
    items = "".join(f'<li><i class="{colour}"></i>{escape(name)}</li>' for name, colour in colours.items())
    return f'<ul class="legend" aria-hidden="true">{items}</ul>'


class _Frame:
    """The axes of a figure: the coordinates of a step and of a value."""

    def __init__(self, steps: tuple[int, int], values: Sequence[float], *, from_zero: bool, may_be_log: bool) -> None:
        self._first, self._last = steps[0], max(steps[1], steps[0] + 1)
        low, high = min(values), max(values)
        self.is_log = may_be_log and low > 0 and high > 50 * low
        self._low, self._high, self._ticks = _axis(low, high, from_zero=from_zero, is_log=self.is_log)

    def x(self, step: float) -> float:
        return round((step - self._first) / (self._last - self._first) * _SIZE, 1)

    def y(self, value: float) -> float:
        low, high = self._low, self._high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round((1 - (value - low) / (high - low)) * _SIZE, 1)

    def grid(self) -> str:
        """Return an SVG path with a line for each label of the values."""
        return "".join(f"M0 {self.y(tick)}H{_SIZE}" for tick in self._ticks)

    def labels(self) -> str:
        """Return the labels of both axes."""
        steps = (tick for tick in _ticks(self._first, self._last, 4).items() if tick[0] == int(tick[0]))
        return "".join(
            f'<span class="y" style="top:{self.y(tick) / 10:.1f}%">{text}</span>' for tick, text in self._ticks.items()
        ) + "".join(f'<span class="x" style="left:{self.x(tick) / 10:.1f}%">{text}</span>' for tick, text in steps)


def _axis(low: float, high: float, *, from_zero: bool, is_log: bool) -> tuple[float, float, dict[float, str]]:
    """Return both ends of the axis, and its labels."""
    if is_log:
        low, high = low / 1.2, high * 1.2
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in ((1, 3) if high < 1000 * low else (1,))]
        ticks = [tick for tick in ticks if low <= tick <= high]
        return low, high, {tick: _short(tick) for tick in ticks[:: math.ceil(len(ticks) / 6)]}
    low = min(0.0, low) if from_zero else low
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero else low - pad), high + pad
    return low, high, _ticks(low, high, 4)


def _ticks(low: float, high: float, num: int) -> dict[float, str]:
    """Return about `num` round numbers between `low` and `high`, with their labels."""
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    num_digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {tick: f"{tick:,.{num_digits}f}" if num_digits < 5 and high < 1e5 else _short(tick) for tick in ticks}


def _short(value: float) -> str:
    """Return a label of some six characters: ``12.5k``, ``0.001``, ``1e+30``."""
    for unit, factor, limit in (("k", 1e3, 1e6), ("M", 1e6, 1e9), ("G", 1e9, 1e12)):
        if factor <= abs(value) < limit:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.3g}"


def _is_drawn(value: float) -> bool:
    return abs(value) <= _LARGEST and (value == 0 or abs(value) >= _SMALLEST)


def _why_lost(points: Sequence[Point]) -> str:
    are_odd = any(math.isfinite(value) and not _is_drawn(value) for _, value in points)
    return "not finite, or too large or small to be drawn" if are_odd else "not finite"


def _segments(points: Sequence[Point]) -> list[list[Point]]:
    """Split the points into segments, at each value that is not drawn."""
    segments: list[list[Point]] = [[]]
    for point in points:
        if _is_drawn(point[1]):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _thinned(points: list[Point], stretch: int) -> list[Point]:
    """Keep the lowest and the highest of every `stretch` points, and both ends, so that no spike is lost."""
    if stretch <= 2:
        return points
    kept = {points[0], points[-1]}
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    return sorted(kept)


def _hints(points: Sequence[Point], x: Callable[[float], float]) -> str:
    """Return invisible strips with step and value as tooltips."""
    told = points[:: math.ceil(len(points) / _NUM_HINTS) or 1]
    edges = [0.0, *((x(a[0]) + x(b[0])) / 2 for a, b in itertools.pairwise(told)), float(_SIZE)]
    return "".join(
        f'<rect class="hint" x="{left:.1f}" width="{right - left:.1f}" height="{_SIZE}">'
        f"<title>step {step:,}: {number(value)}</title></rect>"
        for (step, value), left, right in zip(told, edges, edges[1:], strict=False)
    )


def _description(title: str, points: Sequence[Point], marks: Mapping[int, str], notes: Sequence[str]) -> str:
    if not points:
        return f"{title}: nothing to draw"
    lowest, highest = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    text = (
        f"{title} from step {points[0][0]:,} to {points[-1][0]:,}: from {number(points[0][1])} to "
        f"{number(points[-1][1])}; lowest {number(lowest[1])} at step {lowest[0]:,}, highest {number(highest[1])} at "
        f"step {highest[0]:,}"
    )
    restarts = f"; restarts at steps {', '.join(f'{step:,}' for step in marks)}" if marks else ""
    return text + restarts + "".join(f"; {note}" for note in notes)
