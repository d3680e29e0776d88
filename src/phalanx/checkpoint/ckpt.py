"""``phalanx ckpt``: inspect, verify, compare and export checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from phalanx._command_line import Parser, UsageError, misspelled, whole_number
from phalanx._env import nearest
from phalanx._errors import printable
from phalanx._text import columns, complain, counted, in_units, is_terminal, listed, shortened
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.folder import Checkpoint, Damaged
from phalanx.checkpoint.disk.retention import verify
from phalanx.checkpoint.state.unpacking import KINDS_OF_MAPPINGS, Json, pairs_of, unpack
from phalanx.wire.files import open_regular

_MOST_RUNS = 6  # number of runs that a message names
_LENGTH_BYTES = 8  # a file begins with the length of its header, an integer of this size


class _Command(NamedTuple):
    """A verb of ``phalanx ckpt``.

    Attributes:
        call: Usage line.
        about: Description in the help.
        run: Function that carries out the command and returns the exit code.
    """

    call: str
    about: str
    run: Callable[[argparse.Namespace], int]


class _Mistake(Exception):
    """The command can't be carried out; the message says why."""


def main(args: Sequence[str]) -> int:
    """Run ``phalanx ckpt`` and return its exit code.

    The exit code is 2 if the command can't be carried out; then a line on stderr says why.
    """
    name = args[0] if args else ""
    parser = _parser(name)
    try:
        if name and name not in _COMMANDS and not name.startswith("-"):
            raise _no_command(args)
        given = parser.parse_args(args[1:] if name in _COMMANDS else args)
        if name not in _COMMANDS:
            raise UsageError("no command given")
        return _COMMANDS[name].run(given)
    except BrokenPipeError:  # the reader of our output is gone; `phalanx` has its own exit code for that
        raise
    except UsageError as error:
        return parser.refuse(error, args if parser.prog == "phalanx ckpt" else args[1:])
    except (_Mistake, Damaged, ValueError, FileNotFoundError) as error:
        complain(printable(f"{parser.prog}: {error}"))
    except OSError as error:
        complain(printable(f"{parser.prog}: {error.filename or ''}: {error.strerror}"))
    return 2


def _no_command(args: Sequence[str]) -> UsageError:
    """Return the error for a first word that is no command."""
    name, *folders_given = args
    if os.path.isdir(name):
        said = f"{name!r} is a folder, not a command"
        return UsageError(said) if folders_given else UsageError(said, name, ["ls", name])
    error = misspelled(f"unknown command {name!r}", name, nearest(name, _COMMANDS))
    return error if folders_given else UsageError(str(error))  # no corrected call, which would lack the folders


def _parser(name: str) -> Parser:
    """Return the parser of one command, or of ``phalanx ckpt`` itself if there is no command of that name."""
    if name not in _COMMANDS:
        about = "Inspect checkpoints. FOLDER is the folder of a run, of its checkpoints, or of one checkpoint."
        parser = Parser("phalanx ckpt", f"phalanx ckpt {'|'.join(_COMMANDS)} FOLDER", about)
        parser.add_commands({command.call: command.about for command in _COMMANDS.values()})
        return parser
    command = _COMMANDS[name]
    about = f"{command.about[0].upper()}{command.about[1:]}."
    parser = Parser(f"phalanx ckpt {name}", command.call, about)
    parser.add_argument("folder", metavar="FOLDER", help="folder of a run, of its checkpoints, or of one checkpoint")
    if name == "diff":
        parser.add_argument("others", nargs="+", metavar="STEP", help="two steps, or another folder")
    if name == "export":
        parser.add_argument("out", metavar="OUT", help="file to write; its name ends in .safetensors or .pt")
        parser.add_argument("--key", help="part to export, such as model.encoder (default: model, if there is one)")
    if name in ("show", "verify", "export"):
        parser.add_argument(
            "--step", type=whole_number, metavar="N", help="step of the checkpoint (default: the newest)"
        )
    if name in ("show", "export"):
        parser.add_argument("--rank", type=whole_number, metavar="R", help="rank whose own tensors and values to take")
    if name == "verify":
        parser.add_argument("--all", action="store_true", help="verify every checkpoint in the folder")
    return parser


def _find_steps(path: str, step: int | None = None) -> tuple[str, list[int]]:
    """Return the folder of the checkpoints that `path` names, and their steps; a given `step` must be one of them."""
    path, published = folders.find_steps(path)
    if not published:
        runs = listed([run for run, _ in _runs_in(path)], _MOST_RUNS)
        raise _Mistake(f"{path!r} holds no checkpoint, but the runs in it do; name one: {runs}")
    if step is not None and step not in published:
        raise _Mistake(f"{path!r} has no checkpoint of step {step}; it has steps {', '.join(map(str, published))}")
    return path, published


def _find(path: str, step: int | None = None) -> Checkpoint:
    """Return the checkpoint of `step`; by default the newest in `path`, or `path` itself if it is a checkpoint."""
    path, published = _find_steps(path, step)
    if step is None and (under_way := folders.say_under_way(folders.steps_under_way(path))):
        complain(printable(f"phalanx ckpt: {path}: {under_way}: taking step {published[-1]}"))
    return folders.read_manifest(path, published[-1] if step is None else step)


def _find_whole(path: str, step: int | None = None) -> Checkpoint:
    checkpoint = _find(path, step)
    if problems := folders.problems_of(checkpoint):
        raise Damaged("; ".join(problems))
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
        return _ls_runs(folder)
    rows = []
    for step in published:
        try:
            checkpoint = folders.read_manifest(folder, step)
        except Damaged as error:
            rows.append([str(step), "", "", "", "", _say_damaged(folder, step, [str(error)])])
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.saved_at))
        metric = "" if checkpoint.metric is None else f"{checkpoint.metric:.4g}"
        state = _say_damaged(folder, step, folders.problems_of(checkpoint, reads=False)) or "complete"
        rows.append([str(step), when, in_units(checkpoint.size_bytes), str(checkpoint.world_size), metric, state])
    rows += [[str(step), "", "", "", "", "being saved by another process"] for step in under_way]
    _print_table(["step", "saved", "size", "ranks", "metric", "state"], rows)
    return 0


def _ls_runs(folder: str) -> int:
    """List the runs in a folder that has no checkpoints of its own."""
    rows = [[run, str(len(published)), str(published[-1])] for run, published in _runs_in(folder)]
    _print_table(["run", "checkpoints", "newest step"], rows)
    return 0


def _runs_in(folder: str) -> list[tuple[str, list[int]]]:
    """Return the subfolders with checkpoints, and their steps.

    Raises:
        _Mistake: There are none.
    """
    runs = []
    for path in sorted(os.path.join(folder, name) for name in (os.listdir(folder) if os.path.isdir(folder) else ())):
        with contextlib.suppress(OSError):  # not a folder, or not readable
            if published := folders.find_steps(path)[1]:
                runs.append((path, published))
    if not runs:
        raise _Mistake(folders.say_missing(folder))
    return runs


def _show(given: argparse.Namespace) -> int:
    checkpoint = _find_whole(given.folder, given.step)
    rank = _rank_of(checkpoint, given.rank) or 0
    ranks = counted(checkpoint.world_size, "rank")
    print(f"step {checkpoint.step}, {in_units(checkpoint.size_bytes)} of {ranks}; what rank {rank} has saved:")
    _print_table(["name", "what"], [list(row) for row in _rows_of(checkpoint, rank)])
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
    from phalanx.checkpoint.comparison import compare  # imports torch, which most other commands do not need

    if len(given.others) > 2 or (len(given.others) == 2 and not all(other.isdecimal() for other in given.others)):
        raise UsageError(
            f"a folder and two steps, or two folders are needed, got {shlex.join([given.folder, *given.others])}"
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
        key = "model" if any(name.startswith("model.") for name, _ in _rows_of(checkpoint, rank or 0)) else ""
    folder = os.path.dirname(given.out) or os.curdir
    if not os.path.isdir(folder):
        raise _Mistake(f"there is no folder {folder!r} to write to; make it first: mkdir -p {shlex.quote(folder)}")
    value = read(checkpoint, key, rank)
    try:
        num_tensors = export(value, given.out)
    except OSError as error:  # name the user's file, as the error may name a temporary one
        raise _Mistake(f"can't write {given.out!r}: {error.strerror}") from None
    _say(f"{given.out}: {num_tensors} tensors of step {checkpoint.step}, {in_units(os.path.getsize(given.out))}")
    return 0


_COMMANDS = {
    "ls": _Command(
        "phalanx ckpt ls FOLDER",
        "list the checkpoints in a folder; complete: every file has its size (verify compares the bytes)",
        _ls,
    ),
    "show": _Command(
        "phalanx ckpt show FOLDER [--step N] [--rank R]",
        "list the names, dtypes, shapes and values in a checkpoint",
        _show,
    ),
    "verify": _Command(
        "phalanx ckpt verify FOLDER [--step N | --all]",
        "check by SHA-256 that every bit is as it was saved; exit code 1 if not",
        _verify,
    ),
    "diff": _Command(
        "phalanx ckpt diff FOLDER STEP STEP | FOLDER_A FOLDER_B",
        "compare two checkpoints; exit code 1 if they differ",
        _diff,
    ),
    "export": _Command(
        "phalanx ckpt export FOLDER OUT [--step N] [--key KEY] [--rank R]",
        "write the whole model, saved by any number of ranks, as one file",
        _export,
    ),
}


def _say_damaged(folder: str, step: int, problems: list[str]) -> str:
    """Return the problems of a checkpoint for a row that already names the step; empty if there are none."""
    own = os.path.join(folders.path_of(folder, step), "")
    return f"damaged: {'; '.join(problem.removeprefix(own) for problem in problems)}" if problems else ""


def _say(text: str) -> None:
    """Print one line; control characters in names and values can neither move the cursor nor add lines."""
    print(printable(text))


def _print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Print rows as a table on a terminal, and as aligned lines elsewhere."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if is_terminal(sys.stdout):
        try:
            from rich.console import Console
            from rich.table import Column, Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(*(Column(head, overflow="fold") for head in heads))  # long names are wrapped and not cut
            for row in rows:
                table.add_row(*map(Text, row))
            Console(highlight=False).print(table)
            return
    print("\n".join(columns([heads, *rows])))


# ---------------------------------------------------------------- the content of a rank's file


def _rows_of(checkpoint: Checkpoint, rank: int) -> list[tuple[str, str]]:
    """Return the name and description of each tensor and value that `rank` has saved, from its file's header.

    Raises:
        Damaged: The file has no such header.
    """
    path = os.path.join(checkpoint.path, folders.file_of(rank))
    try:
        with open_regular(path) as file:
            header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
        return list(_rows("", json.loads(header["__metadata__"]["phalanx"])["tree"]))
    except Exception as error:  # a damaged file can make a parser raise anything
        raise Damaged(f"{checkpoint.path} can't be read: {error!r}") from error


def _rows(name: str, node: Json) -> Iterator[tuple[str, str]]:
    kind = next(iter(node)) if isinstance(node, dict) else ""
    if kind == "tensor":
        yield name, f"{node['dtype']} {node['shape']}"
    elif kind == "dtype":  # shown as text, so that torch need not be imported
        yield name, f"torch.{node['dtype']}"
    elif kind == "size":
        yield name, f"torch.Size({node['size']})"
    elif kind == "numpy":
        yield name, f"numpy {node['dtype']} {node['shape']}"
    elif kind in KINDS_OF_MAPPINGS:
        pairs = pairs_of(node)
        yield from ((name, "{}") for _ in range(not pairs))
        for key, value in pairs:
            yield from _rows(f"{name}.{key}" if name else str(key), value)
    elif isinstance(node, dict) and isinstance(node[kind], list) and any(_is_nested(item) for item in node[kind]):
        for index, item in enumerate(node[kind]):
            yield from _rows(f"{name}.{index}" if name else str(index), item)
    else:
        has_tensor = isinstance(node, dict) and isinstance(node[kind], dict)
        text = f"{kind} {node[kind]['shape']}" if has_tensor else repr(unpack(node, _no_tensor))
        yield name, shortened(text)


def _is_nested(node: Json) -> bool:
    return isinstance(node, dict) and not {"float", "complex"} & node.keys()


def _no_tensor(node: Json, _: Any) -> Any:
    raise ValueError("it is read without tensors")
