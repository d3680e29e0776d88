"""LocalSGD: hosts train separately and synchronize every few steps, for a link too slow to average every gradient.

A window consists of the steps between two synchronizations. `LocalSGD` keeps the flat parameters from the start of the
window. At the end of the window, each host computes its pseudo-gradient: the parameters at the window's start minus the
parameters at its end. The pseudo-gradients are averaged over the hosts. Then every rank takes the same step of an outer
optimizer along that average, from the common start, and the result is the start of the next window. So only the
averaged pseudo-gradient crosses between hosts, ranks keep the same bits, and the bf16 residual of a rail's piece stays
with that rail.

Between synchronizations ranks differ, so `state_dict` then contains an entry whose name differs on each rank. That name
makes a checkpoint save each rank's state separately and completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx._torch import foreach_copy_
from phalanx._torch.tensors import is_dtensor
from phalanx.parallel.hosts import HostGroups, cross_hosts, gather_from_all, pieces_of, share_out
from phalanx.parallel.layout import by_kind, views_of
from phalanx.wire.rank_group import group_or_world

_WIDE = (torch.float32, torch.float64)


def nesterov(params: list[nn.Parameter]) -> optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD with learning rate 0.7 and Nesterov momentum 0.9.

    Args:
        params: Parameters for the optimizer to step.
    """
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """Synchronizes the hosts' models every `every` steps, instead of averaging gradients between hosts in each step.

    Within a host, ranks train together in every step, as with DistributedDataParallel over the host's group. Every rank
    calls ``step()`` after ``optimizer.step()``. After a synchronization all ranks have the same parameters, bit for bit
    if their processors are of one kind. Create the object after the model has got its initial weights, because rank 0's
    weights are copied to all ranks.

    The object keeps a copy of the parameters, and the outer optimizer's state. A synchronization needs a second copy.

    Args:
        params: Parameters to train, such as ``model.parameters()``; or tensors that share the parameters' memory, such
            as the local shards of FSDP2's DTensors, if `process_group` is the group of ranks that hold the same shard.
        every: Number of steps between two synchronizations, at least 1.
        process_group: Groups from `host_groups`, or a group whose ranks each train separately; by default all ranks,
            each separately.
        outer_optimizer: Function that makes the outer optimizer for a list of parameters; by default DiLoCo's. With
            None the parameters are averaged, which is local SGD.
        warmup_steps: Number of steps at the beginning of training; after each of them, the parameters are averaged.
        compress: "bf16" to halve the bytes between hosts, or None. The pseudo-gradient is rounded, and the residual is
            added to the next pseudo-gradient.
        buffers: Buffers to average over all ranks at each synchronization, such as ``model.buffers()``; integer
            buffers are not averaged.

    Attributes:
        num_steps: Number of steps since the beginning.
        num_steps_apart: Number of steps since the last synchronization.
        outer_optimizer: Outer optimizer, whose learning rate a scheduler may change; None without an outer optimizer.

    Raises:
        ValueError: An argument is out of range, or differs between ranks; every rank raises the error.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> local = phalanx.LocalSGD(model.parameters(), every=2)
        >>> for _ in range(5):
        ...     model(torch.ones(4, 2)).mean().backward()
        ...     optimizer.step()
        ...     print(local.step(), end=" ")
        False True False True False
        >>> local.sync()
        True
        >>> local.load_state_dict(local.state_dict())

    Source: Stich 2018 (local SGD), Lin et al. 2018 (post-local SGD), Douillard et al. 2023 (DiLoCo).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        every: int,
        process_group: dist.ProcessGroup | HostGroups | None = None,
        outer_optimizer: Callable[[list[nn.Parameter]], optim.Optimizer] | None = nesterov,
        warmup_steps: int = 0,
        compress: str | None = None,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        if not isinstance(process_group, HostGroups):
            group = group_or_world(process_group, "LocalSGD")
            process_group = HostGroups(None, group, group.size(), 1, group.size())
        self.every = every
        self.warmup_steps = warmup_steps
        self.num_steps: int = 0
        self.num_steps_apart: int = 0
        self._groups = process_group
        parameters = [p.detach() for p in params]
        averaged = [b.detach() for b in buffers if b.is_floating_point()]
        problem = _problem_of(parameters, every, warmup_steps, compress)
        self._verify(problem, (every, warmup_steps, compress, outer_optimizer is None), [*parameters, *averaged])
        self._start_alike(parameters + averaged)
        self._windows = [_Window(members, self._groups, compress) for members in by_kind(parameters)]
        self._buffers = by_kind(averaged)
        starts = [parameter for window in self._windows for parameter in window.starts]
        self.outer_optimizer: optim.Optimizer | None = outer_optimizer and outer_optimizer(starts)

    def _verify(self, problem: str, settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Raise the same error on every rank if any rank has a problem, or has other arguments than the first rank."""
        own = (dist.get_rank(), problem, settings, [(list(t.shape), str(t.dtype)) for t in tensors])
        everyone = gather_from_all(own, self._groups)
        for rank, text, _, _ in everyone:
            if text:
                raise ValueError(f"rank {rank}: LocalSGD: {text}")
        first = everyone[0]
        for rank, _, theirs, shapes in everyone:
            names = ("every", "warmup_steps", "compress", "outer_optimizer")
            for name, one, other in zip(names, first[2], theirs, strict=True):
                if one != other:
                    raise ValueError(
                        f"LocalSGD: {name} differs between ranks: {one!r} on rank {first[0]}, {other!r} on rank "
                        f"{rank}. Give every rank the same"
                    )
            if shapes != first[3]:
                raise ValueError(
                    f"LocalSGD: parameters or buffers differ in number, shape or dtype between ranks {first[0]} and "
                    f"{rank}. Build the same model on every rank"
                )

    @torch.no_grad()
    def _start_alike(self, tensors: list[Tensor]) -> None:
        """Copy parameters and buffers from rank 0 of the group, over the slow link only once for each host."""
        groups = self._groups
        for members in by_kind(tensors):
            flat, views = _flat_copy(members)
            if groups.across is not None and groups.rail == 0:
                dist.broadcast(flat, group=groups.across, group_src=0)
            share_out([flat], groups)
            foreach_copy_(members, views)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step of the inner optimizer, and synchronize if the window is over. Every rank must call this.

        Returns:
            Whether the hosts synchronized after this step.

        Raises:
            ValueError: The hosts have taken different numbers of steps.
        """
        self.num_steps += 1
        self.num_steps_apart += 1
        warming_up = self.num_steps <= self.warmup_steps
        if not warming_up and self.num_steps_apart < self.every:
            return False
        self._synchronize(outer=not warming_up)
        return True

    def sync(self) -> bool:
        """Synchronize now, as at the end of training. Every rank must call this.

        Returns:
            Whether the hosts synchronized; False if there was no step since the last synchronization.

        Raises:
            ValueError: The hosts have taken different numbers of steps.
        """
        if self.num_steps_apart == 0:
            return False
        self._synchronize(outer=self.num_steps > self.warmup_steps)
        return True

    @torch.no_grad()
    def _synchronize(self, *, outer: bool) -> None:
        self._verify_steps()
        pseudo_gradients = [window.pseudo_gradient() for window in self._windows]
        for window, gradient in zip(self._windows, pseudo_gradients, strict=True):
            if self.outer_optimizer is None or not outer:
                window.start.sub_(gradient)
                continue
            for start, view in zip(window.starts, views_of(gradient, window.members), strict=True):
                start.grad = view
        if self.outer_optimizer is not None and outer:
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
        for window in self._windows:
            foreach_copy_(window.members, [p.detach() for p in window.starts])
        for members in self._buffers:
            self._average_buffers(members)
        self.num_steps_apart = 0

    def _verify_steps(self) -> None:
        """Raise an error if the hosts have taken different numbers of steps: their windows must end together."""
        groups, device = self._groups, self._windows[0].start.device
        most = torch.tensor([self.num_steps, -self.num_steps], device=device)
        for group in (groups.across, groups.host):
            if group is not None:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        highest, lowest = most[0].item(), -most[1].item()
        if highest != lowest:
            raise ValueError(
                f"rank {dist.get_rank()}: LocalSGD: hosts meet after different numbers of steps, {lowest} to "
                f"{highest}; this one has taken {self.num_steps}. Give all ranks the same number of batches "
                "(DistributedSampler does, with pad=True or drop_last=True), and call sync() on all or on none"
            )

    def _average_buffers(self, members: list[Tensor]) -> None:
        groups = self._groups
        flat, views = _flat_copy(members)
        if groups.host is not None:  # each rank of a host has seen different samples
            dist.all_reduce(flat, group=groups.host)
        cross_hosts(flat, groups)
        flat.div_(groups.num_ranks)
        foreach_copy_(members, views)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, from which training can resume bit for bit after any step.

        To resume, the states of the model and of its optimizer are needed, too. Between two synchronizations, each rank
        has its own state, and only the same number of ranks can load it.
        """
        groups = self._groups
        host = dist.get_rank(groups.across) if groups.across else -1
        # If a name differs on each rank, phalanx.checkpoint saves every rank's state separately. Otherwise a job of
        # another size would load rank 0's small tensors on all ranks, although they belong to one host.
        apart = {f"rank {dist.get_rank()}": torch.tensor(self.num_steps_apart)} if self.num_steps_apart else {}
        return {
            "num_steps": self.num_steps,
            "num_steps_apart": self.num_steps_apart,
            "starts": [window.start for window in self._windows],
            "outer_optimizer": self.outer_optimizer.state_dict() if self.outer_optimizer else None,
            "apart": apart,
            "left_out": [_to_bytes(window.residual) for window in self._windows],
            "place": [host, groups.rail, groups.num_hosts, groups.num_rails],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the model's state must be loaded as well. If the hosts have changed, residuals are dropped.

        Args:
            state_dict: State that `state_dict` returned.

        Raises:
            ValueError: The state has other parameters, or only one of the state and this object has an outer optimizer.
        """
        saved = [list(start.shape) for start in state_dict["starts"]]
        own = [list(window.start.shape) for window in self._windows]
        outer = state_dict["outer_optimizer"]
        if saved != own or (outer is None) != (self.outer_optimizer is None):
            raise ValueError(
                f"rank {dist.get_rank()}: LocalSGD.load_state_dict: a state of {saved} elements "
                f"{'without' if outer is None else 'with'} an outer optimizer does not fit {own} elements "
                f"{'without' if self.outer_optimizer is None else 'with'} one"
            )
        self.num_steps, self.num_steps_apart = state_dict["num_steps"], state_dict["num_steps_apart"]
        if self.outer_optimizer is not None:
            self.outer_optimizer.load_state_dict(outer)
        same_place = state_dict["place"] == self.state_dict()["place"]
        for window, start, residual in zip(self._windows, state_dict["starts"], state_dict["left_out"], strict=True):
            window.start.copy_(start)
            if window.residual is not None:
                fits = same_place and residual is not None
                window.residual.copy_(_from_bytes(residual, window.residual)) if fits else window.residual.zero_()


class _Window:
    """Parameters of one dtype on one device, and their values at the start of the window.

    Attributes:
        members: Parameters of the model.
        start: Values at the start of the window, in one flat tensor.
        starts: Views of `start`, as parameters for the outer optimizer.
        residual: Rounding error of this rail's piece at the last synchronization; None without compression.
    """

    def __init__(self, members: list[Tensor], groups: HostGroups, compress: str | None) -> None:
        self.members = members
        self.start, views = _flat_copy(members)
        self.starts = [nn.Parameter(view) for view in views]
        self.residual: Tensor | None = None
        self._groups = groups
        if compress and self.start.dtype in _WIDE:
            carries = groups.across is not None
            self.residual = torch.zeros_like(pieces_of(self.start, groups)[groups.rail] if carries else self.start[:0])

    def pseudo_gradient(self) -> Tensor:
        """Return the start minus the current parameters, averaged over all ranks, as a flat tensor."""
        groups = self._groups
        gradient = torch.empty_like(self.start)
        for view, start, now in zip(views_of(gradient, self.members), self.starts, self.members, strict=True):
            torch.sub(start.detach(), now, out=view)
        if groups.weight != 1:
            gradient.mul_(groups.weight)
        cross_hosts(gradient, groups, self._cross)
        return gradient.div_(groups.num_hosts)

    def _cross(self, piece: Tensor, across: dist.ProcessGroup) -> None:
        """Sum this rail's piece over the hosts, in place."""
        if self.residual is None:
            dist.all_reduce(piece, group=across)
            return
        piece.add_(self.residual)
        rounded = piece.bfloat16()
        torch.sub(piece, rounded, out=self.residual)
        dist.all_reduce(rounded, group=across)
        piece.copy_(rounded)


def _problem_of(parameters: list[Tensor], every: int, warmup_steps: int, compress: str | None) -> str:
    """Return what is wrong with the arguments, as a clause; empty if nothing is wrong."""
    if every < 1:
        return f"every must be at least 1, got {every}"
    if warmup_steps < 0:
        return f"warmup_steps must be at least 0, got {warmup_steps}"
    if compress not in (None, "bf16"):
        return f'compress must be None or "bf16", got {compress!r}'
    if not parameters:
        return "there are no parameters; pass model.parameters()"
    if any(map(is_dtensor, parameters)):
        return (
            "parameters are DTensors: pass their local shards, LocalSGD([p.to_local() for p in model.parameters()], "
            "every=..., process_group=groups.across), where groups.across are the ranks that hold the same shard"
        )
    if not all(p.is_floating_point() for p in parameters):
        return "parameters must be of real floating-point numbers"
    return ""


def _flat_copy(members: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors of one kind into a flat tensor; return the flat tensor, and a view of it for each tensor."""
    num_elems = sum(t.numel() for t in members)
    flat = torch.empty(num_elems, dtype=members[0].dtype, device=members[0].device)
    views = views_of(flat, members)
    foreach_copy_(views, members)
    return flat, views


def _to_bytes(tensor: Tensor | None) -> bytes | None:
    """Return a tensor as bytes, because a checkpoint saves bytes for every rank, but a tensor only once."""
    return None if tensor is None else tensor.cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype) if data else torch.empty_like(like)
