"""What can go wrong in the world, as opposed to in a call (those are ``ValueError`` and ``TypeError``).

Every error names the rank, the operation and what to do, carries its facts as attributes and survives pickling, since
errors cross processes.
"""

from __future__ import annotations


class PhalanxError(RuntimeError):
    """Base of all errors of phalanx.

    Attributes:
        op: Operation, such as ``"all_reduce"``; empty when no operation was involved.
        seq: Number of the collective in its group, from 1; 0 for point-to-point.
        ranks: Global ranks at fault: missing, dead or in disagreement.
    """

    def __init__(self, message: str, *, op: str = "", seq: int = 0, ranks: tuple[int, ...] = (), **facts: object):
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.ranks = tuple(ranks)
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
    """The ranks of a group called different operations; the message has a table of what each rank called, and where."""


class RankFailed(PhalanxError):
    """A peer died or left the group.

    Attributes:
        pid: Process of the dead rank.
        exit_code: Its exit code, or None when it was killed or the kernel does not tell.
        signal: The signal that killed it, or None.
    """

    pid: int | None
    exit_code: int | None
    signal: int | None


class CollectiveTimeout(PhalanxError, TimeoutError):
    """An operation passed its deadline; ``ranks`` are those that were missing."""

    @property
    def missing(self) -> tuple[int, ...]:
        return self.ranks


class GroupAborted(PhalanxError):
    """``abort()`` was called, or a signal such as Ctrl-C interrupted a rank in the middle of an operation."""


class GroupUnusable(PhalanxError):
    """The group had ended before this call; the message says why."""


class OutOfSharedMemory(PhalanxError, MemoryError):
    """The shared segment cannot grow: a memory limit of the container or the host is reached."""


class CheckpointError(PhalanxError):
    """A checkpoint could not be saved, or none could be loaded; the message says why, and what is still there."""


class NonFinite(PhalanxError, FloatingPointError):
    """A training came to a loss, a gradient or a parameter that is not finite; ``ranks`` are those that saw it first.

    Attributes:
        step: Optimizer step in which it was seen, from 1.
        epoch: That step's epoch, from 0; the message counts from 1, as the screen does.
    """

    step: int
    epoch: int


# In the order of FailureKind in csrc/failure.h.
_KINDS: tuple[type[PhalanxError], ...] = (
    PhalanxError,
    CollectiveMismatch,
    RankFailed,
    CollectiveTimeout,
    GroupAborted,
    GroupUnusable,
    OutOfSharedMemory,
    PhalanxError,
)


for _kind in (*_KINDS, CheckpointError, NonFinite):
    _kind.__module__ = "phalanx"  # where users import them from


def from_core(
    kind: int, message: str, ranks: list[int], op: str, seq: int, pid: int, exit_code: int, signal: int
) -> PhalanxError:
    """Build the exception for a failure that the core reports."""
    facts: dict[str, object] = {}
    if _KINDS[kind] is RankFailed:
        facts = {
            "pid": pid or None,
            "exit_code": exit_code if exit_code >= 0 else None,
            "signal": signal or None,
        }
    return _KINDS[kind](message, op=op, seq=seq, ranks=tuple(ranks), **facts)
