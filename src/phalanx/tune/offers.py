"""Changes to try besides ranks and threads: a flag, the optimizer's fused form, or a setting of a loader or Trainer."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import _env
from phalanx.host.cgroups import read
from phalanx.launch import rank_trial
from phalanx.record.loop import LEAST_LOADING, workers_needed
from phalanx.tune.trials import Setup

_MOST_WORKERS = 8
_COMPILING_S = 60.0
_OF_BF16 = ("amx_bf16", "avx512_bf16", "bf16")  # CPU flags for bf16 multiplication


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """A change to try.

    Attributes:
        name: The change, as the user would write it.
        setup: Setup with the change.
        needs_s: Time that the search must have left to try the change, in seconds.
        note: Reason why the user must decide on the change, even if it is faster; "" if the search may decide.
    """

    name: str
    setup: Setup
    needs_s: float = 0.0
    note: str = ""


def offers(base: Setup, facts: Mapping[str, Any], loading_share: float, memories: Sequence[str]) -> list[Offer]:
    """Return the changes to try with this script on this machine, the most promising first.

    Args:
        base: Setup to change.
        facts: Facts that rank 0 has reported about the script.
        loading_share: Share of a step spent on loading.
        memories: Values of ``--memory`` to try.
    """
    found: list[Offer] = []
    if facts["can_fuse"]:
        name = f"{facts['optimizer']}(fused=True)"
        found.append(Offer(name=name, setup=dataclasses.replace(base, fused=True)))
    if facts["trainer"] is not None:
        found += _of_trainer(base, facts, loading_share)
    elif loading_share > LEAST_LOADING and not facts["has_stream"]:  # each worker would yield all items of a stream
        found.append(_of_workers("DataLoader", base, loading_share))
    for memory in memories:
        if memory != base.memory:
            found.append(Offer(name=f"--memory {memory}", setup=dataclasses.replace(base, memory=memory)))
    return found


def _of_trainer(base: Setup, facts: Mapping[str, Any], loading_share: float) -> list[Offer]:
    found = []
    if loading_share > LEAST_LOADING:
        found.append(_of_workers("Trainer", base, loading_share))
    if facts["has_convolutions"]:
        found.append(Offer(name="Trainer(channels_last=True)", setup=_with(base, channels_last=True)))
    if any(flag in read("/proc", "cpuinfo").split() for flag in _OF_BF16):
        setup, note = _with(base, precision="bf16"), "8 bits of precision: yours to decide"
        found.append(Offer(name="Trainer(precision='bf16')", setup=setup, note=note))
    if shutil.which(_env.environment().get("CXX", "g++")):
        setup = _with(base, **{rank_trial.COMPILE: True})
        found.append(Offer(name="model.compile()", setup=setup, needs_s=_COMPILING_S))
    # A setting that the script passes itself stays as it is.
    return [offer for offer in found if offer.setup.changes[-1][0] not in facts["trainer"]]


def _of_workers(maker: str, base: Setup, loading_share: float) -> Offer:
    """Return the offer to load data in worker processes.

    There are enough workers per rank to load a batch in the time that the rank computes a step, plus headroom, but at
    most `_MOST_WORKERS`.
    """
    num_workers = _MOST_WORKERS if loading_share >= 1 else min(workers_needed(loading_share), _MOST_WORKERS)
    return Offer(name=f"{maker}(num_workers={num_workers})", setup=_with(base, num_workers=num_workers))


def _with(base: Setup, **changes: Any) -> Setup:
    return dataclasses.replace(base, changes=(*base.changes, *changes.items()))


def advice(setup: Setup, facts: Mapping[str, Any]) -> list[str]:
    """Return the lines to write into the script for a setup."""
    lines = []
    if setup.fused:
        lines.append(f"torch.optim.{facts['optimizer']}(..., fused=True)")
    changes = dict(setup.changes)
    if changes.pop(rank_trial.COMPILE, False):
        lines.append("model.compile()")
    if changes:
        maker = "DataLoader" if facts["trainer"] is None else "Trainer"
        lines.append(f"{maker}(..., {', '.join(f'{name}={value!r}' for name, value in changes.items())})")
    return lines
