"""The terminal on which a rank's debugger talks: its own, or one that another process lends over a socket.

Under ``phalanx run`` a rank asks the supervisor for the terminal, over a socket in a folder that only this user can
enter. The user's input then goes to that rank instead of the first one, whichever streams of the rank are shown.
Several debuggers take turns: when one lets its program run, even for a line, it says so, and the supervisor lends the
terminal to the next. Under other launchers a rank uses its own stdin, if that is a terminal and reading would not stop
the process; debuggers then take turns by locking the terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from typing import TextIO

from phalanx import _env
from phalanx._text import is_terminal
from phalanx.wire.lines import as_line
from phalanx.wire.peer import peer_of

CONNECT_S = 2.0
"""Time for the other side of a socket to accept a connection."""
RUNS = "\0"
"""Byte that a debugger sends when its program runs on, so that others may use the terminal until its next prompt."""


class Terminal:
    """The terminal of a debugger. Several debuggers may share one, and take turns.

    Args:
        connection: Connection to the process that lends its terminal; None: the terminal is this process's own.
        is_shared: Whether the lender gives it to others while the program runs.

    Attributes:
        stdin, stdout: Files for `pdb.Pdb`; None stands for this process's own streams, which have line editing.
    """

    def __init__(self, connection: socket.socket | None = None, is_shared: bool = False) -> None:
        self._connection, self._is_shared = connection, is_shared
        self._lock = -1
        self.stdin: TextIO | None = None
        self.stdout: TextIO | None = None
        if connection is not None:
            self.stdin = connection.makefile("r", encoding="utf-8", errors="replace")
            self.stdout = connection.makefile("w", encoding="utf-8", errors="replace")
        elif not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
            # If the output is redirected, as with --redirects, the prompt must not go there.
            self.stdin = open(0, errors="replace", closefd=False)  # noqa: SIM115 until `close`
            self.stdout = open(os.ttyname(0), "w")  # noqa: SIM115

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        for file in (self.stdin, self.stdout):
            if file is not None:
                with contextlib.suppress(OSError, ValueError):
                    file.close()
        if self._connection is not None:
            self._connection.close()
        self._unlock()

    def take(self) -> None:
        """Wait until no other debugger uses the terminal. If the terminal is lent, the first read waits instead."""
        if self._connection is None and self._lock < 0:
            self._lock = os.open(os.ttyname(0), os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)

    def give_back(self) -> None:
        """Let other debuggers use the terminal until the next `take`."""
        self._unlock()
        if self._is_shared and self.stdout is not None:
            with contextlib.suppress(OSError):  # the lender is gone, which the next prompt notices
                self.stdout.write(RUNS)
                self.stdout.flush()

    def _unlock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child forked meanwhile shares the open file
            os.close(self._lock)
            self._lock = -1


def open_terminal(rank: int) -> Terminal | None:
    """Return a terminal for the debugger of this rank; None if there is none at which a person could type."""
    if path := _env.environment().get(_env.PROMPT_VARIABLE, ""):
        return borrow_terminal(path, rank, is_shared=True)
    with contextlib.suppress(OSError):
        if os.isatty(0) and not _is_in_background():
            return Terminal()
    return None


def borrow_terminal(path: str, rank: int, is_shared: bool = False) -> Terminal | None:
    """Return the terminal that a process of this user lends at a socket; None if there is no such process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        connection.connect(path)
        if peer_of(connection)[1] == os.geteuid():
            connection.settimeout(None)
            connection.sendall(as_line({"rank": rank, "pid": os.getpid()}))
            return Terminal(connection, is_shared)
    except OSError:
        pass
    connection.close()
    return None


def listen_at(path: str) -> tuple[str, socket.socket]:
    """Return `path`, and a new socket that listens there, at which a terminal can be lent.

    Raises:
        OSError: The socket can't be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return path, listener


def _is_in_background() -> bool:
    """Whether reading from the terminal would stop this process."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not this session's terminal: torchrun's ranks have their own session
        return False
