"""pdb in one rank. Time at the prompt does not count towards the timeouts of ranks that wait for this rank.

A rank at a prompt locks a byte of the job's shared memory. For the lock, the rank opens the memory again: an OFD lock
belongs to an open file, and all ranks share the one that they received. A rank that waits in any group of this memory
checks every 50 ms whether any byte is locked, and extends its deadline by the time during which a byte is locked. This
also works between groups that have no rank in common. The kernel releases the lock when the process ends, whereas a
flag in memory would remain set. Waits inside Gloo, and ranks on other hosts, still time out. A forked worker of a data
loader locks its rank's byte through another open file.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from phalanx._errors import printable
from phalanx.debugging import HELD_BY, IN_DEBUGGER
from phalanx.debugging.terminal import Terminal
from phalanx.record import writer

_LIBRARIES = {"phalanx", "torch", *sys.stdlib_module_names} - {"__main__"}

_held_threads: list[int] = []  # threads of this process that are at a prompt
_holding = threading.RLock()  # reentrant, because a signal handler may open a prompt while the lock is held


def line_of(frame: FrameType) -> str:
    """Return the line of a frame in the form that our messages use: ``train.py:31``."""
    return printable(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")


@contextlib.contextmanager
def held(where: str) -> Iterator[None]:
    """Within the block, ranks that wait for this rank see that this rank is in a debugger at `where`. Thread-safe."""
    core: Any = None
    with contextlib.suppress(ImportError):  # raised outside Linux, where there are no phalanx groups
        from phalanx import _core as core
    own = threading.get_ident()
    with _holding:
        if core is not None and not _held_threads:
            core.hold(HELD_BY + where)
        _held_threads.append(own)
    try:
        with writer.phase(IN_DEBUGGER, site=where):
            yield
    finally:
        with _holding:
            _held_threads.remove(own)
            if core is not None and not _held_threads:
                core.hold("")


def is_held() -> bool:
    """Whether this thread is at a prompt, so that the code that it runs was typed at the prompt."""
    return threading.get_ident() in _held_threads


def _begin_anew() -> None:
    """Forget the parent's threads in a forked child."""
    global _holding
    _held_threads.clear()
    _holding = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


def _scripts(frame: FrameType) -> FrameType:
    """Return the innermost frame of the user's code; `frame` itself if there is none."""
    found: FrameType | None = frame
    while found is not None:
        package = str(found.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES:
            return found
        found = found.f_back
    return frame


class Prompt(pdb.Pdb):
    """A debugger of this process.

    Args:
        terminal: Terminal of the prompt. It is given back while the program runs, and closed when debugging ends.
        on_resume: Function called whenever the program resumes, even if it runs only one line.
        on_quit: Function called by ``quit`` and at the end of the input. Unless it raises, the program resumes.
    """

    def __init__(self, terminal: Terminal, on_resume: Callable[[], None], on_quit: Callable[[], None]) -> None:
        # Ctrl-C keeps its meaning in a job; pdb must not stop in our own modules.
        super().__init__(stdin=terminal.stdin, stdout=terminal.stdout, nosigint=True, skip=["phalanx.debugging.*"])
        self._terminal, self._on_resume, self._on_quit = terminal, on_resume, on_quit
        self._is_over = False
        self.prompt = "(Pdb) "

    def open_at(self, frame: FrameType) -> None:
        """Open the prompt at once, in the signal handler that interrupted `frame`; the next line may run much later.

        The prompt shows the script's own line; the frames of the library in which the script waits are below that line.
        """
        frame = _scripts(frame)
        self.reset()
        above: FrameType | None = frame
        while above is not None:  # traces all callers, as pdb's set_trace does
            above.f_trace = self.trace_dispatch
            self.botframe = above
            above = above.f_back
        self.interaction(frame, None)
        if not self._is_over:
            sys.settrace(self.trace_dispatch)

    def interaction(self, frame: FrameType | None, *args: Any, **kwargs: Any) -> None:
        assert frame is not None
        try:
            with held(line_of(frame)):
                self._terminal.take()
                super().interaction(frame, *args, **kwargs)
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                told = f"debugger at {line_of(frame)}: its terminal is gone, so this rank continues"
                print(told, file=sys.stderr, flush=True)
            self.clear_all_breaks()
            self.set_continue()
        except BaseException:
            self._terminal.close()
            raise
        if self._is_over:
            self._terminal.close()
        else:
            self._terminal.give_back()
        self._on_resume()

    def format_stack_entry(self, *args: Any, **kwargs: Any) -> str:
        # Names of files and functions come from the script; their escape sequences must not reach the terminal.
        return printable(super().format_stack_entry(*args, **kwargs), keep="\n\t")

    def set_continue(self) -> None:
        super().set_continue()
        self._is_over = not self.get_all_breaks()

    def do_quit(self, arg: str) -> bool:
        self._on_quit()
        self.clear_all_breaks()
        self.set_continue()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self.message("")
        return self.do_quit(arg)
