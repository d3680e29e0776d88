"""Restores the user's state from a tree, or says why the tree does not fit; fills modules and tensors in place.

What the user passes directly is restored exactly as it was saved, or refused. So the tree names the class of each
container. If a tensor shared memory with an earlier tensor, the tree names the earlier tensor, too. A tensor of the
user's is filled only if it can hold every value. What goes to an object's ``load_state_dict`` may be less exact,
because the object itself decides: values are cast as torch does, and mappings become dicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._errors import CheckpointError
from phalanx._text import class_and_message, listed
from phalanx._torch.tensors import is_dtensor
from phalanx.checkpoint.state.tree import unwrap
from phalanx.checkpoint.state.unpacking import Json, Read, as_dtype, form_of, name_kind, pairs_of, unpack

NOT_STRICT = "pass strict=False"
NOT_STRICT_IN_TRAINER = 'set resume="force"'
_MAX_NAMES = 5  # most names in a message


def restore(state: MutableMapping[Any, Any], node: Json, read: Read, *, strict: bool = True) -> None:
    """Fill `state` from a tree: objects and tensors in place, plain values replaced.

    Raises:
        KeyError: With `strict`: `state` has an entry that the tree lacks.
        ValueError: The tree's form differs from that of `state`.
    """
    _walk(state, node, _Sharing(read), strict=strict, assigns=True)


class _Sharing:
    """Reads new tensors so that they share memory as the saved tensors did."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._done: dict[str, Tensor] = {}
        # Node and value of the first tensor that was read and shares memory with a tensor that was not; key: name of
        # the latter.
        self._single: dict[str, tuple[Json, Tensor]] = {}

    def __call__(self, node: Json, into: Tensor | None) -> Tensor:
        name, other = node["tensor"], node.get("shares", [""])[0]
        if into is not None:
            tensor = self._read(node, into)
        elif other in self._done:
            tensor = self._view(node, node["shares"], self._done[other])
        elif name in self._single:
            earlier, read = self._single[name]
            tensor = self._view(node, [earlier["tensor"], *earlier["shares"][1:]], read)
        else:
            tensor = self._read(node, None)
            if other:
                self._single[other] = node, tensor
        self._done[name] = tensor
        return tensor

    def _view(self, node: Json, shares: Sequence[Any], other: Tensor) -> Tensor:
        """Return a node's tensor as a view of `other`, as it was when it was saved.

        Raises:
            ValueError: The saved tensor was not a view of `other`.
        """
        name, *begin = shares
        num = math.prod(node["shape"])
        if begin and other.dtype == as_dtype(node["dtype"]):
            if list(other.shape) == node["shape"] and begin == [0]:
                return other
            if other.is_contiguous() and 0 <= begin[0] <= other.numel() - num:
                return other.detach().view(-1)[begin[0] : begin[0] + num].view(node["shape"])
        raise ValueError(
            f"it shared memory with {name!r} when it was saved, and a new tensor would not: put tensors that share "
            "memory in the place of both"
        )


def survey(state: MutableMapping[Any, Any], node: Json, read: Read, *, strict: bool = True) -> None:
    """Call `read` for each tensor that `restore` would read, with the tensor that it would fill; don't change `state`.

    Raises:
        KeyError, ValueError: As in `restore`, except for errors that depend on a tensor's content.
    """
    _walk(state, node, read, strict=strict, assigns=False)


def _walk(state: MutableMapping[Any, Any], node: Json, read: Read, *, strict: bool, assigns: bool) -> None:
    """Call `_visit` for each entry of `state` that the tree has, and put the result in its place."""
    saved = dict(pairs_of(node))
    if strict and (missing := [key for key in state if key not in saved]):
        raise KeyError(
            f"the checkpoint has no {_some(map(repr, missing))}; it has {_some(map(repr, saved))}: "
            f"load what it has, or {NOT_STRICT}"
        )
    for key in state:
        if key in saved:
            try:
                target = state[key]
                visited = _visit(target, saved[key], read, strict=strict, assigns=assigns)
                if visited is not target:
                    state[key] = visited
            except CheckpointError:
                raise
            except Exception as error:
                raise ValueError(f"{key}: {reason_of(error)}") from error


def drop_gradients(state: Any) -> None:
    """Set the gradients of all modules and optimizers in `state` to None."""
    if isinstance(state, nn.Module | torch.optim.Optimizer):
        state.zero_grad(set_to_none=True)
    elif isinstance(state, Mapping):
        for value in state.values():
            drop_gradients(value)
    elif isinstance(state, list | tuple):
        for value in state:
            drop_gradients(value)


def reason_of(error: Exception) -> str:
    """Return an error's message, preceded by the error's class unless this library raises such errors itself."""
    is_ours = isinstance(error, KeyError | ValueError | RuntimeError) and error.args
    return str(error.args[0]) if is_ours else class_and_message(error)


def _some(names: Iterable[str]) -> str:
    return listed([*names], _MAX_NAMES)


def _visit(target: Any, node: Json, read: Read, *, strict: bool, assigns: bool) -> Any:
    """Read the values for `target`, and return the value that takes its place.

    Objects, tensors, and mappings that hold objects or tensors are restored in place and returned; anything else
    becomes a new value. Without `assigns`, `target` stays as it is and is returned.
    """
    if isinstance(target, nn.Module):
        module = unwrap(target)
        own = module.state_dict()
        with torch.no_grad():
            value = unpack(node, read, own)
        if assigns:
            _load_module(module, own, value, strict)
        return target
    if isinstance(target, torch.optim.Optimizer):
        value = unpack(node, read, _state_like(target, node))
        if assigns:
            _load_optimizer(target, value)
        return target
    if hasattr(target, "state_dict") and hasattr(target, "load_state_dict"):
        value = unpack(node, read)
        if assigns:
            target.load_state_dict(value)
        return target
    if isinstance(target, MutableMapping) and _holds_objects(target):
        _walk(target, node, read, strict=strict, assigns=assigns)
        return target
    if isinstance(target, list | tuple) and _holds_objects(target):
        items = [_visit(own, item, read, strict=strict, assigns=assigns) for own, item in _items(target, node)]
        make: Any = getattr(type(target), "_make", type(target))  # named tuples have `_make`
        return make(items) if assigns else target
    value = unpack(node, read, target, is_exact=True)
    return value if assigns else target


def _load_module(module: nn.Module, own: Mapping[str, Any], value: Mapping[str, Any], strict: bool) -> None:
    try:
        with torch.inference_mode(any(isinstance(t, Tensor) and t.is_inference() for t in own.values())):
            module.load_state_dict(value, strict=strict)
    except RuntimeError as error:
        why = _why_no_fit(own, value)
        raise ValueError(why or str(error)) from (None if why else error)


def _load_optimizer(optimizer: torch.optim.Optimizer, value: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(value)
    except ValueError as error:
        why = _why_no_group_fits(optimizer, value)
        raise ValueError(why or str(error)) from (None if why else error)


def _items(target: Sequence[Any], node: Json) -> Iterable[tuple[Any, Json]]:
    """Return each item of a sequence with its node.

    Raises:
        ValueError: The node does not describe a sequence of the same length.
    """
    saved = next(iter(node.values())) if isinstance(node, dict) else None
    if not isinstance(saved, list) or len(saved) != len(target):
        raise ValueError(f"the checkpoint has {name_kind(node)} where a list of {len(target)} is wanted")
    return zip(target, saved, strict=True)


def _why_no_fit(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return how the tensors of a module and of the checkpoint differ; empty if they do not."""
    other = [
        f"{name} is {form_of(saved[name])} in the checkpoint and {form_of(value)} here"
        for name, value in own.items()
        if name in saved and isinstance(value, Tensor) and getattr(saved[name], "shape", None) != value.shape
    ]
    lacking, further = [name for name in own if name not in saved], [name for name in saved if name not in own]
    differences = [
        f"{len(names)} {what} ({_some(names)})"
        for names, what in (
            (other, "of another shape"), (lacking, "missing from the checkpoint"), (further, "unexpected in it"),
        )
        if names
    ]  # fmt: skip
    to_do = "make the model as it was when it was saved" + ("" if other else f", or {NOT_STRICT}")
    return f"{', '.join(differences)}; {to_do}" if differences else ""


def _why_no_group_fits(optimizer: torch.optim.Optimizer, saved: Any) -> str:
    """Return how the groups of an optimizer and of the checkpoint differ; empty if they do not."""
    groups = saved.get("param_groups", ()) if isinstance(saved, Mapping) else ()
    there, here = ([len(group["params"]) for group in gs] for gs in (groups, optimizer.param_groups))
    if there == here:
        return ""
    return f"the checkpoint has groups of {there} parameters, this optimizer of {here}; make the same groups again"


def _holds_objects(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_objects, value))
    return isinstance(value, Tensor) or hasattr(value, "load_state_dict")


def _state_like(optimizer: torch.optim.Optimizer, node: Json) -> dict[str, Any]:
    """Return empty tensors for the state of parameters that are DTensors or not contiguous, laid out like them.

    With another layout, an optimizer step would take longer and round differently.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[Any, dict[str, Tensor]] = {}
    for index, values in pairs_of(dict(pairs_of(node))["state"]):
        if index not in range(len(parameters)):
            continue  # the state of another model, which load_state_dict() will refuse
        parameter = parameters[index]
        if is_dtensor(parameter) or not parameter.is_contiguous():
            state[index] = {
                name: torch.empty_like(parameter, dtype=as_dtype(value["dtype"]))
                for name, value in pairs_of(values)
                if isinstance(value, dict) and value.get("shape") == list(parameter.shape)
            }
    return {"state": state}
