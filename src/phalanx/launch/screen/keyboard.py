"""Passes on what is typed under ``phalanx run``: to the first rank, or to a debugger that asks for the terminal."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple

from phalanx import _env
from phalanx.debugging.terminal import RUNS, listen_at
from phalanx.host.descriptors import is_in_background
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.output import LiveStream, Screen, prefix
from phalanx.launch.screen.ranks import Rank
from phalanx.wire.lines import receive_line
from phalanx.wire.peer import peer_of
from phalanx.wire.places import make_path

_END_OF_INPUT = b"\x04"  # Ctrl-D, which a terminal treats as the end of input
_HELLO_S = 1.0  # time in which a process that asks for the terminal must name its rank
_RUNS = RUNS.encode()


class _Debugger(NamedTuple):
    """The connection of a debugger, and the rank in which it runs."""

    connection: socket.socket
    rank: int


class Keyboard:
    """The launcher's own input, which one rank at a time reads.

    Args:
        screen: Screen for a debugger's prompt, even if the output of the debugger's rank is not shown.
        terminal_pid: Process id of the process that the shell started.
    """

    def __init__(self, events: EventLoop, screen: Screen, terminal_pid: int) -> None:
        self._events, self._screen, self._terminal_pid = events, screen, terminal_pid
        self._first: Rank | None = None  # the first rank, which gets our input through its terminal
        self._debugger: _Debugger | None = None  # the debugger that has our terminal now
        self._runs = False  # whether the program under `_debugger` is running, so that there is no prompt
        self._view: LiveStream | None = None
        self._queue: list[_Debugger] = []  # debuggers that wait for the terminal
        self._running: list[_Debugger] = []  # debuggers that had the terminal and have not asked for it again
        self._listener: socket.socket | None = None
        self._path = ""
        if os.isatty(0):
            with contextlib.suppress(OSError):  # without a place for the socket, ranks have no debugger
                self._path, self._listener = listen_at(make_path("prompts"))
                self._events.watch(self._listener.fileno(), self._lend)

    def environment(self) -> dict[str, str]:
        """Return the variable that tells ranks where to ask for the terminal."""
        return {_env.PROMPT_VARIABLE: self._path if self._listener is not None else ""}

    def stdin_of(self, rank: Rank) -> int:
        """Return the stdin of the first rank: our own input, or the rank's terminal, to which we pass our input on."""
        self._first = None
        if not os.isatty(0):
            with contextlib.suppress(OSError):  # our stdin is closed
                return os.dup(0)
        elif os.isatty(rank.stdout.rank_fd):
            self._first = rank
            self._watch_input()
            return os.dup(rank.stdout.rank_fd)
        return os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        for debugger in self._running:
            self._events.unwatch(debugger.connection.fileno())
        for debugger in (*self._running, *self._queue):
            debugger.connection.close()
        self._queue.clear()
        if self._debugger is not None:
            self._take_back()
        if self._listener is not None:
            self._events.unwatch(self._listener.fileno())
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _watch_input(self) -> None:
        if not self._events.is_watched(0):
            self._events.watch(0, self._pass_input_on)

    def _pass_input_on(self) -> None:
        typed = b""
        with contextlib.suppress(OSError):  # EIO: we are in the background
            typed = b"" if is_in_background(self._terminal_pid) else os.read(0, 4096)
        if self._debugger is not None:
            self._answer_prompt(typed)
            return
        if not typed or self._first is None:
            self._events.unwatch(0)
        if self._first is not None:
            with contextlib.suppress(BlockingIOError):  # the rank does not read, so the input is dropped
                os.write(self._first.stdout.fd, typed or _END_OF_INPUT)

    # ------------------------------------------------------------ debuggers take turns

    def _lend(self) -> None:
        """Accept the connection of a debugger that asks for the terminal."""
        assert self._listener is not None
        connection, _ = self._listener.accept()
        try:
            rank = int(receive_line(connection, _HELLO_S)["rank"])
            if peer_of(connection)[1] != os.geteuid() or is_in_background(self._terminal_pid):
                raise ConnectionRefusedError
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        connection.setblocking(False)
        self._queue.append(_Debugger(connection, rank))
        self._lend_to_next()

    def _lend_to_next(self) -> None:
        """Give the terminal to the debugger that has waited longest, unless another debugger is at its prompt."""
        if not self._queue or (self._debugger is not None and not self._runs):
            return
        if (before := self._debugger) is not None:  # the debugger `before` is queued again when it writes
            self._end_turn()
            self._running.append(before)
            self._events.watch(before.connection.fileno(), lambda: self._ask_again(before))
        self._debugger, self._runs = self._queue.pop(0), False
        self._view = LiveStream(self._screen, prefix(self._debugger.rank, colour=self._screen.is_terminal))
        self._screen.lend(self._view)
        self._events.watch(self._debugger.connection.fileno(), self._show_prompt)
        self._watch_input()

    def _ask_again(self, debugger: _Debugger) -> None:
        self._events.unwatch(debugger.connection.fileno())
        self._running.remove(debugger)
        self._queue.append(debugger)
        self._lend_to_next()

    def _show_prompt(self) -> None:
        assert self._debugger is not None
        assert self._view is not None
        try:
            said = self._debugger.connection.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the debugger's process was killed
            said = b""
        if not said:
            self._take_back()
            return
        self._runs = said.endswith(_RUNS)
        self._screen.lend(self._view)
        self._view.feed(said.replace(_RUNS, b""))
        if self._runs:
            self._screen.borrower = None
        self._lend_to_next()

    def _answer_prompt(self, typed: bytes) -> None:
        assert self._debugger is not None
        # The terminal itself has echoed what was typed, newline included, so no line is open.
        if typed.endswith(b"\n"):
            self._screen.open_line = b""
        with contextlib.suppress(OSError):
            if typed:
                self._debugger.connection.send(typed)
            else:
                self._debugger.connection.shutdown(socket.SHUT_WR)

    def _take_back(self) -> None:
        """Close the connection of a debugger that has ended."""
        assert self._debugger is not None
        ended = self._debugger
        self._end_turn()
        ended.connection.close()
        if self._first is None and self._events.is_watched(0):
            self._events.unwatch(0)
        self._lend_to_next()

    def _end_turn(self) -> None:
        assert self._debugger is not None
        assert self._view is not None
        self._events.unwatch(self._debugger.connection.fileno())
        self._view.finish()
        self._screen.borrower = None
        self._debugger = self._view = None
