"""Errors caused by the world, such as a dead rank or a damaged file; a wrong call raises ValueError or TypeError.

    PhalanxError (RuntimeError)                  something happened in the world that the caller could not prevent
      + CollectiveMismatch                       ranks called different operations, or disagree about sizes
      + RankFailed                               a peer died or left the group
      + CollectiveTimeout (TimeoutError)         an operation passed its deadline
      + GroupAborted                             abort(), or Ctrl-C during an operation, ended the group
      + GroupUnusable                            the group had ended before this call
      + OutOfSharedMemory (MemoryError)          a memory limit stops the shared segment from growing
      + NonFinite (FloatingPointError)           a loss, a gradient or a parameter is not finite
      + ReplicaMismatch                          the ranks' copies of a model differ
      + WrongResult                              an operation's result differs from Gloo's (PHALANX_VERIFY)
      + NotPublished                             nobody publishes a version that phalanx.subscribe waits for
      + CheckpointError                          a checkpoint could not be saved or loaded
        + Damaged                                its files differ from what was saved (checkpoint/disk/folder.py)
        + OtherSide                              a folder is held by another side or attempt (checkpoint/disk/claim.py)
    RankError (RuntimeError)                     a rank of phalanx.spawn or run_ranks failed (failure/ending.py)
    ArgumentError (ValueError, RuntimeError)     an operation was called with a wrong argument
      + UnsupportedLayout (NotImplementedError)  ... with a tensor whose layout it does not support
      + OtherDevice                              ... with a tensor on another device (backend/calls/memory.py)

``tests/test_error_tree.py`` checks the tree. The tree leaves out exceptions that never reach a user: they are only
signals between modules of one package.

Every message names the rank, the operation and what to do. Errors carry these facts as attributes and can be pickled,
because they cross processes. Start with `facts`, which converts these facts to JSON and back. Nothing here finds out
why an operation failed, and nothing here imports torch.
"""

from __future__ import annotations

import collections
import errno
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx._errors.facts import Facts, MadeCall, Peer, SizeDispute, Standing, Waiter


@dataclass(frozen=True, kw_only=True)
class Failure(Facts):
    """The facts about a failed operation, from which `phalanx.backend.failures.wording` forms sentences.

    They are plain data: hosts send them to each other as the JSON of `to_facts`.

    Attributes:
        kind: Key of `KINDS`.
        rank: Global rank on which the operation failed.
        group: Name of the group.
        op: Operation; ``"join"`` for ``init_process_group``.
        seq: Number of the collective in its group, from 1; 0 for point-to-point.
        site: Line of the call, such as ``"train.py:31"``.
        culprits: Ranks at fault: missing, dead or in disagreement.
        by: Rank that ended the group; None if `rank` itself ended it.
        exit_code: Exit code of the first culprit; None if a signal killed the culprit or the kernel does not report the
            code.
        signal: Signal that killed the first culprit.
        standings: State of each rank that the operation was waiting for.
        circle: Ranks that wait for each other in a circle, starting with `rank`; empty if there is none.
        calls: The ranks' calls, if they differ; for a message, first the receive and then the send.
        sizes: First two sizes that contradict each other.
        hosts: Hosts whose ranks are all lost.
        timeout_s: Deadline that has passed, in seconds after the call.
        size_bytes: Bytes of shared memory that could not be allocated.
        num_ranks: Number of ranks in the group whose memory could not be allocated.
        errno: Error number of the failed system call.
        detail: Unstructured text, such as the system's message or the reason given to ``abort()``.
        cause: Failure that ended the group before this call; None if this rank had left the group itself.
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
    circle: tuple[Waiter, ...] = ()
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
        """Whether the failure of another rank caused this failure."""
        return KINDS[self.kind].is_victim or self.by not in (None, Peer(rank=self.rank))


_INSTEAD = 'use init_process_group("gloo"), or phalanx.init(), which chooses it'


def require_linux(what: str = "the phalanx backend", instead: str = _INSTEAD) -> None:
    """Raise PhalanxError if this is not Linux.

    Args:
        what: Part of phalanx that needs Linux.
        instead: Advice for users of other systems.
    """
    if sys.platform != "linux":
        raise PhalanxError(f"{what} needs Linux, and this is {sys.platform}: {instead}", entry="linux-only")


_ADDRESS = re.compile(r"\s*\(phalanx explain ([a-z0-9-]+)\)")
_ASKED = "\nphalanx why: "
"""Start of the last line of a message if the rank asked ``phalanx why``; the rest of the line is the answer, see
`backend.failures.answer`."""


def address(entry: str) -> str:
    """Return ``" (phalanx explain ENTRY)"``, the end of an error message, which says how to get an explanation."""
    return f" (phalanx explain {entry})"


def addressed(text: str) -> str:
    """Return the entry in the last address in a text (see `address`); "" if the text contains no address."""
    found = _ADDRESS.findall(text)
    return found[-1] if found else ""


class PhalanxError(RuntimeError):
    """Base class of all errors that phalanx raises.

    Its message ends with the command that explains it, such as ``(phalanx explain timeout)``.

    Attributes:
        entry: Name under which ``phalanx explain`` explains the error; empty if there is no explanation.
        op: Operation that failed, such as ``"all_reduce"``; empty if no operation was involved.
        seq: Number of the collective in its group, from 1; 0 for point-to-point messages.
        ranks: Global ranks at fault: missing, dead or in disagreement.
        failure: All facts as plain data, if an operation of a group failed; else None.
        is_victim: Whether the failure of another rank caused this error.

    Example:
        >>> try:
        ...     phalanx.checkpoint.load("runs/nothing", {}, missing="error")
        ... except phalanx.PhalanxError as error:
        ...     print(type(error).__name__, error.is_victim)
        CheckpointError False
    """

    is_victim: bool = False
    entry: str = "error"

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        seq: int = 0,
        ranks: tuple[int, ...] = (),
        failure: Failure | None = None,
        entry: str = "",
        **facts: object,
    ):
        # A message already contains an address if it quotes another error, or if this error was pickled.
        self.entry = entry or (_entry_of(failure) if failure else addressed(message)) or self.entry
        said, asked, answer = _ADDRESS.sub("", message).partition(_ASKED)
        super().__init__(said + (address(self.entry) if self.entry else "") + asked + answer)
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

    entry = "mismatch"


class RankFailed(PhalanxError):
    """A peer died or left the group.

    Attributes:
        pid: Process id of the dead rank, or None.
        exit_code: Exit code of the dead rank; None if a signal killed the rank or the kernel does not report the code.
        signal: Signal that killed the dead rank, or None.
    """

    is_victim = True
    entry = "rank-failed"
    pid: int | None
    exit_code: int | None
    signal: int | None


class CollectiveTimeout(PhalanxError, TimeoutError):
    """An operation passed its deadline; `ranks` are those that did not arrive."""

    is_victim = True
    entry = "timeout"

    @property
    def missing(self) -> tuple[int, ...]:
        """Global ranks that did not arrive."""
        return self.ranks


class GroupAborted(PhalanxError):
    """The group was ended by ``abort()``, or by a signal such as Ctrl-C during an operation."""

    is_victim = True
    entry = "aborted"


class GroupUnusable(PhalanxError):
    """The group ended before this call; the message says why."""

    is_victim = True
    entry = "group-unusable"


class OutOfSharedMemory(PhalanxError, MemoryError):
    """The shared segment can't grow because a memory limit of the container or the host has been reached."""

    entry = "shared-memory"


class CheckpointError(PhalanxError):
    """A checkpoint could not be saved or loaded; the message says why, and which checkpoints remain."""

    entry = "checkpoint-not-loaded"


class NonFinite(PhalanxError, FloatingPointError):
    """A loss, a gradient or a parameter is not finite; `ranks` are those that saw it first.

    Attributes:
        step: Number of the optimizer step, from 1.
        epoch: Number of the epoch, from 0; the message counts from 1, as the screen does.
        tensor: First tensor that was not finite, such as ``parameter '0.weight'``; empty if unknown.
        module: Name of the module that produced this tensor, such as ``"encoder.0"``; empty if unknown.
    """

    entry = "non-finite"
    step: int
    epoch: int
    tensor: str = ""
    module: str = ""


class ReplicaMismatch(PhalanxError):
    """The ranks' copies of a model or its optimizer's state differ; `ranks` are those that differ from the majority.

    Attributes:
        tensors: Names of the tensors that differ, in the model's order.
        how: Kind of difference of the first of `tensors`: "value", "NaN", "shape", "dtype" or "missing".
        step: Number of optimizer steps after which the copies differed; None outside of a Trainer.
        since_step: Number of optimizer steps after which all these tensors were still the same; None outside of a
            Trainer.
    """

    entry = "replica-mismatch"
    tensors: tuple[str, ...] = ()
    how: str = ""
    step: int | None = None
    since_step: int | None = None


class WrongResult(PhalanxError):
    """Gloo repeated an operation and got a different result; `ranks` are the ranks whose results differ from Gloo's.

    ``PHALANX_VERIFY=gloo`` turns this check on. Every rank raises the error.

    Attributes:
        path: Folder in which each rank has saved its inputs.
        index: Index of the first element that differs, in the result of the first of `ranks`.
        got: Value of that element, as text.
        want: Value that this element has in Gloo's result, as text.
    """

    entry = "wrong-result"
    path: str = ""
    index: tuple[int, ...] = ()
    got: str = ""
    want: str = ""


class NotPublished(PhalanxError):
    """`phalanx.subscribe` received no version, or no newer version, before its timeout or the publisher's end.

    Attributes:
        name: Name of the publication.
        pid: Process that last published under this name; None if no process has published under it.
        version: Last version that this process published; 0 if there is none.
        has_ended: Whether the publisher ended during the subscription; if not, the timeout expired.
        is_closed: Whether the publisher called `Publication.close` before it ended.
    """

    entry = "not-published"
    name: str = ""
    pid: int | None = None
    version: int = 0
    has_ended: bool = False
    is_closed: bool = False


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
"""Every kind of failure and its exception. FailureKind in csrc/control/failure.h lacks three of these kinds:
``rank_lost`` (the connection to a rank on another host was lost), ``not_met`` (the ranks did not meet in time) and
``refused`` (a rank was refused for a reason that only `Failure.detail` gives)."""

_ENTRIES = {
    "message_differs": "message-mismatch",
    "rank_replaced": "rank-exited",
    "rank_left": "rank-left",
    "rank_lost": "rank-lost",
    "no_turn": "one-at-a-time",
    "not_met": "not-met",
    "interrupted": "interrupted",
    "destroyed": "destroyed",
    "forked": "forked",
    "nested": "signal-handler",
    "nested_wait": "signal-handler",
    "system": "system",
}
"""Names of the explanations of individual kinds of failure; the other kinds use the explanation of their class."""


def _entry_of(failure: Failure) -> str:
    """Return the name of a failure's explanation."""
    if failure.kind == "rank_ended":
        if failure.signal is not None or "killed by" in failure.detail:
            return "rank-killed"
        return "rank-left" if failure.exit_code == 0 else "rank-exited"
    if failure.kind == "system" and failure.errno in (errno.EMFILE, errno.ENFILE):
        return "open-files"
    if failure.kind == "system" and failure.errno == errno.EAGAIN:
        return "no-thread"
    if failure.kind == "refused":
        return addressed(failure.detail) or "refused"
    return _ENTRIES.get(failure.kind, KINDS[failure.kind].entry)


_handed_over: collections.deque[PhalanxError] = collections.deque(maxlen=16)


def hand_over(error: BaseException) -> BaseException:
    """Return `error`; store a copy for `origins`, because native code passes on only an error's text."""
    if isinstance(error, PhalanxError):
        # A copy without a traceback: the original's traceback refers to frames, which refer to the group, and would
        # thus keep the group alive.
        _handed_over.append(_rebuild(type(error), str(error), error.__dict__.copy()))
    return error


def origins(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, then the errors that caused it or were being handled when it was raised, latest first.

    If native code made one of these errors from the text of a phalanx error, the stored copy of the phalanx error
    follows (see `hand_over`).
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


class ArgumentError(ValueError, RuntimeError):
    """An operation was called with a wrong argument; also a RuntimeError, because that is what Gloo raises."""


class UnsupportedLayout(ArgumentError, NotImplementedError):
    """An operation was called with a tensor whose layout it does not support."""


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside torch and phalanx, which is probably the user's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "phalanx"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


for _kind in (*KINDS.values(), CheckpointError, NonFinite, NotPublished, ReplicaMismatch, WrongResult):
    _kind.__module__ = "phalanx"  # the package from which users import these classes
