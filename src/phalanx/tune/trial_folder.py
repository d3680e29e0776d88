"""The folder of a search: gone when the search ends, and swept by the next one if it was killed.

It is locked as long as the search lives; the next search removes those that are not.
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
_LOCK = "lock"  # held as long as the search lives, however it ends


@contextlib.contextmanager
def folder_of_jobs() -> Iterator[str]:
    """Return a context with a new folder for what jobs write; those of searches that were killed are removed.

    Raises:
        OSError: There is no room for it.
    """
    _sweep(tempfile.gettempdir())
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        open_regular(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT) as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _sweep(parent: str) -> None:
    """Remove our user's folders whose search has ended."""
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(PermissionError):  # one may make folders there, and not look what there is
        entries += os.scandir(parent)
    for entry in entries:
        with contextlib.suppress(OSError):  # another search is faster, or it is in use
            facts = entry.stat(follow_symlinks=False)
            if entry.name.startswith(PREFIX) and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
                with open_regular(os.path.join(entry.path, _LOCK)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path, ignore_errors=True)
