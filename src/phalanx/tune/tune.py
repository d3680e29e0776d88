"""``phalanx tune train.py``: finds the flags and settings that make this script fastest on this machine."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from phalanx import _env
from phalanx._command_line import Parser, UsageError
from phalanx._text import columns, complain
from phalanx.host.block_pool import MemoryPolicy, choose
from phalanx.host.cpus import Share, read_machine
from phalanx.launch.command.flag_parser import add_flags, split_off_flags, without_flags
from phalanx.launch.command.flag_values import number
from phalanx.launch.command.flags import Flag, Setting
from phalanx.launch.command.neighbors import TUNE, Claim, Presence, crowding
from phalanx.launch.command.plan import count_local_ranks, make_plan, read_command
from phalanx.launch.command.tuned import Tuned, remember, tuned_file
from phalanx.launch.job import Job
from phalanx.tune.offers import advice
from phalanx.tune.search import Limits, Search, Step, default_ranks
from phalanx.tune.trial_folder import PREFIX, folder_of_jobs
from phalanx.tune.trial_job import end_on_signals
from phalanx.tune.trials import Failed, Setup, Trials

_OWN_PROCESSES = re.compile(
    "address already in use|two processes claim rank|ProcessRaisedException|in several processes", re.IGNORECASE
)
_SEARCHED = ("--nproc-per-node", "--memory", "--shutdown-timeout")
_TAIL_LINES, _WIDTH = 20, 80
_SHARE_OF_SEARCH = 0.9  # fraction of the time for the search; the rest is for the last round and for ending all jobs
_seconds = number(float, 5, "seconds from 5 to 86400", most=86400)
OWN_FLAGS = (
    Flag("seconds", "approximate length of the search, including the starts of the script", _seconds, "SECONDS", "60"),
    Flag("json", "file to write the table to, as JSON", str, "FILE"),
)


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx tune`` with these arguments, and return its exit code."""
    parser = Parser(
        "phalanx tune",
        "phalanx tune [flags] train.py [args]",
        "Run a script for some seconds in each of a handful of settings, in turns, and show which are the fastest "
        "here: ranks x threads, memory, the optimizer's fused form, and settings of a Trainer. The script must take "
        "optimizer steps on the CPU. It runs unchanged, in a run folder of its own, and is ended once it has been "
        "measured. Every flag of phalanx run is accepted; --nproc-per-node and --memory fix what they set.",
    )
    add_flags(parser, {"Search": OWN_FLAGS})
    try:
        settings, target, _ = read_command(argv, _env.environment(), parser=parser, also=OWN_FLAGS)
        _check_json(settings["json"].value)
        if settings["nnodes"].value != (1, 1):
            raise UsageError("--nnodes: phalanx tune measures on one machine")
        if settings["dry-run"].value:
            raise UsageError("--dry-run is for phalanx run: phalanx tune has to run the script to measure it")
        words = without_flags((*_SEARCHED, *(f"--{flag.name}" for flag in OWN_FLAGS)), argv, target)
        job = make_plan(words, _env.environment(), parser).job  # refuses a job that could not start
        limits, policy = _limits(settings)
    except UsageError as error:
        return parser.refuse(error, argv)
    try:
        _say(f"{shlex.join(target)} on {limits.machine.describe()}; memory {policy}")
        cores = Share(used_threads=limits.machine.num_cores)
        with Presence(claim := Claim.of(TUNE, [cores])) as presence:
            if said := crowding(claim, presence.others):
                _say("; ".join(said))
            return _search(words, target, job, limits, settings["json"].value)
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk has no space for the trials' output
        complain(f"phalanx tune: {error}; TMPDIR names another folder for the trials")
        return 1


def _limits(settings: Mapping[str, Setting]) -> tuple[Limits, MemoryPolicy]:
    """Return the bounds of the search, and the ranks' memory policy under ``--memory`` or its default."""
    machine, environ = read_machine(), _env.environment()
    asked = settings["nproc-per-node"]
    ranks = [count_local_ranks(asked, machine, environ)[1]] if asked.is_given else default_ranks(machine)
    memory = settings["memory"]
    policy = choose(environ, wanted=memory.value, num_ranks=max(ranks))
    memories = [memory.value] if memory.is_given or not policy.keeps else ["auto", "default"]
    deadline = time.monotonic() + settings["seconds"].value * _SHARE_OF_SEARCH
    said = environ.get("OMP_NUM_THREADS", "")
    threads = int(said) if said.isdigit() else 0
    return Limits(ranks=ranks, memories=memories, machine=machine, threads=threads, deadline=deadline), policy


def _check_json(path: str) -> None:
    """Refuse a file that could not be written after the search."""
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    if path and (os.path.isdir(path) or not os.access(place, os.W_OK)):
        raise UsageError(f"--json must name a file that can be written, got {path!r}")


def _search(words: Sequence[str], target: Sequence[str], job: Job, limits: Limits, json_file: str) -> int:
    end_on_signals()
    began_s = time.monotonic()
    script = shlex.join(target)
    if behind := [word for word in split_off_flags(target[1:], OWN_FLAGS)[0] if word.startswith("--")]:
        _say(f"{', '.join(behind)} goes to {target[0]!r}: flags of phalanx tune come before the script")
    in_trials = without_flags(["--log-dir"], words, target)  # because each trial has a folder of its own
    with folder_of_jobs() as folder, Trials(in_trials, folder, limits.deadline) as trials:
        search = Search(trials, limits, _say)
        try:
            search.run()
        except Failed as failure:
            return _refuse(script, failure)
    for line in _table(search):
        print(line)
    command = _command(search, words, target)
    print(f"best: {command}")
    for line in _advice(search, target):
        _show(f"- {line}")
    _show(_remember(search, job))
    print(f"measured in {time.monotonic() - began_s:.0f} s")
    if json_file:
        _write_json(json_file, search, command)
    return 0


def _remember(search: Search, job: Job) -> str:
    """Save the result for ``phalanx run``; return a line for the user about the result."""
    best = search.best
    found = Tuned(
        command=[*job.command[1:]], machine=search.limits.machine.describe(),
        ranks=best.ranks, threads=best.threads, memory=best.memory,
    )  # fmt: skip
    file = tuned_file(job.log_dir, job.command)
    try:
        remember(found, file)
    except OSError as error:
        why = f"{file!r} can't be written ({error.strerror})"
        return f"phalanx run can't use that automatically: {why}; type the best command"
    return f"phalanx run uses that for --nproc-per-node auto ({file})"


def _say(text: str) -> None:
    _show(f"phalanx tune: {text}")


def _show(text: str, file: TextIO | None = None) -> None:
    lines = textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(lines, file=file, flush=True)


def _refuse(script: str, failure: Failed) -> int:
    if failure.printed:
        lines = [line for line in failure.printed.rstrip().splitlines() if PREFIX not in line]
        print("\n".join(lines[-_TAIL_LINES:]), file=sys.stderr)
    _show(f"phalanx tune: {script} {failure}; nothing was measured", sys.stderr)
    if _OWN_PROCESSES.search(f"{failure}\n{failure.printed}"):
        advice = "name no port in it, and start no processes of your own: the jobs run side by side, as under torchrun"
        _show(f"- {advice}", sys.stderr)
    elif not failure.code:
        _show("- phalanx tune measures the steps of a torch.optim optimizer in a loop of the script", sys.stderr)
    return failure.code or 1


def _table(search: Search) -> list[str]:
    rows = [("", f"{search.unit}/s", "speed", "")]
    for step in search.steps:
        if not step.why:
            rate = f"{step.rate:,.0f}" if step.rate >= 100 else f"{step.rate:.3g}"
            rows.append((step.name, rate, *_said(step)))
    lines = columns(rows)
    for why in dict.fromkeys(step.why for step in search.steps if step.why):
        names = ", ".join(step.name for step in search.steps if step.why == why)
        lines += textwrap.wrap(f"not measured: {names}: {why}", _WIDTH, subsequent_indent="  ")
    return lines


def _said(step: Step) -> tuple[str, str]:
    if step.gain is None:
        return "", ""
    gain = step.gain
    words = [f"+- {gain.noise:.0%}"]
    if step.note or step.is_taken:
        words.append(step.note or "taken")
    elif abs(math.log(gain.ratio)) <= gain.noise:
        words.append("within the noise")
    return f"{gain.ratio:.2f}x", ", ".join(words)


def _command(search: Search, words: Sequence[str], target: Sequence[str]) -> str:
    best: Setup = search.best
    share = max(1, search.limits.machine.num_cores // best.ranks)
    environ = f"OMP_NUM_THREADS={best.threads} " if best.threads != share or search.limits.threads else ""
    flags = ["--nproc-per-node", str(best.ranks), *(["--memory", best.memory] if best.memory != "auto" else [])]
    return environ + shlex.join(["phalanx", "run", *flags, *words[: len(words) - len(target)], *target])


def _advice(search: Search, target: Sequence[str]) -> list[str]:
    best, facts = search.best, search.facts
    lines = [f"and in {target[0]}: {change}" for change in advice(best, facts)]
    if not any(step.is_taken and step.gain is not None and step.gain.is_certain for step in search.steps):
        first = next(step.name for step in search.steps if not step.why).partition(":")[0]
        lines.append(f"nothing here was faster than {first} by more than the noise")
    if best.ranks > 1 and facts["trainer"] is None:
        lines.append(f"a step of {best.ranks} ranks has {best.ranks} times the samples, unless the script divides them")
    return lines


def _write_json(path: str, search: Search, command: str) -> None:
    steps = [
        {
            "name": step.name, "rate": step.rate, "why": step.why, "taken": step.is_taken,
            "ratio": step.gain.ratio if step.gain else None, "noise": step.gain.noise if step.gain else None,
        }
        for step in search.steps
    ]  # fmt: skip
    best = {name: getattr(search.best, name) for name in ("ranks", "threads", "memory", "fused", "changes")}
    with open(path, "w") as file:
        json.dump({"unit": search.unit, "steps": steps, "best": best, "command": command}, file, indent=1)
