"""Files that are read with distrust, and files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> FileIO:
    """Open a regular file, unbuffered; a FIFO or a device, whose bytes may never come or never end, is an error.

    Raises:
        OSError: It can't be opened, or is something else.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # or opening a FIFO waits for its other end
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "r+b" if flags & os.O_RDWR else "rb", buffering=0)
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


def write_whole(path: str | os.PathLike[str], text: str, *, durable: bool = False) -> None:
    """Write a file in UTF-8 that is there whole or not at all, whoever is killed meanwhile.

    Args:
        durable: Whether its content survives a loss of power; the folder is the caller's to sync.

    Raises:
        OSError: It can't be written; what was there is unchanged.
    """
    part = f"{os.fspath(path)}.{os.getpid()}.part"
    with open(part, "w", encoding="utf-8", errors="replace") as file:  # a folder's name may be no UTF-8
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.rename(part, path)
