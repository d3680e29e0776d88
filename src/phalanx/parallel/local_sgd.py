"""LocalSGD: hosts train by themselves and meet every so many steps, over a link too slow for every gradient.

At a meeting the way that each host has gone, start minus now, is averaged over the hosts as if it were a gradient, and
an outer optimizer steps from the common start. Where all arrive, the next window starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx._rank_group import group_or_world
from phalanx._torch import foreach_copy_
from phalanx.parallel.hosts import HostGroups, gather_from_all, pieces_of, share_out
from phalanx.parallel.layout import shaped

_WIDE = (torch.float32, torch.float64)


def nesterov(params: list[nn.Parameter]) -> optim.Optimizer:
    """Return the outer optimizer of DiLoCo: SGD with learning rate 0.7 and Nesterov momentum 0.9.

    Args:
        params: Parameters that the optimizer steps.
    """
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """Synchronizes the hosts' models every `every` steps, instead of averaging gradients between hosts in each step.

    Within a host, ranks train together in every step, as with DistributedDataParallel over the host's group. Every rank
    calls ``step()`` after ``optimizer.step()``. After a synchronization all ranks have the same parameters, bit for bit
    if their processors are of one kind. Make it when the model has its initial weights: those of rank 0 are copied to
    all ranks.

    It keeps one copy of the parameters, a second one during a synchronization, and the outer optimizer's state.

    Args:
        params: Parameters to train, such as ``model.parameters()``; or tensors that share their memory, such as the
            local shards of FSDP2's DTensors, together with the group of ranks that hold the same shard.
        every: Number of steps between two synchronizations, at least 1.
        process_group: Groups from `host_groups`, or a group whose ranks each train alone; by default all ranks, each
            alone.
        outer_optimizer: Function that makes the outer optimizer for a list of parameters; by default that of DiLoCo.
            The outer optimizer steps along the pseudo-gradient, the mean difference since the last synchronization.
            None: the parameters are averaged, which is local SGD.
        warmup_steps: Number of steps at the beginning after each of which the parameters are averaged.
        compress: "bf16" to halve the bytes between hosts; None: no compression. The pseudo-gradient is rounded, and its
            rounding error is added to the next one.
        buffers: Buffers to average over all ranks at each synchronization, such as ``model.buffers()``; integers stay
            as they are.

    Attributes:
        num_steps: Number of steps since the beginning.
        num_steps_apart: Number of steps since the last synchronization.
        outer_optimizer: Outer optimizer, whose learning rate a scheduler may change; None without one.

    Raises:
        ValueError: An argument is out of range, or differs between ranks; on every rank.

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
        self._windows = [_Window(members, self._groups, compress) for members in _by_kind(parameters)]
        self._buffers = _by_kind(averaged)
        self._start_alike(parameters + averaged)
        starts = [parameter for window in self._windows for parameter in window.starts]
        self.outer_optimizer: optim.Optimizer | None = outer_optimizer and outer_optimizer(starts)

    def _verify(self, problem: str, settings: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Raise the same error on every rank if one has a problem, or has other arguments than the first."""
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
        """Copy parameters and buffers from rank 0 of the group, which crosses the slow link once for each host."""
        groups = self._groups
        for members in _by_kind(tensors):
            flat, views = _empty_like(members)
            foreach_copy_(views, members)
            if groups.across is not None and groups.rail == 0:
                dist.broadcast(flat, src=dist.get_global_rank(groups.across, 0), group=groups.across)
            share_out([flat], groups)
            foreach_copy_(members, views)
        for window in self._windows:
            window.begin()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step of the inner optimizer, and synchronize if it is time. Every rank calls it.

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
        self._meet(outer=not warming_up)
        return True

    def sync(self) -> bool:
        """Synchronize now, as at the end of training. Every rank calls it.

        Returns:
            Whether the hosts synchronized: False if there was no step since the last synchronization.

        Raises:
            ValueError: The hosts have taken different numbers of steps.
        """
        if self.num_steps_apart == 0:
            return False
        self._meet(outer=self.num_steps > self.warmup_steps)
        return True

    @torch.no_grad()
    def _meet(self, *, outer: bool) -> None:
        self._verify_steps()
        ways = [window.average_way() for window in self._windows]
        if self.outer_optimizer is None or not outer:
            for window, way in zip(self._windows, ways, strict=True):
                window.start.sub_(way)
        else:
            for window, way in zip(self._windows, ways, strict=True):
                for start, grad in zip(window.starts, _views(way, window.members), strict=True):
                    start.grad = grad
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
        for window in self._windows:
            foreach_copy_(window.members, [p.detach() for p in window.starts])
        for members in self._buffers:
            self._average_buffers(members)
        self.num_steps_apart = 0

    def _verify_steps(self) -> None:
        """Raise if the hosts have taken different numbers of steps: their windows would no longer end together."""
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
        flat, views = _empty_like(members)
        foreach_copy_(views, members)
        if groups.host is not None:  # ranks of a host have each seen their own samples
            dist.all_reduce(flat, group=groups.host)
        pieces = pieces_of(flat, groups)
        if groups.across is not None:
            dist.all_reduce(pieces[groups.rail], group=groups.across)
        share_out(pieces, groups)
        flat.div_(groups.num_ranks)
        foreach_copy_(members, views)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank. With those of model and optimizer, training resumes bit for bit at any step.

        Between two synchronizations each rank has its own state, and only the same number of ranks can load it.
        """
        groups = self._groups
        place = [
            dist.get_rank(groups.across) if groups.across else -1,
            groups.rail,
            groups.num_hosts,
            groups.num_rails,
        ]
        # A name of each rank's own makes phalanx.checkpoint save every rank's tensors whole, as it does where names
        # differ. It could not always see that they do: it looks at a few elements of each.
        apart = {f"rank {dist.get_rank()}": torch.tensor(self.num_steps_apart)} if self.num_steps_apart else {}
        return {
            "num_steps": self.num_steps,
            "num_steps_apart": self.num_steps_apart,
            "starts": [window.start for window in self._windows],
            "outer_optimizer": self.outer_optimizer.state_dict() if self.outer_optimizer else None,
            "apart": apart,
            "left_out": [_to_bytes(window.left_out) for window in self._windows],
            "place": place,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the model's must be loaded as well. Rounding errors are dropped if the hosts have changed.

        Args:
            state_dict: State that `state_dict` returned.

        Raises:
            ValueError: The state has other parameters, or an outer optimizer where this one has none, or none where
                this one has one.
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
        for window, start, left_out in zip(self._windows, state_dict["starts"], state_dict["left_out"], strict=True):
            window.start.copy_(start)
            if window.left_out is not None:
                fits = same_place and left_out is not None
                window.left_out.copy_(_from_bytes(left_out, window.left_out)) if fits else window.left_out.zero_()


class _Window:
    """Parameters of one dtype on one device, and their values when the window began.

    Attributes:
        members: Parameters of the model.
        start: Values at the beginning of the window, in one flat tensor.
        starts: Views of `start`, as parameters for the outer optimizer.
        left_out: Rounding error of this rail's piece at the last synchronization; None without compression.
    """

    def __init__(self, members: list[Tensor], groups: HostGroups, compress: str | None) -> None:
        self.members = members
        self.start, views = _empty_like(members)
        self.starts = [nn.Parameter(view) for view in views]
        self.left_out: Tensor | None = None
        self._groups = groups
        if compress and self.start.dtype in _WIDE:
            carries = groups.across is not None
            self.left_out = torch.zeros_like(pieces_of(self.start, groups)[groups.rail] if carries else self.start[:0])

    def begin(self) -> None:
        """Begin a window with the present parameters."""
        foreach_copy_([p.detach() for p in self.starts], self.members)

    def average_way(self) -> Tensor:
        """Return the pseudo-gradient: start minus present value, averaged over all ranks, flat."""
        groups = self._groups
        way = torch.empty_like(self.start)
        for view, start, now in zip(_views(way, self.members), self.starts, self.members, strict=True):
            torch.sub(start.detach(), now, out=view)
        if groups.weight != 1:
            way.mul_(groups.weight)
        pieces = pieces_of(way, groups)
        if groups.across is not None:
            self._cross(pieces[groups.rail], groups.across)
        share_out(pieces, groups)
        return way.div_(groups.num_hosts)

    def _cross(self, piece: Tensor, across: dist.ProcessGroup) -> None:
        """Sum this rail's piece over the hosts."""
        if self.left_out is None:
            dist.all_reduce(piece, group=across)
            return
        piece.add_(self.left_out)
        rounded = piece.bfloat16()
        torch.sub(piece, rounded, out=self.left_out)
        dist.all_reduce(rounded, group=across)
        piece.copy_(rounded)


def _problem_of(parameters: list[Tensor], every: int, warmup_steps: int, compress: str | None) -> str:
    """Return what is wrong with the arguments; empty if nothing is."""
    if every < 1:
        return f"every must be at least 1, got {every}"
    if warmup_steps < 0:
        return f"warmup_steps must be at least 0, got {warmup_steps}"
    if compress not in (None, "bf16"):
        return f'compress must be None or "bf16", got {compress!r}'
    if not parameters:
        return "there are no parameters; pass model.parameters()"
    if any(hasattr(p, "placements") for p in parameters):
        return (
            "parameters are DTensors: pass their local shards, LocalSGD([p.to_local() for p in model.parameters()], "
            "every=..., process_group=groups.across), where groups.across are the ranks that hold the same shard"
        )
    if not all(p.is_floating_point() for p in parameters):
        return "parameters must be of real floating-point numbers"
    return ""


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, in order."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def _empty_like(members: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor for all members, and a view of it for each."""
    num_elems = sum(t.numel() for t in members)
    flat = torch.empty(num_elems, dtype=members[0].dtype, device=members[0].device)
    return flat, _views(flat, members)


def _views(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([t.numel() for t in members])
    return [shaped(part, member) for part, member in zip(parts, members, strict=True)]


def _to_bytes(tensor: Tensor | None) -> bytes | None:
    """Return a tensor as bytes, which a checkpoint saves for each rank, as it does not with tensors that are alike."""
    return None if tensor is None else tensor.cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype) if data else torch.empty_like(like)
