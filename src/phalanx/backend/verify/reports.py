"""Reports a verification: wrong results, to the ranks and in files, and at the end how many results were right."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.util
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from phalanx._errors import WrongResult
from phalanx._text import class_and_message, plural
from phalanx._torch.replace import say_once
from phalanx.backend.calls.memory import copied
from phalanx.backend.types import RedOpType, premul_factor
from phalanx.backend.verify.cases import Finding

FOLDER = "phalanx-verify"
"""Folder, in the working folder, in which inputs are left."""

_NUMBERS = itertools.count(1)  # a rank may find several wrong results in one second


@dataclass
class Tally:
    """Operations that this process has called on groups that are verified; rank 0 says at its end how many there were.

    Attributes:
        num_called: Number of collectives and receives.
        num_repeated: Number of those that were repeated on Gloo.
        num_wrong: Number of wrong results, of any rank.
        is_begun: Whether the numbers will be said.
    """

    num_called: int = 0
    num_repeated: int = 0
    num_wrong: int = 0
    is_begun: bool = False

    def begin(self, rank: int) -> None:
        """Say the numbers when this process ends, if it has rank 0 of the world."""
        if rank == 0 and not self.is_begun:
            self.is_begun = True
            multiprocessing.util.Finalize(
                None, self._say, exitpriority=0
            )  # children of multiprocessing call these, too

    def _say(self) -> None:
        num_wrong = f"{self.num_wrong} {plural(self.num_wrong, 'result')} differed" if self.num_wrong else ""
        outcome = f"; {num_wrong or 'every result agreed'}" if self.num_repeated else ""
        calls = f"{self.num_repeated} of {self.num_called} {plural(self.num_called, 'operation')}"
        say_once(f"PHALANX_VERIFY: rank 0 repeated {calls} on Gloo{outcome}")


tally = Tally()


@dataclass(frozen=True)
class Told:
    """Report of a rank with a wrong result to the others."""

    rank: int
    site: str
    folder: str
    finding: Finding


def error_of(
    me: int, what: str, op: str, number: int, first: Told, ranks: tuple[int, ...], size: int, lost: str
) -> WrongResult:
    """Return the error of every rank for a result that differs; `lost` says why this rank's inputs are not saved."""
    found = first.finding
    place = f"element {list(found.index)}" if found.index else "the element"
    if found.tensor:
        place += f" of tensor {found.tensor}"
    others = ranks[1:]
    also = f", and so is that of {plural(len(others), 'rank')} {', '.join(map(str, others))}" if others else ""
    inputs = f"The inputs are in {first.folder}; to do it again: "
    inputs += f"phalanx run --nproc-per-node {size} -m phalanx.backend.verify.replay {first.folder}"
    if lost:
        inputs = (
            f"The inputs of this rank could not be written to {first.folder}: {lost}. To have them, make room there"
        )
        inputs += " or start in another folder, and run the script again"
    return WrongResult(
        f"rank {me}: {what}: the result of rank {first.rank}{f' at {first.site}' * bool(first.site)} is wrong{also}. "
        f"{place[0].upper()}{place[1:]} is {found.got} on phalanx, and {found.want} on Gloo; {found.num_wrong} of "
        f"{found.num_elems} elements of {found.dtype} differ. {inputs}",
        op=op,
        seq=number,
        ranks=ranks,
        path=first.folder,
        index=found.index,
        got=found.got,
        want=found.want,
    )


def new_folder(op: str) -> str:
    """Return the path of a folder that does not exist yet, in the working folder or that for temporary files."""
    name = f"{op}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{threading.get_native_id()}-{next(_NUMBERS)}"
    base = FOLDER if os.access(".", os.W_OK) else os.path.join(tempfile.gettempdir(), FOLDER)
    return os.path.join(base, name)


def save(state: dict[str, Any], folder: str, rank: int) -> str:
    """Write a rank's file, or none; return why that failed, if it did: the wrong result is the error to raise."""
    path = os.path.join(folder, f"rank_{rank}.pt")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:  # torch's own writer reports a full disk without its name
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(path)
        cause = error if isinstance(error, OSError) else error.__context__
        return str(cause) if isinstance(cause, OSError) else class_and_message(error)
    return ""


def saved(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return arguments with copies in the place of tensors: of inputs as they were before the call."""
    if isinstance(value, torch.Tensor):
        copy = copies.get(id(value))
        return copied(value if copy is None else copy)
    return [saved(one, copies) for one in value] if isinstance(value, (list, tuple)) else value


def factor_of(reduce_op: Any) -> Any:
    return premul_factor(reduce_op) if reduce_op is not None and reduce_op.op == RedOpType.PREMUL_SUM else None
