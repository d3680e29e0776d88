"""The pages as HTML: all jobs, one job, one rank. Each is a dict of parts, of which those that changed are sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from phalanx._text import counted, duration, in_units, named
from phalanx.diagnose.jobs import NO_RANK
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.screen import doing, rate
from phalanx.diagnose.web.pictures import Seen
from phalanx.failure.losses import load_losses, sign_of, who_of, words_of
from phalanx.train.report import plots
from phalanx.train.report.page import page, section, table, table_of_html, tiles
from phalanx.train.report.report import TITLES

Parts = dict[str, str]
_REDRAW_S = 5.0
_MOST_BARS = 16  # ranks whose times are drawn
_STREAM = """<section aria-labelledby="logs"><h2 id="logs">Logs</h2><form id="filter" role="search">
<label>Rank <input name="rank" inputmode="numeric" size="4" placeholder="all"></label>
<label>Containing <input name="find" type="search" maxlength="200"></label></form>
<pre id="lines" tabindex="0" role="log" aria-label="Newest lines" aria-live="off"></pre></section>
"""
_QUESTIONS = """<section aria-labelledby="questions"><h2 id="questions">Ask</h2>
<p>Neither question stops the job.</p><p><button data-ask="why">Why does it not go on?</button>
<button data-ask="stacks">Show the stack</button></p>
<pre id="answer" tabindex="0" role="status" aria-label="Answer"></pre></section>
"""


def shell(title: str, view: str, parts: Mapping[str, str], more: str = "") -> str:
    """Return a whole page, whose parts the script keeps up to date.

    Args:
        view: Name of the view.
        more: HTML below the parts, which stays as it is.
    """
    head = '<link rel="stylesheet" href="style.css"><script src="live.js" defer></script>'
    content = "\n".join(f'<div id="{name}">{html}</div>' for name, html in parts.items())
    foot = '<footer><span id="link" role="status">This page is not updated: it needs its script.</span></footer>'
    return page(title, head, f"{content}\n{more}{foot}\n", f'data-view="{escape(view)}"')


def overview(jobs: Sequence[Seen]) -> Parts:
    """Return the page of all jobs."""
    parts = {"head": "<header><h1>Jobs</h1><p>All jobs of this user on this host, newest last.</p></header>"}
    body = "".join(_job_section(job) for job in jobs) or "<p>No job of this user runs on this host.</p>"
    return {**parts, "jobs": body}


def job_page(job: Seen) -> Parts:
    """Return the page of one job."""
    return {
        "head": _head(job),
        "figures": section("Key figures", tiles(_figures(job))),
        "curves": _curves_lately(job),
        "phases": _phases(job),
        "losses": _losses(job),
        "saves": section("Checkpoints and snapshots", tiles(_saves(job))),
        "ranks": section("Ranks", _ranks(job)),
    }


def rank_page(job: Seen, rank: RankView) -> Parts:
    """Return the page of one rank."""
    figures = [
        ("State", rank.state, ""),
        ("Step", "-" if rank.step is None else f"{rank.step:,}", _of(rank.num_steps)),
        ("Steps per second", _or_dash(rank.steps_per_s, rate), "over ten seconds"),
        ("CPU", _or_dash(rank.cpu_percent, lambda value: f"{value:.0f}%"), "100% is one CPU"),
        (
            "Memory",
            _or_dash(rank.rss_bytes, in_units),
            f"{_or_dash(rank.pss_bytes, in_units)} with shared parts counted",
        ),
        ("Threads", _or_dash(rank.num_threads, str), counted(rank.num_helpers, "child process")),
    ]
    back = f'<p><a href="job?{urlencode({"job": job.key})}">{escape(job.view.name)}</a></p>'
    words = f"Process {rank.pid}, {doing(rank)}. {rank.note}"
    return {
        "head": f"<header>{back}<h1>Rank {rank.rank}</h1><p>{escape(words)}</p></header>",
        "figures": section("Key figures", tiles(figures)),
    }


def questions() -> str:
    """Return the buttons that ask about a job or a rank."""
    return _QUESTIONS


def log_view() -> str:
    """Return the form and the place for log lines."""
    return _STREAM


def waits(ranks: Sequence[RankView]) -> list[str]:
    """Return sentences about which ranks wait in which operation, and for whom."""
    by_what: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.state == "waiting" and rank.what:
            by_what.setdefault(rank.what, []).append(rank.rank)
    living = {rank.rank for rank in ranks if rank.state != "gone"}
    found = []
    for what, waiting in by_what.items():
        awaited = sorted(living.difference(waiting))
        whom = f" for {named('rank', awaited)}" if awaited else ""
        found.append(f"{_capital(named('rank', waiting))} {'waits' if len(waiting) == 1 else 'wait'} in {what}{whom}.")
    return found


def _job_section(job: Seen) -> str:
    href = f"job?{urlencode({'job': job.key})}"
    return (
        f'<section><h2><a href="{escape(href)}">{escape(job.view.name)}</a> {_state(job)}</h2>'
        f"<p>{escape(_story(job))}</p>{_ranks(job)}</section>"
    )


def _story(job: Seen) -> str:
    """Return what the job is, who waits for whom in it, and who is slow."""
    return " ".join(filter(None, [_summary(job), *waits(job.view.ranks), job.view.straggler]))


def _summary(job: Seen) -> str:
    view = job.view
    here = counted(len(view.ranks), "rank")
    size = here if view.world_size in (0, len(view.ranks)) else f"{len(view.ranks)} of {view.world_size} ranks here"
    since = "" if view.seconds is None else f", for {duration(view.seconds)}"
    loss = next((curve.points[-1] for name, curve in job.curves.items() if name == "loss" and curve.points), None)
    last = "" if loss is None else f", loss {plots.number(loss[1])} at step {loss[0]:,}"
    return f"{view.launcher}: {size}{since}{last}."


def _state(job: Seen) -> str:
    words, kind = ("ended", "finished") if job.has_ended else (job.view.state or "running", "running")
    return f'<strong class="state {kind}">{escape(words)}</strong>'


def _head(job: Seen) -> str:
    view = job.view
    report = (
        job.trainer_folder
        and f'<a href="report?{escape(urlencode({"job": job.key}))}">Its report</a> tells the whole story.'
    )
    return (
        f'<header><p><a href="./">All jobs</a></p><h1>{escape(view.name)} {_state(job)}</h1>'
        f"<p>{escape(_story(job))}</p><p>{report} {view.folder and f'Logs: {escape(view.folder)}'}</p></header>"
    )


def _figures(job: Seen) -> list[tuple[str, str, str]]:
    ranks = job.view.ranks
    stepping = [rank for rank in ranks if rank.step is not None]
    step = min((rank.step or 0 for rank in stepping), default=None)
    speeds = [rank.steps_per_s for rank in stepping if rank.steps_per_s is not None]
    last = max((rank.num_steps or 0 for rank in stepping), default=0)
    left = duration((last - step) / min(speeds)) if speeds and step is not None and last and min(speeds) > 0 else ""
    figures = [
        ("Step", "-" if step is None else f"{step:,}", _of(last)),
        ("Steps per second", rate(min(speeds)) if speeds else "-", f"{left} left" if left else ""),
        ("Ranks", f"{sum(rank.state != 'gone' for rank in ranks)}", f"of {job.view.world_size or len(ranks)}"),
        ("Memory", in_units(sum(rank.rss_bytes or 0 for rank in ranks)), "all ranks here"),
        ("CPUs", f"{sum(rank.cpu_percent or 0 for rank in ranks) / 100:.1f}", "in use by ranks here"),
    ]
    for name, curve in job.curves.items():
        if curve.points and (name == "loss" or name.endswith("/loss")):
            figures.append(
                (TITLES.get(name, name), plots.number(curve.points[-1][1]), f"at step {curve.points[-1][0]:,}")
            )
    return figures


def _curves_lately(job: Seen) -> str:
    """Return the curves as they were drawn a few seconds ago: to draw and to send them is most of a page's cost."""
    html, drawn_s = job.curves_drawn
    if not html or time.monotonic() - drawn_s >= _REDRAW_S:
        html = _curves(job)
        job.curves_drawn = html, time.monotonic()
    return html


def _curves(job: Seen) -> str:
    names = [name for name in job.curves if not name.endswith("_s") and name not in ("epoch", "epoch_loss")]
    names = sorted(names, key=lambda name: (name != "loss", "/" not in name, name == "lr"))
    curves = {name: job.curves[name].points for name in [*names, "samples_per_s"] if name in job.curves}
    if not curves:
        return ""
    first = min(points[0][0] for points in curves.values())
    last = max(points[-1][0] for points in curves.values())
    marks = {step: text for step, text in job.marks.items() if first <= step <= last}
    drawn = [
        plots.curve(
            TITLES.get(name, name), points, marks, steps=(first, last), from_zero=name == "samples_per_s",
            may_be_log=name.endswith("loss") or name == "grad_norm",
        )
        for name, points in curves.items()
    ]  # fmt: skip
    return section("Curves", f'<div class="charts">{"".join(drawn)}</div>', "Over steps.")


def _phases(job: Seen) -> str:
    record = job.phases
    rows = [dict(zip(record["phases_s"], row, strict=False)) for row in record.get("phases_by_rank", [])]
    if not rows:
        return ""
    slowest = sorted(range(len(rows)), key=lambda rank: -sum(rows[rank].values()))[:_MOST_BARS]
    note = f"Means of the steps up to {record['step']:,}" + (
        f"; of {len(rows)} ranks, the {_MOST_BARS} slowest." if len(rows) > _MOST_BARS else "."
    )
    return section("Where the time goes", plots.bars([(f"rank {rank}", rows[rank]) for rank in sorted(slowest)]), note)


def _losses(job: Seen) -> str:
    losses = load_losses(Path(job.view.folder)) if job.view.folder else []
    if not losses:
        return ""
    rows = [(_clock(loss.at_s), who_of(loss), sign_of(loss), words_of(loss, "resumed")) for loss in losses]
    return section("Lost ranks", table("Lost ranks", ["Time", "Lost", "Noticed by", "Then"], rows))


def _saves(job: Seen) -> list[tuple[str, str, str]]:
    newest, copied, wanted = job.held
    replicas = f"of {wanted} on other hosts" if wanted else "none wanted on other hosts"
    saved = job.saves
    return [
        ("Snapshot in memory", f"step {newest.step:,}" if newest is not None else "none", ""),
        ("Replicas", str(copied.num_replicas) if copied is not None else "0", replicas),
        (
            "Checkpoint on disk",
            f"step {saved['step']:,}" if saved else "none yet",
            f"at {_clock(saved['time'])}" if saved else "",
        ),
    ]


def _ranks(job: Seen) -> str:
    rows = [
        (
            f'<a href="rank?{escape(urlencode({"job": job.key, "rank": rank.rank}))}">'
            f"{'process' if rank.rank == NO_RANK else f'rank {rank.rank}'}</a>",
            escape(_shorter(doing(rank), rank.site)),
            "" if rank.step is None else f"{rank.step:,}",
            _or_dash(rank.steps_per_s, rate),
            _or_dash(rank.cpu_percent, lambda value: f"{value:.0f}%"),
            _or_dash(rank.rss_bytes, in_units),
        )
        for rank in job.view.ranks
    ]
    head = ["", "Does", "Step", "Steps/s", "CPU", "Memory"]
    return table_of_html(f"Ranks of {job.view.name}", head, rows) if rows else ""


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _shorter(words: str, site: str) -> str:
    return words.replace(site, os.path.basename(site)) if site else words


def _or_dash(value: float | None, words: Callable[..., str]) -> str:
    return "-" if value is None else words(value)


def _of(number: int | None) -> str:
    return f"of {number:,}" if number else ""


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
