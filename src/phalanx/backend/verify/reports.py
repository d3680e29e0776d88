"""Reports wrong results, to the ranks and in files, and prints at the end how many calls were verified."""

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
"""Folder, inside the working folder, in which the inputs of wrong results are saved."""

_NUMBERS = itertools.count(1)  # a rank may find several wrong results in one second


@dataclass
class Tally:
    """Counts of the operations that this process has called on verified groups; rank 0 prints them when it ends.

    Attributes:
        num_called: Number of collectives and receives.
        num_repeated: Number of these calls that were repeated on Gloo.
        num_wrong: Number of wrong results, of any rank.
        is_begun: Whether this process will print the counts.
    """

    num_called: int = 0
    num_repeated: int = 0
    num_wrong: int = 0
    is_begun: bool = False

    def begin(self, rank: int) -> None:
        """Print the counts when this process ends, if it is rank 0 of the world."""
        if rank == 0 and not self.is_begun:
            self.is_begun = True
            multiprocessing.util.Finalize(
                None, self._say, exitpriority=0
            )  # children of multiprocessing run finalizers, but not functions that are registered with atexit

    def _say(self) -> None:
        num_wrong = f"{self.num_wrong} {plural(self.num_wrong, 'result')} differed" if self.num_wrong else ""
        outcome = f"; {num_wrong or 'every result agreed'}" if self.num_repeated else ""
        calls = f"{self.num_repeated} of {self.num_called} {plural(self.num_called, 'operation')}"
        say_once(f"PHALANX_VERIFY: rank 0 repeated {calls} on Gloo{outcome}")


tally = Tally()


@dataclass(frozen=True)
class Told:
    """A rank's report of its wrong result to the other ranks."""

    rank: int
    site: str
    folder: str
    finding: Finding


def error_of(
    me: int, what: str, op: str, number: int, first: Told, ranks: tuple[int, ...], size: int, lost: str
) -> WrongResult:
    """Return the error that each rank raises for a wrong result; `lost` says why this rank's inputs are not saved."""
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
            f"The inputs of this rank could not be written to {first.folder}: {lost}. To save them, free space there"
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
    """Return the path of a folder that does not exist yet, in the working folder or the folder for temporary files."""
    name = f"{op}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{threading.get_native_id()}-{next(_NUMBERS)}"
    base = FOLDER if os.access(".", os.W_OK) else os.path.join(tempfile.gettempdir(), FOLDER)
    return os.path.join(base, name)


def save(state: dict[str, Any], folder: str, rank: int) -> str:
    """Write a rank's file. If that fails, leave no file and return the reason.

    Raises nothing itself, because the caller is about to raise the error about the wrong result.
    """
    path = os.path.join(folder, f"rank_{rank}.pt")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:  # the error of torch's own writer would not mention a full disk
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(path)
        cause = error if isinstance(error, OSError) else error.__context__
        return str(cause) if isinstance(cause, OSError) else class_and_message(error)
    return ""


def saved(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return the arguments with copies in place of tensors; copies of inputs hold the values before the call."""
    if isinstance(value, torch.Tensor):
        copy = copies.get(id(value))
        return copied(value if copy is None else copy)
    return [saved(one, copies) for one in value] if isinstance(value, (list, tuple)) else value


def factor_of(reduce_op: Any) -> Any:
    return premul_factor(reduce_op) if reduce_op is not None and reduce_op.op == RedOpType.PREMUL_SUM else None
