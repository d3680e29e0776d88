"""State as a tree of JSON in which tensors are names: what a checkpoint holds beside the tensors' bytes.

Nothing in it is pickled. A value of a class that is not listed here, and that has no ``state_dict``, is an error.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Json = Any
_SCALARS = (bool, int, str, type(None))
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_MAPPINGS = {"dict": dict, "counter": collections.Counter, "ordered": collections.OrderedDict}


@dataclasses.dataclass
class Leaf:
    """A tensor of the state.

    Attributes:
        name: Where it stands, such as ``model.0.weight``; the same on every rank.
        tensor: The rank's own, or its DTensor.
        is_local: Whether it is each rank's own: buffers of modules.
    """

    name: str
    tensor: Tensor
    is_local: bool


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module without wrappers that only prefix its names: data parallel, torch.compile."""
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        elif type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            module = module.module  # type: ignore[assignment]
        else:
            return module


def pack(state: Any) -> tuple[Json, list[Leaf]]:
    """Return the state's tree and its tensors.

    Raises:
        TypeError: A value is of a class that can't be written without pickling; says where it stands.
    """
    leaves: list[Leaf] = []
    return _pack(state, "", leaves, frozenset()), leaves


def _pack(value: Any, name: str, leaves: list[Leaf], local_names: frozenset[str]) -> Json:
    if isinstance(value, _SCALARS) and type(value) in _SCALARS:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor):
        leaves.append(Leaf(name, value.detach(), name in local_names))
        return {"tensor": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, nn.Module):
        value = unwrap(value)
        buffers = frozenset(_join(name, buffer) for buffer, _ in value.named_buffers())
        return _pack(value.state_dict(), name, leaves, buffers)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _pack(value.state_dict(), name, leaves, local_names)
    for kind, cls in _MAPPINGS.items():
        if type(value) is cls:
            pairs = [[_pack_key(k, name), _pack(v, _join(name, k), leaves, local_names)] for k, v in value.items()]
            return {kind: pairs}
    if isinstance(value, Mapping):
        return _pack(dict(value), name, leaves, local_names)
    for kind, cls in _SEQUENCES.items():
        if type(value) is cls or (kind == "tuple" and isinstance(value, tuple) and not isinstance(value, torch.Size)):
            return {kind: [_pack(item, _join(name, i), leaves, local_names) for i, item in enumerate(value)]}
    return _pack_atom(value, name)


def _pack_atom(value: Any, name: str) -> Json:
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, pathlib.PurePath):
        return {"path": str(value)}
    if type(value).__module__ == "numpy":
        return _pack_numpy(value)
    raise TypeError(
        f"{name or 'the state'} is a {type(value).__qualname__}, which can't be saved without pickling: "
        "save plain values and tensors, or give it state_dict() and load_state_dict()"
    )


def _pack_numpy(value: Any) -> Json:
    import numpy

    array = numpy.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("arrays of Python objects can't be saved without pickling")
    data = base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode()
    return {
        "numpy": data,
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "scalar": isinstance(value, numpy.generic),
    }


def _pack_key(key: Any, name: str) -> Json:
    if type(key) in (*_SCALARS, float):
        return _pack(key, name, [], frozenset())
    if isinstance(key, tuple):
        return {"tuple": [_pack_key(item, name) for item in key]}
    raise TypeError(f"{name}: the key {key!r} can't be saved; use strings or numbers")


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


_ATOMS: dict[str, Callable[[Json], Any]] = {
    "float": lambda node: float(node["float"]),
    "bytes": lambda node: base64.b64decode(node["bytes"]),
    "complex": lambda node: complex(*map(float, node["complex"])),
    "dtype": lambda node: as_dtype(node["dtype"]),
    "device": lambda node: torch.device(node["device"]),
    "size": lambda node: torch.Size(node["size"]),
    "path": lambda node: pathlib.Path(node["path"]),
}


def as_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls `name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch knows no dtype {name!r}")
    return dtype


def unpack(node: Json, read: Callable[[Json, Tensor | None], Tensor], like: Any = None) -> Any:
    """Return the value of a tree; where `like` has a tensor of the same shape, in that one.

    Args:
        read: Given a tensor's node, and the tensor that is to hold it or None: returns it, filled.
        like: A value of the same form, or None.
    """
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        fits = isinstance(like, Tensor) and list(like.shape) == node["shape"]
        return read(node, like if fits else None)
    for kind, mapping in _MAPPINGS.items():
        if kind in node:
            own = like if isinstance(like, Mapping) else {}
            pairs = ((_unpack_key(key), value) for key, value in node[kind])
            return mapping({key: unpack(value, read, own.get(key)) for key, value in pairs})
    for kind, sequence in _SEQUENCES.items():
        if kind in node:
            items = list(like) if isinstance(like, list | tuple) and len(like) == len(node[kind]) else None
            return sequence(unpack(item, read, items[i] if items else None) for i, item in enumerate(node[kind]))
    if "numpy" in node:
        return _unpack_numpy(node)
    [kind] = node
    return _ATOMS[kind](node)


def _unpack_key(node: Json) -> Any:
    return unpack(node, _no_tensor)


def _no_tensor(node: Json, _: Tensor | None) -> Tensor:
    raise ValueError("a key is no tensor")


def _unpack_numpy(node: Json) -> Any:
    import numpy

    array = numpy.frombuffer(base64.b64decode(node["numpy"]), numpy.dtype(node["dtype"])).reshape(node["shape"]).copy()
    return array[()] if node["scalar"] else array


def tensor_nodes(node: Json) -> Iterator[Json]:
    """Yield the tensors' nodes of a tree."""
    if isinstance(node, dict):
        if "tensor" in node:
            yield node
        for value in node.values():
            yield from tensor_nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from tensor_nodes(value)


def assign(target: Any, node: Json, read: Callable[[Json, Tensor | None], Tensor], *, strict: bool = True) -> Any:
    """Restore `target` from a tree: objects and tensors in place, plain values as the return value.

    Raises:
        KeyError: With `strict`: `target` has an entry that the tree lacks.
    """
    if isinstance(target, nn.Module):
        module = unwrap(target)
        with torch.no_grad():
            value = unpack(node, read, module.state_dict())
        module.load_state_dict(value, strict=strict)
        return target
    if isinstance(target, torch.optim.Optimizer):
        target.load_state_dict(unpack(node, read, _sharded_state_like(target, node)))
        return target
    if hasattr(target, "state_dict") and hasattr(target, "load_state_dict"):
        target.load_state_dict(unpack(node, read))
        return target
    if isinstance(target, dict) and _holds_objects(target) and isinstance(node, dict) and "dict" in node:
        saved = {_unpack_key(key): value for key, value in node["dict"]}
        for key in target:
            if key in saved:
                target[key] = assign(target[key], saved[key], read, strict=strict)
            elif strict:
                raise KeyError(f"the checkpoint has no {key!r}, but {', '.join(map(repr, saved))}")
        return target
    if isinstance(target, list | tuple) and _holds_objects(target):
        [saved_items] = node.values()
        return type(target)(
            assign(own, item, read, strict=strict) for own, item in zip(target, saved_items, strict=True)
        )
    return unpack(node, read, target)


def _holds_objects(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_objects, value))
    return isinstance(value, Tensor) or hasattr(value, "load_state_dict")


def _sharded_state_like(optimizer: torch.optim.Optimizer, node: Json) -> dict[str, Any]:
    """Return empty tensors for the state of parameters that are sharded, laid out as these."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[Any, dict[str, Tensor]] = {}
    [saved] = [value for key, value in node["dict"] if key == "state"]
    for index, values in saved["dict"]:
        if not hasattr(parameters[index], "device_mesh"):
            continue
        parameter = parameters[index]
        state[index] = {
            name: torch.empty_like(parameter, dtype=as_dtype(value["dtype"]))
            for name, value in values["dict"]
            if isinstance(value, dict) and value.get("shape") == list(parameter.shape)
        }
    return {"state": state}
