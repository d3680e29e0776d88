"""ZeroRedundancyOptimizer: every rank keeps and steps its shard of the optimizer's state (ZeRO stage 1).

Ranks share the memory of the parameters only if `share_parameters` is set, because a script in which every rank changes
parameters in place would change shared parameters several times. `state_dict` gathers the state, so a snapshot is the
same on all ranks and hosts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from phalanx.parallel.hosts import broadcast_each
from phalanx.parallel.layout import by_kind
from phalanx.parallel.pieces import CUT_ELEMS, ELEMENTWISE, Piece, cut_into_pieces, cuts, elementwise, move_into_buffer
from phalanx.wire.rank_group import RankGroup, group_or_world


class ZeroRedundancyOptimizer(optim.Optimizer, Joinable):
    """torch's ZeroRedundancyOptimizer: the optimizer's state is divided among the ranks, and each rank steps its shard.

    Use it with DistributedDataParallel, in place of ``optimizer_class(params, ...)``. After ``step()`` every rank has
    all parameters. Their bits are those of the plain optimizer if that optimizer works element by element (SGD, Adam,
    AdamW and most others) and runs in one thread. For such optimizers parameters are cut, so that all shards have about
    the same size; other optimizers get whole parameters.

    Differences from torch's:

    - ``state_dict()`` returns the plain optimizer's state on every rank, and all ranks must call it together. After
      ``consolidate_state_dict(to)``, and until the next step, ``state_dict()`` works as in torch: only rank `to` has
      the state, and only that rank calls ``state_dict()``.
    - ``load_state_dict()`` accepts a state that was saved by any number of ranks or by the plain optimizer.
    - ``add_param_group()`` raises NotImplementedError.

    Args:
        params: Parameters, or groups of them, as `optimizer_class` accepts them; the same on all ranks.
        optimizer_class: Class of the plain optimizer, from torch.optim or with the same interface.
        process_group: Group of the ranks among which the state is divided; by default all ranks.
        parameters_as_bucket_view: Ignored; the parameters move into one buffer for each dtype and device in any case.
        overlap_with_ddp: Unsupported: True raises an error, because only torch's DistributedDataParallel can overlap
            with it.
        share_parameters: Whether the parameters live in CPU memory that all ranks of the host share. A step then ends
            with a barrier instead of copies, and only one rank may write to parameters in place (to clip weights, or
            to average models).
        defaults: Arguments of the optimizer, such as ``lr``.

    Attributes:
        optim: Optimizer that steps this rank's shard.
        process_group: Ranks among which the state is divided.

    Raises:
        RuntimeError: `share_parameters` is set, and the ranks are not on one host.
        TypeError: `optimizer_class` is not a class.
        ValueError: A parameter to be shared is not on the CPU; `overlap_with_ddp` is set; or the optimizer is LBFGS.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> optimizer.step()
        >>> optimizer.consolidate_state_dict(to=0)
        >>> if session.is_main:
        ...     state = optimizer.state_dict()
        >>> optimizer.load_state_dict(state)

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
        if issubclass(optimizer_class, optim.LBFGS):
            raise ValueError(
                "ZeroRedundancyOptimizer: LBFGS looks at all parameters together, and a rank steps only its shard: use "
                "torch.optim.LBFGS(model.parameters()) itself"
            )
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = group_or_world(process_group, "ZeroRedundancyOptimizer")
        group = self.process_group
        self._consolidated: dict[str, Any] | None = None  # on the rank that gets it, the whole state; on others, {}
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._shared = share_parameters
        self._built = False
        super().__init__(params, defaults)
        self._built = True
        parameters = [p for g in self.param_groups for p in g["params"]]
        self._index_of = {p: index for index, p in enumerate(parameters)}  # index in the plain optimizer's state
        self._ranges: list[list[Tensor]] = []  # for each buffer, the ranges of the ranks
        self._pieces: list[Piece] = []  # pieces of all ranks, in the same order on each rank
        self._homes: list[tuple[nn.Parameter, Tensor]] = []  # each parameter, and its part of a buffer
        self._lay_out(CUT_ELEMS if optimizer_class in ELEMENTWISE else 0)
        own = [piece for piece in self._pieces if piece.owner == self._rank]  # at most one piece of each parameter
        self._own = {piece: nn.Parameter(piece.of(piece.parameter)) for piece in own}
        shard_of = {piece.parameter: shard for piece, shard in self._own.items()}
        groups = []
        for outer in self.param_groups:
            settings = {name: value for name, value in outer.items() if name != "param_names"}
            groups.append({**settings, "params": [shard_of[p] for p in outer["params"] if p in shard_of]})
        self.optim: optim.Optimizer = optimizer_class(groups, **defaults)
        for outer, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            for name, value in inner.items():
                outer.setdefault(name, value)  # the optimizer's defaults, which schedulers look for

    def _lay_out(self, cut: int) -> None:
        """Move the parameters, with rank 0's values, into a buffer per dtype and device; divide the buffers among
        ranks.
        """
        group, share = self.process_group, self._shared
        for parameter in self._index_of if share else ():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"rank {dist.get_rank()}: ZeroRedundancyOptimizer: share_parameters is for parameters on the CPU, "
                    f"got one on {parameter.device}"
                )
        for members in by_kind(self._index_of):
            buffer, begins = move_into_buffer(members, group, share=share)
            self._homes += [(parameter, parameter.detach()) for parameter in members]
            bounds = [0, *cuts(begins, [p.numel() for p in members], self._size, cut), buffer.numel()]
            self._ranges.append([buffer[lo:hi] for lo, hi in itertools.pairwise(bounds)])
            self._pieces += cut_into_pieces(members, begins, bounds)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise NotImplementedError(
                "ZeroRedundancyOptimizer: make a new one with all groups; load_state_dict keeps the state"
            )
        super().add_param_group(param_group)

    # ---- step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's shard, then gather the updated parameters of all ranks. Every rank must call this.

        Args:
            closure: Function that computes the loss anew and returns it; called before the gradients are used.
            kwargs: Further arguments of the plain optimizer's ``step``.

        Returns:
            The result of `closure`; None without one.

        Raises:
            ValueError: A parameter that is cut has a sparse gradient, or the memory of a shared parameter was replaced.
        """
        Join.notify_join_context(self)
        self._consolidated = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_home()
        self._pass_settings_on()
        for piece, shard in self._own.items():
            shard.grad = piece.gradient()
        if self._shared:
            dist.barrier(group=self.process_group)  # a slower rank may still compute with the parameters
        self.optim.step(**kwargs)
        for shard in self._own.values():
            shard.grad = None
        self._gather()
        return loss

    def _take_home(self) -> None:
        """Move parameters that were given other memory, as by ``parameter.data = ...``, back into their buffer.

        Raises:
            ValueError: The ranks share the parameters' memory.
        """
        for parameter, home in self._homes:
            if parameter.data_ptr() == home.data_ptr():
                continue
            if self._shared:
                raise ValueError(
                    f"rank {dist.get_rank()}: ZeroRedundancyOptimizer.step: a parameter of shape "
                    f"{list(parameter.shape)} was given memory of its own, and all ranks share one: write into it "
                    "instead, with parameter.copy_(values) under torch.no_grad()"
                )
            home.copy_(parameter)
            parameter.data = home

    def _gather(self) -> None:
        if self._shared:
            dist.barrier(group=self.process_group)
        else:
            broadcast_each((part for ranges in self._ranges for part in enumerate(ranges)), self.process_group)

    def _pass_settings_on(self) -> None:
        """Copy the learning rates and other settings to the inner optimizer, which steps the shard."""
        for outer, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name not in ("params", "param_names")})

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without data continues to step, in ``Join([ddp, optimizer])``."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return next(iter(self._index_of)).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the plain optimizer's form, on every rank. Every rank must call this.

        Between `consolidate_state_dict` and the next step, only the rank that has the state may call this method.

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
        """Gather the whole state on one rank, whose `state_dict` then returns that state. Every rank must call this.

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
        own: dict[int, dict[str, Any]] = {}  # state by parameter; a dtype stands for a tensor that is sent later
        for piece, shard in self._own.items():
            values = self.optim.state.get(shard, {})
            dtypes = {name: value.dtype for name, value in elementwise(values, shard).items()}
            own[self._index_of[piece.parameter]] = {**values, **dtypes}
        every = RankGroup(self.process_group).gather(own)
        state: dict[int, dict[str, Any]] = {}
        for piece in self._pieces:
            index = self._index_of[piece.parameter]
            for name, value in every[piece.owner][index].items():
                values = state.setdefault(index, {})
                if not isinstance(value, torch.dtype):
                    values[name] = value
                    continue
                full = values.setdefault(name, torch.zeros_like(piece.parameter, dtype=value))
                if piece.owner == self._rank:
                    piece.of(full).copy_(self.optim.state[self._own[piece]][name])
                dist.broadcast(piece.memory_of(full), group=self.process_group, group_src=piece.owner)
        groups = [{**g, "params": [self._index_of[p] for p in g["params"]]} for g in self.param_groups]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole state.

        Args:
            state_dict: State saved by any number of ranks or by the plain optimizer.

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
        for piece, shard in self._own.items():
            values = state_dict["state"].get(saved_keys[self._index_of[piece.parameter]])
            if values is not None:
                parts = {name: piece.copy_of(v) for name, v in elementwise(values, piece.parameter).items()}
                others = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items() if n not in parts}
                inner["state"][numbers[id(shard)]] = {**others, **parts}
        self.optim.load_state_dict(inner)


class _Shadow(JoinHook):
    """Steps the shard of a rank that has run out of data, with the gradients from `DistributedDataParallel.join`."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step()
