"""`Shards`: divides an optimizer's step among a host's ranks, in blocks that fit into the caches, with the same bits.

Each large parameter is cut into a range per rank, and each range into blocks of 65,536 elements. While the optimizer
steps, the blocks are its parameters. So when the optimizer passes over a block several times, the block stays in the
caches. Cuts lie at multiples of 128 elements, and only optimizers that treat each element separately are divided, so no
bit changes.

The state lies in memory that the ranks of the host share. Each rank has its own parameters, and receives the other
ranks' results through one all_gather per parameter. So every rank has the whole state at any time, and checkpoints,
snapshots and callbacks need not know of the division. Parameters are not shared, because callbacks and models may write
to them.

**Why this is not** `ZeroRedundancyOptimizer`, although both use the same code for cuts, layout and shared memory
(`parallel.pieces`, `parallel.layout`, `parallel.shared_memory`). `ZeroRedundancyOptimizer` is an optimizer of its own:
it owns its parameters' memory, is made before the first step, and accepts no parameter groups later. Each element of
its state lies on one rank only, on any number of hosts. So its state_dict() is a collective that copies the state,
which takes 1.5 s for 16 million parameters of AdamW on two ranks of a busy machine. `Shards` divides the script's own
optimizer, once the first steps have shown that dividing pays. Hooks, schedules, groups and states that a script adds,
loads or clears keep working, `end` undoes the division, and state_dict() takes 0.1 ms, so a Trainer can keep a snapshot
of every step. `Shards` works only on one host, and each rank needs memory for the whole state until the step is
divided, which ZeRO avoids. `Shards` cuts each parameter into equal ranges, because the averaging of gradients returns
such ranges (`Division`), while ZeRO balances one flat buffer, whose cuts fall anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx import _torch
from phalanx._torch.tensors import is_one_range
from phalanx.host.cgroups import known_memory
from phalanx.parallel.layout import flat, laid_out_like, packed, shaped
from phalanx.parallel.pieces import CUT_ELEMS, elementwise
from phalanx.parallel.shared_memory import shared_tensor

_LEAST_ELEMS = 1 << 17  # smaller parameters fit the caches: stepping them is faster than exchanging them
_BLOCK_ELEMS = 1 << 16
_LEAST_ROOM = 4  # each memory limit must leave room for this many times the shared memory


class Shards:
    """Divides the steps of an optimizer whose parameters and gradients are equal on all ranks of one host.

    Each large parameter is cut into a range for each rank. A rank steps its own range block by block, and receives the
    other ranks' results. The state of such a parameter lies in memory that all ranks share, so each rank's optimizer
    has the whole state, where checkpoints and callbacks find it. Every rank steps all other parameters whole. `end`
    gives each rank a private copy of the state again.

    No rank may read the state while another rank steps. So between reading the state and the next step, the ranks must
    wait for each other, as they do when they average gradients.

    Args:
        optimizer: Optimizer that treats each element separately.
        parameters: Parameters to divide, as `divisible` returns them; the same on every rank.
        group: Ranks that train together; None: only this process.

    Raises:
        RuntimeError: The ranks can't share memory; every rank raises the error.
    """

    def __init__(
        self, optimizer: optim.Optimizer, parameters: Collection[nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self._optimizer, self._group = optimizer, group
        self._rank, self._size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        states = {parameter: _elementwise(optimizer, parameter) for parameter in parameters}
        places = _places([(p, value) for p, state in states.items() for value in state.values()], group)
        self._cuts = {
            p: _Cut(p, self._own_range(p), {name: next(places) for name in state}) for p, state in states.items()
        }

    def _own_range(self, parameter: nn.Parameter) -> range:
        """Return the elements that this rank steps: equally many on each rank, and the remainder on the last rank."""
        length = self._length(parameter)
        is_last = self._rank == self._size - 1
        return range(self._rank * length, parameter.numel() if is_last else (self._rank + 1) * length)

    def _length(self, parameter: nn.Parameter) -> int:
        return parameter.numel() // (self._size * CUT_ELEMS) * CUT_ELEMS

    def length(self, parameter: nn.Parameter) -> int:
        """Return how many elements of a parameter each rank steps, without the remainder; 0: every rank steps all."""
        return self._length(parameter) if parameter in self._cuts else 0

    def needs_whole(self) -> bool:
        """Return whether this rank's next step reads more of an averaged gradient than this rank's range."""
        optimizer = self._optimizer
        own_step = vars(optimizer).get("step")  # set by a scheduler, whose wrapper reads no gradients, or by the script
        return (
            has_hooks(optimizer)
            or (own_step is not None and getattr(own_step, "__wrapped__", None) is not type(optimizer).step)
            or not all(cut.fits(optimizer.state) for cut in self._cuts.values())
        )

    def step(self, step: Callable[[], object]) -> None:
        """Step the optimizer by calling `step`, then gather the other ranks' results. Every rank must call this."""
        with _hooks_outside(self._optimizer):
            self._step(step)

    @torch.no_grad()
    def _step(self, step: Callable[[], object]) -> None:
        state, groups, cuts = self._optimizer.state, self._optimizer.param_groups, self._cuts
        whole = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = [b for p in parameters for b in (cuts[p].enter(state) if p in cuts else (p,))]
            step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            for cut in cuts.values():
                cut.leave(state)
        for parameter in cuts if self._group is not None else ():
            self._exchange(flat(parameter), self._length(parameter))

    def _exchange(self, elements: Tensor, length: int) -> None:
        own = slice(self._rank * length, (self._rank + 1) * length)
        end = self._size * length
        dist.all_gather_into_tensor(elements[:end], elements[own], group=self._group)
        if end < len(elements):
            dist.broadcast(elements[end:], group=self._group, group_src=self._size - 1)

    def end(self) -> None:
        """Give this rank a private copy of the state. Other ranks need not call this at the same time."""
        for cut in self._cuts.values() if self._group is not None else ():
            cut.let_go(self._optimizer.state.get(cut.parameter, {}))
        self._cuts = {}


def has_hooks(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer has hooks before or after its step, its own or global ones."""
    own = (getattr(optimizer, name, None) for name in _torch.HOOKS_OF_OPTIMIZER)
    return any((*own, _torch.global_pre_hooks_of_optimizers, _torch.global_post_hooks_of_optimizers))


@contextlib.contextmanager
def _hooks_outside(optimizer: optim.Optimizer) -> Iterator[None]:
    """Call an optimizer's hooks before and after the body, where they see whole parameters, and not in the body.

    These hooks were registered after the division, maybe on one rank only; an optimizer that had hooks before is not
    divided.
    """
    own_pre, own_post = (getattr(optimizer, name, {}) for name in _torch.HOOKS_OF_OPTIMIZER)
    all_pre, all_post = _torch.global_pre_hooks_of_optimizers, _torch.global_post_hooks_of_optimizers
    for hook in [*all_pre.values(), *own_pre.values()]:
        hook(optimizer, (optimizer,), {})
    held = [(hooks, {**hooks}) for hooks in (own_pre, own_post, all_pre, all_post)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)
    for hook in [*own_post.values(), *all_post.values()]:
        hook(optimizer, (optimizer,), {})


class _Cut:
    """A parameter of which this rank steps a range, in blocks that the optimizer treats as parameters.

    Args:
        parameter: Parameter of the model.
        own: Elements that this rank steps, in the order of their memory.
        state: Elementwise state of the whole parameter, in the parameter's layout; maybe in shared memory.
    """

    def __init__(self, parameter: nn.Parameter, own: range, state: dict[str, Tensor]) -> None:
        self.parameter = parameter
        self._state = state
        self._stride, self._address = parameter.stride(), parameter.data_ptr()
        self._ranges = [slice(begin, min(begin + _BLOCK_ELEMS, own.stop)) for begin in own[::_BLOCK_ELEMS]]
        self._own = slice(own.start, own.stop)
        self._blocks = [nn.Parameter(flat(parameter)[of]) for of in self._ranges]
        views = {name: flat(value) for name, value in state.items()}
        self._states: list[dict[str, Any]] = [{name: view[of] for name, view in views.items()} for of in self._ranges]
        self._has_entered = False

    def enter(self, state: dict[Any, Any]) -> Sequence[nn.Parameter]:
        """Return the parameters to step, with gradients and state in place: the blocks, or the whole parameter."""
        parameter, grad = self.parameter, self.parameter.grad
        if grad is None:
            return (parameter,)
        values = state.get(parameter, {})
        if grad.layout is not torch.strided or not self._has_state(values):
            self.let_go(values)  # the cause is the same on every rank, so all ranks do this
            return (parameter,)
        self._take_over(values)
        if parameter.data_ptr() != self._address:
            self._address, elements = parameter.data_ptr(), flat(parameter)
            for block, of in zip(self._blocks, self._ranges, strict=True):
                block.data = elements[of]
        elements, self._has_entered = flat(laid_out_like(parameter, grad)), True
        for block, of, own in zip(self._blocks, self._ranges, self._states, strict=True):
            block.grad = elements[of]
            state[block] = own
        return self._blocks

    def _has_state(self, values: dict[str, Any]) -> bool:
        """Return whether the optimizer has all of the parameter's state, and the parameter's layout is unchanged."""
        return self.parameter.stride() == self._stride and self._state.keys() <= values.keys()

    def fits(self, state: dict[Any, Any]) -> bool:
        """Return whether the next step can use the gradient's blocks in place; True if there is no gradient."""
        grad = self.parameter.grad
        is_alike = grad is None or (grad.layout is torch.strided and grad.stride() == self._stride)
        return is_alike and self._has_state(state.get(self.parameter, {}))

    def _take_over(self, values: dict[str, Any]) -> None:
        """Give the parameter's optimizer state to the blocks, unless they have it already."""
        for name, value in values.items():
            if name not in self._state:
                if value is not self._states[0].get(name):
                    for own in self._states:
                        own[name] = value.clone() if isinstance(value, Tensor) else value
            elif value is not self._state[name]:  # true at the beginning, and after a script has loaded another state
                flat(self._state[name])[self._own] = flat(laid_out_like(self._state[name], value))[self._own]
                values[name] = self._state[name]

    def leave(self, state: dict[Any, Any]) -> None:
        """Give the optimizer the whole parameter back."""
        if self._has_entered:
            self._has_entered = False
            for block in self._blocks:
                block.grad = None
                state.pop(block, None)
            state[self.parameter].update({n: value for n, value in self._states[0].items() if n not in self._state})

    def let_go(self, values: dict[str, Any]) -> None:
        """Replace state in shared memory by this rank's own copies."""
        for name, shared in self._state.items():
            if values.get(name) is shared:
                values[name] = shared.clone()


def divisible(optimizer: optim.Optimizer, trained: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer that are worth dividing, in the optimizer's order.

    These are the large parameters with a dense gradient and elementwise state. The optimizer must have stepped, and its
    gradients must not have been cleared.

    Args:
        optimizer: Optimizer that treats each element separately.
        trained: Parameters whose gradients are averaged over the ranks.
    """
    wanted = set(trained)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [
        p
        for p in parameters
        if p in wanted
        and p.numel() >= _LEAST_ELEMS
        and p.is_floating_point()
        and p.device.type == "cpu"
        and is_one_range(p)
        and p.grad is not None
        and p.grad.layout is torch.strided
        and _elementwise(optimizer, p)
    ]


def _elementwise(optimizer: optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    return elementwise(optimizer.state.get(parameter, {}), parameter)


def has_room(parameters: Collection[nn.Parameter], optimizer: optim.Optimizer) -> bool:
    """Return whether the host and each cgroup have plenty of memory for a second state of the parameters."""
    num_bytes = sum(v.numel() * v.element_size() for p in parameters for v in _elementwise(optimizer, p).values())
    return all(memory.left_bytes >= _LEAST_ROOM * num_bytes for memory in known_memory())


def _places(pairs: Sequence[tuple[nn.Parameter, Tensor]], group: dist.ProcessGroup | None) -> Iterator[Tensor]:
    """Yield a tensor for each pair, with the parameter's layout and the value's dtype, shared by the ranks.

    Raises:
        RuntimeError: The ranks can't share memory; every rank raises the error.
    """
    if group is None:  # one process: values stay where they are, unless a parameter has another layout
        for parameter, value in pairs:
            is_alike = value.stride() == parameter.stride()
            yield value if is_alike else torch.empty_like(parameter, dtype=value.dtype)
        return
    kinds: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}
    for number, (parameter, value) in enumerate(pairs):
        kinds.setdefault(value.dtype, []).append((number, parameter))
    places: dict[int, Tensor] = {}
    for dtype, members in kinds.items():
        begins, length = packed([parameter.numel() for _, parameter in members])
        buffer = shared_tensor(length, dtype, group)
        for (number, parameter), begin in zip(members, begins, strict=True):
            places[number] = shaped(buffer[begin : begin + parameter.numel()], parameter)
    yield from (places[number] for number in range(len(pairs)))
