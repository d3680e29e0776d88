"""Notes that a rank leaves for its supervisor in the folder of its logs. This module does not import torch."""

from __future__ import annotations

import contextlib
import os

from phalanx import _env
from phalanx.wire.files import write_whole

_PREEMPTED = "preempted"
_RESTARTS = "ended_for_restart"
_CHECKPOINTS = "checkpoints"


def was_preempted(rank_folder: str) -> bool:
    """Return whether the rank of that folder ended because it was preempted, so that it can resume."""
    return os.path.exists(os.path.join(rank_folder, _PREEMPTED))


def has_ended_for_restart(rank_folder: str) -> bool:
    """Return whether the rank of that folder has ended only because a restart is planned."""
    return os.path.exists(os.path.join(rank_folder, _RESTARTS))


def note_preempted() -> None:
    """Tell the supervisor that this rank ended because it was preempted; exit code 75 alone could mean anything."""
    _note(_PREEMPTED)


def note_end_for_restart() -> None:
    """Let the supervisor know that this rank ends for a planned restart, which another host may have announced."""
    _note(_RESTARTS)


def _note(name: str) -> None:
    folder = own_folder()
    if folder:
        with contextlib.suppress(OSError), open(os.path.join(folder, name), "w"):
            pass


def note_checkpoints(folder: str) -> None:
    """Tell the supervisor where this job saves its checkpoints."""
    own = own_folder()
    if own and _env.environment().get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):
            write_whole(os.path.join(own, _CHECKPOINTS), os.path.abspath(folder))


def words_of_checkpoints(rank_folder: str) -> str:
    """Return a phrase about the newest checkpoint of the rank's job on disk; "" if the rank named no folder."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(os.path.join(rank_folder, _CHECKPOINTS)) as file:
        return words_on_disk(file.read())
    return ""


def words_on_disk(checkpoints: str) -> str:
    """Return a phrase about the newest checkpoint in a folder."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(checkpoints, "latest")) as file:
        return f"the newest checkpoint on disk is that of step {int(file.read().rpartition('-')[2])}"
    return "no checkpoint is on disk"


def run_logs() -> str:
    """Return the folder with the logs of all attempts and ranks of this launch; "" outside ``phalanx run``."""
    attempt, rank = os.path.split(own_folder())
    return os.path.dirname(attempt) if rank.startswith("rank_") else ""


def own_folder() -> str:
    """Return the folder of this rank's logs; "" if no supervisor reads it."""
    folder = os.path.dirname(_env.environment().get("TORCHELASTIC_ERROR_FILE", ""))
    return folder if os.path.isdir(folder) else ""
