"""How the ranks of a new group tell each other what they bring: through the group's store, in a limited time.

Who can't join says why, and all who wait for it raise that at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx import _core, _env, _errors
from phalanx._errors import CollectiveTimeout, OutOfSharedMemory, PhalanxError, RankFailed
from phalanx._launched import Launch
from phalanx._store import GarbledError, JsonStore, Shape, StoreGoneError, StoreSilentError, require, wait_until

_PART_S = 1.0
_PAUSE_S = 0.02  # between questions to the store
_MANY = 50  # ranks
T = TypeVar("T")
_LOOK_S = 0.1  # between looks at whether those who are awaited can't come
_STORE_S = 1.0  # for the store to take last words
_DEATH_S = 0.3  # for the end of a process to be seen after that of its connections
_LOOK = "Look at what rank {} printed last; this rank is only its victim."
_FACTS = ("pid", "exit_code", "signal")  # of a rank that has died
_WHO = re.compile(r"^rank \d+: init_process_group: ")


def _natural(value: Any, limit: int = 1 << 63) -> Any:
    require(type(value) is int and 0 <= value < limit, f"a whole number below {limit}", value)
    return value


_HELLO = {
    "pid": int,
    "process": (functools.partial(_natural, limit=1 << 31), _natural, _natural),
    "host": str,
    "kernel": str,
    "network": str,
    "torch": str,
    "bridge": str,
    "segments": [str],
    "one_shot_bytes": int,
    "chunk_bytes": int,
}
_SHAPES: dict[str, Shape] = {
    "hello": _HELLO,
    "hellos": [_HELLO],
    "offer": {"nonce": str, "socket": str},
    "placed": {"offset": _natural, "ranks": [int]},
    "mailbox": (str, int, str),
    "unreached": [str],
    "failed": {"kind": str, "text": str, "ranks": [int], "facts": dict},
}
"""What is said under a key, by the last of its parts that is a word."""


def answer_within(question: Callable[[], Any], limit_s: float) -> tuple[threading.Thread, list[Any]]:
    """Ask a store, whose answers have no deadline of their own; return who asks, and the answer, empty if none came."""
    answer: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # it has gone; whoever asks knows what that means
            answer.append(question())

    thread = threading.Thread(target=ask, name="phalanx-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    return thread, answer


@dataclass(eq=False)
class Meeting:
    """What a rank brings to the meeting of its group.

    Attributes:
        watches: Of the processes of this host's other ranks, by rank, once they have said hello.
    """

    store: JsonStore
    rank: int
    size: int
    name: str
    global_ranks: list[int]
    timeout_s: float
    deadline: float
    watches: dict[int, _core.PeerWatch] = field(default_factory=dict)
    _suspects: set[int] = field(default_factory=set)
    _has_parted: bool = False

    @property
    def me(self) -> int:
        return self.global_ranks[self.rank]

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def get(self, key: str, what: str) -> Any:
        """Return what `key` of the store says; a missing one is a timeout that names the ranks that did not come."""
        shape = _SHAPES[re.sub(r".*/(?=[a-z])|/\d+$", "", key)]
        most_s = _PAUSE_S * (1 + self.size / _MANY)  # the store serves all ranks
        try:
            # Not Store.wait: it would not end when somebody fails, and TCPStore prints a warning whenever it times out.
            said = wait_until(
                lambda: self.store.get(key, shape), self.deadline, seldom=self.look, seldom_s=_LOOK_S, most_s=most_s
            )
        except StoreGoneError as error:
            raise self._lost_store(error) from error
        except GarbledError as error:
            raise self._garbled(key, error) from None
        if said is None:
            raise self._timed_out(what)
        return said

    def _garbled(self, key: str, error: GarbledError) -> PhalanxError:
        """Return the error of a key that says nothing that a rank says; it names the rank that wrote it."""
        number = re.search(r"/(\d+)", key)
        rank = self.global_ranks[int(number[1])] if number else self.global_ranks[0]
        return PhalanxError(
            f"rank {self.me}: init_process_group: what rank {rank} said of itself ({key}) is not understood: {error}. "
            "Run the same version of phalanx on every rank, and let nothing else write to the store.",
            op="join",
            ranks=(rank,),
        )

    def set(self, key: str, value: Any) -> None:
        try:
            self.store.set(key, value, self.left_s)
        except StoreSilentError:
            raise self._timed_out("the job's store did not answer") from None
        except StoreGoneError as error:
            raise self._lost_store(error) from error

    def has(self, key: str) -> bool:
        try:
            return self.store.has(key)
        except StoreSilentError:
            return False
        except StoreGoneError as error:
            raise self._lost_store(error) from error

    def share(self, key: str, value: Any) -> list[Any]:
        """Give every rank of the group what this one brings; return what each has brought."""
        self.set(f"{key}/{self.rank}", value)
        return [self.get(f"{key}/{r}", f"rank {other} did not answer") for r, other in enumerate(self.global_ranks)]

    def part(self) -> None:
        """Before all raise an error that they share: rank 0, which may serve the store, goes last."""
        if self._has_parted:
            return
        self._has_parted = True
        self._ask(lambda: self.store.set(f"parted/{self.rank}", "", _STORE_S))
        keys = [f"parted/{r}" for r in range(self.size)]
        if self.me == 0:
            have_parted = functools.partial(self._ask, lambda: self.store.has(*keys))
            wait_until(lambda: self.store.is_gone or have_parted() or None, time.monotonic() + _PART_S)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return what the store says; None if it has gone or does not answer: whoever can't do without it says so."""
        with contextlib.suppress(StoreGoneError, StoreSilentError):
            return question()
        return None

    # ---- who can't join --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Tell the others what this rank fails with."""
        spare: list[int] = []
        try:
            with contextlib.suppress(OSError):
                spare.append(os.open(os.devnull, os.O_RDONLY))
            yield
        except CollectiveTimeout:  # theirs comes too, and names whom they miss
            raise
        except BaseException as error:
            while spare:  # where descriptors have run out, a store that is a file needs one
                os.close(spare.pop())
            cause = _cause(error, self)
            self._tell(cause)
            if isinstance(error, (MemoryError, OSError, RuntimeError)) and not isinstance(error, PhalanxError):
                raise self._rebuild({**cause, "text": cause["text"].partition(": ")[2]}) from error
            raise
        finally:
            for fd in spare:
                os.close(fd)
            self.store.close()

    def look(self) -> None:
        """Raise what another rank has failed with while joining; RankFailed if one of this host has died."""
        try:
            told = self._ask(lambda: self.store.get("failed", _SHAPES["failed"]))
        except GarbledError as error:
            raise self._garbled("failed", error) from None
        if told is not None:
            self.part()
            raise self._rebuild(told)
        for rank, watch in self.watches.items():
            if not watch.dead:
                continue
            if rank in self._suspects:  # what it had done before was looked at since
                raise self._rebuild(self._bury(rank, watch))
            self._suspects.add(rank)
        if not self.watches:
            self._look_at_launch()

    def _look_at_launch(self) -> None:
        """Raise RankFailed if the launcher knows that a rank ended that has not said hello."""
        launch = Launch.of(_env.environment().get(_env.LAUNCH_VARIABLE, ""))
        num_ranks = dist.get_world_size() if dist.is_initialized() else self.size
        is_launchs_world = launch is not None and (launch.rank, launch.world_size) == (self.me, num_ranks)
        if launch is None or not is_launchs_world or os.getpgrp() != os.getpid():  # what a rank starts has other worlds
            return
        for end in launch.ended():
            rank = self.global_ranks.index(end.rank) if end.rank in self.global_ranks else -1
            if rank < 0 or self._ask(functools.partial(self.store.has, f"hello/{rank}")) is not False:
                continue
            if rank in self._suspects:
                text = f"rank {end.rank} (pid {end.pid}) {end.how} before it joined\n{_LOOK.format(end.rank)}"
                facts = {"pid": end.pid, "exit_code": end.exit_code, "signal": end.signal}
                cause = {"kind": RankFailed.__name__, "text": text, "ranks": [end.rank], "facts": facts}
                self._tell(cause)
                raise self._rebuild(cause)
            self._suspects.add(rank)

    def _bury(self, rank: int, watch: _core.PeerWatch) -> dict[str, Any]:
        text, exit_code, signal = watch.ending
        number = self.global_ranks[rank]
        cause = {
            "kind": RankFailed.__name__,
            "text": f"rank {number} (pid {watch.pid}) {text}\n{_LOOK.format(number)}",
            "ranks": [number],
            "facts": {"pid": watch.pid, "exit_code": exit_code if exit_code >= 0 else None, "signal": signal or None},
        }
        self._tell(cause)
        return cause

    def _tell(self, cause: dict[str, Any]) -> None:
        if self._ask(lambda: self.store.has("failed")) is False:
            self._ask(lambda: self.store.set("failed", cause, _STORE_S))
        self.part()

    def _rebuild(self, cause: dict[str, Any]) -> PhalanxError:
        """Return the error of this rank for what a rank has failed with."""
        kind = getattr(_errors, cause["kind"], None)
        if not (isinstance(kind, type) and issubclass(kind, PhalanxError)):
            kind = PhalanxError
        text = f"rank {self.me}: init_process_group: {cause['text']}"
        facts = {name: cause["facts"][name] for name in _FACTS if type(cause["facts"].get(name)) is int}
        return kind(text, op="join", ranks=tuple(cause["ranks"]), **facts)

    def _timed_out(self, what: str) -> CollectiveTimeout:
        ranks = self._absent()
        if ranks:
            what = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come"
        return CollectiveTimeout(
            f"rank {self.me}: init_process_group: {what} within the timeout. "
            "Start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE (or init_method).",
            op="join",
            ranks=ranks,
        )

    def _lost_store(self, error: Exception) -> PhalanxError:
        """Return the error of a store that does not answer: its server has died, if that is seen in a moment."""
        deadline = time.monotonic() + _DEATH_S
        while time.monotonic() < deadline:
            self.look()
            time.sleep(_PAUSE_S)
        return PhalanxError(
            f"rank {self.me}: init_process_group: the job's store is gone ({error}). Look at what the rank or "
            "launcher that serves it, most often rank 0, printed last.",
            op="join",
        )

    def _absent(self) -> tuple[int, ...]:
        """Return the ranks that have not said hello, none if the store cannot tell: it may have gone, or be stopped."""
        came = self._ask(lambda: self.store.ask(lambda store: [store.check([f"hello/{r}"]) for r in range(self.size)]))
        return tuple(rank for rank, is_here in zip(self.global_ranks, came or [], strict=bool(came)) if not is_here)


def _cause(error: BaseException, meeting: Meeting) -> dict[str, Any]:
    """Return what keeps this rank from joining, as it is told to the others."""
    kind: type[PhalanxError] = PhalanxError
    if isinstance(error, PhalanxError):
        kind, why = type(error), _WHO.sub("", str(error))
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        kind = OutOfSharedMemory
        what = f" ({error.strerror})" if isinstance(error, OSError) else ""
        why = (
            f"no shared memory for a group of {meeting.size} ranks{what}; raise the memory limit of the job or "
            "container, and see ulimit -f and -v"
        )
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        why = f"no file descriptor is left ({error.strerror}); raise the limit of open files (ulimit -n)"
    elif isinstance(error, OSError):
        why = f"{error.strerror or error}; a sandbox may forbid it: run phalanx doctor there"
    else:
        why = f"{type(error).__name__}: {error}"
    facts = {name: getattr(error, name, None) for name in _FACTS} if kind is RankFailed else {}
    ranks = list(getattr(error, "ranks", ())) or [meeting.me]
    return {"kind": kind.__name__, "text": f"rank {meeting.me} could not join: {why}", "ranks": ranks, "facts": facts}
