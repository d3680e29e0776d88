"""Finds a run's folder, finds out whether a start is a restart, and sets aside an earlier run in the folder."""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
import weakref
from collections.abc import Sequence

from phalanx import _env
from phalanx.checkpoint.memory.snapshots import memory
from phalanx.session.survival import may_outlive
from phalanx.train.report.loggers import WANDB_ID
from phalanx.wire.rank_group import RankGroup

_trained: dict[str, weakref.ref[object]] = {}  # the last trainer in a folder, by folder
_by: weakref.WeakKeyDictionary[object, weakref.ref[object]] = weakref.WeakKeyDictionary()  # last trainer of each model


def run_folder(given: str | os.PathLike[str] | None) -> str:
    """Return the folder of the run: PHALANX_RUN_FOLDER, else the given folder, else a folder named after the script."""
    script = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    return os.fspath(_env.environment().get(_env.FOLDER_VARIABLE) or given or os.path.join("runs", script or "run"))


def is_restart() -> bool:
    """Return whether ``phalanx run`` or torchrun has restarted these ranks."""
    return _number("TORCHELASTIC_RESTART_COUNT") > 0


def words_of_another(trainer: object, model: object, folder: str, goes_on: bool) -> str:
    """Record that this trainer trains this model in this folder; return a hint if another trainer has used either."""
    last, last_of_model = _trained.get(folder), _by.get(model)
    _trained[folder] = _by[model] = weakref.ref(trainer)
    if not goes_on and last_of_model is not None and last_of_model() is not trainer:
        return (
            "another Trainer of this process has trained this model: the run begins with those weights. For new ones, "
            "as in a fold of its own or when a notebook's cell runs again, make the model and its optimizer anew"
        )
    if not goes_on or last is None or last() is trainer:
        return ""
    return (
        f"another Trainer of this process has trained in {folder}: this one continues its run. For a run of its own, "
        "such as a fold or another seed, give folder="
    )


def has_been_trained(model: object) -> bool:
    """Return whether a trainer in this process has trained this model."""
    return model in _by


def leave_if_restarted() -> None:
    """End this process at once if ``phalanx run`` is going to restart the ranks from the last snapshot.

    An orderly exit of the interpreter would take longer than the restart. A process that may be kept is not ended.
    """
    if may_outlive():
        return
    if not memory().problem and _number("TORCHELASTIC_MAX_RESTARTS") > _number("TORCHELASTIC_RESTART_COUNT"):
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def set_aside(folder: str, ranks: RankGroup) -> str:
    """Give unused names to the files that an earlier run has left in the folder; every rank must call this.

    Returns:
        A line for the user; empty if there was nothing to rename, and on ranks other than 0.
    """
    moved = []
    if ranks.rank == 0:
        moved = _set_aside([os.path.join(folder, name) for name in ("checkpoints", "metrics.jsonl", WANDB_ID)])
    ranks.gather(None)
    names = " and ".join(map(os.path.basename, moved))
    return f'resume="never": the run that was in {folder} is kept there as {names}' if moved else ""


def _set_aside(paths: Sequence[str]) -> list[str]:
    """Rename the paths that exist, and return the new paths."""
    stamp = f"before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    numbered = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    suffix = next(one for one in numbered if not any(os.path.lexists(f"{path}.{one}") for path in paths))
    found = [*filter(os.path.exists, paths)]
    for path in found:
        os.rename(path, f"{path}.{suffix}")
    return [f"{path}.{suffix}" for path in found]


def _number(name: str) -> int:
    return int(_env.environment().get(name) or 0)
