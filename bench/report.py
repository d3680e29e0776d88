"""Reports the results: a table, the targets, JSON and a plot."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from bench.plan import COLUMNS, LABELS, TARGETS, Point, Target, size_text, usable_cpus
from bench.record import Table

_COLORS = {"phalanx": "#d62728", "core": "#ff9896", "gloo": "#1f77b4", "mpi": "#2ca02c", "memcpy": "#7f7f7f"}
_LINES = {2: "-", 4: "--", 8: ":"}


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median, over the rounds, of the ratio of a time in `of` to the time in `to`."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def verdict_line(is_reached: bool, text: str) -> str:
    """Return the line for a target: whether it was reached, and the text, which states the measured value."""
    return f"{'reached' if is_reached else 'missed ':8} {text}"


@dataclass(frozen=True)
class Result:
    """All measurements of a point; `samples` maps each engine to the seconds of one operation in each round."""

    point: Point
    samples: dict[str, list[float]]
    iterations: dict[str, int]

    def median(self, engine: str) -> float:
        return statistics.median(self.samples[engine])

    def ratio(self, slow: str, fast: str) -> float:
        """Return how many times faster `fast` is, by medians; for a call check, where 1 % matters, round by round."""
        if "core_unchecked" in self.samples:
            return median_ratio(self.samples[slow], self.samples[fast])
        return self.median(slow) / self.median(fast)

    def value(self, target: Target) -> float | None:
        """Return the value that the target limits; None if this point does not measure that value."""
        point = self.point
        needed = {target.engine, target.baseline} - {None}
        if not target.covers(point.op, point.size_bytes, point.world_size) or not needed <= self.samples.keys():
            return None
        if target.baseline is None:
            return self.median(target.engine)
        if target.at_least is not None:
            return self.ratio(target.baseline, target.engine)
        return self.ratio(target.engine, target.baseline)


@dataclass(frozen=True)
class Verdict:
    """A target, the worst value that was measured for this target, and the size at which it was measured."""

    target: Target
    value: float
    size_bytes: int

    @property
    def reached(self) -> bool:
        return self.target.reached(self.value)

    def text(self) -> str:
        if self.target.baseline is None:
            number = f"{self.value * 1e6:.2f} us"
        else:
            number = f"{self.value:.3g}x" if self.target.at_least is not None else f"{self.value:.3f}"
        where = "" if self.target.low == self.target.high else f" at {size_text(self.size_bytes)}, the worst"
        return f"{self.target.text()}: {number}{where}"


def judge(results: Sequence[Result]) -> list[Verdict]:
    """Return the verdict on every target for which there are measurements."""
    verdicts = []
    for target in TARGETS:
        values = [(v, r.point.size_bytes) for r in results if (v := r.value(target)) is not None]
        if values:
            worst = (min if target.at_least is not None else max)(values)
            verdicts.append(Verdict(target, *worst))
    return verdicts


def time_text(seconds: float) -> str:
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * factor:.3g} {unit}"


def _marks(result: Result) -> str:
    """Return a text with the targets at this point, and whether each was reached: "30x Gloo ok, 8 us MISSED"."""
    marks = []
    for target in TARGETS:
        value = result.value(target)
        if value is not None:
            subject = "" if target.engine == "phalanx" else f"{LABELS[target.engine]} "
            bound = target.bound_text().removeprefix("at least ").removeprefix("at most ")
            marks.append(f"{subject}{bound} {'ok' if target.reached(value) else 'MISSED'}")
    return ", ".join(marks)


def _rows(results: Sequence[Result], engines: Sequence[str]) -> list[list[str]]:
    rows = []
    for result in results:
        row = [result.point.op, size_text(result.point.size_bytes)]
        for engine in engines:
            row.append(time_text(result.median(engine)) if engine in result.samples else "")
            if engine != "phalanx":
                row.append(f"{result.ratio(engine, 'phalanx'):.3g}x" if engine in result.samples else "")
        rows.append([*row, _marks(result)])
    return rows


def print_results(results: Sequence[Result]) -> None:
    """Print a table for each world size, with medians, and with each engine's time as a multiple of phalanx's."""
    for world_size in sorted({r.point.world_size for r in results}):
        here = [r for r in results if r.point.world_size == world_size and "phalanx" in r.samples]
        engines = [e for e in COLUMNS if any(e in r.samples for r in here)]
        header = ["operation", "size"]
        for engine in engines:
            header += [LABELS[engine]] if engine == "phalanx" else [LABELS[engine], "ratio"]
        title = f"{world_size} ranks on {usable_cpus()} CPUs: median times, each with its ratio to that of phalanx"
        print_table(title, [*header, "targets"], _rows(here, engines))


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table whose last cells are marks: in red if a mark contains MISSED, otherwise in green."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        print(f"\n{title}")
        for row in [header, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(
            name, justify="left" if name in ("operation", "targets") else "right", no_wrap=name != "targets"
        )
    for row in rows:
        style = "red" if "MISSED" in row[-1] else "green" if row[-1] else None
        table.add_row(*row[:-1], f"[{style}]{row[-1]}[/]" if style else "")
    console = Console()
    Console(width=console.width if console.is_terminal else 180).print(table)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    reached = sum(verdict.reached for verdict in verdicts)
    print(f"\nTargets, stated for an idle machine with 2 cores: {reached} of {len(verdicts)} reached")
    for verdict in verdicts:
        print(f"  {'reached' if verdict.reached else 'MISSED '}  {verdict.text()}")


def machine_facts(mpi_version: str) -> dict[str, object]:
    """Return the facts about this machine and its software that readers of the numbers need."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    versions = {}
    for package in ("torch", "phalanx-torch", "mpi4py"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu,
        "usable_cpus": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "mpi": mpi_version or None,
        **versions,
    }


def _engine_record(result: Result, engine: str) -> dict[str, object]:
    samples = result.samples[engine]
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median_s": median,
        "quartiles_s": [first, third],
        "iterations": result.iterations[engine],
        "samples_s": samples,
    }


def table(results: Sequence[Result], **first: str) -> Table:
    """Return a table of medians and their ratios to phalanx's; `first` are columns with the same text in all rows."""
    with_ours = [r for r in results if "phalanx" in r.samples]
    others = [e for e in COLUMNS if e != "phalanx" and any(e in r.samples for r in with_ours)]
    columns = [(name, "text") for name in (*first, "operation")]
    columns += [("ranks", "count"), ("size", "bytes"), (LABELS["phalanx"], "seconds")]
    for engine in others:
        columns += [(LABELS[engine], "seconds"), ("ratio", "ratio")]
    rows: list[list[str | float | None]] = []
    for r in with_ours:
        row: list[str | float | None] = [*first.values(), r.point.op, r.point.world_size, r.point.size_bytes]
        row.append(r.median("phalanx"))
        for engine in others:
            row += [r.median(engine), r.ratio(engine, "phalanx")] if engine in r.samples else [None, None]
        rows.append(row)
    return Table("collectives", columns, rows)


def raw(results: Sequence[Result], verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Return every sample of every engine, and the targets."""
    return {
        "results": [
            {
                "op": r.point.op,
                "size_bytes": r.point.size_bytes,
                "world_size": r.point.world_size,
                "engines": {engine: _engine_record(r, engine) for engine in r.samples},
                "ratio_to_phalanx": {e: r.ratio(e, "phalanx") for e in r.samples} if "phalanx" in r.samples else None,
            }
            for r in results
        ],
        "targets": [
            {"text": v.text(), "reached": v.reached, "value": v.value, "at_bytes": v.size_bytes, **asdict(v.target)}
            for v in verdicts
        ],
    }


def write_plot(path: Path, results: Sequence[Result]) -> None:
    """Plot time against size, with a panel per operation, a color per engine and a line style per world size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [r for r in results if "phalanx" in r.samples and r.point.op != "barrier"]
    drawn = drawn or [r for r in results if "phalanx" in r.samples]
    ops = list(dict.fromkeys(r.point.op for r in drawn))
    num_columns = min(len(ops), 3)
    num_rows = -(-len(ops) // num_columns)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=(5.5 * num_columns, 4.2 * num_rows), squeeze=False)
    for panel in axes.flat[len(ops) :]:
        panel.set_visible(False)
    for panel, op in zip(axes.flat, ops, strict=False):
        for world_size in sorted({r.point.world_size for r in drawn if r.point.op == op}):
            here = [r for r in drawn if r.point.op == op and r.point.world_size == world_size]
            for engine, color in _COLORS.items():
                line = [(max(r.point.size_bytes, 1), r.median(engine) * 1e6) for r in here if engine in r.samples]
                if line:
                    label = f"{LABELS[engine]}, {world_size} ranks"
                    style = _LINES.get(world_size, "-.")
                    panel.plot(*zip(*line, strict=True), style, color=color, marker=".", label=label)
        panel.set(title=op, xlabel="bytes", ylabel="microseconds", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
