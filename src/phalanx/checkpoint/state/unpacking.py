"""Turns trees of JSON back into values; torch is imported only for torch's own values.

So a command that shows the content of a checkpoint, but loads no tensors, starts fast.
"""

from __future__ import annotations

import base64
import collections
import copy
import functools
import pathlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Json = Any
SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict, "counter": collections.Counter, "ordered": collections.OrderedDict,
}  # fmt: skip
KINDS_OF_MAPPINGS = (*MAPPINGS, "default", "mapping")
FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)
}

Read = Callable[[Json, "Tensor | None"], "Tensor"]

_ATOMS: dict[str, Callable[[Json], Any]] = {
    "float": lambda node: float(node["float"]),
    "complex": lambda node: complex(*map(float, node["complex"])),
    "dtype": lambda node: as_dtype(node["dtype"]),
    "device": lambda node: _torch().device(node["device"]),
    "size": lambda node: _torch().Size(node["size"]),
    "path": lambda node: pathlib.Path(node["path"]),
}


def _torch() -> Any:
    import torch

    return torch


def _is_tensor(value: Any) -> bool:
    return value is not None and isinstance(value, _torch().Tensor)


def as_dtype(name: str) -> torch.dtype:
    """Return torch's dtype with this name.

    Raises:
        ValueError: This torch has no such dtype.
    """
    dtype = getattr(_torch(), name, None)
    if not isinstance(dtype, _torch().dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def form_of(value: Any) -> str:
    """Return dtype and shape of a tensor, such as ``float32[3, 4]``; for anything else its class."""
    if not _is_tensor(value):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def unpack(node: Json, read: Read, like: Any = None, *, is_exact: bool = False) -> Any:
    """Return the value of a tree. A tensor of the same shape in `like` is filled and returned.

    Args:
        node: Tree that `pack` returned.
        read: Function that takes a tensor's node and the tensor to fill, or None, and returns the tensor.
        like: Value of the same form, or None.
        is_exact: Whether to refuse any loss: a tensor in `like` that can't hold every value, and a mapping of a user's
            class where `like` has no mapping. Otherwise such a mapping becomes a dict.

    Raises:
        ValueError: `pack` did not make the tree, or with `is_exact`, something would be lost.
    """
    if is_exact and _is_tensor(like):
        _check_fit(like, node)
    if not isinstance(node, dict):
        return node
    kind = _kind_of(node)
    if kind == "tensor":
        fits = _is_tensor(like) and list(like.shape) == node["shape"]
        return read(node, like if fits else None)
    if kind in KINDS_OF_MAPPINGS:
        own = like if isinstance(like, Mapping) else {}
        values = {key: unpack(value, read, own.get(key), is_exact=is_exact) for key, value in pairs_of(node)}
        return _as_mapping(node, kind, values, like if is_exact else None, is_exact=is_exact)
    if kind in SEQUENCES or kind == "named":
        likes = like if isinstance(like, list | tuple) and len(like) == len(node[kind]) else [None] * len(node[kind])
        items = [unpack(item, read, own, is_exact=is_exact) for item, own in zip(node[kind], likes, strict=True)]
        if kind == "named":
            return _as_named(node, items, like)
        return collections.deque(items, node["maxlen"]) if kind == "deque" else SEQUENCES[kind](items)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(_unpack_bytes(node[kind], read))
    return _unpack_numpy(node, read) if kind == "numpy" else _ATOMS[kind](node)


def _check_fit(like: Tensor, node: Json) -> None:
    """Check that a tensor can be filled with a node's tensor without losing a value.

    Raises:
        ValueError: The node describes no tensor of the same shape, or a value would be lost.
    """
    if not isinstance(node, dict) or "tensor" not in node:
        raise ValueError(
            f"the checkpoint has {name_kind(node)} where a tensor is wanted: put None in its place to get it"
        )
    if list(like.shape) != node["shape"] or not _holds_all(like.dtype, as_dtype(node["dtype"])):
        raise ValueError(
            f"it is {node['dtype']}{node['shape']} in the checkpoint and {form_of(like)} here: make it as it was when "
            "it was saved, or put None in its place to get the saved one"
        )


def _holds_all(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype can hold every value of another, that is, whether torch promotes the two to the first."""
    if dtype == other:
        return True
    inexact = [one.is_floating_point or one.is_complex for one in (dtype, other)]
    try:
        return bool(_torch().promote_types(dtype, other) == dtype) and (
            other == _torch().bool or inexact[0] == inexact[1]
        )
    except RuntimeError:
        return False


def _as_mapping(node: Json, kind: str, values: dict[Any, Any], like: Any, *, is_exact: bool) -> Any:
    """Return values in a mapping of the class of `like` if that is a user's class, else of the saved class."""
    if isinstance(like, MutableMapping) and type(like) not in MAPPINGS.values():
        mapping = copy.copy(like)
        mapping.clear()
        mapping.update(values)
        return mapping
    if kind == "default":
        factory = node["factory"]
        return collections.defaultdict(None if factory is None else FACTORIES[factory], values)
    if kind == "mapping" and is_exact and not isinstance(like, Mapping):
        raise ValueError(
            f"the checkpoint has a {node['class']}, which load can't create: put an empty one in its place for load "
            "to fill, or {} to get a dict"
        )
    return values if kind == "mapping" else MAPPINGS[kind](values)


def _as_named(node: Json, items: list[Any], like: Any) -> Any:
    """Return items in a named tuple of the class of `like`, or else of a new class with the saved name and fields."""
    fields = tuple(node["fields"])
    if getattr(like, "_fields", None) == fields:
        return type(like)._make(items)
    return _class_of_named(node["class"], fields)._make(items)


@functools.lru_cache
def _class_of_named(name: str, fields: tuple[str, ...]) -> Any:
    # `rename` gives invalid names the form that they have in the saved class: the second field becomes _1.
    return collections.namedtuple(name, fields, rename=True)


def _kind_of(node: Json) -> str:
    """Return the kind of a node, which is its first key.

    Raises:
        ValueError: There is no such kind, or the other keys do not belong to it.
    """
    kind, *others = node
    wanted = {
        "tensor": ["shape", "dtype"], "numpy": ["dtype", "shape", "scalar"], "deque": ["maxlen"],
        "named": ["class", "fields"], "default": ["factory"], "mapping": ["class"],
    }  # fmt: skip
    if kind == "tensor" and others[2:] == ["shares"]:
        others.pop()
    if others != wanted.get(kind, []):
        raise ValueError(f"a node has the keys {list(node)}")
    return kind


def pairs_of(node: Json) -> list[tuple[Any, Json]]:
    """Return the keys and nodes in a mapping's node.

    Raises:
        ValueError: `node` is not a mapping's node.
    """
    for kind in KINDS_OF_MAPPINGS:
        if isinstance(node, dict) and kind in node:
            return [(unpack(key, _no_tensor), value) for key, value in node[kind]]
    raise ValueError(f"the checkpoint has {name_kind(node)} where a mapping is wanted")


def name_kind(node: Json) -> str:
    return f"a {next(iter(node))}" if isinstance(node, dict) else repr(node)


def _no_tensor(node: Json, _: Tensor | None) -> Tensor:
    raise ValueError("a key is not a tensor")


def _unpack_bytes(data: Json, read: Read) -> bytes:
    return base64.b64decode(data) if isinstance(data, str) else read(data, None).numpy().tobytes()


def _unpack_numpy(node: Json, read: Read) -> Any:
    import numpy

    data = bytearray(_unpack_bytes(node["numpy"], read))
    dtype = numpy.dtype(node["dtype"])
    if dtype.hasobject or dtype.names:  # refused, because the bytes of objects are addresses
        raise ValueError(f"an array of {node['dtype']!r} can't have been saved")
    array: Any = numpy.ndarray(node["shape"], dtype, data)
    return array[()] if node["scalar"] else array
