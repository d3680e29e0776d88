"""Fuzzed inputs for each parser of foreign data: mutations of saved files, with their checksums corrected.

Whatever the input, `load` takes it, takes an older checkpoint instead, or raises CheckpointError.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import phalanx.checkpoint as ckpt
from phalanx import CheckpointError, cli
from phalanx.checkpoint import loading
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.snapshots import SnapshotMemory
from phalanx.checkpoint.state.image import Part, fill, lay_out
from phalanx.checkpoint.state.tree import pack

Attack = Callable[[st.DataObject], None]

WORDS = [
    "tensor", "dict", "ordered", "counter", "list", "tuple", "set", "deque", "numpy", "bytes", "float", "complex",
    "dtype", "shape", "scalar", "maxlen", "device", "size", "path", "F32", "F64", "U8", "BOOL", "C64", "float32",
    "complex128", "bool", "bfloat16", "float8_e8m0fnu", "|O", "i4,O", "<f8", "U3", "V0", "blocks", "tree", "big",
    "big@20,0", "phalanx", "__metadata__", "data_offsets", "\x1b[31m", "\u202e", "\ud800", "../../x", "",
]  # fmt: skip
SCALARS = st.one_of(
    st.sampled_from(WORDS), st.integers(-3, 70), st.sampled_from([2**31, 2**36, 2**63, 2**64, 10**30, -(2**63)]),
    st.none(), st.booleans(), st.floats(), st.text(max_size=5),
)  # fmt: skip
KEYS = st.sampled_from(WORDS) | st.text(max_size=3)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)


def state_of(number: int) -> dict[str, Any]:
    """A small state with something of each kind that a checkpoint knows."""
    return {
        "big": torch.full((40, 3), float(number)),
        "mixed": [torch.ones(3, dtype=torch.complex128), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(True)],
        "exotic": torch.zeros(3).to(torch.float8_e8m0fnu),
        "numpy": [numpy.arange(3.0), numpy.float32(1), numpy.array(["a"])],
        "bytes": [b"x" * 2000, bytearray(b"y")],
        "plain": {"a": (1, 2.5, None), ("t", 1): {2, 3}, "d": collections.deque([1], 4), "n": float("nan"), "c": 1j},
        "names": [torch.float16, torch.device("cpu"), torch.Size([2]), Path("/a")],
    }


def images_of(number: int) -> list[bytes]:
    """What two ranks save, of which each has half of the tensor ``big``."""
    tree, leaves = pack(state_of(number))
    images = []
    for rank in range(2):
        metadata = {"step": number, "rank": rank, "world_size": 2, "is_alike": True, "tree": tree}
        parts = [Part(leaf.name, (0,) * leaf.tensor.dim(), leaf.tensor) for leaf in leaves if leaf.name != "big"]
        parts.append(Part("big", (20 * rank, 0), leaves[0].tensor[20 * rank : 20 * rank + 20]))
        laid_out = lay_out(parts, metadata)
        image = bytearray(laid_out.size_bytes)
        fill(image, laid_out, parts)
        images.append(bytes(image))
    return images


def publish(folder: Path, number: int) -> None:
    draft = folders.begin(str(folder), number, 2, 0.5)
    for rank, image in enumerate(images_of(number)):
        sha256: Future[str] = Future()
        sha256.set_result(hashlib.sha256(image).hexdigest())
        draft.write(rank, memoryview(image), sha256)
    draft.publish()


# ---------------------------------------------------------------- mutations


def mutated(data: st.DataObject, document: Any) -> Any:
    """Return a copy of a JSON document in which up to three places are others."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        owner, key = places[data.draw(st.integers(0, len(places) - 1))]
        what = data.draw(st.sampled_from(["replace", "remove", "copy", "nudge", "wrap"]))
        if what == "remove":
            del owner[key]
        elif what == "copy":
            source, name = places[data.draw(st.integers(0, len(places) - 1))]
            owner[key] = copy.deepcopy(source.get(name) if isinstance(source, dict) else source[name])
        elif what == "nudge" and type(owner[key]) is int:
            owner[key] += data.draw(st.sampled_from([-1, 1, 4, -owner[key], owner[key]]))
        elif what == "wrap":
            owner[key] = data.draw(st.sampled_from([[owner[key]], {data.draw(KEYS): owner[key]}]))
        else:
            owner[key] = data.draw(VALUES)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Return bytes with one flipped, some cut out, some put in, or others altogether."""
    at, what = data.draw(st.integers(0, len(content))), data.draw(st.sampled_from(["flip", "cut", "insert", "other"]))
    if what == "other":
        return data.draw(st.binary(max_size=64))
    some = data.draw(st.binary(min_size=1, max_size=8))
    return content[:at] + (some if what != "cut" else b"") + content[at + (len(some) if what == "flip" else 0) :]


def mutated_image(data: st.DataObject, image: bytes) -> bytes:
    if data.draw(st.integers(0, 4)) == 0:
        return damaged(data, image)
    length = int.from_bytes(image[:8], "little")
    header = json.loads(image[8 : 8 + length])
    header["__metadata__"]["phalanx"] = json.loads(header["__metadata__"]["phalanx"])
    header = mutated(data, header)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get("phalanx"), dict):
        metadata["phalanx"] = json.dumps(metadata["phalanx"])
    text = json.dumps(header).encode()
    if data.draw(st.booleans()):
        text = text.ljust(length)  # the data stays aligned
    return len(text).to_bytes(8, "little") + text + image[8 + length :]


# ---------------------------------------------------------------- parsers


def try_load(folder: Path) -> None:
    """Load into nothing, and into tensors and values of the same form."""
    for state in (dict.fromkeys(state_of(0)), state_of(0)):
        with warnings.catch_warnings(), contextlib.suppress(CheckpointError):
            warnings.simplefilter("ignore")
            assert ckpt.load(folder, state).step in (1, 2)


def try_command(data: st.DataObject, folder: Path) -> None:
    if data.draw(st.integers(0, 7)):  # it takes longer than all the rest
        return
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        for args in (["ls", folder], ["show", folder], ["verify", folder, "--all"], ["diff", folder, 1, 2]):
            assert cli.main(["ckpt", *map(str, args)]) in (0, 1, 2)
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())


def manifest(folder: Path) -> Attack:
    path = folder / "step-00000002" / "manifest.json"
    content = path.read_bytes()
    document = {key: value for key, value in json.loads(content).items() if key != "checksum"}

    def attack(data: st.DataObject) -> None:
        if data.draw(st.integers(0, 4)) == 0:
            path.write_bytes(damaged(data, content))
        else:
            path.write_text(folders._sign(mutated(data, document)))
        ckpt.list_checkpoints(folder)
        assert ckpt.verify(folder) is not None
        try_load(folder)
        try_command(data, folder)

    return attack


def image(folder: Path) -> Attack:
    place = folder / "step-00000002"
    contents = images_of(2)
    document = json.loads((place / "manifest.json").read_bytes())
    del document["checksum"]

    def attack(data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, 1))
        contents_now = [*contents]
        contents_now[rank] = mutated_image(data, contents[rank])
        for number, content in enumerate(contents_now):
            (place / folders.file_of(number)).write_bytes(content)
            signed = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            document["files"][folders.file_of(number)] = signed
        (place / "manifest.json").write_text(folders._sign(document))
        try_load(folder)
        try_command(data, folder)

    return attack


def latest(folder: Path) -> Attack:
    def attack(data: st.DataObject) -> None:
        (folder / "latest").write_bytes(damaged(data, b"step-00000002\n"))
        assert ckpt.load(folder, dict.fromkeys(state_of(0))) == ckpt.Loaded(2, "disk")

    return attack


def region(folder: Path) -> Attack:
    fd = int(os.environ["PHALANX_SNAPSHOTS"].rpartition("/")[2])  # as under phalanx run, by the fixture
    head = layout.Head(layout.MAGIC, 1, 3, 0, 2, 0, hashlib.blake2b(str(folder).encode(), digest_size=16).digest())
    contents = images_of(3)
    numbers = st.sampled_from([0, 1, 2, 3, 4096, 2**36, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)

    def attack(data: st.DataObject) -> None:
        os.ftruncate(fd, 0)
        for rank in range(2):
            content, own = contents[rank], head._replace(size_bytes=len(contents[rank]))
            if data.draw(st.booleans()):
                content = mutated_image(data, content)
            packed = own._replace(size_bytes=len(content)).pack()
            if data.draw(st.booleans()):
                field = data.draw(st.sampled_from(["is_whole", "step", "size_bytes", "world_size", "attempt"]))
                packed = own._replace(**{field: data.draw(numbers)}).pack()
            elif data.draw(st.integers(0, 4)) == 0:
                packed = damaged(data, packed)
            offset = layout.region_offset(rank, data.draw(st.integers(0, 1)))
            os.pwrite(fd, packed, offset)
            os.pwrite(fd, content, offset + 4096)
        held = SnapshotMemory()
        before, loading.memory = loading.memory, lambda: held
        try:
            with warnings.catch_warnings(), contextlib.suppress(CheckpointError):
                warnings.simplefilter("ignore")
                ckpt.load(folder, dict.fromkeys(state_of(0)))
        finally:
            os.close(held._fd)
            loading.memory = before

    return attack


PARSERS = (manifest, image, latest, region)


def attack(parser: Callable[[Path], Attack], folder: Path, num_inputs: int) -> None:
    """Give a parser so many inputs."""
    publish(folder, 1)
    publish(folder, 2)
    assert ckpt.load(folder, dict.fromkeys(state_of(0))) == ckpt.Loaded(2, "disk")
    one = parser(folder)

    @settings(
        max_examples=num_inputs, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def give(data: st.DataObject) -> None:
        one(data)

    give()
