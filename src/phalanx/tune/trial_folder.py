"""The folder of a search: removed when the search ends, or by a later search if this search was killed.

A search locks a file in its folder until the search ends or is killed. The next search removes the folders whose locks
are free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

from phalanx.wire.files import open_regular

PREFIX = "phalanx-tune-"
_LOCK = "lock"  # file that the search keeps locked until the search ends or is killed


@contextlib.contextmanager
def folder_of_jobs() -> Iterator[str]:
    """Make a folder for the jobs' output, and remove it at the end; also remove the folders of killed searches.

    Raises:
        OSError: The folder can't be made.
    """
    _sweep(tempfile.gettempdir())
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        open_regular(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT) as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _sweep(parent: str) -> None:
    """Remove this user's folders whose searches have ended."""
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(PermissionError):  # the parent may be writable, but not listable
        entries += os.scandir(parent)
    for entry in entries:
        with contextlib.suppress(OSError):  # another search has removed the folder, or still uses it
            facts = entry.stat(follow_symlinks=False)
            if entry.name.startswith(PREFIX) and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
                with open_regular(os.path.join(entry.path, _LOCK)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path, ignore_errors=True)
