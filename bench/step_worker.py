"""One rank of ``python -m bench.step``: trains a model of `bench.step_models` and leaves its times in a folder."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.step_models import CASES

_WARM_UP = 2


def _wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "torch":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "phalanx":
        import phalanx

        return phalanx.DistributedDataParallel(model)
    return model


def peak_mib() -> float:
    """Return the peak memory of this process, in MiB, without the pages of library files.

    Pages of library files do not count, because a forked rank maps only the pages that it uses, whereas a rank that
    imports torch itself maps all of them.
    """
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
    return (int(sizes["VmHWM"]) - int(sizes["RssFile"])) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--backend", default="", help="of the process group; none if empty")
    parser.add_argument("--ddp", default="", help="torch or phalanx; none if empty")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for rank_<N>.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.backend:
        dist.init_process_group(given.backend)
    case = CASES[given.case]
    model, (inputs, targets) = _wrap(case.build(), given.ddp), case.batch()
    optimizer = case.optimizer(model.parameters(), lr=1e-3) if case.optimizer else None
    model.train(optimizer is not None)
    seconds = []
    for _ in range(_WARM_UP + given.steps):
        begin = time.perf_counter()
        with torch.set_grad_enabled(optimizer is not None):
            outputs = model(inputs)
            if optimizer is not None:
                optimizer.zero_grad()
                nn.functional.cross_entropy(outputs, targets).backward()
                optimizer.step()
        seconds.append(time.perf_counter() - begin)
    if given.backend:
        dist.destroy_process_group()
    found = {"seconds": seconds[_WARM_UP:], "peak_mib": peak_mib()}
    (given.out / f"rank_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
