"""What a rank leaves for its supervisor in the folder of its logs. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig

from phalanx import _env
from phalanx._files import write_whole
from phalanx.launch import ahead

_MODULES = "modules.json"
_ROOM_MADE = "made_room"
_RESTARTS = "ended_for_restart"
_CHECKPOINTS = "checkpoints"


def modules_file(rank_folder: str) -> str:
    """Return the file in which the rank of that folder notes what it has imported."""
    return os.path.abspath(os.path.join(rank_folder, _MODULES))


def has_made_room(rank_folder: str) -> bool:
    """Return whether the rank of that folder was asked to end and has saved."""
    return os.path.exists(os.path.join(rank_folder, _ROOM_MADE))


def has_ended_for_restart(rank_folder: str) -> bool:
    """Return whether the rank of that folder has ended only because a restart is planned."""
    return os.path.exists(os.path.join(rank_folder, _RESTARTS))


def note_room_made() -> None:
    """Let the supervisor know that this rank was asked to end and has saved: any program may exit with that code."""
    _note(_ROOM_MADE)


def note_end_for_restart() -> None:
    """Let the supervisor know that this rank ends for a planned restart, of which another host may have told it."""
    _note(_RESTARTS)


def _note(name: str) -> None:
    folder = _own_folder()
    if folder:
        with contextlib.suppress(OSError), open(os.path.join(folder, name), "w"):
            pass


def note_checkpoints(folder: str) -> None:
    """Tell the supervisor where this job saves its checkpoints."""
    own = _own_folder()
    if own and _env.environment().get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):
            write_whole(os.path.join(own, _CHECKPOINTS), os.path.abspath(folder))


def words_of_checkpoints(rank_folder: str) -> str:
    """Return what is on disk of what the rank of that folder saves; empty if it has not told where that is."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(os.path.join(rank_folder, _CHECKPOINTS)) as file:
        return words_on_disk(file.read())
    return ""


def words_on_disk(checkpoints: str) -> str:
    """Return which checkpoint of a folder is the newest."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(checkpoints, "latest")) as file:
        return f"the newest checkpoint on disk is that of step {int(file.read().rpartition('-')[2])}"
    return "no checkpoint is on disk"


def note_modules() -> None:
    """Tell the supervisor which installed modules this rank has imported, and how; called once it trains.

    Nothing happens outside ``phalanx run``, where no restart is allowed, or without preloading.
    """
    folder = _own_folder()
    if ahead.log is None or not folder:
        return
    places = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        is_ours = name.partition(".")[0] == "phalanx"  # knows which rank and which attempt it is in
        if spec is not None and spec.name == name and str(spec.origin).startswith(places) and not is_ours:
            names.append(name)
    path = modules_file(folder)
    with contextlib.suppress(OSError):  # a full disk: restarts are slower
        write_whole(path, json.dumps(ahead.log.summary(names)))


def run_logs() -> str:
    """Return the folder with the logs of all attempts and ranks of this launch; empty outside ``phalanx run``."""
    attempt, rank = os.path.split(_own_folder())
    return os.path.dirname(attempt) if rank.startswith("rank_") else ""


def _own_folder() -> str:
    """Return the folder of this rank's logs; empty if no supervisor reads it."""
    folder = os.path.dirname(_env.environment().get("TORCHELASTIC_ERROR_FILE", ""))
    return folder if os.path.isdir(folder) else ""
