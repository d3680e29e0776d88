"""Records which modules a rank has imported by its first step, so that a standby imports them before a restart."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig

from phalanx.launch.processes import ahead
from phalanx.record.notes import own_folder
from phalanx.wire.files import write_whole

_MODULES = "modules.json"


def modules_file(rank_folder: str) -> str:
    """Return the path of the file in which the rank of that folder records its imports."""
    return os.path.abspath(os.path.join(rank_folder, _MODULES))


def note_modules() -> None:
    """Tell the supervisor which installed modules this rank has imported, and how. Call this once the rank is training.

    This does nothing outside ``phalanx run``, if no restart is allowed, or without preloading.
    """
    folder = own_folder()
    if ahead.log is None or not folder:
        return
    places = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        is_ours = name.partition(".")[0] == "phalanx"  # left out, as our modules hold state of this rank and attempt
        if spec is not None and spec.name == name and str(spec.origin).startswith(places) and not is_ours:
            names.append(name)
    path = modules_file(folder)
    with contextlib.suppress(OSError):  # such as a full disk; then restarts are slower
        write_whole(path, json.dumps(ahead.log.summary(names)))
