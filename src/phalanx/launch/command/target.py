"""The target of a job (a script, a module or a program), checked here once, so that it does not fail in every rank."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence

from phalanx._command_line import UsageError, misspelled
from phalanx._env import nearest
from phalanx._text import listed
from phalanx.host.cpus import has_module


def command_of(target: Sequence[str], *, module: str, no_python: bool) -> tuple[str, ...]:
    """Return the command of every rank.

    Args:
        target: Script, module or program, with its arguments.
        module: Flag or variable that says that `target` is a module; empty if `target` is not a module.

    Raises:
        UsageError: There is no such script, module or program, or it can't be run.
    """
    if not target:
        raise UsageError("no script given")
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder has been removed: cd to another") from None
    if no_python:
        _check_program(target)
        return tuple(target)
    if module:
        package = target[0].split(".")[0]
        if target[0].endswith(".py") or os.sep in target[0]:
            raise UsageError(f"-m takes a module, got the file {target[0]!r}", module if module.startswith("-") else "")
        if not has_module(package, here):
            near = nearest(package, _modules_in(here)) if package == target[0] else ""
            raise misspelled(f"no module named {package!r}", package, near)
        return (sys.executable, "-m", *target)
    _check_script(target)
    return (sys.executable, *target)


def _modules_in(folder: str) -> list[str]:
    """Return the modules and packages in a folder."""
    with os.scandir(folder) as found:
        names = [entry.name.removesuffix(".py") for entry in found if entry.name.endswith(".py") or entry.is_dir()]
    return [name for name in names if name.isidentifier()]


_OURS = {  # our flags that few scripts define themselves
    *("--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--standalone", "--shutdown-timeout"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--regrow-after", "--replace-gloo"),
    *("--no-preload", "--no-keep", "--no-pin"),
}


def flags_after_the_script(target: Sequence[str]) -> str:
    """Return a remark if some of our flags were put after a script that does not know them; otherwise ""."""
    given = [word.partition("=")[0] for word in target[1:]]
    ours = [word for word in dict.fromkeys(given) if word.replace("_", "-") in _OURS]
    source = b""
    with contextlib.suppress(OSError), open(target[0], "rb") as script:  # fails for a module, whose file is elsewhere
        source = script.read()
    ours = [word for word in ours if word[2:].replace("-", "_").encode() not in source.replace(b"-", b"_")]
    if not ours:
        return ""
    stand, them = ("stands", "it goes") if len(ours) == 1 else ("stand", "they go")
    have = "has" if len(ours) == 1 else "have"
    return (
        f"{listed(ours)} {stand} after the script, so {them} to the script and {have} no effect here; put flags of "
        "phalanx run before the script"
    )


def _check_program(target: Sequence[str]) -> None:
    program = target[0]
    folders = [""] if os.sep in program else os.get_exec_path()
    paths = [os.path.join(folder, program) for folder in folders]
    if any(os.access(path, os.X_OK) for path in paths):
        return
    there = [path for path in paths if os.path.exists(path)]
    if there:
        raise UsageError(f"{there[0]!r} is not executable; chmod +x {shlex.quote(there[0])} makes it so")
    raise UsageError(f"no program {program!r}" + " on the PATH" * (os.sep not in program))


def _check_script(target: Sequence[str]) -> None:
    """Raise UsageError for a script that every rank would fail to open or compile."""
    script = target[0]
    if not os.path.exists(script):
        if os.path.basename(script).startswith("python") and len(target) > 1:
            has_options = target[1].startswith("-") and target[1] != "-m"  # of Python, which are none of ours
            what = f"{script!r} and its options" if has_options else repr(script)
            raise UsageError(f"give the script alone, without {what}", "" if has_options else script)
        folder = os.path.dirname(script) or "."
        scripts = [name for name in os.listdir(folder) if name.endswith(".py")] if os.path.isdir(folder) else []
        near = nearest(os.path.basename(script), scripts)
        near = near and os.path.join(os.path.dirname(script), near)
        raise misspelled(f"no script {script!r} in {os.getcwd()!r}", script, near)
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"the folder {script!r} has no __main__.py; name a script in it")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {script!r} is not readable; chmod +r {shlex.quote(script)} makes it so")
