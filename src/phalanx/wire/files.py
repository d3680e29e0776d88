"""Reads files that any process may have created, writes files atomically, and frees the pages of files in memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import stat
import time
from io import FileIO
from typing import Any

from phalanx.wire.messages import parse_json
from phalanx.wire.waiting import wait_until

_LOCK_EVERY_S = 0.005
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate(2)
# limit for a JSON file: enough for 10,000 hosts or ranks, each with a long name and a few numbers
_MOST_BYTES = 4 << 20


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> FileIO:
    """Open a regular file, unbuffered. A FIFO or device, which may block or never end, is an error.

    On a full disk, a write to the returned file may be cut short without an error; use `write_regular`, which writes
    everything or raises.

    Raises:
        OSError: `path` can't be opened, or is not a regular file.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # without O_NONBLOCK, opening a FIFO would wait
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "r+b" if flags & os.O_RDWR else "rb", buffering=0)
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


def lock_within(wait_s: float, file: FileIO, operation: int) -> bool:
    """Lock a file with ``flock``; return whether this succeeded within `wait_s` seconds.

    Args:
        operation: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``.

    Raises:
        OSError: The file system does not support locks.
    """

    def lock() -> bool | None:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return True

    return wait_until(lock, time.monotonic() + wait_s, most_s=_LOCK_EVERY_S) is not None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a small JSON file, as `parse_json` returns it.

    Raises:
        OSError: `path` can't be opened, or is not a regular file.
        ValueError: The file is larger than 4 MiB, or `parse_json` rejects its content.
    """
    with io.BufferedReader(open_regular(path)) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    return parse_json(data)


def write_regular(path: str | os.PathLike[str], content: str | bytes, flags: int = 0, *, durable: bool = False) -> None:
    """Replace the content of a regular file; text is written as UTF-8.

    Args:
        path: New or existing file.
        content: Whole content of the file.
        flags: More flags for `os.open`.
        durable: Whether the content must survive a power loss; the caller must also sync the folder.

    Raises:
        OSError: `path` can't be opened or written, or is not a regular file.
    """
    # the text may contain file names that are not UTF-8
    data = content if isinstance(content, bytes) else content.encode(errors="replace")
    with io.BufferedWriter(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags)) as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, durable: bool = False) -> None:
    """Write a file like `write_regular`, but atomically: readers see the old or the new content, even after a kill.

    Raises:
        OSError: The file can't be written; the old content is unchanged.
    """
    part = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        write_regular(part, content, os.O_NOFOLLOW, durable=durable)
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def free_pages(fd: int, offset: int, size_bytes: int) -> None:
    """Free some pages of a file in memory. The file keeps its size, and its mappings show zeros in these pages.

    Raises:
        OSError: The pages can't be freed.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size_bytes) != 0:
        raise OSError(ctypes.get_errno(), "the memory can't be freed")
