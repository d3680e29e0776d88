"""Where multiprocessing keeps its sockets: in a folder whose path is short enough for one, whatever TMPDIR says."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from multiprocessing import util

_MAX_FOLDER_BYTES = (
    70  # of the 107 of a socket's path, the rest is multiprocessing's own: /pymp-12345678/listener-12345678
)
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def keep_paths_short() -> None:
    """Have this process, and those that it starts from now on, put multiprocessing's sockets where they can be made.

    With a long TMPDIR, its fork server fails, and so does every worker of a data loader.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder = config.get("tempdir") or tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES:
        return
    config.pop("tempdir", None)
    for short in _SHORT:
        with contextlib.suppress(OSError):
            given, tempfile.tempdir = tempfile.tempdir, short
            try:
                util.get_temp_dir()  # makes one of this process's own, which is removed at its end
                return
            finally:
                tempfile.tempdir = given
