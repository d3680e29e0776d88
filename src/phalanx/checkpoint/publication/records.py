"""How readers find the publisher of a name: a small file in a folder that only their user can enter.

`Record` is the file's content. Each version replaces the file by a rename, so readers always see a whole file, and no
process has to serve it. Readers check the record: the publisher counts as alive only if its process still has the
recorded block of memory open under the recorded descriptor. So a killed publisher, a pid that now belongs to another
process, and a forked child do not count. The file stays when its publisher ends, because the next publisher continues
from the version in it.

The folder depends on no environment variable, so a trainer started from a login shell and an evaluator started by cron
find the same folder. It lies in memory if possible: on a disk, a rename may have to wait while a checkpoint is written.
An abstract socket would leave no file, but any user could claim its name first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from phalanx._errors import PhalanxError
from phalanx._text import shortened
from phalanx.host.processes import command_of, process_of
from phalanx.host.shared_blocks import Address, path_of
from phalanx.wire.files import lock_within, open_regular, write_whole
from phalanx.wire.messages import GarbledError, between, cropped, require, understand
from phalanx.wire.places import common_files, in_common_folder

_MOST = 2**62
_MOST_BYTES = 4096
_LOCK_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_Count = Annotated[int, between(0, _MOST)]


@dataclass(frozen=True)
class Record:
    """Who publishes a name, and where the newest version lies.

    Attributes:
        pid: Id of the process that publishes.
        token: Random text that distinguishes this publication from all others.
        version: Newest version.
        fd: Descriptor of the block with that version, in that process.
        inode: Inode of the block.
        size_bytes: Size of the block.
        started: Clock ticks from the host's boot to the start of that process.
        pid_namespace: Number of the namespace in which `pid` is valid.
        is_closed: Whether the publication was closed, rather than ended by an error or with its process.
    """

    pid: Annotated[int, between(1, _MOST)]
    token: Annotated[str, cropped(32)]
    version: _Count
    fd: _Count
    inode: _Count
    size_bytes: Annotated[int, between(4096, _MOST)]
    started: _Count
    pid_namespace: _Count
    is_closed: bool = False

    @property
    def address(self) -> Address:
        return Address(self.pid, self.fd, self.inode, self.size_bytes)

    @property
    def is_live(self) -> bool:
        """Whether the publisher holds this version's memory; also False if a newer version has replaced this one."""
        if self.is_closed:
            return False
        try:
            return os.stat(path_of(self.fd, self.pid)).st_ino == self.inode
        except PermissionError:  # the publisher has dropped privileges, or its pid now belongs to another user
            return start_of(self.pid) == self.started
        except OSError:
            return False


def check_name(call: str, name: Any) -> str:
    """Check the name of a publication, and return it.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is not valid.
    """
    if not isinstance(name, str):
        raise TypeError(f"{call}: name must be a text such as 'policy', got {type(name).__name__}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{call}: name must have 1 to 100 of the letters A to Z and a to z, digits, - and _, got "
            f"{shortened(repr(name))}"
        )
    return name


def after(version: int) -> int:
    """Return the number of the next version; after the largest that a record can hold, numbers start at 1 again."""
    return version % _MOST + 1


def file_name(name: str) -> str:
    return f"publication-{name}"


def find(name: str) -> Record | None:
    """Return the record of a name; None if there is no readable record.

    Raises:
        PhalanxError: The name was published in another container, or this process has too many open files.
    """
    found: Record | None = None
    for path in common_files(file_name(name)):
        try:
            with open_regular(path) as file:
                if os.fstat(file.fileno()).st_uid == os.geteuid():
                    one = _record_in(file.read(_MOST_BYTES) or b"")
                    found = one if found is None or one.version > found.version else found
                    place = path
        except GarbledError:
            continue
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # after any other error, the file counts as missing
                raise PhalanxError(
                    f"{path} can't be opened: {error.strerror}; raise the limit (ulimit -n)", entry="open-files"
                ) from error
    if found is not None and found.pid_namespace != pid_namespace():
        raise PhalanxError(
            f"{name!r} was published by process {found.pid} of another container (pid namespace), whose memory can't "
            f"be mapped from here: run both in one container, or if it has ended, remove {place}",
            entry="not-published",
        )
    return found


@functools.lru_cache(maxsize=16)
def _record_in(text: bytes) -> Record:
    record: Record = understand(text, Record)
    require(_TOKEN.fullmatch(record.token) is not None, "a token", record.token)
    return record


def write(name: str, record: Record) -> None:
    """Replace the record of a name.

    Raises:
        OSError: The file can't be written to any of the possible folders.
    """
    text = json.dumps(asdict(record))
    in_common_folder(lambda folder: write_whole(os.path.join(folder, file_name(name)), text))


@contextlib.contextmanager
def claiming() -> Iterator[None]:
    """Keep every other process from beginning to publish.

    Raises:
        OSError: The lock's file can't be written to any of the possible folders.
        PhalanxError: Another process does not release the lock.
    """
    path = in_common_folder(lambda folder: os.path.join(folder, "publications.lock"))
    with open_regular(path, os.O_RDWR | os.O_CREAT) as file:
        if not lock_within(_LOCK_S, file, fcntl.LOCK_EX):
            raise PhalanxError(f"another process has held {path} for {_LOCK_S:g} s: is it stopped?", entry="system")
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # explicit: a child forked meanwhile has the file open, too


def pid_namespace() -> int:
    """Return the number of the namespace in which this process has its pid; 0 if the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_of(pid: int) -> int:
    """Return when a process was started, in clock ticks; 0 if the process has ended."""
    process = process_of(pid)
    return process.start_time if process else 0


def described(pid: int) -> str:
    """Return words for a process, such as ``process 123 (train.py)``."""
    words = [os.path.basename(word) for word in command_of(pid)[1:] if not word.startswith("-")]
    return f"process {pid} ({shortened(words[0])})" if words else f"process {pid}"
