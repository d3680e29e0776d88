"""Draws the views of `watch`: lines that fit the terminal, in colors if the terminal has any."""

from __future__ import annotations

import dataclasses
import os
import textwrap
import time
from collections.abc import Callable, Sequence

from rich.text import Text

from phalanx._text import counted, duration
from phalanx.diagnose.jobs import NO_JOB, NO_RANK
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.watch import JobView

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_STYLES = {
    "computing": "green",
    "waiting": "yellow",
    "asleep": "bold yellow",
    "reading": "bold cyan",
    "loading data": "magenta",
    "writing a checkpoint": "cyan",
    "in the debugger": "bold cyan",
    "stopped": "bold red",
    "gone": "bold red",
}
_SPARK_WIDTH = 8
_LEAST_STATE_WIDTH = 30
_PROGRESS_WIDTH = 12
_NO_BREAK = "\xa0"


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the table of ranks; columns that do not fit are left out, last first."""

    title: str
    width: int
    cell: Callable[[RankView], str]


def draw(jobs: Sequence[JobView], width: int, is_ascii: bool = False) -> list[Text]:
    """Return the lines of a picture, none longer than `width`."""
    lines: list[Text] = []
    for job in jobs:
        lines += [Text()] if lines else []
        lines += _head(job, width, is_ascii)
        lines += _table(job.ranks, width, is_ascii) if job.ranks else []
        notes = dict.fromkeys(rank.note for rank in job.ranks if rank.note)
        lines += [Text(note, "red") for note in notes]
    if len(jobs) > 1:
        pid = jobs[-1].launcher_pid or jobs[-1].ranks[0].pid
        lines += [Text(), Text(f"phalanx top {pid} shows this last job alone", "dim")]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis" if not is_ascii else "crop")
    return lines or [Text("no job of this user on this host")]


def bars(values: Sequence[float], is_ascii: bool = False) -> str:
    """Return a bar for each value, scaled to the largest."""
    ramp = _ASCII_BARS if is_ascii else _BARS
    most = max(values, default=0.0) or 1.0
    return "".join(ramp[min(int(value / most * len(ramp)), len(ramp) - 1)] for value in values)


def _head(job: JobView, width: int, is_ascii: bool) -> list[Text]:
    here = len(job.ranks)
    starter = f"{job.launcher}, pid {job.launcher_pid}" if job.launcher_pid else job.launcher
    if job.state:
        head = f"{job.name}  {starter}  "
        first, *more = textwrap.wrap(job.state, width, initial_indent=" " * min(len(head), width - 1)) or [""]
        title = Text.assemble((job.name, "bold"), f"  {starter}  ", (first.lstrip(), "yellow"))
        return [title, *(Text(f"  {line}", "yellow") for line in textwrap.wrap(" ".join(more), width - 2))]
    ranks = (
        counted(here, "process" if job.launcher == NO_JOB else "rank")
        if job.world_size in (0, here)
        else f"{here} of {job.world_size} ranks here"
    )
    running = "ended" if job.seconds is None else f"since {_clock(job.seconds)}, {_in_brief(job.seconds)}"
    title = Text.assemble((job.name, "bold"), f"  {starter}  {ranks}  {running}")
    lines = [title]
    if (progress := _progress(job.ranks, width, is_ascii)) is not None:
        lines.append(progress)
    if job.straggler:
        lines += [Text(line, "yellow") for line in textwrap.wrap(job.straggler, width)]
    return lines


def _clock(seconds: float) -> str:
    began = time.localtime(time.time() - seconds)
    return time.strftime("%H:%M" if seconds < 43200 else "%b %d %H:%M", began)


def _progress(ranks: Sequence[RankView], width: int, is_ascii: bool) -> Text | None:
    """Return a line about the job's steps; None if no rank records any."""
    stepping = [rank for rank in ranks if rank.step is not None]
    if not stepping:
        return None
    step = min(rank.step or 0 for rank in stepping)
    num_steps = max((rank.num_steps or 0 for rank in stepping), default=0)
    line = Text(f"step {step:,}")
    if num_steps:
        share = min(1.0, step / num_steps)
        filled = round(_PROGRESS_WIDTH * share)
        full, empty = ("#", ".") if is_ascii else ("━", "─")
        line.append(f" of {num_steps:,} ")
        line.append(full * filled, "green").append(empty * (_PROGRESS_WIDTH - filled)).append(f" {share:.0%}")
    speeds = [rank.steps_per_s for rank in stepping if rank.steps_per_s is not None]
    if speeds:
        speed, samples = min(speeds), max(rank.samples_per_s or 0.0 for rank in stepping)
        line.append(f"  {rate(speed)} steps/s")
        if samples:
            line.append(f"  {rate(samples)} samples/s")
        if num_steps and speed:
            line.append(f"  {_in_brief((num_steps - step) / speed)} left")
    return line


def _table(ranks: Sequence[RankView], width: int, is_ascii: bool) -> list[Text]:
    columns = [
        _Column("step", 6, lambda rank: "" if rank.step is None else rate(rank.step)),
        _Column("cpu%", 4, lambda rank: "" if rank.cpu_percent is None else f"{rank.cpu_percent:.0f}"),
        _Column("rss", 5, lambda rank: _size(rank.rss_bytes)),
        _Column("pss", 5, lambda rank: _size(rank.pss_bytes)),
        _Column("steptime", _SPARK_WIDTH, lambda rank: bars(rank.step_times_s[-_SPARK_WIDTH:], is_ascii)),
        _Column("thr", 3, lambda rank: "" if rank.num_threads is None else str(rank.num_threads)),
        _Column("flt/s", 5, _faults),
    ]
    if all(rank.step is None for rank in ranks):
        columns = [column for column in columns if column.title not in ("step", "steptime")]
    if any(rank.gpus for rank in ranks):
        columns.insert(2, _Column("gpu", 10, _gpus))
    number = max(4, *(len(str(rank.rank)) for rank in ranks)) if ranks else 4
    while columns and number + sum(column.width + 1 for column in columns) + 1 + _LEAST_STATE_WIDTH > width:
        columns.pop()
    state = max(1, width - number - 1 - sum(column.width + 1 for column in columns))
    title = f"{'rank':>{number}} {'state':<{state}}" + "".join(f" {c.title:>{c.width}}" for c in columns)
    lines = [Text(title, "dim")]
    for rank in ranks:
        text, *more = _wrapped(rank, state, max(width - number - 1, 1), "~" if is_ascii else "…")
        style = _STYLES.get(rank.state, "")
        cells = "".join(f" {column.cell(rank):>{column.width}}" for column in columns)
        lines.append(
            Text.assemble(
                f"{'' if rank.rank == NO_RANK else rank.rank:>{number}} ",
                (f"{text:<{state}}", style),
                cells,
            )
        )
        lines += [Text(f"{'':>{number}} {line}", style) for line in more]
    return lines


def _wrapped(rank: RankView, width: int, room: int, mark: str) -> list[str]:
    """Return a rank's activity: a line of at most `width` characters and, if needed, a second of at most `room`.

    If the text is too long, a path is shortened to its file, and then to its end with the line number.
    """
    said = doing(rank)
    if len(said) > width and rank.site:
        place = f" at {os.path.basename(rank.site)}"
        short = said.removesuffix(f" at {rank.site}") + place
        if len(short) <= width or len(said) > room:
            said = short
        head = said[: said.rfind(" at ")]
        said = f"{head} at{_NO_BREAK}{said[len(head) + 4 :]}"
    first, *more = textwrap.wrap(said, width, break_on_hyphens=False, break_long_words=False)
    rest = " ".join(more)
    if len(rest) > room:
        rest = mark + rest[1 - room :] if room > 1 else ""
    return [line.replace(_NO_BREAK, " ") for line in (first, rest) if line]


def doing(rank: RankView) -> str:
    """Return a rank's activity in words, the most important first: ``waiting 41 s all_reduce #12 at train.py:31``."""
    since = "" if rank.since_s is None else f" {duration(rank.since_s)}"
    what = f" {rank.what}" if rank.what else ""
    return f"{rank.state}{since}{what}{rank.site and f' at {rank.site}'}"


def _in_brief(seconds: float) -> str:
    return duration(seconds if seconds < 120 else seconds - seconds % 60)


def rate(value: float) -> str:
    """Return a number in few characters: ``0.25``, ``12.3``, ``1,580``, ``12.5k``; counts below 10,000 are exact."""
    if isinstance(value, int) and value < 10_000:
        return f"{value:,}"
    if value >= 10_000:
        return f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    for unit, size in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20)):
        if size_bytes >= size:
            value = size_bytes / size
            return f"{value:.1f}{unit}" if value < 100 and unit != "M" else f"{value:.0f}{unit}"
    return f"{size_bytes >> 10}K"


def _faults(rank: RankView) -> str:
    if rank.minor_faults_per_s is None or rank.major_faults_per_s is None:
        return ""
    return rate(rank.minor_faults_per_s + rank.major_faults_per_s) if rank.minor_faults_per_s >= 1 else "0"


def _gpus(rank: RankView) -> str:
    used = sum(gpu.used_bytes or 0 for gpu in rank.gpus)
    busy = [gpu.busy_percent for gpu in rank.gpus if gpu.busy_percent is not None]
    share = f"{sum(busy) / len(busy):.0f}% " if busy else ""
    return f"{share}{_size(used)}" if rank.gpus else ""
