"""Errors of the world: a rank died, a file is damaged. A wrong call raises ``ValueError`` or ``TypeError`` instead.

Every message names the rank, the operation and what to do. Errors carry these facts as attributes and can be pickled,
because they cross processes.
"""

from __future__ import annotations


class PhalanxError(RuntimeError):
    """Base class of all errors that phalanx raises.

    Attributes:
        op: Operation, such as ``"all_reduce"``; empty if there was none.
        seq: Number of the collective in its group, from 1; 0 for point-to-point messages.
        ranks: Global ranks at fault: missing, dead or in disagreement.
    """

    def __init__(self, message: str, *, op: str = "", seq: int = 0, ranks: tuple[int, ...] = (), **facts: object):
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.__dict__.copy())


def printable(text: str, keep: str = "") -> str:
    """Return text of others without what a terminal would obey: each such character as its escape.

    Args:
        keep: Characters that stay, such as line feeds.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 rank``, ``2 passes`` and ``1,024 steps``."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


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

    pid: int | None
    exit_code: int | None
    signal: int | None


class CollectiveTimeout(PhalanxError, TimeoutError):
    """An operation passed its deadline; `ranks` are those that did not come."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Global ranks that did not come."""
        return self.ranks


class GroupAborted(PhalanxError):
    """The group was ended by ``abort()``, or by a signal such as Ctrl-C in the middle of an operation."""


class GroupUnusable(PhalanxError):
    """The group ended before this call; the message says why."""


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
