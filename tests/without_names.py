"""Two ranks on a torch that lacks some of its private names: an all_reduce and two steps of training.

Reads a JSON list from stdin, whose items are lists of keys of ``_torch.NAMES``. Prints one JSON list: for each item
``[error, warnings]`` of rank 0, where an empty error means that the numbers were right.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo  # here, and not by each rank
import torch.distributed as dist

from phalanx import _torch
from phalanx._torch import lookup

_LIMIT_S = 60


def train(rank: int) -> None:
    """What is asked of a rank: sums, means of gradients, rank 0's buffers, an event of the profiler."""
    from phalanx.parallel import DistributedDataParallel

    total = torch.full((3,), rank + 1.0)
    with torch.autograd.profiler.profile() as profile:
        dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    if _torch.is_profiling.__name__ != "<lambda>":
        assert any(event.name == "phalanx:all_reduce" for event in profile.function_events)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.BatchNorm1d(1))
    model[1].running_mean.fill_(float(rank))
    model = DistributedDataParallel(model).eval()
    for _ in range(2):
        model(torch.tensor([[1.0, rank]])).sum().backward()
    grad = model.module[0].weight.grad
    assert torch.allclose(grad, torch.tensor([[2.0, 1.0]]), rtol=1e-4), grad
    assert model.module[1].running_mean.item() == 0


def run_rank(rank: int, keys: list[str], folder: str) -> None:
    """Be a rank: never returns."""
    signal.alarm(_LIMIT_S)
    gone, find = {_torch.NAMES[key].path for key in keys}, lookup._find

    def find_the_rest(path: str) -> object:
        if path in gone:
            raise ImportError(path)
        return find(path)

    lookup._find = find_the_rest
    for key in keys:
        for module in (_torch, lookup):
            vars(module).pop(key, None)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dist.init_process_group("phalanx", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
            train(rank)
            dist.destroy_process_group()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            if not isinstance(raised, ImportError):
                traceback.print_exc()
    if rank == 0:
        Path(folder, "said").write_text(json.dumps([error, [str(one.message) for one in caught]]))
    os._exit(0)


def main() -> None:
    told = []
    for keys in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(2):
                pid = os.fork()
                if pid == 0:
                    run_rank(rank, keys, folder)
                ranks.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
            said = Path(folder, "said")
            told.append(json.loads(said.read_text()) if codes == [0, 0] else [f"ranks ended with {codes}", []])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
