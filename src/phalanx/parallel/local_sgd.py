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
from phalanx.parallel.hosts import HostGroups, gather_from_all, pieces_of, share_out
from phalanx.parallel.layout import shaped

_WIDE = (torch.float32, torch.float64)


def nesterov(params: list[nn.Parameter]) -> optim.Optimizer:
    """Return the outer optimizer of DiLoCo: SGD with learning rate 0.7 and Nesterov momentum 0.9."""
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """Lets hosts meet every `every` steps instead of averaging gradients between them at each.

    Within a host, ranks train together at every step, as by DistributedDataParallel over the group of the host. Call
    ``step()`` after ``optimizer.step()``, on every rank; after a meeting, parameters have the same bits on all ranks
    (whose processors are of one kind).
    Make it when the model has its first weights: those of rank 0 of the group are copied to all.

    Of memory it takes one copy of the parameters, another while ranks meet, and the outer optimizer's state.

    Args:
        params: What is trained, such as ``model.parameters()``; or tensors that share its memory, such as the local
            shards of FSDP2's DTensors, with the group of ranks that hold the same shard.
        every: Steps from one meeting to the next, at least 1.
        process_group: What `host_groups` returned; or ranks each of which trains by itself; by default the whole
            world, likewise.
        outer_optimizer: Makes the optimizer that steps when hosts meet, given parameters; by default that of DiLoCo.
            None: parameters become their mean, which is local SGD.
        warmup_steps: So many first steps are averaged each, plainly.
        compress: ``"bf16"`` halves what crosses: the way gone is rounded, and what rounding left out is added to the
            next one, so nothing is lost but what the sum of the hosts itself rounds.
        buffers: Averaged over all ranks when they meet, such as ``model.buffers()``; integers stay as they are.

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
        self.num_steps = 0
        """Steps taken since the beginning."""
        self.num_steps_apart = 0
        """Steps taken since the last meeting."""
        self._groups = process_group
        parameters = [p.detach() for p in params]
        averaged = [b.detach() for b in buffers if b.is_floating_point()]
        problem = _problem_of(parameters, every, warmup_steps, compress)
        self._verify(problem, (every, warmup_steps, compress, outer_optimizer is None), [*parameters, *averaged])
        self._windows = [_Window(members, self._groups, compress) for members in _by_kind(parameters)]
        self._buffers = _by_kind(averaged)
        self._start_alike(parameters + averaged)
        self.outer_optimizer = outer_optimizer and outer_optimizer([p for w in self._windows for p in w.starts])
        """Steps from the common start; give it to a scheduler to change its learning rate."""

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
        """Copy parameters and buffers from rank 0 of the group, over the slow link once for each host."""
        groups = self._groups
        for members in _by_kind(tensors):
            flat, views = _empty_like(members)
            torch._foreach_copy_(views, members)
            if groups.across is not None and groups.rail == 0:
                dist.broadcast(flat, src=dist.get_global_rank(groups.across, 0), group=groups.across)
            share_out([flat], groups)
            torch._foreach_copy_(members, views)
        for window in self._windows:
            window.begin()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step of the inner optimizer; True if the hosts have met after it. Every rank calls it.

        Raises:
            ValueError: The hosts come to this meeting after different numbers of steps.
        """
        self.num_steps += 1
        self.num_steps_apart += 1
        warming_up = self.num_steps <= self.warmup_steps
        if not warming_up and self.num_steps_apart < self.every:
            return False
        self._meet(outer=not warming_up)
        return True

    def sync(self) -> bool:
        """Meet now, as at the end of training; False if no step was taken since the last meeting.

        Every rank calls it, after the same number of steps; else it raises as `step` does.
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
            torch._foreach_copy_(window.members, [p.detach() for p in window.starts])
        for members in self._buffers:
            self._average_buffers(members)
        self.num_steps_apart = 0

    def _verify_steps(self) -> None:
        """Raise if hosts have taken different numbers of steps: their windows would end apart from then on."""
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
        torch._foreach_copy_(views, members)
        if groups.host is not None:  # ranks of a host have each seen their own samples
            dist.all_reduce(flat, group=groups.host)
        pieces = pieces_of(flat, groups)
        if groups.across is not None:
            dist.all_reduce(pieces[groups.rail], group=groups.across)
        share_out(pieces, groups)
        flat.div_(groups.num_ranks)
        torch._foreach_copy_(members, views)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; with model and optimizer it resumes in the middle of a window, to the bit.

        Between two meetings each rank's state is its own, and only as many ranks can load it as have saved.
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
        """Go on from a state; load the model's as well. What rounding left out is dropped if hosts are others now.

        Raises:
            ValueError: The state is of other parameters, or of another kind of outer optimizer.
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
    """Parameters of one dtype on one device, and where they stood when the window began.

    Attributes:
        members: The model's own.
        start: Where they stood, flat: the one copy.
        starts: Views of it, as parameters for the outer optimizer.
        left_out: What rounding left out of this rail's piece at the last meeting; None without compression.
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
        """Let the window start where the parameters are now."""
        torch._foreach_copy_([p.detach() for p in self.starts], self.members)

    def average_way(self) -> Tensor:
        """Return start minus now, flat, averaged over the hosts by the number of their ranks."""
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
    """Return what is wrong with the arguments, or nothing."""
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
    """Return a flat tensor for all members, and the view of it for each."""
    num_elems = sum(t.numel() for t in members)
    flat = torch.empty(num_elems, dtype=members[0].dtype, device=members[0].device)
    return flat, _views(flat, members)


def _views(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([t.numel() for t in members])
    return [shaped(part, member) for part, member in zip(parts, members, strict=True)]


def _to_bytes(tensor: Tensor | None) -> bytes | None:
    """Return what no other rank has: a checkpoint saves bytes for each rank, and tensors once for all if alike."""
    return None if tensor is None else tensor.cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype) if data else torch.empty_like(like)
