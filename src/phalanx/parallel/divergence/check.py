"""`check_replicas`: tests that all ranks hold the same model and optimizer state, and names the tensor that differs.

Ranks compare a digest of each 4 MiB of each tensor, then of each 64 KiB of the first tensor that differs, and finally
the bytes of the first 64 KiB that differ. If a rank gets an error while it makes its digests, the ranks exchange that
error along with the digests, and all ranks raise it. If only that rank raised the error, its next collective would be
paired with a collective of the comparison on the other ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._errors import ReplicaMismatch
from phalanx._text import class_and_message, listed, named
from phalanx._torch.tensors import is_dtensor
from phalanx.checkpoint.state.digest import bytes_of, digests
from phalanx.parallel.divergence.replicated import (
    Entry,
    buffers,
    optimizer_state,
    other_parameters,
    parameters,
)
from phalanx.wire.rank_group import RankGroup, group_with_this_rank

_COARSE_BYTES, _FINE_BYTES = 4 << 20, 64 << 10  # bytes per digest: of all tensors, and of the tensor that differs
_MOST_NAMED = 3
_MOST_WORDS = 200  # characters kept of torch's error, which may fill pages
_SHARED = (TypeError, ValueError)
_SHARED_BY_NAME: dict[str, type[Exception]] = {kind.__name__: kind for kind in _SHARED}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first tensor that is not the same on all ranks, and how it differs.

    Attributes:
        tensors: Names of all tensors that differ, in the model's order.
        ranks: Ranks in the group that differ from the majority; all ranks if there is no majority.
        how: Kind of the first tensor's difference: "value", "NaN", "shape", "dtype" or "missing".
        words: Clause that states the difference.
    """

    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    how: str
    words: str


def check_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Raise an error on every rank if any rank's copy of the model or of the optimizer's state differs by a bit.

    Every rank must call this between two steps, on any backend. The comparison covers the parameters (also those that
    only the optimizer has), the buffers of the ``state_dict``, the learning rates, and the tensors and numbers of the
    optimizer's state. Ranks may differ in the running statistics of a batch norm that is not synchronized, in the
    tensors that the model tells DistributedDataParallel to ignore, and in the state of a ZeroRedundancyOptimizer, which
    is divided.

    Args:
        model: Model, wrapped or not.
        optimizer: Optimizer whose state is compared, too.
        group: Group of the ranks that each hold a copy; by default all ranks.

    Raises:
        ReplicaMismatch: A tensor differs; the error names the first such tensor, the ranks that differ from the
            majority, and how they differ.
        ValueError: There is no process group yet, this rank is not in the group, or any rank has a DTensor, which ranks
            hold in parts.
        TypeError: The model or the optimizer of any rank has the wrong type.
        RuntimeError: Any rank has a tensor that can't be read, such as a nested or a fake tensor; the error names the
            tensor.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> phalanx.check_replicas(model, optimizer)
    """
    group = group_with_this_rank(group, "check_replicas")
    difference = first_difference(_entries(model, optimizer), group)
    if difference is not None:
        ranks = tuple(dist.get_global_rank(group, rank) for rank in difference.ranks)
        raise ReplicaMismatch(
            f"check_replicas: the ranks' copies differ: {difference.words}",
            op="check_replicas", ranks=ranks, tensors=difference.tensors, how=difference.how,
        )  # fmt: skip


def _entries(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Entry]:
    """Yield the tensors that must be the same on all ranks; raise an error for a DTensor, which ranks hold in parts."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_replicas: model must be a torch.nn.Module, got {type(model).__name__}")
    entries = [parameters(model), buffers(model)]
    if optimizer is not None:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
            raise TypeError(
                f"check_replicas: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}: call "
                "check_replicas(model, optimizer)"
            )
        entries += [other_parameters(model, optimizer), optimizer_state(model, optimizer, lambda _: False)]
    for entry in itertools.chain(*entries):
        if (tensor := entry.fetch()) is not None and is_dtensor(tensor):
            raise ValueError(
                f"check_replicas: {entry.name} is a DTensor, of which each rank has a part: pass a model whose "
                "parameters all ranks hold whole"
            )
        yield entry


def first_difference(entries: Iterable[Entry], group: dist.ProcessGroup) -> Difference | None:
    """Compare every bit of the entries. Every rank of the group must call this, and gets the same result.

    If one rank gets an error while it iterates over its entries, all ranks raise that error. If only that rank raised
    it, its next collective would be paired with a collective of the comparison on the other ranks.

    Raises:
        RuntimeError: A rank could not read a tensor.
        TypeError, ValueError: A rank got this error while it iterated over its entries.
    """
    ranks = RankGroup(group)
    own: dict[str, Tensor] = {}
    described: dict[str, tuple[str, str, bytes]] = {}
    problem: tuple[str, str] | None = None
    try:
        for entry in entries:
            if (tensor := entry.fetch()) is not None and not tensor.is_meta:
                own[entry.name] = tensor
                described[entry.name] = _description(entry.name, tensor)
    except Exception as error:
        words = str(error) if type(error) in (RuntimeError, *_SHARED) else class_and_message(error)
        problem = type(error).__name__, f"rank {dist.get_rank()}: {words}"
    every = ranks.gather((described, problem))
    for _, found in every:
        if found is not None:
            kind, words = found
            raise _SHARED_BY_NAME.get(kind, RuntimeError)(words)
    tables = [table for table, _ in every]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    return _difference(differing, tables, own, ranks, group) if differing else None


def _difference(
    differing: list[str],
    tables: list[dict[str, tuple[str, str, bytes]]],
    own: dict[str, Tensor],
    ranks: RankGroup,
    group: dist.ProcessGroup,
) -> Difference:
    """Describe how the first of the differing tensors differs."""
    first = differing[0]
    found = [table.get(first) for table in tables]
    forms = [None if one is None else one[:2] for one in found]
    if len(set(forms)) > 1:
        place, values = "", ["missing" if one is None else f"{one[1]} {one[0]}" for one in forms]
        dtypes = {one[1] for one in forms if one is not None}
        how = "missing" if None in forms else "dtype" if len(dtypes) > 1 else "shape"
    else:
        place, values = _first_element(own[first], ranks)
        how = "NaN" if any("nan" in value for value in values) else "value"
    parties: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        parties.setdefault(value, []).append(dist.get_global_rank(group, rank))
    by_rank = ", and ".join(f"{value} on {named('rank', of)}" for value, of in parties.items())
    others = differing[1:]
    more = f"; {listed(others, _MOST_NAMED)} differ{'s' * (len(others) == 1)}, too" if others else ""
    return Difference(tuple(differing), _odd_ranks(found), how, f"{first}{place} is {by_rank}{more}")


def _odd_ranks(found: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority; all ranks if there is no majority.

    The ranks that agree form a party. There is no majority if the two largest parties are of equal size.
    """
    parties = collections.Counter(found).most_common(2)
    has_majority = parties[0][1] > parties[1][1]
    return tuple(r for r, one in enumerate(found) if not has_majority or one != parties[0][0])


def _description(name: str, tensor: Tensor) -> tuple[str, str, bytes]:
    try:
        bits = bytes_of(_elements(tensor)).cpu()
        digest = digests(bits.split(_COARSE_BYTES), torch.get_num_threads())
        return str(list(tensor.shape)), _kind(tensor), digest
    except Exception as error:  # a nested or fake tensor, or one whose storage was freed
        why = next(iter(str(error).splitlines()), "")[:_MOST_WORDS]
        raise RuntimeError(f"can't read {name} to compare it: {type(error).__name__}: {why}") from error


def _elements(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor of any layout; for a quantized tensor, its integers."""
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return tensor.int_repr() if tensor.is_quantized else tensor


def _kind(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, with scale and zero point if it is quantized."""
    name = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_quantized:
        return name
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{name} (scale {tensor.q_scale()!r}, zero point {tensor.q_zero_point()})"
    of_channels = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
    digest = digests([bytes_of(values).cpu() for values in of_channels])
    return f"{name} (scales {digest[:4].hex()}, zero points {digest[16:20].hex()})"


def _first_element(tensor: Tensor, ranks: RankGroup) -> tuple[str, list[str]]:
    """Return the place of the first element that differs, and its value on each rank."""
    tensor = _elements(tensor)
    bits = bytes_of(tensor)
    every = ranks.gather(digests(bits.cpu().split(_FINE_BYTES)))
    at = next(
        at for at in range(0, len(every[0]), 16) if len({digest[at : at + 16] for digest in every}) > 1
    )  # offset of the digest of the first piece that differs
    size = tensor.element_size()
    first = at // 16 * _FINE_BYTES // size
    part = bits[first * size : first * size + _FINE_BYTES].clone()
    parts = ranks.gather_tensor(part.to(ranks.device))
    differs = torch.stack([one != parts[0] for one in parts]).any(0).view(-1, size).any(1)
    offset = int(differs.nonzero()[0])
    elements = [one[offset * size : (offset + 1) * size].cpu() for one in parts]
    words = [f"bits 0x{bytes(element.tolist())[::-1].hex()}" for element in elements]
    try:
        values = [repr(element.view(tensor.dtype).item()) for element in elements]
    except (NotImplementedError, RuntimeError):  # torch can't read numbers of this dtype, such as float4_e2m1fn_x2
        values = words
    else:
        if len({*values}) == 1:  # the values look equal, such as NaNs with different bits
            values = [f"{value} ({word})" for value, word in zip(values, words, strict=True)]
    index = torch.unravel_index(torch.tensor(first + offset), tensor.shape)
    return f" at [{', '.join(str(int(i)) for i in index)}]" if tensor.dim() else "", values
