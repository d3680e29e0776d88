"""Errors of the world: a rank died, a file is damaged. A wrong call raises ``ValueError`` or ``TypeError`` instead.

Every message names the rank, the operation and what to do. Errors carry these facts as attributes and can be pickled,
because they cross processes.
"""

from __future__ import annotations

import collections
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

if typing.TYPE_CHECKING:
    from typing_extensions import Self


class _Facts:
    """Plain data, which JSON can hold."""

    def to_facts(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]  # what derives from it is a dataclass

    @classmethod
    def from_facts(cls, facts: object) -> Self:
        """Return what `to_facts` gave, perhaps through JSON.

        Raises:
            ValueError: Nothing that `to_facts` gives: whoever sent it may have sent anything.
        """
        try:
            value: Self = _read(facts, cls)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return value


@dataclass(frozen=True, kw_only=True)
class Peer(_Facts):
    """A rank of the world, its process and its host, as far as they are known.

    Attributes:
        host: Name of its host; empty where all ranks of the group share one.
    """

    rank: int
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Standing(Peer):
    """Where a rank stands that others wait for.

    Attributes:
        has_joined: Whether it has joined the group.
        waits_in: The call in which it waits, in whichever group; empty if in none.
        last: Number of its last collective in the group; None if nobody knows.
    """

    has_joined: bool = True
    waits_in: str = ""
    last: int | None = None


@dataclass(frozen=True, kw_only=True)
class MadeCall(Peer):
    """What a rank called: a row of a mismatch's table.

    Attributes:
        op: Operation; empty if it has not called yet.
        dtype: Name of the tensor's dtype, without ``torch.``.
        count: Elements of a rank's block; None where each rank gives sizes of its own.
        sizes: Elements of each rank's block, where they differ and are known.
        reduce_op: Name of the reduction, such as ``SUM``.
        root: Rank of the world that sends or receives.
        tag: Tag of a message.
        site: Line of the call, ``"train.py:31"``.
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
        """What ranks must agree on."""
        return self.op, self.dtype, self.count, self.sizes, self.reduce_op, self.root


@dataclass(frozen=True, kw_only=True)
class SizeDispute(_Facts):
    """Sizes that contradict each other: what `one` sends and `other` expects, or what they say of the block of `of`.

    Attributes:
        one: The rank whose size is `count`.
        count: Elements that it sends, or has in its list for `of`.
        other: The rank that contradicts it.
        other_count: Elements that this one expects, or has in its list for `of`.
        of: Rank of the world whose block it is; None for what is sent.
    """

    one: Peer
    count: int
    other: Peer
    other_count: int
    of: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failure(_Facts):
    """Why an operation of a rank failed: facts, which `phalanx.backend._wording` makes sentences of.

    It is plain data: between hosts it travels as the JSON of `to_facts`.

    Attributes:
        kind: One of `KINDS`.
        rank: The rank of the world that met it.
        group: Name of the group.
        op: Operation; ``"join"`` for ``init_process_group``.
        seq: Number of the collective in its group, from 1; 0 for point-to-point.
        site: Line of the call, ``"train.py:31"``.
        culprits: Ranks at fault: missing, dead or in disagreement.
        by: The rank that ended the group, if this one only follows.
        exit_code: Exit code of the first culprit; None when it was killed or the kernel does not tell.
        signal: Signal that killed it.
        standings: Standing of each rank that was waited for.
        calls: Calls of the ranks, where they differ; for a message those of its two ends, the receive first.
        sizes: The first two sizes that contradict each other.
        hosts: Hosts whose ranks are all lost.
        timeout_s: Deadline that has passed, in seconds from the call.
        size_bytes: Bytes of shared memory that could not be had.
        num_ranks: Ranks of the group for which there was no memory.
        errno: Error number of the system's refusal.
        detail: Whatever has no structure: the system's words, the reason given to ``abort()``.
        cause: The failure that had ended the group before this call; None if it was left in order.
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
        """Whether the rank that met it only suffers from what another rank did or met."""
        return KINDS[self.kind].is_victim or self.by not in (None, Peer(rank=self.rank))


def _read(value: Any, shape: Any) -> Any:
    """Return plain data as what a type hint names."""
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
    if type(value) is shape or (shape is float and type(value) is int):  # true is no number
        return value
    raise ValueError(f"it is not of the expected form: {str(value)[:80]}")


class PhalanxError(RuntimeError):
    """Base class of all errors that phalanx raises.

    Attributes:
        op: Operation, such as ``"all_reduce"``; empty if there was none.
        seq: Number of the collective in its group, from 1; 0 for point-to-point messages.
        ranks: Global ranks at fault: missing, dead or in disagreement.
        failure: All facts as plain data, where an operation of a group failed; else None.
        is_victim: Whether this rank only suffers from what another rank did or met.
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
    """Return text of others without what a terminal would obey: each such character as its escape.

    Args:
        keep: Characters that stay, such as line feeds.
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
    """The group was ended by ``abort()``, or by a signal such as Ctrl-C in the middle of an operation."""

    is_victim = True


class GroupUnusable(PhalanxError):
    """The group ended before this call; the message says why."""

    is_victim = True


class OutOfSharedMemory(PhalanxError, MemoryError):
    """The shared segment cannot grow, because a memory limit of the container or the host is reached."""


class CheckpointError(PhalanxError):
    """A checkpoint could not be saved or loaded; the message says why, and which checkpoints are left."""


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
"""What can happen, and its exception. All but three are those of FailureKind in csrc/failure.h: between hosts the
connection to a rank may be lost (``rank_lost``), ranks may not meet in time (``not_met``), and a rank may be refused
for a reason that only `Failure.detail` tells (``refused``)."""


_handed_over: collections.deque[PhalanxError] = collections.deque(maxlen=16)


def hand_over(error: BaseException) -> BaseException:
    """Return `error`, to be raised where native code takes it and gives on its text alone; see `origins`."""
    if isinstance(error, PhalanxError):
        # A copy, since a traceback holds frames, and frames hold the group.
        _handed_over.append(_rebuild(type(error), str(error), error.__dict__.copy()))
    return error


def origins(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and those in whose handling it was raised, the latest first.

    What native code has made of an error of phalanx (see `hand_over`) is followed by that error.
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


for _kind in (*KINDS.values(), CheckpointError, NonFinite):
    _kind.__module__ = "phalanx"  # where users import them from
