"""ShardedOptimizer: every rank keeps and steps its shard of the optimizer's state (ZeRO stage 1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx._rank_group import RankGroup, group_or_world
from phalanx.parallel.layout import flat, shaped
from phalanx.parallel.shared_memory import shared_tensor

# Optimizers that treat every element by itself: a parameter may be cut anywhere.
_ELEMENTWISE = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
}
# Kernels treat the last elements of a tensor otherwise than full vectors, with other rounding: shards are cut where
# vectors end, at any width and element size.
_CUT_ELEMS = 128
_ALIGN_ELEMS = 64


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one rank steps of a parameter: all of it, or the elements ``[start, stop)`` in the order of its memory."""

    number: int  # of the piece, the same on all ranks
    parameter: nn.Parameter
    index: int  # of the parameter, in the order of the plain optimizer
    owner: int  # rank in the group
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.parameter.numel()

    def memory_of(self, tensor: Tensor) -> Tensor:
        """View this piece of a tensor laid out like the parameter, flat."""
        return flat(tensor)[self.start : self.stop]

    def of(self, tensor: Tensor) -> Tensor:
        """View this piece of a tensor laid out like the parameter; the whole one keeps its shape."""
        return tensor.detach() if self.is_whole else self.memory_of(tensor)


class ShardedOptimizer(optim.Optimizer):
    """An optimizer whose state is divided among the ranks: each steps its shard, then all get all parameters.

    Use it with DistributedDataParallel, in place of ``optimizer_class(params, ...)``. The parameters come out the same,
    bit for bit where the optimizer works element by element (SGD, Adam, AdamW and most others) and runs one thread;
    parameters are then cut so that shards are equal. Other optimizers get whole parameters.

    Args:
        optimizer_class: A class of torch.optim, or one like them.
        params: Parameters, or groups of them, as for `optimizer_class`; the same on all ranks. They move into one
            buffer per dtype and device.
        process_group: The ranks to divide among, by default the whole world.
        share_parameters: Let the parameters live once in memory that all ranks of the host share, on the CPU: a step
            then ends with a barrier instead of copies. Whatever else writes to parameters in place (clipping of
            weights, an average of models) must then be done by one rank alone.
        defaults: The optimizer's own arguments, ``lr=...``.

    Raises:
        RuntimeError: `share_parameters`, and the ranks are not on one host.
        ValueError: `share_parameters`, and a parameter is not on the CPU.
    Source: Rajbhandari et al. 2020 (ZeRO).
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        params: Iterable[Any],
        *,
        process_group: dist.ProcessGroup | None = None,
        share_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        self._group = group = group_or_world(process_group, "ShardedOptimizer")
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._shared = share_parameters
        self._built = False
        super().__init__(params, defaults)
        self._built = True
        self._parameters = [p for g in self.param_groups for p in g["params"]]
        self._ranges: list[list[Tensor]] = []  # of each buffer, by rank
        self._pieces: list[_Piece] = []
        cut = _CUT_ELEMS if optimizer_class in _ELEMENTWISE else 0
        for members in self._by_kind():
            self._lay_out(members, cut)
        self._own = [
            (piece, nn.Parameter(piece.of(piece.parameter))) for piece in self._pieces if piece.owner == self._rank
        ]
        by_index: dict[int, list[nn.Parameter]] = {}
        for piece, shard in self._own:
            by_index.setdefault(piece.index, []).append(shard)
        groups = []
        for outer, indices in self._groups_with_indices():
            settings = {name: value for name, value in outer.items() if name != "param_names"}
            groups.append({**settings, "params": [s for i in indices for s in by_index.get(i, [])]})
        self.optimizer = optimizer_class(groups, **defaults)
        for outer, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            for name, value in inner.items():
                outer.setdefault(name, value)  # what the optimizer has by default: schedulers look for it

    def _groups_with_indices(self) -> Iterator[tuple[dict[str, Any], range]]:
        """Yield each group with the indices of its parameters, counted through all groups."""
        first = 0
        for group in self.param_groups:
            yield group, range(first, first + len(group["params"]))
            first += len(group["params"])

    # ---- layout ----------------------------------------------------------------------------------------------------

    def _by_kind(self) -> Iterator[list[int]]:
        """Yield indices of parameters that share a buffer: those of one dtype on one device."""
        kinds: dict[Any, list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            if self._shared and parameter.device.type != "cpu":
                raise ValueError(
                    f"rank {dist.get_rank()}: ShardedOptimizer: share_parameters is for parameters on the CPU, "
                    f"got one on {parameter.device}"
                )
            kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        yield from kinds.values()

    @torch.no_grad()
    def _lay_out(self, indices: list[int], cut: int) -> None:
        """Move parameters into one buffer, equal to rank 0's, and divide it among the ranks."""
        parameters = [self._parameters[i] for i in indices]
        begins, num_elems = [], 0
        for parameter in parameters:
            begins.append(num_elems)
            num_elems += -(-parameter.numel() // _ALIGN_ELEMS) * _ALIGN_ELEMS
        first = parameters[0]
        if self._shared:
            buffer = shared_tensor(num_elems, first.dtype, self._group)
        else:
            buffer = torch.zeros(num_elems, dtype=first.dtype, device=first.device)
        views = [shaped(buffer[begin : begin + p.numel()], p) for p, begin in zip(parameters, begins, strict=True)]
        if self._rank == 0 or not self._shared:
            for parameter, view in zip(parameters, views, strict=True):
                view.copy_(parameter)
        if self._shared:
            dist.barrier(group=self._group)
        else:
            dist.broadcast(buffer, src=dist.get_global_rank(self._group, 0), group=self._group)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view
        bounds = [0, *_cuts(begins, [p.numel() for p in parameters], self._size, cut), num_elems]
        self._ranges.append([buffer[lo:hi] for lo, hi in itertools.pairwise(bounds)])
        for owner, (lo, hi) in enumerate(itertools.pairwise(bounds)):
            for index, parameter, begin in zip(indices, parameters, begins, strict=True):
                start, stop = max(lo - begin, 0), min(hi - begin, parameter.numel())
                if start < stop:
                    self._pieces.append(_Piece(len(self._pieces), parameter, index, owner, start, stop))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise NotImplementedError(
                "ShardedOptimizer: make a new one with all groups; load_state_dict keeps the state"
            )
        super().add_param_group(param_group)

    # ---- step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's shard, then bring the parameters of all ranks here. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_settings_on()
        for piece, shard in self._own:
            shard.grad = _piece_of_gradient(piece)
        if self._shared:
            dist.barrier(group=self._group)  # a slower rank may still compute with the parameters
        self.optimizer.step()
        for _, shard in self._own:
            shard.grad = None
        self._gather()
        return loss

    def _gather(self) -> None:
        if self._shared:
            dist.barrier(group=self._group)
            return
        works = [
            dist.broadcast(part, src=dist.get_global_rank(self._group, r), group=self._group, async_op=True)
            for ranges in self._ranges
            for r, part in enumerate(ranges)
            if part.numel()
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    def _pass_settings_on(self) -> None:
        """Give the learning rates and whatever else was set here to the optimizer that steps."""
        for outer, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name not in ("params", "param_names")})

    # ---- state -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer's, on every rank. Collective: all ranks must call it."""
        own: dict[int, dict[str, Any]] = {}  # by number of the piece
        for piece, shard in self._own:
            values = self.optimizer.state.get(shard, {})
            own[piece.number] = {
                name: (value.dtype if _is_elementwise(name, value, shard) else value) for name, value in values.items()
            }
        every = RankGroup(self._group).gather(own)
        shards = {piece.number: shard for piece, shard in self._own}
        state: dict[int, dict[str, Any]] = {}
        for piece in self._pieces:
            for name, value in every[piece.owner][piece.number].items():
                values = state.setdefault(piece.index, {})
                if not isinstance(value, torch.dtype):
                    values[name] = value
                    continue
                full = values.setdefault(name, torch.zeros_like(piece.parameter, dtype=value))
                if piece.owner == self._rank:
                    piece.of(full).copy_(self.optimizer.state[shards[piece.number]][name])
                dist.broadcast(
                    piece.memory_of(full), src=dist.get_global_rank(self._group, piece.owner), group=self._group
                )
        groups = [{**group, "params": list(indices)} for group, indices in self._groups_with_indices()]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shard of a whole state, saved here with any number of ranks or by the plain optimizer."""
        saved_groups = state_dict["param_groups"]
        saved_sizes, own_sizes = ([len(g["params"]) for g in groups] for groups in (saved_groups, self.param_groups))
        if saved_sizes != own_sizes:
            raise ValueError(
                f"rank {dist.get_rank()}: ShardedOptimizer.load_state_dict: groups of {saved_sizes} parameters do not "
                f"fit this optimizer's {own_sizes}"
            )
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self._pass_settings_on()
        saved_keys = [key for group in saved_groups for key in group["params"]]
        inner = self.optimizer.state_dict()
        numbers = {id(s): n for n, s in enumerate(s for g in self.optimizer.param_groups for s in g["params"])}
        inner["state"] = {}
        for piece, shard in self._own:
            values = state_dict["state"].get(saved_keys[piece.index])
            if values is not None:
                inner["state"][numbers[id(shard)]] = {
                    name: _part_of_saved(name, value, piece) for name, value in values.items()
                }
        self.optimizer.load_state_dict(inner)


def _is_elementwise(name: str, value: Any, shard: Tensor) -> bool:
    return isinstance(value, Tensor) and name != "step" and value.shape == shard.shape


def _part_of_saved(name: str, value: Any, piece: _Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name == "step" or value.shape != piece.parameter.shape:
        return value.clone()
    return piece.of(torch.empty_like(piece.parameter, dtype=value.dtype).copy_(value)).clone()


def _piece_of_gradient(piece: _Piece) -> Tensor | None:
    parameter, grad = piece.parameter, piece.parameter.grad
    if grad is None or piece.is_whole:
        return grad
    if grad.layout is not torch.strided:
        raise ValueError(
            f"rank {dist.get_rank()}: ShardedOptimizer: step() takes dense gradients, got a sparse one; "
            "make the embedding with sparse=False"
        )
    if grad.stride() != parameter.stride():
        grad = torch.empty_like(parameter).copy_(grad)
    return piece.of(grad)


def _cuts(begins: Sequence[int], numels: Sequence[int], num_shards: int, cut: int) -> list[int]:
    """Return where a buffer of tensors is cut into shards that are as equal as can be.

    Args:
        begins: Where each tensor begins in the buffer, in elements.
        numels: Elements of each tensor.
        num_shards: How many shards, at least 1; there is one cut less.
        cut: A tensor may be cut at multiples of this from its own start; 0: only between tensors.
    """
    total = sum(numels)
    cuts: list[int] = []
    for shard in range(1, num_shards):
        want = total * shard // num_shards
        at, place = 0, 0
        for begin, numel in zip(begins, numels, strict=True):
            inside = want - at
            if inside <= numel:
                whole = numel if 2 * inside >= numel else 0
                place = begin + (min(round(inside / cut) * cut, numel) if cut else whole)
                break
            at += numel
        cuts.append(max(place, cuts[-1] if cuts else 0))
    return cuts
