"""How the ranks agree on a checkpoint before any of them touches it, and raise the same error if they can't."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

from phalanx._errors import CheckpointError, GroupUnusable, addressed, printable
from phalanx._text import named
from phalanx.wire.rank_group import RankGroup

_MISSING_S = 60.0  # time for every rank to make the call


def require_all(op: str) -> None:
    """Wait until every rank has called this.

    Raises:
        CheckpointError: Some rank makes a different call, or makes no call within a minute.
    """
    ranks = RankGroup()
    try:
        ranks.barrier(_MISSING_S)
    except GroupUnusable:
        raise  # no rank is late; this rank itself can't use the group
    except RuntimeError as error:
        raise CheckpointError(
            f"rank {ranks.rank}: checkpoint.{op}: not every rank has called it. All must, not only rank 0: take the "
            f"call out of `if rank == 0:`. {error}",
            op=op,
            ranks=getattr(error, "ranks", ()),
            entry="checkpoint-alone",
        ) from error


def gather(op: str, message: Any) -> list[Any]:
    """Return the messages of all ranks, in rank order.

    Raises:
        CheckpointError: As in `require_all`.
    """
    require_all(op)
    return RankGroup().gather(message)


def raise_problems(op: str, problems: Sequence[str], cause: Exception | None = None, about: str = "") -> None:
    """Raise an error on every rank if any rank has a problem.

    Args:
        op: Name of the operation.
        problems: Problem of each rank; empty for a rank without a problem. The error has one line for each problem, or
            a single line if all ranks have the same problem.
        cause: Exception of this rank; shown only if its traceback says more than its message.
        about: Step and folder as text; the error puts it after the operation's name.

    Raises:
        CheckpointError: Some rank has a problem.
    """
    found = {rank: printable(problem, keep="\n\t") for rank, problem in enumerate(problems) if problem}
    if found:
        lines = "".join(f"\nrank {rank}: {problem}" for rank, problem in found.items())
        if len(found) == 1:
            lines = f" {lines[1:]}"
        elif len(found) == len(problems) and len({*found.values()}) == 1:
            lines = f" {named('rank', range(len(found)))}: {found[0]}"
        about = printable(f" {about}" if about else "")
        entry = addressed(lines) or ("checkpoint-not-loaded" if op == "load" else "checkpoint-not-saved")
        raise CheckpointError(f"checkpoint.{op}{about}:{lines}", op=op, ranks=tuple(found), entry=entry) from (
            cause if _tells_more(cause) else None
        )


def _tells_more(cause: BaseException | None) -> bool:
    """Return whether a cause's traceback says more than its message, as when a user's ``load_state_dict()`` raised it.

    The traceback says no more if this library raised the error, or if the system raised it in a call that this library
    made: the traceback would only show the same message a second time.
    """
    if cause is None:
        return False
    while cause.__cause__ is not None:
        cause = cause.__cause__
    where = cause.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    if where is None or not str(where.tb_frame.f_globals.get("__name__")).startswith("phalanx."):
        return True
    line = linecache.getline(where.tb_frame.f_code.co_filename, where.tb_lineno)
    return not isinstance(cause, OSError) and not line.lstrip().startswith("raise ")
