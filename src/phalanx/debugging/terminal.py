"""The terminal of a rank's debugger: the rank's own, or one that another process lends over a socket.

Under ``phalanx run``, a rank asks the supervisor for the terminal, over a socket in a folder that only this user can
enter. The user's input then goes to that rank instead of the first rank, even if the rank's streams are not shown.
Several debuggers take turns: when a debugger lets its program run, even for one line, it notifies the supervisor, which
lends the terminal to the next debugger. Under other launchers, a rank uses its own stdin, if that is a terminal and if
the kernel would not suspend the process for reading from it. Debuggers then take turns by locking the terminal.
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
"""Byte that a debugger sends when its program resumes: other debuggers may use the terminal until its next prompt."""


class Terminal:
    """The terminal of a debugger. Several debuggers may share one, and take turns.

    Args:
        connection: Connection to the process that lends its terminal; None for this process's own terminal.
        is_shared: Whether the lender lends the terminal to other debuggers while this debugger's program runs.

    Attributes:
        stdin, stdout: Files for `pdb.Pdb`; None means this process's own streams, with which pdb offers line editing.
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
            # If stdout is redirected, as with --redirects, the prompt must still appear on the terminal.
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
        """Wait until no other debugger uses the terminal. For a lent terminal, the first read waits instead."""
        if self._connection is None and self._lock < 0:
            self._lock = os.open(os.ttyname(0), os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # the file system does not support locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)

    def give_back(self) -> None:
        """Make the terminal available to other debuggers until the next `take`."""
        self._unlock()
        if self._is_shared and self.stdout is not None:
            with contextlib.suppress(OSError):  # the lender has ended; the next prompt reports it
                self.stdout.write(RUNS)
                self.stdout.flush()

    def _unlock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                # a child forked since `take` shares the open file and would keep the lock
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1


def open_terminal(rank: int) -> Terminal | None:
    """Return a terminal for the debugger of this rank; None if there is no terminal at which the user could type."""
    if path := _env.environment().get(_env.PROMPT_VARIABLE, ""):
        return borrow_terminal(path, rank, is_shared=True)
    with contextlib.suppress(OSError):
        if os.isatty(0) and not _is_in_background():
            return Terminal()
    return None


def borrow_terminal(path: str, rank: int, is_shared: bool = False) -> Terminal | None:
    """Return the terminal that a process of this user lends through the socket at `path`; None if there is none."""
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
    """Return `path` and a new socket that listens at `path`, for lending a terminal.

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
    """Whether the kernel would suspend this process if it read from the terminal."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # the terminal belongs to another session, because torchrun gives ranks sessions of their own
        return False
