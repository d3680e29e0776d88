"""Folders that only their user can enter, in which processes find one another's sockets and files."""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import stat
import sys
import time

from phalanx import _env
from phalanx.wire.peer import peer_of

TYPE_CHECKING = False  # importing typing would take longer than everything else
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _T = TypeVar("_T")

READY_S = 2.0
"""Seconds within which a warm process that has imported torch answers."""
_BACKLOG = 1024
_MADE_S = 1.0  # if no process listens on a socket file of this age, none ever will
_IMPORTING_MODE, _READY_MODE = 0o600, 0o700  # modes of the socket file before and after the import of torch
_SUFFIX = ".sock"


def folders() -> list[str]:
    """Return the folders that may contain sockets, the preferred one first."""
    runtime = _env.environment().get("XDG_RUNTIME_DIR", "")
    own = [os.path.join(runtime, "phalanx")] if os.path.isabs(runtime) else []
    return [*own, *reversed(common_folders())]


def common_folders() -> list[str]:
    """Return the folders that do not depend on a process's environment; the folder in memory is the first."""
    return [f"{shared}/phalanx-{os.geteuid()}" for shared in ("/dev/shm", "/tmp")]


def common_files(name: str) -> list[str]:
    """Return the possible paths of a file of this name, in the common folders that only this user can enter."""
    found = []
    for folder in common_folders():
        with contextlib.suppress(OSError):
            if _is_private(folder):
                found.append(os.path.join(folder, name))
    return found


def in_common_folder(use: Callable[[str], _T]) -> _T:
    """Return what `use` returns for the first common folder that can be used; create the folder if it does not exist.

    Raises:
        OSError: No common folder can be used; the error is that of the first folder.
    """
    return _in_first_folder(use, common_folders())


def make_folder() -> str:
    """Return the first folder that can hold sockets; create the folder if it does not exist.

    Raises:
        OSError: There is no folder that only this user can enter.
    """
    return _in_first_folder(lambda folder: folder)


def make_path(kind: str) -> str:
    """Return a path for a socket other than a warm process's, in a folder that only this user can enter.

    Sockets of this kind whose processes were killed are removed.

    Raises:
        OSError: There is no folder that only this user can enter.
    """
    folder = make_folder()
    for name in os.listdir(folder):
        if name.startswith(f"{kind}-") and _is_stale(path := os.path.join(folder, name)):
            forget(path)
    return os.path.join(folder, f"{kind}-{os.getpid()}-{os.urandom(4).hex()}")


def _is_stale(path: str) -> bool:
    """Whether no process has this socket open any more; a process that has it open does not notice the check."""
    with contextlib.suppress(OSError), contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)) as asker:
        is_made = time.time() - os.lstat(path).st_mtime > _MADE_S
        # if a process still has the socket open, the error is EPROTOTYPE, because the types differ
        return is_made and asker.connect_ex(path) == errno.ECONNREFUSED
    return False


def make_socket() -> tuple[str, _socket.socket]:
    """Return a new socket that listens, and its path.

    Raises:
        OSError: No folder can hold the socket.
    """
    name = f"{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"
    return _in_first_folder(lambda folder: _listen(os.path.join(folder, name)))


def _in_first_folder(use: Callable[[str], _T], places: list[str] | None = None) -> _T:
    """Return what `use` returns for the first usable folder; if there is none, raise the first folder's error."""
    errors = []
    for folder in folders() if places is None else places:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            if _is_private(folder):
                return use(folder)
            raise PermissionError(errno.EPERM, "others own it, or may enter it", folder)
        except OSError as error:
            errors.append(OSError(error.errno, error.strerror, folder))
    raise errors[0]


def _listen(path: str) -> tuple[str, _socket.socket]:
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        # The socket is bound under a temporary name and renamed once it listens. So a socket file under its final name
        # that does not listen is stale.
        listener.bind(f"{path}.new")
        try:
            os.chmod(f"{path}.new", _IMPORTING_MODE)
            listen(listener)
            os.rename(f"{path}.new", path)
        except BaseException:
            os.unlink(f"{path}.new")
            raise
    except BaseException:
        listener.close()
        raise
    return path, listener


def listen(listener: _socket.socket) -> None:
    """Accept connections; the peer that clients see (`peer_of`) is the process that called this last."""
    listener.listen(_BACKLOG)


def sockets() -> list[str]:
    """Return the paths of this user's sockets, the most recently used first."""
    found = []
    for folder in folders():
        with contextlib.suppress(OSError):
            if _is_private(folder):
                for name in os.listdir(folder):
                    if name.endswith(_SUFFIX):
                        path = os.path.join(folder, name)
                        found.append((os.lstat(path).st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def connect(path: str) -> _socket.socket | None:
    """Return a connection to the warm process that listens at `path`; None if no process of this user listens there.

    A socket file on which no process listens is removed. If the backlog is full, this waits for up to `READY_S`.
    """
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        # Linux waits this long for room in the backlog. With a timeout set in Python, the socket would be non-blocking,
        # and connect() would fail at once.
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, _timeval(READY_S))
        connection.connect(path)
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, _timeval(0))
        if peer_of(connection)[1] == os.geteuid():
            return connection
    except ConnectionRefusedError:
        forget(path)
    except BlockingIOError:  # the backlog stayed full: the process accepts no connections
        if not is_importing(path):
            forget(path)
    except OSError:  # the file does not exist, or is not such a socket
        pass
    connection.close()
    return None


def _timeval(limit_s: float) -> bytes:
    return b"".join(int(part).to_bytes(8, sys.byteorder) for part in (limit_s, limit_s % 1 * 1e6))


def announce_ready(path: str) -> None:
    """Mark the socket as ready: its process has imported torch, and must answer at once from now on."""
    with contextlib.suppress(OSError):
        os.chmod(path, _READY_MODE)


def is_importing(path: str) -> bool:
    """Whether the process of this socket is still importing torch; otherwise it answers at once or never."""
    try:
        return stat.S_IMODE(os.lstat(path).st_mode) == _IMPORTING_MODE
    except OSError:
        return False


def forget(path: str) -> None:
    """Remove a socket file, so that no process connects to it any more."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_private(folder: str) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
