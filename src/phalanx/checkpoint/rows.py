"""What a checkpoint holds, as rows to read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from phalanx._text import shortened
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.folder import Checkpoint, Damaged
from phalanx.checkpoint.state.unpacking import KINDS_OF_MAPPINGS, Json, pairs_of, unpack
from phalanx.wire.files import open_regular

_LENGTH_BYTES = 8  # of a header, before it


def rows_of(checkpoint: Checkpoint, rank: int) -> list[tuple[str, str]]:
    """Return name and description of each tensor and each value that `rank` has saved, from its file's header.

    Raises:
        Damaged: The file is not one that was saved.
    """
    path = os.path.join(checkpoint.path, folders.file_of(rank))
    try:
        with open_regular(path) as file:
            header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
        return list(_rows("", json.loads(header["__metadata__"]["phalanx"])["tree"]))
    except Exception as error:  # whatever a parser makes of what others wrote
        raise Damaged(f"{checkpoint.path} can't be read: {error!r}") from error


def _rows(name: str, node: Json) -> Iterator[tuple[str, str]]:
    kind = next(iter(node)) if isinstance(node, dict) else ""
    if kind == "tensor":
        yield name, f"{node['dtype']} {node['shape']}"
    elif kind == "dtype":  # without torch
        yield name, f"torch.{node['dtype']}"
    elif kind == "size":
        yield name, f"torch.Size({node['size']})"
    elif kind == "numpy":
        yield name, f"numpy {node['dtype']} {node['shape']}"
    elif kind in KINDS_OF_MAPPINGS:
        pairs = pairs_of(node)
        yield from ((name, "{}") for _ in range(not pairs))
        for key, value in pairs:
            yield from _rows(f"{name}.{key}" if name else str(key), value)
    elif isinstance(node, dict) and isinstance(node[kind], list) and any(_is_nested(item) for item in node[kind]):
        for index, item in enumerate(node[kind]):
            yield from _rows(f"{name}.{index}" if name else str(index), item)
    else:
        has_tensor = isinstance(node, dict) and isinstance(node[kind], dict)
        text = f"{kind} {node[kind]['shape']}" if has_tensor else repr(unpack(node, _no_tensor))
        yield name, shortened(text)


def _is_nested(node: Json) -> bool:
    return isinstance(node, dict) and not {"float", "complex"} & node.keys()


def _no_tensor(node: Json, _: Any) -> Any:
    raise ValueError("it is read without tensors")
