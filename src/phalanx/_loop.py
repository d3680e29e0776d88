"""What a training loop of one's own needs of all ranks: results together, one rank first, gradients averaged now or
later, half precision. `Session` offers it.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._errors import PhalanxError

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class LoopTools:
    """What a `Session` offers beside its attributes."""

    rank: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone; the arguments are those of the built-in ``print``."""
        if self.is_main:
            builtins.print(*values, **options)

    def barrier(self) -> None:
        """Wait until every rank has come here, at most as long as the group's timeout."""
        dist.barrier()

    def main_process_first(self, *, per_host: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context whose block runs on rank 0 first, such as a download, and then on the others.

        The others wait at most as long as the group's timeout. If the first one's block raises, theirs is not run, and
        `PhalanxError` names the error there.

        Args:
            per_host: The first of each host go first, where hosts share no files.
        """
        return _first(self.rank, self.local_rank == 0 if per_host else self.is_main)

    def gather(self, value: Any, total: int | None = None) -> Any:
        """Return the rows of all ranks' tensors together, on every rank; ranks may have different numbers of rows.

        Args:
            value: A tensor, or mappings, lists and tuples of them; what is no tensor becomes a list of what the ranks
                have. Numbers without a dimension become one row each.
            total: Rows without padding. They are then in the order in which torch's `DistributedSampler` and ours deal
                samples out, rank after rank; what a sampler has added at the end of an epoch is left out. By default
                the rows stand rank by rank.

        Raises:
            ValueError: On every rank: the ranks' values are not alike, or do not have that many rows.
        """
        on_cpu = any(name in self.backend for name in ("phalanx", "gloo", "mpi"))
        return _gather(value, total, torch.device("cpu") if on_cpu else self.device)

    @contextlib.contextmanager
    def accumulate(self, model: Any, step: int, every: int, num_steps: int | None = None) -> Iterator[bool]:
        """Let gradients of `every` passes add up, and average them over the ranks in the last of them.

        The context holds forward and backward of one pass. Divide its loss by `every`; step and zero the optimizer
        after a pass whose context was true.

        Args:
            model: In a DistributedDataParallel, ours or torch's, or of FSDP2; another only counts.
            step: Number of the pass, from 0.
            every: Passes whose gradients make one step.
            num_steps: Passes of the epoch; the last makes a step, too.

        Raises:
            ValueError: `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"accumulate: every must be at least 1, got {every}")
        averages = (step + 1) % every == 0 or step + 1 == num_steps
        with synchronizing(model, averages):
            yield averages

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Return ``torch.autocast`` on this device for "bf16" or "fp16"; for "fp32" a context that does nothing.

        Raises:
            ValueError: There is no such precision.
        """
        if precision not in _DTYPES:
            raise ValueError(f"autocast: precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
        dtype = _DTYPES[precision]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def grad_scaler(self, precision: str) -> torch.amp.GradScaler:
        """Return torch's gradient scaler, which "fp16" needs; for other precisions it passes everything through."""
        return torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")


@contextlib.contextmanager
def synchronizing(model: Any, averages: bool) -> Iterator[None]:
    """Average gradients over the ranks in this backward pass, or let them add up."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(averages)
    with contextlib.nullcontext() if averages or not hasattr(model, "no_sync") else model.no_sync():
        yield


@contextlib.contextmanager
def _first(rank: int, is_first: bool) -> Iterator[None]:
    """Run a block on the ranks that are first, then on the others; every rank calls it.

    Raises:
        PhalanxError: On the others, if the block of a first one has raised; it is not run there.
    """
    if is_first:
        try:
            yield
        except BaseException as error:
            _told(f"{type(error).__name__}: {error}")
            raise
    failures = _told("")
    if failed := [number for number, failure in enumerate(failures) if failure]:
        raise PhalanxError(
            f"rank {rank}: main_process_first: rank {failed[0]} goes first and has failed with "
            f"{failures[failed[0]]}{'' if is_first else '; the block was not run here'}. Mend what failed there",
            op="main_process_first",
            ranks=tuple(failed),
            is_victim=True,
        )
    if not is_first:
        yield


def _told(failure: str) -> list[str]:
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, failure)
    return told


def _gather(value: Any, total: int | None, device: torch.device) -> Any:
    """Return the tensors of all ranks, one after another along their first dimension, on every rank.

    Args:
        value: A tensor, or mappings, lists and tuples of them; what is no tensor becomes a list of what the ranks have.
        total: Rows that all ranks have together. They are then put in the order in which a sampler has dealt them out,
            in turns, and what comes behind is padding.

    Raises:
        ValueError: On every rank: the ranks' values differ in structure, dtype or in shape behind the first dimension,
            or do not have `total` rows.
    """
    leaves: list[Any] = []
    shape = _take_apart(value, leaves)
    world_size = dist.get_world_size()
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, (shape, [_describe(leaf) for leaf in leaves], total))
    _check(told)
    gathered: list[Any] = []
    for number, leaf in enumerate(leaves):
        of_ranks = [leaves_of_rank[number] for _, leaves_of_rank, _ in told]
        if isinstance(leaf, Tensor):
            gathered.append(_gather_tensor(leaf, [rows for rows, *_ in of_ranks], total, device))
        else:
            gathered.append([other for (other,) in of_ranks])
    return _put_together(value, iter(gathered))


def _gather_tensor(tensor: Tensor, num_rows: Sequence[int], total: int | None, device: torch.device) -> Tensor:
    rows = (tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()).to(device)
    most = max(num_rows)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in num_rows]
    dist.all_gather(parts, padded)
    if total is None:
        joined = torch.cat([part[:num] for part, num in zip(parts, num_rows, strict=True)])
    else:  # row i of rank r was dealt out as number i * ranks + r
        joined = torch.stack(parts, dim=1).flatten(0, 1)[:total]
    return joined.to(tensor.device)


def _check(told: Sequence[Any]) -> None:
    """Raise unless the ranks have values of the same kind, and as many rows as they should."""
    kinds = [(shape, [leaf[1:] if len(leaf) > 1 else None for leaf in leaves], total) for shape, leaves, total in told]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"gather: rank 0 has {kinds[0]} and rank {rank} has {kind}; they must be alike")
    total = told[0][2]
    for number in range(len(told[0][1])) if total is not None else ():
        of_ranks = [leaves[number] for _, leaves, _ in told]
        if len(of_ranks[0]) == 1:
            continue
        num_rows = [rows for rows, *_ in of_ranks]
        least = [(total - rank + len(told) - 1) // len(told) for rank in range(len(told))]
        if total < 0 or any(num < needed for num, needed in zip(num_rows, least, strict=True)):
            raise ValueError(
                f"gather: total={total} rows dealt out in turns are {least} of the ranks, and they have {num_rows}"
            )


def _describe(leaf: Any) -> tuple[Any, ...]:
    """Return rows, dtype and the rest of the shape of a tensor; of anything else itself."""
    if not isinstance(leaf, Tensor):
        return (leaf,)
    return (len(leaf) if leaf.dim() else 1, str(leaf.dtype), tuple(leaf.shape[1:]))


def _take_apart(value: Any, leaves: list[Any]) -> Any:
    """Append what is no container to `leaves`, and return how the containers nest."""
    if isinstance(value, Mapping):
        return [(repr(key), _take_apart(item, leaves)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return [_take_apart(item, leaves) for item in value]
    leaves.append(value)
    return "tensor" if isinstance(value, Tensor) else "value"


def _put_together(value: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _put_together(item, leaves) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_put_together(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)
