"""Chooses a folder for multiprocessing's sockets; the folder's path is short enough even if TMPDIR is long."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from multiprocessing import util

# A socket's path has at most 107 bytes; multiprocessing appends /pymp-12345678/listener-12345678.
_MAX_FOLDER_BYTES = 70
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def keep_paths_short() -> None:
    """Make this process, and the processes that it starts, use a folder with a path short enough for sockets.

    Otherwise, with a long TMPDIR, the fork server and every worker of a data loader would fail.
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
                util.get_temp_dir()  # creates a folder for this process, which is removed when the process ends
                return
            finally:
                tempfile.tempdir = given
