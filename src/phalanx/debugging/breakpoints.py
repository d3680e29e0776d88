"""`phalanx.breakpoint`: every rank stops at a line of the script, and one rank opens the debugger.

Ranks meet in the default group's store, under a key that contains the line and the number of times that it was reached.
So if a condition makes some rank skip a line, the ranks still meet at the next line. One rank enters pdb, and the other
ranks wait, with any backend, until that rank releases them through the store. The rank releases them when the user
first leaves the prompt: if the user then steps over a collective, the other ranks must take part in it.

In a thread other than the main one, ``quit`` ends the process, because ``SystemExit`` would end only the thread. A rank
counts as being in the debugger until the last of its threads has left the debugger. A forked worker of a data loader
does not meet the ranks, because it shares its rank's connection to the store, and two processes can't use one
connection at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from phalanx import _env
from phalanx._errors import RankFailed
from phalanx.debugging import AT_BREAKPOINT
from phalanx.debugging.prompt import Prompt, is_held, line_of
from phalanx.debugging.terminal import open_terminal
from phalanx.host.network import host_identity
from phalanx.record import writer
from phalanx.rendezvous.launched import Launch, start_time

# intervals at which a waiting rank checks for its release, and for the end of the rank that must release it
_LOOK_S, _CHECK_S = 0.1, 0.5
_TELL_S = 5.0  # time after which a waiting rank prints which rank has the debugger
_QUIT, _GOES_ON = "quit", "goes on"

_num_stops: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()  # by group and line


def breakpoint(rank: int | None = None) -> None:
    """Stop every rank here: one rank opens pdb at the terminal, and the other ranks wait, without a time limit.

    All ranks continue when the rank with the debugger continues, after ``continue`` or the first ``next`` or ``step``.
    In a collective of the phalanx backend, the other ranks wait for that rank without timing out, even if the user
    steps through its code later. ``quit`` and Ctrl-D end the job. If there is no terminal to type at, a line says so
    and every rank continues.

    This works under ``phalanx run``, under torchrun, and for ranks started by hand. Before there is a process group,
    and in the workers of a data loader, only the rank with the debugger stops. With
    ``PYTHONBREAKPOINT=phalanx.breakpoint``, Python's own ``breakpoint()`` calls this function.

    Args:
        rank: Global rank that gets the debugger; default: rank 0.

    Raises:
        ValueError: There is no such rank.
        RankFailed: The rank with the debugger ended while this rank waited for it.

    Example:
        >>> phalanx.breakpoint()  # this example has no terminal, so it continues
    """
    frame = sys._getframe(1)
    own, world_size, meeting = _place(frame)
    chosen = 0 if rank is None else rank
    if not 0 <= chosen < world_size:
        raise ValueError(f"rank must lie in [0, {world_size}), got {rank}")
    if own == chosen:
        _debug(frame, own, meeting)
    elif meeting is not None:
        meeting.wait(chosen, own)


def _debug(frame: FrameType, rank: int, meeting: _Meeting | None) -> None:
    # if called at a prompt: a second prompt would wait for the terminal that the first prompt uses
    is_nested = is_held()
    terminal = None if is_nested else open_terminal(rank)
    if terminal is None:
        why = "has no terminal for a debugger, so no rank stops"
        if is_nested:
            why = "is at a debugger's prompt already, so it does not stop here"
        _say(f"{line_of(frame)}: rank {rank} {why}")
        if meeting is not None:
            meeting.end(_GOES_ON)
        return

    def on_resume() -> None:
        if meeting is not None:
            meeting.end(_GOES_ON)

    def on_quit() -> None:
        if meeting is not None:
            meeting.end(_QUIT)
        _leave(rank)

    if meeting is not None:
        meeting.begin()
    Prompt(terminal, on_resume, on_quit).set_trace(frame)


def _leave(rank: int) -> NoReturn:
    words = f"phalanx.breakpoint: rank {rank} has quit the debugger, so the job ends"
    if threading.current_thread() is not threading.main_thread():  # SystemExit would end only this thread
        with contextlib.suppress(OSError, ValueError):
            print(words, file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(1)
    raise SystemExit(words)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"phalanx.breakpoint at {text}", file=sys.stderr, flush=True)


def _place(frame: FrameType) -> tuple[int, int, _Meeting | None]:
    """Return this process's rank, the world size, and the meeting of the ranks if they have a group."""
    dist, data = sys.modules.get("torch.distributed"), sys.modules.get("torch.utils.data")
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # A worker would share its rank's connection to the store, and receive answers that are meant for the rank.
        is_worker = data is not None and data.get_worker_info() is not None
        return rank, world_size, _Meeting(frame) if world_size > 1 and not is_worker else None
    environ = _env.environment()
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal():
        return int(rank), int(size), None
    return 0, 1, None


class _Meeting:
    """One stop of all ranks at a line; they meet in the store of the default group."""

    def __init__(self, frame: FrameType) -> None:
        import torch.distributed as dist

        from phalanx import _torch
        from phalanx.wire.store import JsonStore

        self._line = line_of(frame)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        # Counted by line: if a condition makes some ranks skip one line, the counts of the other lines still agree.
        num_stops = _num_stops.setdefault(dist.group.WORLD, collections.Counter())
        num_stops[place] += 1
        self._key = f"phalanx/breakpoint/{place}/{num_stops[place]}"
        self._pids = getattr(dist.group.WORLD, "pids", {})
        self._has_ended = False
        # The group's own store is preferred: torch's store may still hold the stops of an earlier group.
        self._store = JsonStore(getattr(dist.group.WORLD, "life_store", None) or _torch.get_default_store())

    def begin(self) -> None:
        """Publish which process has the debugger."""
        self._tell("who", [host_identity(), os.getpid(), start_time(os.getpid())])

    def end(self, how: str) -> None:
        """Release the other ranks. Only the first call counts."""
        if not self._has_ended:
            self._has_ended = True
            self._tell("how", how)
            self._store.close()

    def _tell(self, what: str, value: object) -> None:
        from phalanx.wire.store import StoreGoneError
        from phalanx.wire.waiting import StoreSilentError

        with contextlib.suppress(StoreGoneError, StoreSilentError):  # the other ranks notice a lost store on their own
            self._store.set(f"{self._key}/{what}", value)

    def wait(self, chosen: int, own: int) -> None:
        """Return once the rank with the debugger releases this rank.

        Raises:
            SystemExit: That rank has quit the debugger.
            RankFailed: That rank has ended.
        """
        from phalanx.wire.store import StoreGoneError
        from phalanx.wire.waiting import wait_until

        def look() -> str | None:
            how: str | None = self._store.get(f"{self._key}/how", str)
            return how

        def check() -> None:
            if self._is_gone(chosen):
                raise _lost(f"rank {chosen}, which had the debugger, has ended", own, self._line, chosen)

        with _standing(self._line):
            try:
                how = wait_until(look, time.monotonic() + _TELL_S, seldom=check, seldom_s=_CHECK_S, most_s=_LOOK_S)
                if how is None:
                    self._say_whom(chosen, own)
                    how = wait_until(look, math.inf, seldom=check, seldom_s=_CHECK_S, most_s=_LOOK_S)
            except StoreGoneError:
                raise _lost("rank 0, which served the store, has ended", own, self._line, 0) from None
            finally:
                self._store.close()
        if how == _QUIT:
            _leave(chosen)

    def _say_whom(self, chosen: int, own: int) -> None:
        if self._debugger() is None:
            _say(
                f"{self._line}: rank {own} waits for rank {chosen}, which should get the debugger but has not reached "
                f"this line. Call it on all ranks; or, if only this rank comes here, give it the debugger: "
                f"phalanx.breakpoint(rank={own})"
            )

    def _debugger(self) -> list[Any] | None:
        from phalanx.wire.waiting import StoreSilentError

        with contextlib.suppress(StoreSilentError):
            who: list[Any] | None = self._store.get(f"{self._key}/who", (str, int, int))
            return who
        return None

    def _is_gone(self, chosen: int) -> bool:
        if (who := self._debugger()) is not None:
            host, pid, started = who
            return bool(host == host_identity() and start_time(pid) != started)
        launch = Launch.of(_env.environment().get(_env.LAUNCH_VARIABLE, ""))
        pid = self._pids.get(chosen)  # None for a rank that another launcher started
        return launch is not None and any(end.rank == chosen and pid in (None, end.pid) for end in launch.ended())


def _lost(what: str, own: int, line: str, rank: int) -> RankFailed:
    message = f"rank {own}: phalanx.breakpoint at {line}: {what}"
    return RankFailed(message, ranks=(rank,), pid=None, exit_code=None, signal=None)


@contextlib.contextmanager
def _standing(line: str) -> Iterator[None]:
    """Publish that this rank is at a breakpoint, for the ranks that wait for it in a collective."""
    try:
        from phalanx import _core
    except ImportError:  # not on Linux
        yield
        return
    _core.say_where(f"{AT_BREAKPOINT} at {line}")
    try:
        with writer.phase(AT_BREAKPOINT, site=line):
            yield
    finally:
        _core.say_where("")
