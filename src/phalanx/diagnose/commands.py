"""Reads the command line of a process: whether it is a launcher, and which script it runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from phalanx._errors import printable
from phalanx.host.processes import command_of, working_folder

_PYTESTS = ("pytest", "py.test")
BY_HAND = "by hand"
"""Stands for the name of the launcher if a person started the ranks without a launcher, for example from a shell."""
_STARTERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "prterun": "mpirun",
    "orted": "mpirun",
    "prted": "mpirun",
    "hydra_pmi_proxy": "mpirun",
    "slurmstepd": "srun",
}


def launcher_of(pid: int) -> str:
    """Return the name of a launcher by its pid; ``by hand`` if the process is something else, such as a shell."""
    words = program_of(pid)
    name = os.path.basename(words[0]).partition(":")[0] if words else ""  # "slurmstepd: [4711.0]"
    if name == "phalanx":
        return "phalanx run" if words[1:2] == ["run"] else BY_HAND
    return _STARTERS.get(name, BY_HAND)


def program_of(pid: int) -> list[str]:
    """Return the command line of a process without the interpreter and its options: a script or a module first."""
    words = command_of(pid)
    if words and os.path.basename(words[0]).startswith(("python", "pypy")):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if words[0] in ("-X", "-W") else 1]
        words = words[1:] if words[:1] == ["-m"] else words
    return words


def script_name(words: Sequence[str]) -> str:
    """Return the script or the module in a command line of Python or of a launcher; empty if there is none."""
    words = [printable(word) for word in words]
    program = ""
    for word, following in itertools.pairwise([*words, ""]):
        if (script := _script_in(word)) is not None:
            return os.path.basename(script)
        if word == "-m" and following in _PYTESTS:  # pytest: the test file is the script
            program = following
        elif word == "-m" and following:
            return following
        elif word == "-c" and not program:
            return "-c"
    return program or (os.path.basename(words[0]) if words else "")


def script_path(words: Sequence[str], pid: int) -> str:
    """Return the path of the script in a command line of a process; empty if there is none, or it can't be found."""
    named = next(filter(None, map(_script_in, words)), "")
    folder = working_folder(pid)
    path = os.path.realpath(os.path.join(folder, named))
    return path if named and folder and os.path.isfile(path) else ""


def _script_in(word: str) -> str | None:
    """Return the script that a word names, alone or as part of pytest's name for a test (``test_job.py::test_it``)."""
    script = word.partition("::")[0]
    return script if script.endswith(".py") else None
