"""Turns state into a tree of JSON in which tensors are represented by names; their bytes are stored separately.

Nothing in the tree is pickled. A value of a class that is not listed here and has no ``state_dict`` is an error.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import _torch
from phalanx._torch.tensors import is_dtensor, is_stored, unusual_keys
from phalanx.checkpoint.state.unpacking import FACTORIES, MAPPINGS, SEQUENCES, Json

_SCALARS = (bool, int, str, type(None))
_UNLOADABLE = re.compile("bcomplex32|u?int[1-7]|qu?int.*")  # dtypes that torch can't copy, or view as complex
_MAX_INT_BITS = 14_000  # Python refuses to read a number of more than 4300 digits
_MOST_DEPTH = 200  # levels of nesting; a reader needs three nested calls for each, and Python allows 1000
_INLINE_BYTES = 1024  # longer bytes are saved like a tensor


@dataclasses.dataclass
class Leaf:
    """A tensor of the state.

    Attributes:
        name: Position in the state, such as ``model.0.weight``; the same on every rank.
        tensor: Tensor or DTensor of this rank.
        is_local: Whether each rank saves its own values, as for buffers of modules, bytes and NumPy arrays.
    """

    name: str
    tensor: Tensor
    is_local: bool


def refuse_no_mapping(call: str, state: object, more: str = "") -> None:
    """Refuse a state that is not a dictionary.

    Args:
        call: Name of the call, such as "load".
        more: Arguments that follow the state in the right call.

    Raises:
        TypeError: The state is not a mapping.
    """
    if not isinstance(state, Mapping):
        name = "model" if isinstance(state, nn.Module) else "state"
        name = "optimizer" if isinstance(state, torch.optim.Optimizer) else name
        raise TypeError(
            f"checkpoint.{call}: state must be a dictionary, got an object of type {type(state).__name__}; right: "
            f'checkpoint.{call}(folder, {{"{name}": {name}}}{more})'
        )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module without the wrappers of DistributedDataParallel, DataParallel and torch.compile.

    Args:
        module: Module that may be wrapped.

    Example:
        >>> ddp = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        >>> phalanx.checkpoint.unwrap(ddp)
        Linear(in_features=2, out_features=1, bias=True)
    """
    while True:
        if (inner := _torch.uncompiled(module)) is not None:
            module = inner
        elif type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            module = module.module  # type: ignore[assignment]
        else:
            return module


def pack(state: Any, done: str = "saved") -> tuple[Json, list[Leaf]]:
    """Return the state's tree and its tensors.

    Args:
        state: Values and tensors.
        done: Participle for messages: what is done with the state, such as "saved" or "published".

    Raises:
        TypeError: A value can't be written without pickling; the message says where it is.
        ValueError: The tree can't be written as JSON.
    """
    packer = _Packer(done)
    try:
        tree = packer.pack(state, "")
        packer.note_shared_memory()
        json.dumps(tree)  # tried here, so that a failure comes before the ranks agree to save
    except RecursionError:  # the caller was already deep in nested calls
        raise _too_deep(done) from None
    return tree, packer.leaves


def _too_deep(done: str) -> ValueError:
    return ValueError(f"the state is nested too deeply to be {done}: make it flatter")


class _Packer:
    """Turns values into JSON and collects the tensors."""

    def __init__(self, done: str = "saved") -> None:
        self._done = done
        self.leaves: list[Leaf] = []
        self._names = {"__metadata__"}  # names in use; this one is reserved in a safetensors file
        self._buffers: frozenset[str] = frozenset()
        self._level = 0  # nesting level of the value that is being packed
        self._depth = 0  # number of enclosing objects; inside one, shared memory is not recorded
        self._places: list[_Place] = []

    def note_shared_memory(self) -> None:
        """If a tensor shares memory with an earlier one, record the earlier tensor's name in the later one's node."""
        for places in _overlapping(self._places):
            for number, place in enumerate(places):
                if shares := next(filter(None, map(place.within, places[:number])), None):
                    place.node["shares"] = shares

    def pack(self, value: Any, name: str) -> Json:
        self._level += 1
        if self._level > _MOST_DEPTH:
            raise _too_deep(self._done)
        node = self._pack(value, name)
        self._level -= 1
        return node

    def _pack(self, value: Any, name: str) -> Json:
        if type(value) in _SCALARS:
            if type(value) is int and value.bit_length() > _MAX_INT_BITS:
                raise ValueError(
                    f"{name or 'the state'} is an integer of {value.bit_length()} bits, more than {_MAX_INT_BITS}: "
                    "save it as bytes"
                )
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            with torch.DisableTorchFunctionSubclass():  # a subclass may override torch's functions
                is_divided = is_dtensor(value)
                tensor = value if is_divided else value.detach()  # detach() on a DTensor would import torch._dynamo
                node = self._pack_tensor(tensor, name, name in self._buffers)
                if not self._depth and not is_divided and tensor.numel():
                    self._places.append(_Place.of(tensor, node))
                return node
        if isinstance(value, nn.Module):
            value = unwrap(value)
            self._buffers |= {_join(name, buffer) for buffer, _ in value.named_buffers()}
            return self._pack_object(value, name)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return self._pack_object(value, name)
        for kind, cls in MAPPINGS.items():
            if type(value) is cls:
                return {
                    kind: [[_pack_key(k, name, self._done), self.pack(v, _join(name, k))] for k, v in value.items()]
                }
        if isinstance(value, Mapping):
            return self._pack_mapping(value, name)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [self.pack(item, _join(name, i)) for i, item in enumerate(value)]
            return {"named": items, "class": type(value).__name__, "fields": list(value._fields)}
        for kind, cls in SEQUENCES.items():
            if type(value) is cls:
                items = [self.pack(item, _join(name, i)) for i, item in enumerate(value)]
                return {kind: items, "maxlen": value.maxlen} if kind == "deque" else {kind: items}
        return self._pack_atom(value, name)

    def _pack_object(self, value: Any, name: str) -> Json:
        self._depth += 1
        node = self.pack(value.state_dict(), name)
        self._depth -= 1
        return node

    def _pack_mapping(self, value: Mapping[Any, Any], name: str) -> Json:
        pairs = self.pack(dict(value), name)["dict"]
        factory = getattr(value, "default_factory", None)
        if type(value) is collections.defaultdict and (factory is None or factory in FACTORIES.values()):
            return {"default": pairs, "factory": factory and factory.__name__}
        return {"mapping": pairs, "class": type(value).__qualname__}

    def _pack_tensor(self, tensor: Tensor, name: str, is_local: bool) -> Json:
        kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else tensor.layout
        is_divided = is_dtensor(tensor)
        if hasattr(tensor, "__tensor_flatten__") and not is_divided:
            kind = f"a {type(tensor).__name__} around others"
        if kind != torch.strided:
            advice = "give it memory first (to_empty)" if tensor.is_meta else "make it a dense one"
            raise TypeError(f"{name or 'the state'} is a tensor that is {kind}, which can't be {self._done}: {advice}")
        if is_divided and any(how.is_partial() for how in tensor.placements):  # type: ignore[attr-defined]
            raise TypeError(
                f"{name} is a DTensor that is not reduced yet (Partial), which can't be {self._done}: redistribute it"
            )
        if is_divided:
            _check_memory(_local_part(tensor), name, self._done)
        else:
            _check_memory(tensor, name, self._done)
            tensor = tensor.as_subclass(Tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if _UNLOADABLE.fullmatch(dtype):
            raise TypeError(
                f"{name or 'the state'} is a tensor of {dtype}, which can't be loaded: save a view as uint8"
            )
        own, number = name, 1
        while own in self._names:  # {"a.b": x, "a": {"b": y}} has one path twice
            number += 1
            own = f"{name}#{number}"
        self._names.add(own)
        self.leaves.append(Leaf(own, tensor, is_local))
        return {"tensor": own, "shape": list(tensor.shape), "dtype": dtype}

    def _pack_bytes(self, data: bytes | bytearray, name: str) -> Json:
        if len(data) <= _INLINE_BYTES:
            return base64.b64encode(data).decode()
        return self._pack_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), name, is_local=True)

    def _pack_atom(self, value: Any, name: str) -> Json:
        if type(value).__module__ == "numpy":
            return self._pack_numpy(value, name)
        if type(value) in (bytes, bytearray):
            return {type(value).__name__: self._pack_bytes(value, name)}
        if type(value) is complex:
            return {"complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, pathlib.PurePath):
            return {"path": str(value)}
        raise TypeError(
            f"{name or 'the state'} is a {type(value).__qualname__}, which can't be {self._done} without pickling: "
            "use plain values and tensors, or give it state_dict() and load_state_dict()"
        )

    def _pack_numpy(self, value: Any, name: str) -> Json:
        import numpy

        array = numpy.asarray(value)
        if array.dtype.hasobject or array.dtype.names:
            raise TypeError(f"{name} is an array of objects or records, which can't be {self._done} without pickling")
        return {
            "numpy": self._pack_bytes(numpy.ascontiguousarray(array).tobytes(), name),
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "scalar": isinstance(value, numpy.generic),
        }


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the elements of a tensor lie in memory, to find tensors that share memory."""

    node: dict[str, Any]
    begin: int
    end: int
    form: tuple[Any, ...]
    is_range: bool

    @staticmethod
    def of(tensor: Tensor, node: dict[str, Any]) -> _Place:
        begin, size = tensor.data_ptr(), tensor.element_size()
        extent = 1 + sum((num - 1) * stride for num, stride in zip(tensor.shape, tensor.stride(), strict=True))
        form = tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj()
        return _Place(node, begin, begin + extent * size, form, tensor.is_contiguous())

    def within(self, other: _Place) -> list[Any] | None:
        """Return the other tensor's name and its element at which this tensor begins; None if they share no memory.

        The element's index is omitted if this tensor is not a view of the other. Tensors that are not contiguous, such
        as columns, count as sharing memory only if they are identical.
        """
        if (self.form, self.begin) == (other.form, other.begin):
            return [other.node["tensor"], 0]
        if not (self.is_range and other.is_range and self.form[1] == other.form[1]):
            return None
        if self.end <= other.begin or other.end <= self.begin:
            return None
        has_elements = self.form[0] == other.form[0] and self.form[4:] == other.form[4:]
        is_view = has_elements and other.begin <= self.begin and self.end <= other.end
        at = (self.begin - other.begin) // self.form[0].itemsize
        return [other.node["tensor"], at] if is_view else [other.node["tensor"]]


def _overlapping(places: list[_Place]) -> Iterator[list[_Place]]:
    """Yield groups of places that overlap, directly or through others, each in the given order."""
    numbered = sorted(enumerate(places), key=lambda one: one[1].begin)
    together: list[tuple[int, _Place]] = []
    end = 0
    for number, place in numbered:
        if place.begin >= end:
            yield [one for _, one in sorted(together, key=lambda one: one[0])]
            together = []
        together.append((number, place))
        end = max(end, place.end)
    yield [one for _, one in sorted(together, key=lambda one: one[0])]


def _local_part(tensor: Any) -> Tensor:
    local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local  # a collective may still be filling the tensor


def _check_memory(tensor: Tensor, name: str, done: str) -> None:
    """Raise a TypeError unless the tensor's values are the bytes of its own memory."""
    keys = unusual_keys(tensor)
    if keys and not tensor.is_cpu:  # dispatch keys implied by the device are fine
        keys -= unusual_keys(torch.empty(0, device=tensor.device))
    if keys:
        raise TypeError(
            f"{name or 'the state'} is a {type(tensor).__name__} without memory of its own "
            f"({', '.join(sorted(keys - {'PythonTLSSnapshot'}))}), which can't be {done}: use a plain tensor"
        )
    if not is_stored(tensor):
        raise TypeError(
            f"{name or 'the state'} is a tensor whose storage holds {tensor.untyped_storage().nbytes()} bytes, too few "
            f"for its shape {list(tensor.shape)}: it was resized or freed under the tensor, as FSDP does with "
            "parameters that are not in use. Save it while it has its storage"
        )


def _pack_key(key: Any, name: str, done: str) -> Json:
    if type(key) in (*_SCALARS, float):
        return _Packer().pack(key, name)
    if type(key) is tuple:
        return {"tuple": [_pack_key(item, name, done) for item in key]}
    raise TypeError(f"{name or 'the state'} has the key {key!r}, which can't be {done}; use strings or numbers")


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
