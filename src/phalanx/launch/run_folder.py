"""Where a run leaves its logs: ``runs/<script>/<id>/logs/attempt_0/rank_0/{stdout.log,stderr.log,error.json}``."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence

LAUNCH_LOG = "launch.log"
"""Of what the launcher says, and the processes that fork ranks."""


class RunFolder:
    """The folder of one run.

    Args:
        log_dir: Folder that holds it; empty: ``runs/<name>``, named after the script.
        command: Command of a rank, from which the name comes.

    Attributes:
        path: Relative where `log_dir` is, so that it reads well.
        note: Why the logs are not where they were wanted; empty when they are.
    """

    def __init__(self, log_dir: str, command: Sequence[str]) -> None:
        self.note: str = ""
        base = log_dir or os.path.join("runs", name_of(command))
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        try:
            os.makedirs(base, exist_ok=True)
            self.path: str = _make_new(os.path.join(base, run))
        except OSError as error:
            if log_dir:
                raise
            import tempfile

            self.path = tempfile.mkdtemp(prefix="phalanx-run-")
            self.note = f"can't write to {base} ({error.strerror})"

    def rank_folder(self, attempt: int, rank: int) -> str:
        """Return the folder of one rank's logs, made now; where the disk is full, it may be missing."""
        path = os.path.join(self.path, "logs", f"attempt_{attempt}", f"rank_{rank}")
        with contextlib.suppress(OSError):  # a job that goes on after a loss is not to end for its logs
            os.makedirs(path, exist_ok=True)
        return path


def _make_new(path: str) -> str:
    """Make a folder that is ours alone, also where other hosts share its parent and have equal pids."""
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path if number == 2 else f"{path}-{number - 1}")
            return path if number == 2 else f"{path}-{number - 1}"
    raise AssertionError


def name_of(command: Sequence[str]) -> str:
    """Return ``train`` for ``python train.py``, ``python -m pkg.train`` and ``./train``."""
    import sys

    words = list(command)
    if words[0] == sys.executable:
        if "-m" in words[1:2]:
            return words[2].rsplit(".", 1)[-1]
        words = words[1:]
    name = os.path.splitext(os.path.basename(os.path.normpath(words[0])))[0]
    return "".join(char if char.isprintable() else "_" for char in name) or "run"
