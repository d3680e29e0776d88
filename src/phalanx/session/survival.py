"""Outliving the failure of another rank: this process leaves its groups, waits, and takes a place in new ones.

- **A function that is called again,** not an iterator, because a generator can't catch an exception from the body of a
  loop over it. Objects that the script makes outside the function are kept; the function itself must make the group,
  wrap the model and call `load`. Our wrappers and torch's remove their hooks from the parameters once nothing refers to
  the wrappers. The frames of the exception still refer to the wrappers, so these frames are cleared before the groups
  are destroyed.
- **State in place.** `load` restores into the existing objects, and drops gradients of the interrupted step. A kept
  process no longer has the initial values, so a process is kept only if everything that it has loaded can be loaded
  again.
- **Meeting new processes.** A new process runs the script from the top, so kept processes can meet it only at the
  script's first group. Processes are not kept if there was a group before the function was called, or if this is the
  script's second such call: the new process would then have to skip everything that the other ranks had done together
  before, and would need a log of it.
- **Without peers.** In a world of one rank, no collective can raise. So wherever such a rank would otherwise meet other
  ranks, at a Trainer's step or at a snapshot, it checks whether the launcher has told it to stop
  (`wire.rank_group.call_when_solo`).

**Alternatives.** torchft's Manager keeps processes, too: it reconfigures its groups at each step's quorum, and skips a
step that fails. As in torchft, a new group takes the place of the old one, and state is restored in place. We did not
adopt its wrappers of groups, optimizers and collectives, because programs must be written for them. Nor did we adopt
steps with fewer ranks, because results then depend on which ranks took part. torch 2.14's `reconfigure` replaces the
ranks of an existing group, even with new processes, and phalanx implements it (`backend/membership.py`). Using
`reconfigure` would save nothing here: all other groups and the wrappers of the models must be made again in any case,
and making everything again works with every backend and torch version.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from phalanx import _env, _torch
from phalanx._errors import origins
from phalanx.checkpoint import loading, saving
from phalanx.checkpoint.memory import snapshots
from phalanx.failure import last_words
from phalanx.failure.last_words import LastWords
from phalanx.failure.victims import is_victim
from phalanx.record import writer
from phalanx.record.notes import note_end_for_restart
from phalanx.session.session import leave_session
from phalanx.wire.packets import PacketSocket
from phalanx.wire.rank_group import call_when_solo

_T = TypeVar("_T")
_CONNECT_S = 2.0
_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_num_begun = 0  # number of outermost `Survivor` blocks that this process has entered
_is_open = False  # whether this process is inside a `Survivor` block


class _ToldToStop(RuntimeError):
    """Raised after the launcher has told this rank to stop, if no collective of the rank fails for this reason."""


class PlannedRestart(SystemExit):
    """Ends a rank after a snapshot, so that a different number of ranks can start; the process is kept if possible."""

    def __init__(self) -> None:
        note_end_for_restart()
        super().__init__(_env.PREEMPTED_CODE)


class Survivor:
    """A context in which this process can outlive the failure of another rank, if ``phalanx run`` keeps processes.

    A failure reaches this rank as an exception from its next collective. If the launcher's order to stop arrives
    earlier, a thread aborts all groups, which also makes the collective raise. In a world of one rank, no collective
    can fail: the rank checks at each step of a Trainer and at each snapshot whether it has been told to stop
    (`call_when_solo`).

    Args:
        why_not: Function that returns why this process can't continue after another rank has failed; "" if the process
            can continue.
        let_go: Function called before the groups are destroyed, to drop the objects that belong to them.
    """

    def __init__(self, why_not: Callable[[], str], let_go: Callable[[], None] = lambda: None) -> None:
        self._why_not, self._let_go = why_not, let_go
        self._is_outermost = self._is_first = False
        self._channel: PacketSocket | None = None
        self._is_told = threading.Event()  # set once the launcher has told this rank to stop
        self._has_looked = False  # whether the main thread has seen that the event is set
        self._places: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()

    def __enter__(self) -> Survivor:
        global _num_begun, _is_open
        if not _is_open:
            _num_begun += 1
            self._is_outermost = _is_open = True
            self._is_first = _num_begun == 1
            self._connect()
            call_when_solo(self._stop_if_told)
        return self

    def __exit__(self, *_: object) -> None:
        global _is_open
        if self._is_outermost:
            _is_open = False
            call_when_solo(None)
            self._disconnect()

    def outlive(self, run: Callable[[], _T]) -> _T:
        """Return what `run` returns; call it again, with a new place in the job, each time another rank fails."""
        while True:
            try:
                return run()
            except (Exception, PlannedRestart) as error:
                if not self._can_outlive(error):
                    raise
                failure = error
            # outside the except block, which would keep the exception, its frames and so the groups alive
            self._leave(failure)
            del failure
            self._rejoin()

    def _connect(self) -> None:
        path = _env.environment().get(_env.SURVIVORS_VARIABLE, "")
        if not path or not _env.is_rank() or threading.current_thread() is not threading.main_thread():
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_CONNECT_S)
            connection.connect(path)
            connection.settimeout(None)
        except OSError:  # the launcher is ending
            connection.close()
            return
        self._socket, self._channel = connection, PacketSocket(connection)
        self._thread = threading.Thread(
            target=self._listen, args=(self._channel,), daemon=True, name="phalanx-survivor"
        )
        self._thread.start()

    def _disconnect(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            self._thread.join()
            channel.close()

    def _listen(self, channel: PacketSocket) -> None:
        while (packet := channel.wait()) is not None:
            if "stop" in packet:
                self._is_told.set()
                _abort_groups()
            else:
                self._is_told.clear()
                self._has_looked = False
                self._places.put(packet["environ"])
        self._places.put(None)

    def _stop_if_told(self) -> None:
        if self._is_told.is_set() and not self._has_looked and threading.current_thread() is threading.main_thread():
            self._has_looked = True  # raise only once: code that runs during the unwinding may call this function again
            raise _ToldToStop("the launcher has told this rank to stop")

    def _can_outlive(self, error: BaseException) -> bool:
        """Return whether this process can continue after `error`, and did not cause it."""
        is_planned = isinstance(error, PlannedRestart)
        if self._channel is None or not (is_planned or self._is_told.is_set() or is_victim(LastWords.of_error(error))):
            return False
        why_not = self._why_not()
        if not self._is_first:
            why_not = "phalanx.resilient or fit() was called before in this process"
        if why_not:
            self._channel.send({"refuses": why_not})
        return not why_not

    def _leave(self, error: BaseException) -> None:
        """Leave all groups, and free the objects to which the failed call still refers."""
        if not isinstance(error, PlannedRestart):
            last_words.tell(error)
        self._let_go()
        for one in origins(error):
            # Frames refer to wrapped models, and the wrappers refer to groups.
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
        leave_session(error)
        last_words.forget_rank()
        gc.collect()  # collecting a wrapper removes its hooks
        writer.stop()

    def _rejoin(self) -> None:
        """Wait for this process's place in the next attempt, and set its environment variables for the next group.

        Raises:
            SystemExit: The launcher has ended.
        """
        assert self._channel is not None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._channel.send({"waits": True})
        place = self._places.get()
        if place is None:
            raise SystemExit(1)
        _env.update(place)
        snapshots.renew()
        saving.renew()
        if not place[_env.SURVIVORS_VARIABLE]:  # the next attempt is the last one, after which no process is kept
            self._disconnect()


def may_outlive() -> bool:
    """Return whether this process may outlive an error that another rank's failure has caused."""
    return _is_open


def _abort_groups() -> None:
    """End every wait in every group of this process."""
    with contextlib.suppress(ImportError):  # if this torch has no `world`, this rank runs until it is killed
        for group in list(_torch.world.pg_names):
            with contextlib.suppress(Exception):  # the group may be closing, or its backend can't abort
                group.abort()


def resilient(train: Callable[[], _T]) -> _T:
    """Return what `train` returns; call it again, in the same process, when another rank has failed.

    Under ``phalanx run --max-restarts N``, a rank that did not cause a failure keeps its process, with the process's
    imports, data and device. `train` ends with the exception of the failed collective, all process groups are
    destroyed, and `train` is called again as part of the next attempt, in which a new process replaces the lost one.
    Without such a launcher, this is a plain call.

    `train` must make the process group, wrap the model and call `checkpoint.load`, because all this has to be done
    again. State that `train` does not load keeps the value that it had at the failure.

    A process that can't be kept is killed and started again, as without this function; the launcher says why. A process
    can't be kept if it has taken no snapshot or checkpoint yet, if it reaches no collective or snapshot within two
    seconds, or if a process group existed before this call, because a new process could not join that group.

    Args:
        train: Function without arguments that trains to the end.

    Raises:
        TypeError: `train` is a generator or a coroutine function, whose body would run after this call.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> def train():
        ...     with phalanx.init() as session:
        ...         ddp = phalanx.DistributedDataParallel(model)
        ...         state = {"model": model, "step": 0}
        ...         phalanx.checkpoint.load("runs/resilient", state, missing="ignore")
        ...         return state["step"]
        >>> phalanx.resilient(train)
        0
    """
    if any(is_one(train) for is_one in _RUN_LATER):
        raise TypeError("phalanx.resilient: train is a generator or a coroutine function, so calling it trains nothing")
    had_group = dist.is_available() and dist.is_initialized()

    def why_not() -> str:
        if had_group:
            return "a process group was made before phalanx.resilient was called"
        return loading.why_not_loadable()

    with Survivor(why_not) as survivor:
        return survivor.outlive(train)
