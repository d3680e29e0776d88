"""Errors caused by the world, such as a dead rank or a damaged file; a wrong call raises ValueError or TypeError.

Every message names the rank, the operation and what to do. Errors carry these facts as attributes and can be pickled,
because they cross processes.
"""

from __future__ import annotations

import collections
import sys
import types
import typing
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

if typing.TYPE_CHECKING:
    from typing_extensions import Self


class _Facts:
    """Plain data that JSON can hold."""

    def to_facts(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses

    @classmethod
    def from_facts(cls, facts: object) -> Self:
        """Return the object that `to_facts` was called on; the facts may have travelled as JSON.

        Raises:
            ValueError: `to_facts` would not return this; the sender may have sent anything.
        """
        try:
            value: Self = _read(facts, cls)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return value


@dataclass(frozen=True, kw_only=True)
class Peer(_Facts):
    """A rank of the world, with its process and its host as far as they are known.

    Attributes:
        host: Name of its host; empty if all ranks of the group share one.
    """

    rank: int
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Standing(Peer):
    """What a rank is doing that others are waiting for.

    Attributes:
        has_joined: Whether it has joined the group.
        waits_in: Call in which it is waiting, in any group; empty if it is not waiting.
        last: Number of its last collective in the group; None: unknown.
    """

    has_joined: bool = True
    waits_in: str = ""
    last: int | None = None


@dataclass(frozen=True, kw_only=True)
class MadeCall(Peer):
    """The call that a rank made: one row in the table of a mismatch.

    Attributes:
        op: Operation; empty if it has made no call yet.
        dtype: Name of the tensor's dtype, without ``torch.``.
        count: Number of elements in a rank's block; None if each rank passes its own sizes.
        sizes: Number of elements in each rank's block, if they differ and are known.
        reduce_op: Name of the reduction, such as ``SUM``.
        root: Rank of the world that sends or receives.
        tag: Tag of a message.
        site: Line of the call, such as ``"train.py:31"``.
    """

    op: str = ""
    dtype: str = ""
    count: int | None = None
    sizes: tuple[int, ...] = ()
    reduce_op: str = ""
    root: int | None = None
    tag: int | None = None
    site: str = ""

    @property
    def asked(self) -> tuple[object, ...]:
        """The facts on which all ranks must agree."""
        return self.op, self.dtype, self.count, self.sizes, self.reduce_op, self.root


@dataclass(frozen=True, kw_only=True)
class SizeDispute(_Facts):
    """Two sizes that contradict each other: of what `one` sends to `other`, or of the block of the rank `of`.

    Attributes:
        one: Rank whose size is `count`.
        count: Number of elements that `one` sends, or lists for `of`.
        other: Rank that contradicts it.
        other_count: Number of elements that `other` expects, or lists for `of`.
        of: Rank of the world that owns the block; None if the sizes are those of a message.
    """

    one: Peer
    count: int
    other: Peer
    other_count: int
    of: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failure(_Facts):
    """Why an operation of a rank failed: the facts from which `phalanx.backend._wording` forms sentences.

    It is plain data: between hosts it travels as the JSON of `to_facts`.

    Attributes:
        kind: Key of `KINDS`.
        rank: Rank of the world that met the failure.
        group: Name of the group.
        op: Operation; ``"join"`` for ``init_process_group``.
        seq: Number of the collective in its group, from 1; 0 for point-to-point.
        site: Line of the call, such as ``"train.py:31"``.
        culprits: Ranks at fault: missing, dead or in disagreement.
        by: Rank that ended the group; None if this one did.
        exit_code: Exit code of the first culprit; None if it was killed or the kernel does not tell.
        signal: Signal that killed the first culprit.
        standings: Standing of each rank that was waited for.
        calls: Calls of the ranks, if they differ; of a message, the receive and then the send.
        sizes: First two sizes that contradict each other.
        hosts: Hosts whose ranks are all lost.
        timeout_s: Deadline that has passed, in seconds from the call.
        size_bytes: Bytes of shared memory that could not be allocated.
        num_ranks: Number of ranks of the group for which there was no memory.
        errno: Error number of the failed system call.
        detail: Unstructured text: the system's message, or the reason given to ``abort()``.
        cause: Failure that ended the group before this call; None if this rank left it in order.
    """

    kind: str
    rank: int
    group: str = ""
    op: str = ""
    seq: int = 0
    site: str = ""
    culprits: tuple[Peer, ...] = ()
    by: Peer | None = None
    exit_code: int | None = None
    signal: int | None = None
    standings: tuple[Standing, ...] = ()
    calls: tuple[MadeCall, ...] = ()
    sizes: SizeDispute | None = None
    hosts: tuple[str, ...] = ()
    timeout_s: float | None = None
    size_bytes: int | None = None
    num_ranks: int | None = None
    errno: int | None = None
    detail: str = ""
    cause: Failure | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(culprit.rank for culprit in self.culprits)

    @property
    def is_victim(self) -> bool:
        """Whether the rank that met it only suffers from the failure of another rank."""
        return KINDS[self.kind].is_victim or self.by not in (None, Peer(rank=self.rank))


def _read(value: Any, shape: Any) -> Any:
    """Return plain data as an object of the type that a hint names."""
    if is_dataclass(shape):
        make: Any = shape
        if not isinstance(value, dict):
            raise ValueError(f"it is not of the expected form: {str(value)[:80]}")
        hints = typing.get_type_hints(shape)
        given = {field.name: value[field.name] for field in fields(shape) if field.name in value}
        try:
            return make(**{name: _read(one, hints[name]) for name, one in given.items()})
        except TypeError as missing:
            raise ValueError(str(missing)) from None
    options = typing.get_args(shape)
    if typing.get_origin(shape) is tuple and isinstance(value, (list, tuple)):
        return tuple(_read(one, options[0]) for one in value)
    if isinstance(shape, types.UnionType):
        return None if value is None else _read(value, options[0])
    if type(value) is shape or (shape is float and type(value) is int):  # not a subclass: True is not a number
        return value
    raise ValueError(f"it is not of the expected form: {str(value)[:80]}")


_INSTEAD = 'use init_process_group("gloo"), or phalanx.init(), which chooses it'


def require_linux(what: str = "the phalanx backend", instead: str = _INSTEAD) -> None:
    """Raise PhalanxError if this is not Linux.

    Args:
        what: Part of phalanx that needs Linux.
        instead: Advice for users of other systems.
    """
    if sys.platform != "linux":
        raise PhalanxError(f"{what} needs Linux, and this is {sys.platform}: {instead}")


class PhalanxError(RuntimeError):
    """Base class of all errors that phalanx raises.

    Attributes:
        op: Operation, such as ``"all_reduce"``; empty if there was none.
        seq: Number of the collective in its group, from 1; 0 for point-to-point messages.
        ranks: Global ranks at fault: missing, dead or in disagreement.
        failure: All facts as plain data, if an operation of a group failed; else None.
        is_victim: Whether this rank only suffers from the failure of another rank.
    """

    is_victim: bool = False

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        seq: int = 0,
        ranks: tuple[int, ...] = (),
        failure: Failure | None = None,
        **facts: object,
    ):
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.failure = failure
        if failure is not None:
            self.is_victim = failure.is_victim
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.__dict__.copy())


def printable(text: str, keep: str = "") -> str:
    """Return untrusted text in which every character that could control a terminal is escaped.

    Args:
        keep: Characters to leave alone, such as line feeds.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _rebuild(cls: type[PhalanxError], message: str, facts: dict[str, object]) -> PhalanxError:
    error = cls(message)
    error.__dict__.update(facts)
    return error


class CollectiveMismatch(PhalanxError):
    """The ranks of a group called different operations. The message lists each rank's call and source line."""


class RankFailed(PhalanxError):
    """A peer died or left the group.

    Attributes:
        pid: Process id of the dead rank, or None.
        exit_code: Exit code of the dead rank; None if a signal killed it or the kernel does not tell.
        signal: Signal that killed the dead rank, or None.
    """

    is_victim = True
    pid: int | None
    exit_code: int | None
    signal: int | None


class CollectiveTimeout(PhalanxError, TimeoutError):
    """An operation passed its deadline; `ranks` are those that did not come."""

    is_victim = True

    @property
    def missing(self) -> tuple[int, ...]:
        """Global ranks that did not come."""
        return self.ranks


class GroupAborted(PhalanxError):
    """The group was ended by ``abort()``, or by a signal such as Ctrl-C during an operation."""

    is_victim = True


class GroupUnusable(PhalanxError):
    """The group ended before this call; the message says why."""

    is_victim = True


class OutOfSharedMemory(PhalanxError, MemoryError):
    """The shared segment can't grow because a memory limit of the container or the host has been reached."""


class CheckpointError(PhalanxError):
    """A checkpoint could not be saved or loaded; the message says why, and which checkpoints remain."""


class NonFinite(PhalanxError, FloatingPointError):
    """A loss, a gradient or a parameter is not finite; `ranks` are those that saw it first.

    Attributes:
        step: Number of the optimizer step, from 1.
        epoch: Number of the epoch, from 0; the message counts from 1, as the screen does.
    """

    step: int
    epoch: int


KINDS: dict[str, type[PhalanxError]] = {
    "calls_differ": CollectiveMismatch,
    "sizes_differ": CollectiveMismatch,
    "message_differs": CollectiveMismatch,
    "rank_ended": RankFailed,
    "rank_replaced": RankFailed,
    "rank_left": RankFailed,
    "rank_fell": RankFailed,
    "rank_failed": RankFailed,
    "rank_lost": RankFailed,
    "rank_missing": CollectiveTimeout,
    "came_late": CollectiveTimeout,
    "no_turn": CollectiveTimeout,
    "not_met": CollectiveTimeout,
    "aborted": GroupAborted,
    "interrupted": GroupAborted,
    "destroyed": GroupAborted,
    "unusable": GroupUnusable,
    "forked": GroupUnusable,
    "nested": GroupUnusable,
    "nested_wait": GroupUnusable,
    "no_memory": OutOfSharedMemory,
    "system": PhalanxError,
    "refused": PhalanxError,
}
"""Every kind of failure and its exception. Three are not in FailureKind of csrc/failure.h: the connection to a rank of
another host was lost (``rank_lost``), the ranks did not meet in time (``not_met``), or a rank was refused for a reason
that only `Failure.detail` gives (``refused``)."""


_handed_over: collections.deque[PhalanxError] = collections.deque(maxlen=16)


def hand_over(error: BaseException) -> BaseException:
    """Return `error`, to be raised into native code that passes only its text on; `origins` finds it again."""
    if isinstance(error, PhalanxError):
        # A copy: the traceback of the original holds frames, and frames hold the group.
        _handed_over.append(_rebuild(type(error), str(error), error.__dict__.copy()))
    return error


def origins(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the errors during whose handling it was raised, the latest first.

    An error that native code made from one of phalanx (see `hand_over`) is followed by that one.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        if type(one) is RuntimeError:
            text = str(one)
            yield from (given for given in _handed_over if str(given) in text)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside torch and phalanx: the user's own, and not one of ours."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "phalanx"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


for _kind in (*KINDS.values(), CheckpointError, NonFinite):
    _kind.__module__ = "phalanx"  # where users import them from
