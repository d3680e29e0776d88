"""The folder of a run's logs: ``logs/<script>/<id>/attempt_0/rank_0/{stdout.log,stderr.log,error.json}``."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import time
from collections.abc import Sequence

LAUNCH_LOG = "launch.log"
"""Log of the launcher, and of the processes that fork ranks."""
NUM_KEPT = 20
"""Number of runs of a script whose logs are kept in the default folder."""
_BASE, _TRAINERS = "logs", "runs"  # default parents of run folders, and of Trainers' folders
_OWN = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")  # matches the name of a run's folder
_PART = re.compile(r"attempt_\d+|blackbox")  # matches the names of the folders in a run's folder


class RunFolder:
    """The folder of one run.

    Args:
        log_dir: Folder in which to create the run's folder; empty: ``logs/<name>``, named after the script.
        command: Command of a rank, from which the script's name is taken.

    Attributes:
        path: Path of the folder, relative if `log_dir` is.
        note: Reason why the logs are not where the user wanted them; "" if they are.
    """

    def __init__(self, log_dir: str, command: Sequence[str]) -> None:
        self.note: str = ""
        base = base_of(log_dir, command)
        self._lock = -1  # descriptor of a lock, held until this process ends, so that no other run removes the logs
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        try:
            os.makedirs(base, exist_ok=True)
            self.path: str = _make_new(os.path.join(base, run))
            self._lock = _lock(self.path)
        except OSError as error:
            if log_dir:
                raise
            import tempfile

            self.path = tempfile.mkdtemp(prefix="phalanx-run-")
            self.note = f"can't write to {base} ({error.strerror})"

        if not log_dir:
            _remove_old(base)

    def rank_folder(self, attempt: int, rank: int) -> str:
        """Create and return the folder of one rank's logs; on a full disk it may be missing."""
        path = os.path.join(self.path, f"attempt_{attempt}", f"rank_{rank}")
        with contextlib.suppress(OSError):  # a job that survived the loss of a rank must not fail for lack of logs
            os.makedirs(path, exist_ok=True)
        return path


def num_attempts(folder: str) -> int:
    """Return how many attempts of a run have begun on this host; 0 if the folder can't be read."""
    with contextlib.suppress(OSError):
        return sum(name.startswith("attempt_") for name in os.listdir(folder))
    return 0


def _lock(path: str) -> int:
    """Lock a run's log against removal; return the descriptor of the lock, or -1 if another process holds it."""
    fd = os.open(os.path.join(path, LAUNCH_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


def _remove_old(base: str) -> None:
    """Remove what launchers wrote into the folders of old runs that have ended; other files stay."""
    import shutil  # not at the top: most runs do not need it

    with contextlib.suppress(OSError):
        for name in sorted(filter(_OWN.fullmatch, os.listdir(base)))[:-NUM_KEPT]:
            path = os.path.join(base, name)
            with contextlib.suppress(OSError):
                if (fd := _lock(path)) >= 0:
                    for part in filter(_PART.fullmatch, os.listdir(path)):
                        shutil.rmtree(os.path.join(path, part), ignore_errors=True)
                    for part in ("standby.log", LAUNCH_LOG):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(os.path.join(path, part))
                    os.close(fd)
                    os.rmdir(path)


def _make_new(path: str) -> str:
    """Create a folder that only this run uses, even if other hosts share its parent and have equal pids."""
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path if number == 2 else f"{path}-{number - 1}")
            return path if number == 2 else f"{path}-{number - 1}"
    raise AssertionError


def base_of(log_dir: str, command: Sequence[str]) -> str:
    """Return the folder that holds the folders of a script's runs; `log_dir` if it is not empty."""
    return log_dir or logs_of(name_of(command))


def logs_of(name: str, where: str = "") -> str:
    """Return the folder for runs of the script of that name, started in the folder `where`."""
    return os.path.join(where, _BASE, name)


def logs_beside(folder: str) -> str:
    """Return ``logs/train`` for a Trainer's ``runs/train``, and ``logs`` for ``runs``; else `folder`."""
    above, name = os.path.split(os.path.normpath(folder))
    if name == _TRAINERS:
        return os.path.join(above, _BASE)
    return logs_of(name, os.path.dirname(above)) if os.path.basename(above) == _TRAINERS else folder


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
