"""Repeats an operation whose result was wrong: ``phalanx run --nproc-per-node N -m phalanx.backend.verify.replay``.

Each rank reads its inputs from the folder that `phalanx.WrongResult` named. The operation is verified again, so if the
result is wrong again, the same error is raised; if it is right, a printed line says so. A message is sent from rank 0
to rank 1.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Any

import torch
import torch.distributed as dist

from phalanx import _env, _torch
from phalanx._command_line import UsageError
from phalanx._text import class_and_message
from phalanx.backend.calls.collectives import UNSET, Blocking
from phalanx.backend.types import RedOpType

_KEYS = {"method", "args", "world_size", "call"}  # in every call that `proof` and `messages` save


def main(words: list[str]) -> int:
    """Run the command on one rank; return 2 for a usage error."""
    try:
        if len(words) != 1 or not os.path.isdir(words[0]):
            raise UsageError(f"pass the folder that the error named; got {shlex.join(words) or 'nothing'}")
        _env.update({_env.VERIFY_VARIABLE: "gloo"})
        dist.init_process_group("phalanx")
        _replay(words[0])
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def _replay(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    saved = sorted(int(found[1]) for name in os.listdir(folder) if (found := re.fullmatch(r"rank_(\d+)\.pt", name)))
    if not saved:
        raise UsageError(f"{folder!r} holds no inputs of a call (rank_0.pt and so on)")
    state = _read(folder, rank if rank in saved else saved[0])
    if state["world_size"] != size:
        raise UsageError(f"the call was made by {state['world_size']} ranks, but this run has {size}")
    if state["method"] == "recv":
        tensor = state["args"][0]
        dist.send(tensor, 1) if rank == 0 else dist.recv(torch.empty_like(tensor), 0)
        dist.barrier()
    else:
        _call(state)
    if rank == 0:
        print(f"{state['call']}: the result is right this time")


def _read(folder: str, rank: int) -> dict[str, Any]:
    path = os.path.join(folder, f"rank_{rank}.pt")
    try:
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch passes on whatever its readers raise
        raise UsageError(f"{path!r} can't be read: {class_and_message(error)[:200]}") from None
    if not isinstance(loaded, dict) or not loaded.keys() >= _KEYS:
        raise UsageError(f"{path!r} holds no inputs of a call")
    return loaded


def _call(state: dict[str, Any]) -> None:
    group: Any = dist.group.WORLD
    if state["method"] == "average_coalesced":
        group.average_coalesced(*state["args"])
        return
    options = Blocking(UNSET, root=state["root"])
    if state["reduce_op"] == "PREMUL_SUM":
        options.reduceOp = _torch.make_premul_sum(state["factor"])
    elif state["reduce_op"]:
        options.reduceOp = dist.ReduceOp(getattr(RedOpType, state["reduce_op"]))
    group.run(state["method"], *state["args"], options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
