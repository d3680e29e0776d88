"""The parent's side of `phalanx.spawn`: starts the ranks, receives their messages, signals them and ends them.

Ranks are forked from a server process, which has imported torch and ends with this process. So a group of two ranks
starts in a tenth of a second. torch read some environment variables when the server imported it, so ranks with other
values of these variables need another server. At most four servers are kept; the least recently used one without ranks
ends first. Variables that the launcher itself sets do not need another server: the number of threads is also set in the
rank, and the way in which threads wait is decided when a server starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver
from types import MappingProxyType
from typing import Any

from phalanx import _env
from phalanx._errors import require_linux
from phalanx.failure.ending import Ending, read_stderr
from phalanx.failure.last_words import LastWords
from phalanx.host.block_pool import choose
from phalanx.host.ports import ReservedPort
from phalanx.host.proc_stat import children_of
from phalanx.launch.deadlines import ASK_AGAIN_S, KILL_S
from phalanx.launch.environment import WAIT_VARIABLES, Attempt
from phalanx.launch.processes.ahead import relevant
from phalanx.launch.processes.forker import RANK_MODULES
from phalanx.launch.spawn.cleaner import Orphans, cleaner
from phalanx.launch.spawn.worker import Assignment, Function, Inherited, dumps, worker_main
from phalanx.record.memory import BoxMemory
from phalanx.rendezvous.launched import Notes
from phalanx.wire.sockets import keep_paths_short

# Modules that every rank needs, imported once in the server. The first one puts a reaper above the server. No module in
# this list may start a thread.
_PRELOAD = ("phalanx.launch.spawn.server", *RANK_MODULES, "phalanx.launch.spawn.worker")
# If this process has imported one of these modules, its ranks will soon need it, too. The first optimizer imports
# torch._dynamo, which is slow.
_PRELOAD_IF_LOADED = re.compile(r"numpy|pytest|torch\._dynamo|phalanx\..*")
_NO_GUARD = 88  # exit code of a rank that, while importing the script, reached the call that starts ranks


_MAX_SERVERS = 4


class _Servers:
    """The servers from which ranks are forked: one for each set of variables that ``import torch`` may read.

    multiprocessing knows only one server at a time, the one that was chosen last.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while ranks start, so that no other thread chooses another server
        self._states: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}  # least recently used first

    def choose(self, environ: Mapping[str, str]) -> None:
        """Make multiprocessing use the server for an environment, or start one if there is none yet."""
        server = forkserver._forkserver
        names = [name for name in vars(server) if name.startswith("_forkserver_")]
        state = self._states.pop(frozenset(relevant(environ).items()), None) or dict.fromkeys(names)
        vars(server).update(state)
        while len(self._states) >= _MAX_SERVERS and self._end_one():
            pass

    def keep(self, environ: Mapping[str, str]) -> None:
        """Store multiprocessing's state of the server that is now in use."""
        known = vars(forkserver._forkserver)
        state = {name: value for name, value in known.items() if name.startswith("_forkserver_")}
        self._states[frozenset(relevant(environ).items())] = state

    @property
    def known(self) -> tuple[set[int], set[int]]:
        """Process ids of all servers, and the descriptors that keep the servers alive."""
        states = self._states.values()
        return {one["_forkserver_pid"] for one in states}, {one["_forkserver_alive_fd"] for one in states}

    def _end_one(self) -> bool:
        """End the least recently used server without ranks; return False if all servers have ranks.

        Whether a server has ranks is found through the process that multiprocessing started, normally the server's
        parent. A server that a warm process has forked has another parent, so its ranks can't be seen and it is left
        alone.
        """
        for key, state in self._states.items():
            reaper = state["_forkserver_pid"]
            below = children_of(reaper)
            if below and not any(map(children_of, below)):
                os.kill(reaper, signal.SIGKILL)  # the kernel then kills the server
                os.waitpid(reaper, 0)
                os.close(state["_forkserver_alive_fd"])
                with contextlib.suppress(OSError, TypeError):  # an abstract address has no file to remove
                    os.unlink(state["_forkserver_address"])
                del self._states[key]
                return True
        return False


servers = _Servers()
"""The servers of this process."""


def start_server(environ: Mapping[str, str] | None = None, *, warm: bool = False) -> None:
    """Start the server from which ranks are forked, unless it is running. Server and ranks end with this process.

    Ranks in whose environment ``import torch`` would read other values are forked from another server. Up to four
    servers are kept; a server that has ranks is always kept.

    Args:
        environ: Environment of the server's ranks; None: the environment of this process.
        warm: Whether the server is forked from a process that has imported torch and outlives this process, as with
            ``phalanx run --warm``. PHALANX_WARM=1 has the same effect.

    Example:
        >>> phalanx.testing.start_server()
    """
    _start_server(_env.environment() if environ is None else environ, {}, warm)


def _start_server(environ: Mapping[str, str], defaults: Mapping[str, str], warm: bool) -> None:
    keep_paths_short()
    loaded = [name for name in sys.modules if _PRELOAD_IF_LOADED.fullmatch(name)]
    forkserver.set_forkserver_preload([*_PRELOAD, *loaded])
    own = _env.environment()
    changes: dict[str, str | None] = {
        name: value for name, value in relevant(environ).items() if own.get(name) != value
    }
    changes |= {name: value for name, value in defaults.items() if name in WAIT_VARIABLES}
    changes |= dict.fromkeys(_env.OBEYED_BY_RANKS)
    if warm and _env.WARM_VARIABLE not in own:
        changes[_env.WARM_VARIABLE] = "1"
    with servers.lock:
        servers.choose(environ)
        _env.change(changes)
        try:
            forkserver.ensure_running()
        finally:
            _env.change({name: own.get(name) for name in changes})
        servers.keep(environ)


class Workers:
    """The ranks of one group, running ``fn(rank, *args)``; `close` ends and forgets them.

    Args:
        environ: Environment of every rank, to which torchrun's variables are added.
        defaults: Variables that ranks have unless they are in `environ`.
        num_threads: Number of torch's threads in each rank.
        daemon: Whether the ranks are daemonic, as in ``multiprocessing.Process``.
        warm: Whether the first ranks of this process may be forked from a warm process, see `start_server`.
        forked: Whether ranks are forked from this very process, so that `fn` and `args` need not be picklable. This
            process must then have imported what ranks need, and must hold nothing that can't be forked.

    Raises:
        TypeError: `fn` or `args` can't be sent to another process.
        OSError: A rank can't be forked.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        num_ranks: int,
        *,
        environ: Mapping[str, str],
        num_threads: int,
        defaults: Mapping[str, str] = MappingProxyType({}),
        daemon: bool = False,
        warm: bool = False,
        forked: bool = False,
    ) -> None:
        require_linux("starting ranks", "start the script with torchrun")
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_NO_GUARD)  # the parent reports the mistake, once for all ranks
        call = (fn, tuple(args)) if forked else _sendable(fn, args)
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-ranks-")
        self._port = ReservedPort()
        self._notes = Notes()
        self._notes.note_attempt("phalanx.spawn", "", "", num_ranks)
        self._boxes = BoxMemory(num_ranks)
        # Ranks that are forked from this process run a test, which ends too soon for kept memory to be of use.
        wanted = environ.get(_env.MEMORY_VARIABLE, "default" if forked else "auto")
        self._forked = forked
        self._orphans = Orphans() if forked else None
        self.handles: list[Handle] = []
        assignment = Assignment(
            call=call,
            folder=self._folder.name,
            attempt=Attempt(world_size=num_ranks, num_local_ranks=num_ranks, master_port=self._port.port),
            notes=self._notes.path,
            environ={**defaults, **environ, _env.RECORD_VARIABLE: self._boxes.path},
            memory=choose(environ, wanted=wanted, num_ranks=num_ranks),
            cpus=os.sched_getaffinity(0),
            num_threads=num_threads,
            start_method=multiprocessing.get_start_method(allow_none=True)
            or multiprocessing.get_all_start_methods()[0],
        )
        try:
            if forked:
                self._start(assignment, "fork", daemon)
            else:
                with servers.lock:
                    _start_server(environ, defaults, warm)
                    self._start(assignment, "forkserver", daemon)
        except BaseException:
            self.close()
            raise

    def _start(self, assignment: Assignment, start_method: str, daemon: bool) -> None:
        context: Any = multiprocessing.get_context(start_method)
        streams = (Inherited(1), Inherited(2)) if start_method == "forkserver" else (None, None)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # so that our output is printed before the ranks' output
        for rank in range(assignment.attempt.world_size):
            ours, theirs = context.Pipe()
            args = (rank, assignment, theirs, *streams)
            process = context.Process(target=worker_main, args=args, daemon=daemon)
            try:
                with _without_pseudo_file():
                    process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self.handles.append(Handle(rank, process, ours, assignment.folder, forked=self._forked))
            if self._forked:
                cleaner.watch([outcome.pid for outcome in self.outcomes])
            self._notes.note_start(rank, process.pid or 0)

    @property
    def outcomes(self) -> list[Ending]:
        return [handle.outcome for handle in self.handles]

    @property
    def failures(self) -> list[Ending]:
        """Outcomes of the ranks that have failed so far."""
        return [handle.outcome for handle in self.handles if handle.ended and not handle.outcome.ok]

    @property
    def all_ended(self) -> bool:
        return all(handle.ended for handle in self.handles)

    def check_guard(self, call: str, instead: str = "") -> None:
        """Reject a script that starts ranks when it is imported, because each rank imports it.

        Args:
            call: Call that has started the ranks, in the form that the error shows.
            instead: Alternative to that call, which the error shows, too.

        Raises:
            RuntimeError: A rank has reached the call; the message shows the right form.
        """
        if any(outcome.exitcode == _NO_GUARD and outcome.error is None for outcome in self.failures):
            raise RuntimeError(
                f"{call.partition('(')[0]} is called while a rank imports the script; right:\n"
                f'    if __name__ == "__main__":\n        {call}{instead}'
            )

    def pump(self, deadline: float | None) -> None:
        """Process what the ranks have sent; return after the first event or at `deadline`.

        If the deadline is more than an hour away, return after an hour without an event. If `deadline` is None, there
        is no limit.
        """
        sources: dict[Any, Handle] = {}
        for handle in self.handles:
            sources.update((source, handle) for source in handle.sources())
        timeout = None if deadline is None else min(max(0.0, deadline - time.monotonic()), ASK_AGAIN_S)
        ready = connection.wait(list(sources), timeout)
        for handle in {id(sources[source]): sources[source] for source in ready}.values():
            handle.take_news()
            if handle.ended:
                self._note_end(handle.outcome)

    def _note_end(self, outcome: Ending) -> None:
        """Record the end of a rank in the notes, for ranks that wait for this rank."""
        self._notes.note_end(outcome)

    def end(self, sig: int, grace_s: float) -> None:
        """Send `sig` to the ranks that are alive; return when all have ended or `grace_s` has passed."""
        for handle in self.handles:
            handle.send_signal(sig)
        deadline = time.monotonic() + grace_s
        while not self.all_ended and time.monotonic() < deadline:
            self.pump(deadline)

    def close(self) -> None:
        """Kill the ranks that are still alive and close every descriptor."""
        self.end(signal.SIGKILL, KILL_S)
        if self._orphans is not None:
            self._orphans.end([outcome.pid for outcome in self.outcomes])
        if self._forked and self.handles:
            cleaner.watch([])
        for handle in self.handles:
            handle.close()
        self._port.close()
        self._notes.close()
        self._boxes.close()
        self._folder.cleanup()


def _sendable(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return a function and its arguments, pickled for a rank.

    Raises:
        TypeError: They can't be sent to another process.
    """
    try:
        return dumps((Function.of(fn), tuple(args)))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"{name} or its arguments can't be sent to another process: {error}. Make in the function itself what "
            "can't be pickled, such as locks, open files and connections, or define it at the top of a module"
        ) from None


@contextlib.contextmanager
def _without_pseudo_file() -> Iterator[None]:
    """Hide ``__main__.__file__`` if it names no file, as in ``python - < train.py``; ranks would try to import it."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or os.path.exists(name):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


class Handle:
    """One rank as the parent sees it; owns its pipe, its pidfd and its process object.

    Attributes:
        points: Payloads that the rank has sent with ``reached``, by point.
    """

    def __init__(
        self, rank: int, process: Any, pipe: connection.Connection, folder: str, *, forked: bool = False
    ) -> None:
        self.outcome: Ending = Ending(rank=rank, pid=process.pid)
        self.points: dict[str, Any] = {}
        self.ended: bool = False
        self.process = process
        self._has_returned = False
        self._pipe = pipe
        self._stacks = os.path.join(folder, f"stacks_{rank}")
        try:
            self._pidfd: int | None = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._pidfd = None
        # The end of a forked rank is seen by its pidfd, because multiprocessing's sentinel becomes ready only when the
        # rank's children have ended, too.
        self._end = process.sentinel if self._pidfd is None or not forked else self._pidfd

    def sources(self) -> list[Any]:
        """Objects to wait for; none once the rank has ended."""
        if self.ended:
            return []
        return [self._end, *([] if self._pipe.closed else [self._pipe])]

    def send_signal(self, sig: int) -> None:
        # By pidfd, because the pid of a dead rank may be reused.
        if self._pidfd is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the rank is gone, as its outcome will say
            self._pipe.send_bytes(pickle.dumps(message))

    def take_news(self) -> None:
        ended = not self.process.is_alive()  # checked first: if the rank has ended, all that it sent is in the pipe
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._take(self._pipe.recv_bytes())
        except (EOFError, OSError):  # the rank has ended, perhaps in the middle of a message
            self._pipe.close()
        if ended:
            self._record_end()

    def _record_end(self) -> None:
        self.ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ends processes that a killed rank left
            os.killpg(self.outcome.pid, signal.SIGKILL)
        self.outcome.exitcode = self.process.exitcode
        self.outcome.when_s = self.outcome.when_s or time.monotonic()
        if self.outcome.ok and not self._has_returned:
            self.outcome.error = RuntimeError("it ended without a result")
        if not self.outcome.last_words.lines:
            with contextlib.suppress(OSError), open(self._stacks, "rb") as stacks:
                self.outcome.last_words = read_stderr(stacks.read())

    def _take(self, data: bytes) -> None:
        try:
            message = pickle.loads(data)
        except Exception as error:  # a message that can't be unpickled counts as a failure of the rank
            ours = TypeError(f"its result can't be unpickled here: {error}")
            ours.__cause__ = error
            self.outcome.error, self.outcome.when_s = ours, time.monotonic()
            self.outcome.last_words = LastWords.of_error(ours)
            return
        if message[0] == "reached":
            self.points[message[1]] = message[2]
        elif message[0] == "returned":
            self.outcome.value, self._has_returned = message[1], True
        else:
            _, raised, self.outcome.error, self.outcome.last_words, self.outcome.when_s = message
            with contextlib.suppress(Exception):  # if the exception can't be unpickled, the stand-in remains
                self.outcome.error = pickle.loads(raised)

    def close(self) -> None:
        self._pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self.ended:
            with contextlib.suppress(ValueError):  # the process object was closed before
                self.process.close()
