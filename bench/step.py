"""``python -m bench.step``: how long a training step takes under plain python, torchrun and ``phalanx run``.

First, one rank trains with one thread and without communication. Then two ranks train: under torchrun with torch's
DistributedDataParallel on Gloo, and under torchrun and ``phalanx run`` with phalanx's DistributedDataParallel on
phalanx. Each turn starts new processes, because the launchers differ in how a process handles its memory. The launchers
take turns, so that other load on the machine affects all of them equally. The peak memory of a rank is reported, too.
``--allocators`` adds turns of one rank under plain python with another library for malloc; these have no targets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import record
from bench.plan import parse_names
from bench.report import machine_facts, median_ratio, verdict_line
from bench.step_models import CASES

_OURS = "phalanx run"
_FASTER = ("MLP of 17 M", "large CNN", "small GPT")  # models for which page faults take a large part of the step
_LEAST_ANYWHERE, _MOST_MEMORY = 0.99, 1.15
_STEP_LIMIT_S = 600


@dataclass(frozen=True)
class Variant:
    """A way to start ranks that train."""

    name: str
    launcher: Sequence[str]
    options: Sequence[str] = ()
    least: float = 1.0  # target in the cases of `_FASTER`: the step time must be at least this multiple of ours
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One turn: the median time of a step on the slowest rank, and the peak memory of a rank."""

    step_s: float
    peak_mib: float


def _variants(num_ranks: int) -> list[Variant]:
    number = ("--nproc-per-node", str(num_ranks))
    beside = os.path.join(os.path.dirname(sys.executable), "torchrun")
    torchrun = (beside if os.path.exists(beside) else shutil.which("torchrun") or beside, "--standalone", *number)
    ours = (sys.executable, "-m", "phalanx", "run", *number)
    if num_ranks == 1:
        return [
            Variant("python", (sys.executable,), least=1.3),
            Variant("torchrun", torchrun, least=1.3),
            Variant(_OURS, ours),
        ]
    on_phalanx = ("--backend", "phalanx", "--ddp", "phalanx")
    return [
        Variant("torchrun, torch DDP on Gloo", torchrun, ("--backend", "gloo", "--ddp", "torch"), 1.3),
        Variant("torchrun, phalanx DDP on phalanx", torchrun, on_phalanx, 1.15),
        Variant(_OURS, ours, on_phalanx),
    ]


def with_allocators(num_ranks: int, libraries: Sequence[str]) -> list[Variant]:
    """Return the variants to compare; with one rank, these include plain python with each of `libraries` preloaded."""
    preloaded = [
        Variant(f"python, {os.path.basename(library)}", (sys.executable,), environ={"LD_PRELOAD": library})
        for library in (libraries if num_ranks == 1 else ())
    ]
    return [*preloaded, *_variants(num_ranks)]


def _turn(variant: Variant, case: str, num_steps: int) -> Sample:
    """Run a job and return the sample that its ranks have written."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        module = ("-m", "bench.step_worker", "--case", case, "--steps", str(num_steps), "--out", folder)
        command = [*variant.launcher, *module, *variant.options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_LOG_DIR": folder, **variant.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_STEP_LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("rank_*.json")]
    return Sample(
        max(statistics.median(rank["seconds"]) for rank in ranks), max(float(rank["peak_mib"]) for rank in ranks)
    )


def measure(case: str, variants: Sequence[Variant], rounds: int, scale: float) -> dict[str, list[Sample]]:
    """Return the samples of every variant; every second round has the reverse order, which cancels a steady drift."""
    num_steps = max(2, round(CASES[case].num_steps * scale))
    samples: dict[str, list[Sample]] = {variant.name: [] for variant in variants}
    for number in range(rounds):
        for variant in variants[:: -1 if number % 2 else 1]:
            samples[variant.name].append(_turn(variant, case, num_steps))
    return samples


def speedup(samples: dict[str, list[Sample]], over: str) -> float:
    """Return the median, over the rounds, of the ratio of the step time of `over` to ours."""
    return median_ratio(*([sample.step_s for sample in samples[name]] for name in (over, _OURS)))


def _memory(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.peak_mib for sample in samples)


def verdicts(case: str, num_ranks: int, samples: dict[str, list[Sample]]) -> list[tuple[bool, str]]:
    """Return for each target whether it was reached, and a text with the measured value."""
    found = []
    for variant in _variants(num_ranks):
        if variant.name == _OURS:
            continue
        least = variant.least if case in _FASTER else _LEAST_ANYWHERE
        if num_ranks == 1 or case in _FASTER:
            ratio = speedup(samples, variant.name)
            found.append((ratio >= least, f"{case}, {num_ranks}: {ratio:.2f}x {variant.name} (at least {least})"))
    # The variant before ours, in the list, differs from ours only in the launcher.
    like = _variants(num_ranks)[-2].name
    memory = _memory(samples[_OURS]) / _memory(samples[like])
    text = f"{case}, {num_ranks}: {memory:.2f} of the memory of {like} (at most {_MOST_MEMORY})"
    return [*found, (memory <= _MOST_MEMORY, text)]


def _print_samples(console: Console, case: str, num_ranks: int, samples: dict[str, list[Sample]]) -> None:
    title = f"{case}, {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    table = Table("", "step", "spread", "phalanx run is", "peak memory", title=title, title_justify="left")
    for name, turns in samples.items():
        times = [sample.step_s * 1e3 for sample in turns]
        ratio = f"{speedup(samples, name):.2f}x" if name != _OURS else ""
        spread = f"{min(times):.1f} to {max(times):.1f}"
        table.add_row(name, f"{statistics.median(times):.1f} ms", spread, ratio, f"{_memory(turns):.0f} MiB")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each launcher (default 5)")
    parser.add_argument("--only", default=",".join(CASES), help="models to measure, separated by commas")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks (default 1,2)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of steps in a turn")
    parser.add_argument("--allocators", default="", metavar="PATH,...", help="libraries for malloc to compare with")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for step.json")
    record.add_arguments(parser, "step.json")
    given = parser.parse_args()
    names = parse_names(given.only, CASES, parser)
    libraries = [path for path in given.allocators.split(",") if path]
    for path in libraries:
        # otherwise the loader would only print a warning, and plain python would be measured
        if not os.path.isfile(path):
            parser.error(f"--allocators: there is no file {path!r}")
    console = Console(width=110, highlight=False)
    found, judged, peak_rows = {}, [], []
    # speed of our launcher, as a multiple of another launcher's: by the other launcher, then by model
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for name in names:
        for num_ranks in map(int, given.ranks.split(",")):
            if num_ranks > 1 and CASES[name].optimizer is None:
                continue  # evaluation has no gradients to average
            samples = measure(name, with_allocators(num_ranks, libraries), given.rounds, given.scale)
            _print_samples(console, name, num_ranks, samples)
            found[f"{name}, {num_ranks}"] = {
                variant: [vars(sample) for sample in turns] for variant, turns in samples.items()
            }
            judged += verdicts(name, num_ranks, samples)
            like = _variants(num_ranks)[-2].name  # the variant that differs from ours only in the launcher
            peak_rows.append([name, num_ranks, _memory(samples[_OURS]) / _memory(samples[like])])
            for other in samples.keys() - {_OURS}:
                ratios[f"{num_ranks}: {other}"][name] = speedup(samples, other)
    for reached, text in judged:
        print(verdict_line(reached, text))
    path = given.json or given.out / "step.json"
    raw = {"samples": found, "verdicts": judged}
    columns = sorted(ratios)
    rows = [[name, *(ratios[column].get(name) for column in columns)] for name in names]
    table = record.Table("step", [("model", "text"), *((column, "ratio") for column in columns)], rows)
    peaks = record.Table("memory", [("model", "text"), ("ranks", "count"), ("peak memory", "fraction")], peak_rows)
    record.write(path, given.note, machine_facts(""), [table, peaks], raw)


if __name__ == "__main__":
    main()
