"""Where a run's folder lies, and what a start in it takes up."""

from __future__ import annotations

import itertools
import os
import sys
import time

from phalanx import _env
from phalanx.checkpoint.memory import memory


def run_folder(given: str | None) -> str:
    """Return the folder of the run: PHALANX_RUN_FOLDER, else as given, else named after the script."""
    script = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    return _env.environment().get(_env.FOLDER_VARIABLE) or given or os.path.join("runs", script or "run")


def is_restart() -> bool:
    """Return whether ``phalanx run`` or torchrun has started these ranks again."""
    return _number("TORCHELASTIC_RESTART_COUNT") > 0


def will_restart() -> bool:
    """Return whether ``phalanx run`` will start the ranks again after a failure, from the last snapshot."""
    return not memory.problem and _number("TORCHELASTIC_MAX_RESTARTS") > _number("TORCHELASTIC_RESTART_COUNT")


def set_aside(*paths: str) -> None:
    """Rename what an earlier run has left at these paths, to names that nothing has yet."""
    stamp = f"before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    numbered = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    suffix = next(one for one in numbered if not any(os.path.lexists(f"{path}.{one}") for path in paths))
    for path in filter(os.path.exists, paths):
        os.rename(path, f"{path}.{suffix}")


def _number(name: str) -> int:
    return int(_env.environment().get(name) or 0)
