"""ZeroRedundancyOptimizer: every rank keeps and steps its shard of the optimizer's state (ZeRO stage 1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

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


class ZeroRedundancyOptimizer(optim.Optimizer, Joinable):
    """torch's ZeroRedundancyOptimizer: the optimizer's state is divided among the ranks, and each steps its shard.

    Use it with DistributedDataParallel, in place of ``optimizer_class(params, ...)``. After ``step()`` every rank has
    all parameters, with the same bits as from the plain optimizer if that works element by element (SGD, Adam, AdamW
    and most others) and runs one thread; such parameters are cut, so that shards are equal. Other optimizers get whole
    parameters.

    What differs from torch's:

    - ``state_dict()`` returns the plain optimizer's state on every rank, which all ranks call together. After
      ``consolidate_state_dict(to)`` it is torch's until the next step: rank `to` has the state, and calls it alone.
    - ``load_state_dict()`` takes a state that any number of ranks has saved, or the plain optimizer.
    - ``add_param_group()`` raises NotImplementedError.

    Args:
        params: Parameters, or groups of them, as `optimizer_class` takes them; the same on all ranks.
        optimizer_class: Class from torch.optim, or one like those.
        process_group: Ranks to divide the state among; by default all.
        parameters_as_bucket_view: Accepted as in torch. The parameters move into one buffer for each dtype and device
            in any case.
        overlap_with_ddp: Accepted as in torch, but True is refused: only torch's DistributedDataParallel can overlap.
        share_parameters: Whether the parameters live in memory that all ranks of the host share, on the CPU. A step
            then ends with a barrier instead of copies, and whatever else writes to parameters in place (clipping of
            weights, an average of models) must be done by one rank alone.
        defaults: Arguments of the optimizer, such as ``lr``.

    Attributes:
        optim: Optimizer that steps this rank's shard.
        process_group: Ranks among which the state is divided.

    Raises:
        RuntimeError: `share_parameters`, and the ranks are not on one host.
        ValueError: `share_parameters` with a parameter that is not on the CPU; or `overlap_with_ddp`.

    Source: Rajbhandari et al. 2020 (ZeRO).
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        share_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        if not isinstance(optimizer_class, type):
            raise TypeError(
                f"ZeroRedundancyOptimizer: optimizer_class must be a class, got {optimizer_class!r}; right: "
                "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"
            )
        if overlap_with_ddp:
            raise ValueError(
                "ZeroRedundancyOptimizer: overlap_with_ddp is not supported; leave it out and call step() after "
                "backward(), or use torch.distributed.optim.ZeroRedundancyOptimizer, which runs on phalanx too"
            )
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = group_or_world(process_group, "ZeroRedundancyOptimizer")
        group = self.process_group
        self._consolidated: dict[str, Any] | None = None  # the whole state; empty on ranks that were not to have it
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
        self.optim: optim.Optimizer = optimizer_class(groups, **defaults)
        for outer, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
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
                    f"rank {dist.get_rank()}: ZeroRedundancyOptimizer: share_parameters is for parameters on the CPU, "
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
            buffer = shared_tensor(num_elems, first.dtype, self.process_group)
        else:
            buffer = torch.zeros(num_elems, dtype=first.dtype, device=first.device)
        views = [shaped(buffer[begin : begin + p.numel()], p) for p, begin in zip(parameters, begins, strict=True)]
        if self._rank == 0 or not self._shared:
            for parameter, view in zip(parameters, views, strict=True):
                view.copy_(parameter)
        if self._shared:
            dist.barrier(group=self.process_group)
        else:
            dist.broadcast(buffer, src=dist.get_global_rank(self.process_group, 0), group=self.process_group)
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
                "ZeroRedundancyOptimizer: make a new one with all groups; load_state_dict keeps the state"
            )
        super().add_param_group(param_group)

    # ---- step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's shard, then bring the parameters of all ranks here. Every rank calls it.

        Args:
            closure: Function that computes the loss anew and returns it; called before the gradients are looked at.
            kwargs: Further arguments of the optimizer's own ``step``.
        """
        Join.notify_join_context(self)
        self._consolidated = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_settings_on()
        for piece, shard in self._own:
            shard.grad = _piece_of_gradient(piece)
        if self._shared:
            dist.barrier(group=self.process_group)  # a slower rank may still compute with the parameters
        self.optim.step(**kwargs)
        for _, shard in self._own:
            shard.grad = None
        self._gather()
        return loss

    def _gather(self) -> None:
        if self._shared:
            dist.barrier(group=self.process_group)
            return
        works = [
            dist.broadcast(
                part, src=dist.get_global_rank(self.process_group, r), group=self.process_group, async_op=True
            )
            for ranges in self._ranges
            for r, part in enumerate(ranges)
            if part.numel()
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    def _pass_settings_on(self) -> None:
        """Give the learning rates and whatever else was set here to the optimizer that steps."""
        for outer, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name not in ("params", "param_names")})

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what steps in the place of a rank that has run out of data, in ``Join([ddp, optimizer])``."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer's, on every rank. Every rank calls it.

        Between `consolidate_state_dict` and the next step, only the rank that has the state may call it.

        Raises:
            RuntimeError: The state was consolidated on another rank.
        """
        if self._consolidated is not None:
            if not self._consolidated:
                raise RuntimeError(
                    f"rank {dist.get_rank()}: ZeroRedundancyOptimizer.state_dict: the state was consolidated on "
                    f"another rank; call consolidate_state_dict(to={self._rank}) on all ranks to have it here"
                )
            return self._consolidated
        return self._collect_state()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, whose `state_dict` then returns it. Every rank calls it.

        Args:
            to: Rank in the group that gets the state.

        Raises:
            ValueError: `to` is outside the group.
        """
        if not 0 <= to < self._size:
            raise ValueError(
                f"rank {dist.get_rank()}: ZeroRedundancyOptimizer.consolidate_state_dict: to must lie in "
                f"[0, {self._size}), got {to}"
            )
        state = self._collect_state()
        self._consolidated = state if to == self._rank else {}

    @torch.no_grad()
    def _collect_state(self) -> dict[str, Any]:
        own: dict[int, dict[str, Any]] = {}  # by number of the piece
        for piece, shard in self._own:
            values = self.optim.state.get(shard, {})
            own[piece.number] = {
                name: (value.dtype if _is_elementwise(name, value, shard) else value) for name, value in values.items()
            }
        every = RankGroup(self.process_group).gather(own)
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
                    piece.of(full).copy_(self.optim.state[shards[piece.number]][name])
                dist.broadcast(
                    piece.memory_of(full),
                    src=dist.get_global_rank(self.process_group, piece.owner),
                    group=self.process_group,
                )
        groups = [{**group, "params": list(indices)} for group, indices in self._groups_with_indices()]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole state.

        Args:
            state_dict: State that any number of ranks has saved, or the plain optimizer.

        Raises:
            ValueError: The state has other groups of parameters.
        """
        self._consolidated = None
        saved_groups = state_dict["param_groups"]
        saved_sizes, own_sizes = ([len(g["params"]) for g in groups] for groups in (saved_groups, self.param_groups))
        if saved_sizes != own_sizes:
            raise ValueError(
                f"rank {dist.get_rank()}: ZeroRedundancyOptimizer.load_state_dict: groups of {saved_sizes} "
                f"parameters do not fit this optimizer's {own_sizes}"
            )
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self._pass_settings_on()
        saved_keys = [key for group in saved_groups for key in group["params"]]
        inner = self.optim.state_dict()
        numbers = {id(s): n for n, s in enumerate(s for g in self.optim.param_groups for s in g["params"])}
        inner["state"] = {}
        for piece, shard in self._own:
            values = state_dict["state"].get(saved_keys[piece.index])
            if values is not None:
                inner["state"][numbers[id(shard)]] = {
                    name: _part_of_saved(name, value, piece) for name, value in values.items()
                }
        self.optim.load_state_dict(inner)


class _Shadow(JoinHook):
    """Lets a rank without data go on to step its shard, with the gradients that DistributedDataParallel brings it."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step()


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
            f"rank {dist.get_rank()}: ZeroRedundancyOptimizer: step() takes dense gradients, got a sparse one; "
            "make the embedding with sparse=False"
        )
    if grad.stride() != parameter.stride():
        grad = torch.empty_like(parameter).copy_(grad)
    return piece.of(grad)


def _cuts(begins: Sequence[int], numels: Sequence[int], num_shards: int, cut: int) -> list[int]:
    """Return where a buffer of tensors is cut into shards that are as equal as can be.

    Args:
        begins: Offsets of the tensors in the buffer, in elements.
        numels: Numbers of elements of the tensors.
        num_shards: Number of shards, at least 1; there is one cut less.
        cut: Number of elements from a tensor's start at multiples of which it may be cut; 0: only between tensors.
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
