"""FOLDER/report.html: the story of a run on one page that needs no network, no script and no other file.

Everything that comes from the run is escaped for HTML. This module imports no torch.
"""

from __future__ import annotations

import itertools
import math
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import phalanx
from phalanx._text import counted, listed, measured
from phalanx.failure.losses import place_of, repeated, sign_of, who_of
from phalanx.record.box import SavedBoxes
from phalanx.record.loop import LEAST_LOADING, workers_needed
from phalanx.train.report import black_box, plots
from phalanx.train.report.metrics import (
    WORKERS,
    Record,
    is_being_written,
    is_number,
    read_metrics,
    resumed_at,
    without_undone,
)
from phalanx.train.report.page import page, section, style, table, tiles
from phalanx.train.report.plots import Point, number
from phalanx.train.settings import mode_of
from phalanx.wire.files import write_whole

_NO_METRIC = ("time", "kind", "attempt", "step", "epoch")
_MAX_RANKS = 16  # number of bars; if there are more ranks, the slowest are shown
_MOST_WORKERS = 1000  # beyond which a record is not believed
TITLES = {"loss": "Training loss", "lr": "Learning rate", "samples_per_s": "Samples per second",
           "grad_norm": "Norm of the gradient"}  # fmt: skip


def write_report(folder: str | Path) -> Path:
    """Write FOLDER/report.html from FOLDER/metrics.jsonl, at any time during or after a run, and return its path.

    Args:
        folder: Folder of the run.

    Raises:
        FileNotFoundError: `folder` is not the folder of a run.
        ValueError: The run has recorded nothing yet.

    Example:
        >>> phalanx.train.write_report("runs/example")
        PosixPath('runs/example/report.html')
    """
    records = read_metrics(folder)
    if not records:
        raise ValueError(f"nothing recorded yet in {str(folder)!r}")
    path = Path(folder, "report.html")
    write_whole(path, report_of(folder, records))
    return path


def report_of(folder: str | Path, records: list[Record]) -> str:
    """Return the page about a run, from all its records."""
    return _page(_Run(Path(folder), records))


class _Run:
    """A run, as its records describe it.

    Attributes:
        starts: "start" records of the attempts that trained.
        steps, epochs: Records of these kinds, as if the run had never been interrupted.
        attempts: All records of the attempts that trained, by attempt.
        metrics: Steps and values of each evaluation metric, by name.
        last: Last record.
    """

    def __init__(self, folder: Path, records: list[Record]) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.num_records = len(records)
        records = _without_idle(records)
        self.attempts = _by_attempt(records)
        self.starts = [record for record in records if record["kind"] == "start"]
        kept = without_undone(records)
        self.steps = [record for record in kept if record["kind"] == "step"]
        self.epochs = [record for record in kept if record["kind"] == "epoch" and is_number(record.get("loss"))]
        self.metrics: dict[str, list[Point]] = defaultdict(list)
        for record in kept:
            if record["kind"] == "evaluation":
                for name in (name for name, value in record.items() if name not in _NO_METRIC and is_number(value)):
                    self.metrics[name].append((record["step"], record[name]))
        self.last_step: int = next((record["step"] for record in reversed(kept) if is_number(record.get("step"))), 0)
        self.last = records[-1]
        self.began_s, self.last_s = records[0]["time"], self.last["time"]
        self.settings: dict[str, Any] = self.starts[-1].get("settings", {}) if self.starts else {}
        self.state = _ending(self.attempts[records[-1]["attempt"]])
        if self.state == "interrupted" and is_being_written(folder):
            self.state = "running"

    def values(self, name: str) -> list[Point]:
        """Return the steps and values of a field of the "step" records."""
        return [(record["step"], record[name]) for record in self.steps if is_number(record.get(name))]

    def mode_of(self, metric: str) -> str | None:
        """Return "min" or "max": whether a lower or a higher value of a metric is better; None if unknown."""
        set_to = self.settings.get("mode") if metric == self.settings.get("monitor") else None
        return set_to if set_to in ("min", "max") else mode_of(metric)

    def boxes(self, attempt: int) -> SavedBoxes:
        """Return the black boxes of an attempt's ranks, if there are any."""
        records = self.attempts[attempt]
        return black_box.boxes_of(self.folder, self.logs, (records[0]["time"], records[-1]["time"]))

    @property
    def logs(self) -> list[str]:
        """Folders of the logs of all launches, relative to the folder of the run."""
        found = (start["origin"]["logs"] for start in self.starts if start.get("origin", {}).get("logs"))
        return list(dict.fromkeys(map(str, found)))

    @property
    def others(self) -> list[tuple[str, str]]:
        """Other hosts of the job, each with the folder of its launch's logs, relative to the folder of the run."""
        told = [start.get("origin", {}).get("logs of others") for start in self.starts]
        pairs = [pair for listed in told if isinstance(listed, list) for pair in listed]
        found = [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
        return list(dict.fromkeys(found))

    def marks(self) -> dict[int, str]:
        """Return labels for the steps from which later attempts resumed, by step."""
        return {resumed_at(start): f"attempt {start['attempt']} resumes here" for start in self.starts[1:]}


def _by_attempt(records: Sequence[Record]) -> dict[int, list[Record]]:
    attempts: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        attempts[record["attempt"]].append(record)
    return attempts


def _without_idle(records: list[Record]) -> list[Record]:
    """Leave out attempts that found the run already finished: their ranks and times say nothing about the training."""
    idle = {n for n, of in _by_attempt(records).items() if [record["kind"] for record in of] == ["start", "end"]}
    return [record for record in records if record["attempt"] not in idle] or records


def _ending(records: Sequence[Record]) -> str:
    """Return how an attempt ended: finished, stopped, preempted, stopped by Ctrl-C, diverged or interrupted."""
    kinds = {record["kind"] for record in records}
    if records[-1]["kind"] in ("not_finite", "replicas_differ"):  # the last record: it has ended the attempt
        return "diverged"
    if "end" not in kinds and any(one["kind"] == "preempted" and one.get("signal") == signal.SIGINT for one in records):
        return "stopped by Ctrl-C"
    if any(one["kind"] == "end" and one.get("reason") == "stop" for one in records):
        return "stopped"
    return "finished" if "end" in kinds else "preempted" if "preempted" in kinds else "interrupted"


# ---- the page --------------------------------------------------------------------------------------------------------


def _page(run: _Run) -> str:
    sections = [_key_figures(run), _curves(run), _phases(run), _stragglers(run), _last_moments(run)]
    sections += [_restarts(run), _losses(run), _origin(run), _settings(run)]
    name = escape(run.name)
    note = {
        "finished": _note_of_end(run.last),
        "stopped": f"{_note_of_end(run.last)} It resumes from there when it is started again.",
        "running": f"This page shows the run as it was at {_clock(run.last_s)}.",
        "preempted": "It was preempted, and resumes where it was when it is started again.",
        "stopped by Ctrl-C": "It resumes where it was when it is started again.",
        "interrupted": "It ended early, and resumes from its newest checkpoint when it is started again.",
        "diverged": f"It was stopped. {escape(str(run.last.get('message', '')))}",
    }[run.state]
    content = (
        f'<header><h1>{name}</h1><p><strong class="state {run.state}">{run.state}</strong> '
        f"Started at {_clock(run.began_s)}. {note}</p></header>\n"
        + "\n".join(filter(None, sections))
        + f"\n<footer>Made at {_clock(time.time())} by Phalanx {phalanx.__version__} from "
        f"{counted(run.num_records, 'record')} in metrics.jsonl; "
        "<code>phalanx report FOLDER</code> makes it anew.</footer>\n"
    )
    return page(f"{run.name}, {run.state}", f"<style>\n{style()}</style>", content)


def _note_of_end(end: Record) -> str:
    words = str(end.get("message", ""))
    return escape(f"{words[:1].upper()}{words[1:]}.") if words else "All training is done."


def _key_figures(run: _Run) -> str:
    last = run.steps[-1] if run.steps else {}
    start = run.starts[-1] if run.starts else {}
    figures = [("Steps", number(run.last_step), _of(run.settings.get("max_steps")))]
    if is_number(last.get("epoch")):
        figures.append(("Epoch", number(last["epoch"] + 1), _of(run.settings.get("max_epochs"))))
    figures += _training_loss(run)
    for name, points in run.metrics.items():
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            mode = run.mode_of(name)
            step, value = finite[-1] if mode is None else (min if mode == "min" else max)(finite, key=lambda p: p[1])
            which = {"min": "best (lowest)", "max": "best (highest)"}.get(str(mode), "last")
            figures.append((_validation(name), number(value), f"{which}, at step {step:,}"))
    speeds = [speed for _, speed in run.values("samples_per_s") if math.isfinite(speed)]
    if speeds:
        figures.append(("Samples per second", number(statistics.median(speeds)), "median"))
    figures.append(("Ranks", str(start.get("world_size", "?")), str(start.get("backend", ""))))
    figures.append(("Attempts", number(len(run.attempts)), ""))
    rare = next(
        (record for record in reversed(run.attempts[run.last["attempt"]]) if record["kind"] == "rare_saves"), {}
    )
    if is_number(rare.get("least_s")):
        figures.append(
            ("Checkpoints on disk", measured(rare["least_s"]), "minimum interval: hosts keep the state in memory")
        )
    trained_s = sum(records[-1]["time"] - records[0]["time"] for records in run.attempts.values())
    in_all = f"{measured(run.last_s - run.began_s)} with gaps" if len(run.attempts) > 1 else ""
    figures.append(("Time", measured(trained_s), in_all))
    return section("Key figures", tiles(figures))


def _training_loss(run: _Run) -> list[tuple[str, str, str]]:
    """Return the tile with the mean loss of the last epoch, or of the last logged steps."""
    if run.epochs:
        record = run.epochs[-1]
        which = f"mean of epoch {number(record['epoch'] + 1)}" if is_number(record.get("epoch")) else "mean of an epoch"
        return [("Training loss", number(record["loss"]), f"{which}, step {record['step']:,}")]
    losses = run.values("loss")
    return [("Training loss", number(loss), f"mean up to step {step:,}") for step, loss in losses[-1:]]


def _validation(name: str) -> str:
    return f"Validation {name}"


def _curves(run: _Run) -> str:
    curves: list[tuple[str, list[Point]]] = [("loss", run.values("loss"))]
    curves += [(_validation(name), points) for name, points in run.metrics.items()]
    curves += [(name, run.values(name)) for name in ("lr", "samples_per_s", "grad_norm")]
    curves = [(name, points) for name, points in curves if points]
    if not curves:
        return section("Curves", "<p>No step has been recorded yet.</p>")
    steps = [step for _, points in curves for step, _ in points]
    first, last = min(steps), max(steps)
    marks = {step: text for step, text in run.marks().items() if first <= step <= last}
    plotted = [
        plots.curve(
            TITLES.get(name, name),
            points,
            marks,
            steps=(first, last),
            from_zero=name == "samples_per_s",
            may_be_log=name in ("loss", "grad_norm") or name.endswith("loss"),
            is_wide=number == 0 and len(curves) % 2 == 1,
        )
        for number, (name, points) in enumerate(curves)
    ]
    note = "Over steps. Dashed lines: a later attempt resumed here." if marks else "Over steps."
    return section("Curves", f'<div class="charts">{"".join(plotted)}</div>', note)


def _phases(run: _Run) -> str:
    """Return bars of each rank's time by phase, for the last attempt alone: ranks may differ between attempts."""
    timed = [record for record in run.steps if record.get("phases_by_rank") and record.get("phases_s")]
    if not timed:
        return ""
    names, num_ranks = list(timed[-1]["phases_s"]), len(timed[-1]["phases_by_rank"])
    records = [record for record in timed if record["attempt"] == timed[-1]["attempt"]]
    tables = [record["phases_by_rank"] for record in records]
    tables = [table for table in tables if [len(row) for row in table] == [len(names)] * num_ranks]
    if not tables:
        return ""
    ranks = range(len(tables[-1]))
    means = [
        (rank, {name: statistics.fmean(table[rank][place] for table in tables) for place, name in enumerate(names)})
        for rank in ranks
    ]
    totals = [sum(parts.values()) for _, parts in means]
    note = f"Mean of a step in the latest attempt. It takes {measured(max(totals))}"
    if len(means) > 1:
        busy = [sum(parts.values()) - parts.get("exchange", 0.0) - parts.get("wait", 0.0) for _, parts in means]
        behind = max(busy) / min(busy) - 1 if min(busy) > 0 else 0.0
        note += f"; up to the exchange, the slowest rank takes {behind:.0%} longer than the fastest"
    if "exchange" in names:
        note += ". Exchange: averaging gradients, and waiting for the slowest rank where no wait is shown by itself"
        note += "; torch's wrappers do both in backward"
    if "data" in names:
        note += _note_of_loading(run, records[-1]["attempt"], tables, names.index("data"))
    if len(means) > _MAX_RANKS:
        slowest = sorted(means, key=lambda row: -sum(row[1].values()))[:_MAX_RANKS]
        note += f". Of {len(means)} ranks, the {_MAX_RANKS} slowest are shown"
        means = sorted(slowest, key=lambda row: row[0])
    rows = [(f"rank {rank}", parts) for rank, parts in means]
    cells = [(who, *map(measured, parts.values()), measured(sum(parts.values()))) for who, parts in rows]
    by_phase = table("Time per phase and rank", ["", *names, "step"], cells)
    return section(
        "Where the time goes",
        f"{plots.bars(rows)}<details><summary>As a table</summary>{by_phase}</details>",
        f"{note}.",
    )


def _note_of_loading(run: _Run, attempt: int, tables: Sequence[Sequence[Sequence[float]]], place: int) -> str:
    """Return a sentence on how many loader workers would be enough, if steps wait for their data; "" if they do not.

    The usual step counts, not the mean, because the first one waits until the workers have started.

    Args:
        tables: Seconds of each phase of a step, by record and rank.
        place: Place of loading among the phases.
    """
    shares = [
        statistics.median(row[place] / total if (total := sum(row)) > 0 else 0.0 for row in rows)
        for rows in zip(*tables, strict=True)
    ]
    share = max(shares)
    start = next((start for start in run.starts if start["attempt"] == attempt), {})
    num_workers = start.get("origin", {}).get(WORKERS)
    if not LEAST_LOADING < share < 1 or not isinstance(num_workers, int) or num_workers not in range(_MOST_WORKERS):
        return ""
    does = f"waits for {counted(num_workers, 'loader worker')}" if num_workers else "loads its data itself"
    needed = counted(workers_needed(share, num_workers), "worker")
    return (
        f". Rank {shares.index(share)} {does} in {share:.0%} of a step; {needed} per rank would be enough, if there "
        "are CPUs for them"
    )


def _stragglers(run: _Run) -> str:
    """Return a table of the ranks that others waited for in the last recorded steps of the newest attempt."""
    summary = black_box.summary_of(run.boxes(max(run.attempts)).boxes)
    if summary.kind == "unknown":
        return ""
    words = str(summary)
    head = ["Rank", "Others waited for it", "Cost of a step", "Where it loses the time"]
    slow = table("Stragglers", head, black_box.rows_of(summary))
    return section("Stragglers", slow, f"{escape(words[0].upper() + words[1:])}.")


def _last_moments(run: _Run) -> str:
    """Return the timeline of the newest attempt that failed and left black boxes."""
    for attempt in sorted(run.attempts, reverse=True):
        is_over = attempt < max(run.attempts) or run.state != "running"
        if is_over and _ending(run.attempts[attempt]) in ("interrupted", "diverged"):
            figure, note = black_box.timeline(run.boxes(attempt))
            if figure:
                return section("The last moments", figure, f"Attempt {attempt}. {note}")
    return ""


def _restarts(run: _Run) -> str:
    rows = []
    for before, start in itertools.pairwise(run.starts):
        earlier = run.attempts[before["attempt"]]
        resumed = start.get("resumed_from") or {}
        source = resumed.get("source", "?")
        origin = f"step {resumed_at(start):,}, from {source}" if resumed else "the beginning"
        gap_s = start["time"] - earlier[-1]["time"]
        size = _ranks(start)
        how, between = _how(earlier), (earlier[0]["time"], start["time"])
        logs, next_logs = (str(one.get("origin", {}).get("logs") or "") for one in (before, start))
        if _ending(earlier) == "interrupted" and black_box.was_planned(run.folder, logs, next_logs, between):
            how = how.replace("interrupted", "planned restart", 1)
        rows.append((str(start["attempt"]), _clock(start["time"]), how, origin, size, measured(gap_s)))
    if not rows:
        return ""
    head = ["Attempt", "Started", "The one before", "Resumed from", "With", "Gap"]
    note = "Gap: from the last record of the attempt before to the first of this one, recovery and waiting included."
    return section("Restarts", table("Restarts", head, rows), note)


def _losses(run: _Run) -> str:
    """Return a table and bars of the lost ranks: how each was noticed, and how long each phase of recovery took."""
    losses = black_box.losses_of(run.folder, [*run.logs, *(logs for _, logs in run.others)])
    away = black_box.out_of_reach(run.folder, run.others)
    more = f"The launchers on {listed(away, 8)} recorded theirs in run folders that are not on this host."
    if not losses:
        return section("Lost ranks", "", escape(more)) if away and len(run.attempts) > 1 else ""
    names = list(dict.fromkeys(name for loss in losses for name in loss.phases_s))
    head = ["Time", "Lost", "Noticed by", *names, "In all", "Resumed", "Again"]
    rows = []
    for loss in losses:
        took = [measured(loss.phases_s[name]) if name in loss.phases_s else "" for name in names]
        whole = measured(loss.total_s) if loss.is_over else "no step after it"
        rows.append((_clock(loss.at_s), who_of(loss), sign_of(loss), *took, whole, place_of(loss, ","), repeated(loss)))
    bars = [(who_of(loss), {name: loss.phases_s.get(name, 0.0) for name in names}) for loss in losses]
    note = (
        "From the first sign of a lost rank to the first step after it, by the clock of the host that recorded it. "
        "Time between two phases is part of the later one."
    )
    note += f" {escape(more)}" if away else ""
    return section("Lost ranks", f"{plots.bars(bars, whole='the recovery')}{table('Lost ranks', head, rows)}", note)


def _how(records: Sequence[Record]) -> str:
    """Return how an attempt ended, and at which step."""
    ending = _ending(records)
    for record in records:
        if record["kind"] == "preempted" and ending == "preempted":
            number = record.get("signal")
            known = {int(member): member.name for member in signal.Signals}
            ending = f"preempted by {known.get(number, number) if isinstance(number, int) else number}"
    steps = [record["step"] for record in records if is_number(record.get("step"))]
    return f"{ending}, last record at step {steps[-1]:,}" if steps else f"{ending} before its first step"


def _origin(run: _Run) -> str:
    """Return a table of what the last start ran and where, with links to the logs of all starts."""
    origin = run.starts[-1].get("origin", {}) if run.starts else {}
    rows = [(str(name), str(value)) for name, value in origin.items() if name not in ("logs", "logs of others")]
    # Always a relative path, so that a recorded folder can't make a link to another host.
    links = ", ".join(f'<a href="./{quote(logs.lstrip("/"))}">{escape(logs)}</a>' for logs in run.logs)
    note = f"Logs of the ranks: {links}" if links else ""
    return section("Origin", table("Origin", ["What", "Value"], rows), note) if rows else ""


def _settings(run: _Run) -> str:
    if not run.settings:
        return ""
    rows = [(str(name), "none" if value is None else str(value)) for name, value in run.settings.items()]
    return section("Settings", table("Settings", ["Setting", "Value"], rows))


def _ranks(start: Record) -> str:
    size = start.get("world_size")
    return counted(size, "rank") if type(size) is int else f"{size or '?'} ranks"


def _of(limit: object) -> str:
    return f"of {limit:,}" if isinstance(limit, int) else ""


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
