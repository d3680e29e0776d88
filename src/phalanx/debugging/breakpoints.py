"""`phalanx.breakpoint`: every rank stops at a line of the script, and one of them has the debugger.

Ranks meet in the default group's store, under a key that names the line and how often it was reached. So if a condition
keeps a rank from one line, the ranks still meet at the next. The rank with the debugger enters pdb, and the others
wait, with any backend, until it releases them through the store. It does so when the user leaves its prompt for the
first time, so that the others take part if the user then steps over a collective.

In a thread other than the main one, ``quit`` ends the process, because ``SystemExit`` would end only the thread. A rank
counts as being in the debugger until its last thread has left it. A forked worker of a data loader does not meet the
ranks: it shares its rank's connection to the store, which two processes can't use at once.
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

_LOOK_S, _CHECK_S = 0.1, 0.5  # intervals at which a waiting rank looks for its release, and checks that one can come
_TELL_S = 5.0  # time after which a waiting rank says for whom it waits
_QUIT, _GOES_ON = "quit", "goes on"

_num_stops: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()  # by group and line


def breakpoint(rank: int | None = None) -> None:
    """Stop every rank here: one gets the terminal with pdb, and the others wait for as long as it takes.

    All ranks continue when the one with the debugger does, by ``continue`` or by the first ``next`` or ``step``. Ranks
    that wait for it in a collective of the phalanx backend, now or while it is stepped, do not time out. ``quit`` and
    Ctrl-D end the job. Without a terminal to type at, one line says so and every rank continues.

    Works under ``phalanx run``, torchrun, and for ranks started by hand. Before there is a process group, and in the
    workers of a data loader, only the rank with the debugger stops. ``PYTHONBREAKPOINT=phalanx.breakpoint`` makes it
    Python's own ``breakpoint()``.

    Args:
        rank: Global rank that gets the debugger; default: rank 0.

    Raises:
        ValueError: There is no such rank.
        RankFailed: The rank with the debugger ended while this one waited for it.

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
    is_nested = is_held()  # called at a prompt: a second prompt would wait for the terminal that the first one uses
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
        # Counted by line: if a condition keeps some ranks from one line, the counts of the other lines still agree.
        num_stops = _num_stops.setdefault(dist.group.WORLD, collections.Counter())
        num_stops[place] += 1
        self._key = f"phalanx/breakpoint/{place}/{num_stops[place]}"
        self._pids = getattr(dist.group.WORLD, "pids", {})
        self._has_ended = False
        # Not torch's store, if possible: it may hold the stops of an earlier group.
        self._store = JsonStore(getattr(dist.group.WORLD, "life_store", None) or _torch.get_default_store())

    def begin(self) -> None:
        """Tell the others which process has the debugger."""
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

        with contextlib.suppress(StoreGoneError, StoreSilentError):  # the others notice a lost store themselves
            self._store.set(f"{self._key}/{what}", value)

    def wait(self, chosen: int, own: int) -> None:
        """Return once the rank with the debugger releases this one.

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
    """Let the ranks that wait for this one in a collective know that it is at a breakpoint."""
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
