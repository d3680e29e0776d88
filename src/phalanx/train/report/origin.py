"""The origin of a run, for its report: command, code, model, optimizer, hosts, versions and logs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx import _env, checkpoint
from phalanx._text import format_ranges
from phalanx.doctor.limits import examine_swap
from phalanx.doctor.processors import examine_places
from phalanx.host.block_pool import in_force
from phalanx.host.cgroups import usable_cpus
from phalanx.host.cpus import read_machine
from phalanx.record.notes import run_logs
from phalanx.train.feed.feed import Feed
from phalanx.train.report.metrics import WORKERS
from phalanx.wire.rank_group import RankGroup

_MAX_PIDS, _MAX_PLACES = 16, 8  # most process ids, and most sets of CPUs, in a line
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def describe_origin(
    model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, ranks: RankGroup, folder: str
) -> dict[str, Any]:
    """Return a run's origin by topic, with paths relative to `folder`; every rank must call this."""
    module = checkpoint.unwrap(model)
    size = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    frozen = f", {trained:,} of them trained" if trained != size else ""
    wrapper = "" if module is model else f" in {type(model).__name__}"
    told = ranks.gather((_env.host_name(), run_logs()))
    hosts = dict.fromkeys(host for host, _ in told)
    elsewhere = {path: host for host, path in told if path not in ("", told[0][1])}
    origin = {
        "command": command_line(),
        "git commit": git_commit(os.path.dirname(os.path.abspath(sys.argv[0]))),
        "model": f"{type(module).__name__}{wrapper}, {size:,} parameters{frozen}",
        "optimizer": _describe(optimizer),
        "hosts": ", ".join(hosts),
        "versions": f"phalanx {phalanx.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "threads": _threads(ranks),
        "freed memory": str(in_force()),
        **(_what_to_tune() if ranks.rank == 0 else {}),
        "logs": os.path.relpath(logs, folder) if (logs := run_logs()) else "",
        "logs of others": [(host, os.path.relpath(path, folder)) for path, host in elsewhere.items()],
    }
    return {name: value for name, value in origin.items() if value} | {WORKERS: feed.num_workers}


def _threads(ranks: RankGroup) -> str:
    """Return a phrase on the threads of each rank and the CPUs that they may use; every rank must call this."""
    told = ranks.gather((torch.get_num_threads(), format_ranges(usable_cpus())))
    numbers = list(dict.fromkeys(num for num, _ in told))
    where = list(dict.fromkeys(cpus for _, cpus in told))
    if len(where) > _MAX_PLACES:
        where = [*where[: _MAX_PLACES - 1], "...", where[-1]]
    waiting = ", asleep while they wait" if _env.environment().get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" else ""
    return f"{' or '.join(map(str, numbers))} in each rank{waiting}, on CPUs {' | '.join(where)}"


def _what_to_tune() -> dict[str, str]:
    """Return what is slow on this rank's host and what to do about it, as ``phalanx doctor`` finds it."""
    findings = [*examine_places(read_machine()), *examine_swap()]
    todo = {finding.topic: f"{finding.found}; {finding.todo}" for finding in findings if finding.level != "ok"}
    if in_force().todo:
        todo["freed memory"] = in_force().todo
    return {f"to tune: {topic}": text for topic, text in todo.items()}


def processes_of(ranks: RankGroup) -> str:
    """Return a line with the process id of each rank; every rank must call this."""
    told = ranks.gather((_env.host_name(), os.getpid()))[:_MAX_PIDS]
    by_host: dict[str, list[int]] = {}
    for host, pid in told:
        by_host.setdefault(host, []).append(pid)
    shown = {host: " ".join(map(str, pids)) for host, pids in by_host.items()}
    if len(shown) == 1:
        return f"processes of the ranks: {shown[told[0][0]]}"
    return f"processes of the ranks: {'; '.join(f'{pids} on {host}' for host, pids in shown.items())}"


def git_commit(folder: str) -> str:
    """Return the commit of the work tree that contains `folder`; empty if there is none. This needs no git."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for place in (Path(folder), *Path(folder).parents):
            git = place / ".git"
            if git.is_file():  # a worktree or a submodule
                git = place / git.read_text().removeprefix("gitdir:").strip()
            if (git / "HEAD").is_file():
                return _resolve(git, (git / "HEAD").read_text().strip())
    return ""


def _resolve(git: Path, head: str) -> str:
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref: ")
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    for place in (git, common):
        if (place / name).is_file():
            found = (place / name).read_text().strip()
            return found if _COMMIT.fullmatch(found) else ""
    for line in (common / "packed-refs").read_text().splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and _COMMIT.fullmatch(commit):
            return commit
    return ""


def command_line() -> str:
    """Return the command that the user typed: the launcher's if ``phalanx run`` has started this rank."""
    own = shlex.join([os.path.basename(sys.executable or "python"), *_arguments()])
    return _env.environment().get(_env.COMMAND_VARIABLE) or own


def _arguments() -> list[str]:
    """Return the interpreter's arguments as typed; only those of the script if a fork server started this process."""
    own, num = sys.argv[1:], len(sys.argv) - 1
    return sys.orig_argv[1:] if num and sys.orig_argv[-num:] == own else sys.argv


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer with its main settings: ``AdamW(lr=0.01, weight_decay=0.1)``."""
    named = {name: optimizer.param_groups[0].get(name) for name in ("lr", "momentum", "betas", "weight_decay")}
    told = ", ".join(f"{name}={_short(value)}" for name, value in named.items() if value)
    groups = f", {len(optimizer.param_groups)} groups" if len(optimizer.param_groups) > 1 else ""
    return f"{type(optimizer).__name__}({told}){groups}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
