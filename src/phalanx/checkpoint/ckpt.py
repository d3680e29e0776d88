"""``phalanx ckpt``: look at checkpoints, compare and export them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from phalanx._command_line import Parser, UsageError, whole_number
from phalanx._env import nearest
from phalanx._errors import printable
from phalanx._text import columns, counted, in_units
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.folder import Checkpoint, Damaged
from phalanx.checkpoint.disk.retention import verify
from phalanx.checkpoint.rows import rows_of

_CALLS = {
    "ls": "phalanx ckpt ls FOLDER",
    "show": "phalanx ckpt show FOLDER [--step N] [--rank R]",
    "verify": "phalanx ckpt verify FOLDER [--step N | --all]",
    "diff": "phalanx ckpt diff FOLDER STEP STEP | FOLDER_A FOLDER_B",
    "export": "phalanx ckpt export FOLDER OUT [--step N] [--key KEY] [--rank R]",
}
_RIGHT = {
    "ls": "phalanx ckpt ls runs/train",
    "show": "phalanx ckpt show runs/train --step 100",
    "verify": "phalanx ckpt verify runs/train --all",
    "diff": "phalanx ckpt diff runs/train 100 200",
    "export": "phalanx ckpt export runs/train model.safetensors",
}
_HELP = {
    "ls": "list the checkpoints in a folder; complete: every file has its size (verify compares the bytes)",
    "show": "list the names, dtypes, shapes and values in a checkpoint",
    "verify": "check by SHA-256 that every bit is as it was saved; exit code 1 if not",
    "diff": "compare two checkpoints; exit code 1 if they differ",
    "export": "write the whole model, saved by any number of ranks, as one file",
}


class _Mistake(Exception):
    """The command can't be carried out; says why."""


def main(args: Sequence[str]) -> int:
    """Run ``phalanx ckpt`` and return its exit code: 2 for what can't be done, with a line that says why."""
    name = args[0] if args else ""
    parser = _parser(name)
    try:
        if name and name not in _CALLS and not name.startswith("-"):
            near = nearest(name, _CALLS)
            right = parser.call(args, {name: near}) if near else ""
            raise UsageError(f"unknown command {name!r}{near and f', did you mean {near}?'}", right)
        given = parser.parse_args(args[1:] if name in _CALLS else args)
        if name not in _CALLS:
            raise UsageError("no command given")
        return _COMMANDS[name](given)
    except BrokenPipeError:  # whoever read our output has gone
        raise
    except UsageError as error:
        return parser.refuse(error)
    except (_Mistake, Damaged, ValueError, FileNotFoundError) as error:
        _say(f"{parser.prog}: {error}", sys.stderr)
    except OSError as error:
        _say(f"{parser.prog}: {error.filename or ''}: {error.strerror}", sys.stderr)
    return 2


def _parser(name: str) -> Parser:
    """Return the parser of a command, or of all where there is none of that name."""
    if name not in _CALLS:
        about = "Look at checkpoints. FOLDER is the folder of a run, of its checkpoints, or of one checkpoint."
        parser = Parser("phalanx ckpt", f"phalanx ckpt {'|'.join(_CALLS)} FOLDER", about, _RIGHT["ls"])
        parser.add_commands({call: _HELP[name] for name, call in _CALLS.items()})
        return parser
    parser = Parser(f"phalanx ckpt {name}", _CALLS[name], f"{_HELP[name][0].upper()}{_HELP[name][1:]}.", _RIGHT[name])
    parser.add_argument("folder", metavar="FOLDER", help="folder of a run, of its checkpoints, or of one checkpoint")
    if name == "diff":
        parser.add_argument("others", nargs="+", metavar="STEP", help="two steps, or another folder")
    if name == "export":
        parser.add_argument("out", metavar="OUT", help="file to write, which ends in .safetensors or .pt")
        parser.add_argument("--key", help="part to export, such as model.encoder (default: model, if there is one)")
    if name in ("show", "verify", "export"):
        parser.add_argument(
            "--step", type=whole_number, metavar="N", help="step of the checkpoint (default: the newest)"
        )
    if name in ("show", "export"):
        parser.add_argument(
            "--rank", type=whole_number, metavar="R", help="rank whose own tensors and values are meant"
        )
    if name == "verify":
        parser.add_argument("--all", action="store_true", help="verify every checkpoint in the folder")
    return parser


def _find_steps(path: str, step: int | None = None) -> tuple[str, list[int]]:
    """Return the folder of the checkpoints and the steps that `path` stands for, of which `step` must be one."""
    path, published = folders.find_steps(path)
    if not published:
        raise _Mistake(folders.say_missing(path))
    if step is not None and step not in published:
        raise _Mistake(f"{path} has no checkpoint of step {step}; it has steps {', '.join(map(str, published))}")
    return path, published


def _find(path: str, step: int | None = None) -> Checkpoint:
    """Return the checkpoint that is meant: of a step, or the newest, or the one whose own folder `path` is."""
    path, published = _find_steps(path, step)
    if step is None and (under_way := folders.say_under_way(folders.steps_under_way(path))):
        _say(f"phalanx ckpt: {path}: {under_way}: taking step {published[-1]}", sys.stderr)
    return folders.read_manifest(path, published[-1] if step is None else step)


def _find_whole(path: str, step: int | None = None) -> Checkpoint:
    checkpoint = _find(path, step)
    problems = [folders.check_file(checkpoint, name) for name in checkpoint.files]
    if any(problems):
        raise Damaged("; ".join(filter(None, problems)))
    return checkpoint


def _rank_of(checkpoint: Checkpoint, rank: int | None) -> int | None:
    if rank is not None and not 0 <= rank < checkpoint.world_size:
        raise _Mistake(f"--rank must lie in [0, {checkpoint.world_size}), got {rank}")
    return rank


# ---------------------------------------------------------------- the commands


def _ls(given: argparse.Namespace) -> int:
    folder, published = folders.find_steps(given.folder)
    under_way = folders.steps_under_way(folder)
    if not published and not under_way:
        raise _Mistake(folders.say_missing(folder))
    rows = []
    for step in published:
        try:
            checkpoint = folders.read_manifest(folder, step)
        except Damaged as error:
            rows.append([str(step), "", "", "", "", _say_damaged(folder, step, [str(error)])])
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.saved_at))
        metric = "" if checkpoint.metric is None else f"{checkpoint.metric:.4g}"
        wrong = filter(None, (folders.check_file(checkpoint, name, reads=False) for name in checkpoint.files))
        state = _say_damaged(folder, step, list(wrong)) or "complete"
        rows.append([str(step), when, in_units(checkpoint.size_bytes), str(checkpoint.world_size), metric, state])
    rows += [[str(step), "", "", "", "", "being saved by another process"] for step in under_way]
    _print_table(["step", "saved", "size", "ranks", "metric", "state"], rows)
    return 0


def _show(given: argparse.Namespace) -> int:
    checkpoint = _find_whole(given.folder, given.step)
    rank = _rank_of(checkpoint, given.rank) or 0
    ranks = counted(checkpoint.world_size, "rank")
    print(f"step {checkpoint.step}, {in_units(checkpoint.size_bytes)} of {ranks}; what rank {rank} has saved:")
    _print_table(["name", "what"], [list(row) for row in rows_of(checkpoint, rank)])
    return 0


def _verify(given: argparse.Namespace) -> int:
    if given.all and given.step is not None:
        raise UsageError("--step and --all contradict each other")
    folder, published = _find_steps(given.folder, given.step)
    is_damaged = False
    for step in published if given.all else [published[-1] if given.step is None else given.step]:
        problems = verify(folder, step)
        is_damaged |= bool(problems)
        _say(f"step {step}: {'; '.join(problems) or 'whole'}")
    return int(is_damaged)


def _diff(given: argparse.Namespace) -> int:
    from phalanx.checkpoint.comparison import compare  # with torch, which the other commands do without

    if len(given.others) > 2 or (len(given.others) == 2 and not all(other.isdecimal() for other in given.others)):
        raise UsageError(
            f"a folder and two steps, or two folders are needed, got {given.folder} {' '.join(given.others)}"
        )
    if len(given.others) == 2:
        pair = [_find_whole(given.folder, int(other)) for other in given.others]
    else:
        pair = [_find_whole(path) for path in (given.folder, given.others[0])]
    found = compare(*((os.path.dirname(checkpoint.path), checkpoint.step) for checkpoint in pair))
    for difference in found:
        _say(str(difference))
    if not found:
        _say(f"{pair[0].path} and {pair[1].path} hold the same bits")
    return int(bool(found))


def _export(given: argparse.Namespace) -> int:
    from phalanx.checkpoint.export import export, read

    checkpoint = _find_whole(given.folder, given.step)
    rank = _rank_of(checkpoint, given.rank)
    key = given.key
    if key is None:
        key = "model" if any(name.startswith("model.") for name, _ in rows_of(checkpoint, rank or 0)) else ""
    folder = os.path.dirname(given.out) or os.curdir
    if not os.path.isdir(folder):
        raise _Mistake(f"there is no folder {folder} to write to; make it first: mkdir -p {shlex.quote(folder)}")
    value = read(checkpoint, key, rank)
    try:
        num_tensors = export(value, given.out)
    except OSError as error:  # which names a file of its own
        raise _Mistake(f"can't write {given.out}: {error.strerror}") from None
    _say(f"{given.out}: {num_tensors} tensors of step {checkpoint.step}, {in_units(os.path.getsize(given.out))}")
    return 0


_COMMANDS: dict[str, Callable[[Any], int]] = {
    "ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "export": _export,
}  # fmt: skip


def _say_damaged(folder: str, step: int, problems: list[str]) -> str:
    """Return the problems of a checkpoint in a row that names its step; empty if there are none."""
    own = os.path.join(folders.path_of(folder, step), "")
    return f"damaged: {'; '.join(problem.removeprefix(own) for problem in problems)}" if problems else ""


def _say(text: str, file: TextIO | None = None) -> None:
    """Print a line, in which names and values of a checkpoint can't move the terminal's cursor or add lines."""
    print(printable(text), file=file or sys.stdout)


def _print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Print rows: as a table where somebody looks on, as aligned lines for other programs."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Column, Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(*(Column(head, overflow="fold") for head in heads))  # a long name is not cut off
            for row in rows:
                table.add_row(*map(Text, row))
            Console(highlight=False).print(table)
            return
    print("\n".join(columns([heads, *rows])))
