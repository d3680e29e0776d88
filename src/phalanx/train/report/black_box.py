"""The part of a run's report that comes from black boxes: waits, the last moments before a failure, lost ranks.

Everything that comes from the boxes is escaped for HTML. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from phalanx._text import measured
from phalanx.failure.losses import Loss, load_losses
from phalanx.record.box import Box, Event, SavedBoxes, boxes_in, load_boxes, open_box, read_box
from phalanx.record.stragglers import Ledger, Summary
from phalanx.train.report.plots import colours_of, legend

_WIDTH, _ROW = 1000, 10  # width of the figure and height of a row, in the SVG's own coordinates
_MOST_S = 5.0  # longest time that is drawn
_MOST_EVENTS = 80  # most events that are drawn for a rank
_MOST_RANKS = 16
_CLOCKS_S = 5.0  # most seconds by which clocks of hosts are assumed to differ

Span = tuple[float, float]
"""Two times of day, in seconds since 1970."""


def boxes_of(folder: Path, logs: Iterable[str], trained: Span) -> SavedBoxes:
    """Return the boxes of the attempt that ran in the span `trained`; empty if none can be read.

    Args:
        folder: Folder of the run's report.
        logs: Folders of the logs of all launches, relative to `folder`.
        trained: Times of the attempt's first and last record.
    """
    for found in _candidates(folder, logs):
        begin_s, end_s = _span(found.boxes)
        if begin_s <= trained[1] + 1 and trained[0] <= end_s:
            return found
    return SavedBoxes()


def _candidates(folder: Path, logs: Iterable[str]) -> Iterator[SavedBoxes]:
    """Yield the boxes in memory, if this process is a rank, then the boxes that launchers have saved, by attempt."""
    with contextlib.suppress(ValueError, OSError):
        if (place := open_box(os.getpid())) is not None:
            fd, _ = place
            try:
                yield SavedBoxes([read_box(data) for data in boxes_in(fd)])
            finally:
                os.close(fd)
    for run in _launches(folder, logs):
        for attempt in run.glob("blackbox/attempt_*"):
            yield load_boxes(attempt)


def losses_of(folder: Path, logs: Iterable[str]) -> list[Loss]:
    """Return the lost ranks that the launches of a run have recorded, in order of time.

    On several hosts, each launcher that survived a loss has recorded it; such a loss is returned only once.
    """
    by_launch = sorted(map(load_losses, _launches(folder, logs)), key=len, reverse=True)
    found: list[Loss] = []
    for losses in by_launch:
        known = [*found]
        for loss in losses:
            same = next((one for one in known if _is_same(one, loss)), None)
            if same is None:
                found.append(loss)
            else:
                known.remove(same)
    return sorted(found, key=lambda loss: loss.at_s)


def _is_same(one: Loss, other: Loss) -> bool:
    """Return whether two launchers have recorded the same loss, each by its host's clock."""
    is_same = (one.ending.rank, bool(one.node_sign)) == (other.ending.rank, bool(other.node_sign))
    return is_same and abs(one.at_s - other.at_s) < _CLOCKS_S


def out_of_reach(folder: Path, logs: Iterable[tuple[str, str]]) -> list[str]:
    """Return the hosts whose logs can't be read here. `logs` has pairs of host and folder, relative to `folder`."""
    return sorted({host for host, one in logs if not Path(folder, one).is_dir()})


def was_planned(folder: Path, before: str, after: str, between: Span) -> bool:
    """Return whether an attempt ended in a planned restart.

    The restart was planned if the next attempt belongs to the same launch, which has recorded no loss in between.

    Args:
        before: Folder of the logs of the attempt's launch, relative to `folder`; empty: unknown.
        after: Folder of the logs of the next attempt's launch; empty: unknown.
        between: Times at which the attempt and the next one began.
    """
    run = Path(folder, before)
    if not before or before != after or not Path(run, "blackbox").is_dir():
        return False
    return not any(between[0] <= loss.at_s <= between[1] for loss in load_losses(run))


def _launches(folder: Path, logs: Iterable[str]) -> list[Path]:
    """Return the folders of all launches of a run."""
    return list(dict.fromkeys(Path(folder, one) for one in logs))


def summary_of(boxes: Iterable[Box]) -> Summary:
    """Return the ledger's summary of the steps that these boxes still hold."""
    ledger = Ledger()
    ledger.add(boxes)
    return ledger.summary()


def rows_of(summary: Summary) -> list[tuple[str, str, str, str]]:
    """Return a row for each rank: its name, the time that other ranks waited for it, its cost, and where it is slow."""
    return [
        (f"rank {one.rank}", measured(one.awaited_s), f"{max(0.0, one.cost):.1%}", one.what_is_slow or "nothing clear")
        for one in summary.accounts
    ]


def timeline(saved: SavedBoxes) -> tuple[str, str]:
    """Return a figure of the last moments of all ranks, and a note about it.

    Each rank has a row with its phases and collectives as bars; the bar of a phase or collective that did not end
    extends to the edge.
    """
    boxes = saved.boxes
    shown = [box for box in boxes if box.events][:_MOST_RANKS]
    if not shown:
        return "", ""
    begin_ns, end_ns = _last_moments(shown)
    drawn = [[*_drawn(box, begin_ns, end_ns)] for box in shown]
    colours = colours_of(dict.fromkeys(_name_of(event) for events in drawn for event in events))
    rows = [_bars_of(events, begin_ns, end_ns, colours, place) for place, events in enumerate(drawn)]
    labels = "".join(
        f'<span class="y" style="top:{(place + 0.5) / len(shown):.1%}">rank {box.rank}</span>'
        for place, box in enumerate(shown)
    )
    shown_s = (end_ns - begin_ns) / 1e9
    labels += "".join(
        f'<span class="x" style="left:{part:.0%}">{f"-{measured(shown_s * (1 - part))}" if part < 1 else "end"}</span>'
        for part in (0.0, 0.5, 1.0)
    )
    told = "; ".join(f"rank {box.rank} {_last_words(box, end_ns)}" for box in shown)
    figure = (
        f'{legend(colours)}<figure class="chart"><div class="plot" '
        f'style="height:{2 * len(shown)}rem"><svg role="img" aria-label="{escape(told)}" '
        f'viewBox="0 0 {_WIDTH} {_ROW * len(shown)}" preserveAspectRatio="none">{"".join(rows)}</svg>'
        f'<div aria-hidden="true">{labels}</div></div></figure><p>{escape(told)}.</p>'
    )
    more = f"; the first {len(shown)} of {len(boxes)} ranks" if len(shown) < len(boxes) else ""
    lacks = "".join(f" {escape(problem)}." for problem in saved.problems.values())
    return figure, f"The last {measured(shown_s)} that the ranks have recorded{more}.{lacks}"


def _span(boxes: Sequence[Box]) -> Span:
    times = [_seconds_of(box, time) for box in boxes for event in box.events for time in (event.begun_ns, _end(event))]
    return (min(times), max(times)) if times else (0.0, -1.0)


def _seconds_of(box: Box, time_ns: int) -> float:
    return (time_ns + box.realtime_less_monotonic_ns) / 1e9


def _end(event: Event) -> int:
    return event.ended_ns or event.begun_ns


def _last_moments(boxes: Sequence[Box]) -> tuple[int, int]:
    """Return the beginning and end of a span with so few events that they can be told apart when drawn."""
    end_ns = max(max(map(_end, box.events)) for box in boxes)
    begin_ns = max(box.events[-_MOST_EVENTS:][0].begun_ns for box in boxes)
    span_ns = min(int(_MOST_S * 1e9), max(end_ns - begin_ns, 1_000))
    return end_ns - span_ns, end_ns + span_ns // 20


def _drawn(box: Box, begin_ns: int, end_ns: int) -> Iterator[Event]:
    """Yield the events of a rank's row, in drawing order."""
    for kind in ("phase", "collective", "call", "message"):
        yield from (event for event in box.events if event.kind == kind and (event.ended_ns or end_ns) >= begin_ns)


def _name_of(event: Event) -> str:
    return event.op or event.text


def _bars_of(events: Iterable[Event], begin_ns: int, end_ns: int, colours: Mapping[str, str], place: int) -> str:
    """Return the bars of a rank's row: phases at full height, collectives and messages in the middle."""
    bars = []
    for event in events:
        top, height = (1, 8) if event.kind == "phase" else (3, 4)
        ended = event.ended_ns or end_ns
        left = max(0.0, (event.begun_ns - begin_ns) / (end_ns - begin_ns) * _WIDTH)
        width = max(0.5, (ended - begin_ns) / (end_ns - begin_ns) * _WIDTH - left)
        bars.append(
            f'<rect class="{colours[_name_of(event)]}" x="{left:.1f}" y="{place * _ROW + top}" width="{width:.1f}" '
            f'height="{height}"><title>{escape(_title(event, ended))}</title></rect>'
        )
    return "".join(bars)


def _title(event: Event, ended_ns: int) -> str:
    number = f" #{event.seq}" if event.kind in ("collective", "call") else ""
    site = f" at {event.site}" if event.site else ""
    if event.kind == "call":  # its end, and so its duration, is unknown
        return f"call of {event.op}{number}{site}"
    end = "" if event.ended_ns else ", did not end"
    return f"{event.op or event.text}{number}{site}: {measured((ended_ns - event.begun_ns) / 1e9)}{end}"


def _last_words(box: Box, end_ns: int) -> str:
    """Return what a rank was last doing."""
    for event in reversed(box.events):
        if event.kind in ("collective", "message", "phase") and not event.ended_ns:
            return f"was in {_title(event, end_ns)}"
    for event in reversed(box.events):
        if event.kind == "call":
            return f"had made its {_title(event, event.ended_ns)}"
        if event.kind in ("collective", "message"):
            return f"had left {_title(event, event.ended_ns)}"
    return "had not called any collective"
