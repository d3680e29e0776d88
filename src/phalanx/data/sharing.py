"""`phalanx.share`: data that a host holds once, however many ranks and workers read it.

One rank of each host, its builder, writes the data into a block of memory (`packing`). The other ranks of that host map
the block, and the workers of their loaders inherit the mapping. Nobody copies anything, and nothing lies in
``/dev/shm``. The memory has no name: the kernel frees it when the last process that maps it has ended.

Ranks that pass data which they have already built are compared first, because only the builder's data remains: types,
lengths, and some items spread over the whole. A function is called by the builder alone, so the others need not build
what they would throw away.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import _env, _settings
from phalanx._errors import require_linux
from phalanx._text import complain, in_units
from phalanx.data.kept import KeptData, Place, fingerprint_of, path_of_kept
from phalanx.data.packing import PURPOSE, NotPackedError, pack, skeleton_bytes, unpack
from phalanx.host.network import host_identity
from phalanx.host.shared_blocks import Address, Block
from phalanx.wire.rank_group import RankGroup, group_with_this_rank

_COMPARED = 64  # items of each list and places of each array that are compared between ranks
_PRIVATE_BYTES = 16 << 20  # a skeleton of this size is worth a remark

_calls = itertools.count()

T = TypeVar("T")


class _Offer(NamedTuple):
    """What a rank tells the others once it has built the data, or has mapped it."""

    at: Address | Place | None = None
    problem: str = ""


def share(data: T | Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Return the data, held in memory once for all ranks and workers of a host. Every rank must call this.

    Tensors, arrays and the buffers of tables are views of the shared memory. So are those inside of a dataset, whose
    own code and transforms run as before. A list of 1,000 items or more becomes a `SharedList`, whose items are made on
    each access. Everything else (dicts, short lists, attributes) is small as a rule, and each process has its own; if
    it is more than 16 MiB, a line on stderr says so. What a process writes to a shared tensor or array, only this
    process sees. A ``numpy.memmap`` stays one.

    Args:
        data: Data that every rank has: a dataset, or a list, dict, tensor, array or table; or a function without
            parameters that builds it, which only one rank of each host calls. The others wait, at most as long as the
            group's timeout.
        group: Ranks that share the data; None for all. A process without a group shares with its workers.

    Raises:
        PhalanxError: This is not Linux.
        RuntimeError: A rank has failed to build the data or to map it, or memory is short; every rank raises this.
        ValueError: The ranks' data differs; the message names the rank and the first difference that was found.

    Example:
        >>> records = phalanx.share(lambda: [{"number": number} for number in range(5000)])
        >>> len(records), records[4321]
        (5000, {'number': 4321})
    """
    require_linux("phalanx.share", "pass the data itself to the loader")
    ranks = _ranks(group)
    builds = inspect.isroutine(data) or isinstance(data, (functools.partial, type))
    mine = host_identity(_settings.read_settings().host)
    told = ranks.gather((mine, [] if builds else [*_marks(data)]))
    _refuse_different([marks for _, marks in told])
    builder = next(rank for rank, (host, _) in enumerate(told) if host == mine)
    cause = None
    memory: mmap.mmap | None = None
    offer = _Offer()
    with contextlib.ExitStack() as held:  # until all have mapped the memory
        if builder == ranks.rank:
            offer, memory, cause = _build(data, builds, held)
        offers = ranks.gather(offer)
        _raise_first(offers, ranks, cause)
        if memory is None:
            memory, problem = _map(offers[builder].at)
            offer = _Offer(problem=problem)
        _raise_first(ranks.gather(offer), ranks, None)
    assert memory is not None  # because otherwise there was a problem
    private_bytes = skeleton_bytes(memory)
    if builder == ranks.rank and private_bytes > _PRIVATE_BYTES:
        complain(
            f"phalanx.share: {in_units(private_bytes)} of the data stay private to each process: dicts, short lists "
            "and objects are not shared, but a list of records is"
        )
    return unpack(memory)


def _ranks(group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks that share; refuse a rank that would share with nobody by mistake."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if not is_initialized and int(_env.environment().get("WORLD_SIZE") or 1) > 1:
        raise RuntimeError(
            "phalanx.share: there is no process group yet, so each rank would hold a copy of its own: call "
            "phalanx.init() or init_process_group() first"
        )
    return RankGroup(group_with_this_rank(group, "phalanx.share") if is_initialized else None)


class _BuildError(Exception):
    """The function that builds the data has raised an exception, which is the cause of this one."""


def _build(
    data: Any, builds: bool, held: contextlib.ExitStack
) -> tuple[_Offer, mmap.mmap | None, BaseException | None]:
    """Return where the data is and its memory, or why there is none."""

    def build() -> Any:
        try:
            return data()
        except Exception as error:
            raise _BuildError from error

    try:
        call = next(_calls)
        path, fingerprint = (path_of_kept(), fingerprint_of(data, call)) if builds else ("", None)
        if path and fingerprint:
            with contextlib.suppress(PermissionError, FileNotFoundError):  # the supervisor is in another container
                kept = held.enter_context(KeptData(path))
                if place := kept.find_or_build(fingerprint, call, build):
                    return _Offer(place), kept.map(place), None
        block = pack(build() if builds else data)
        held.callback(block.close)
        return _Offer(block.address), block.memory, None
    except _BuildError as error:
        cause = error.__cause__
        return _Offer(problem=f"has raised {type(cause).__name__} in {_name(data)}: {cause}"), None, cause
    except NotPackedError as error:
        return _Offer(problem=f"can't share the data: {error}"), None, error
    except OSError as error:
        advice = "share less, or read it from disk with numpy.memmap, which is one copy, too"
        return _Offer(problem=f"has no memory for the data: {error.strerror or error}; {advice}"), None, error


def _map(at: Address | Place | None) -> tuple[mmap.mmap | None, str]:
    """Return the memory that another rank has offered, or why it can't be mapped."""
    try:
        if isinstance(at, Place):
            with KeptData(path_of_kept()) as kept:
                return kept.map(at), ""
        assert at is not None
        block = Block.open(at, PURPOSE, is_private=True)
        block.close()
        return block.memory, ""
    except OSError as error:
        return None, f"can't map the shared data: {error.strerror or error}"


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", function))


def _open(address: Address | None) -> tuple[Block | None, str]:
    assert address is not None
    try:
        return Block.open(address, PURPOSE, is_private=True), ""
    except OSError as error:
        return None, f"can't map the memory of process {address.pid}: {error.strerror or error}"


def _raise_first(offers: list[_Offer], ranks: RankGroup, cause: BaseException | None) -> None:
    """Raise on every rank if a rank has a problem."""
    for rank, offer in enumerate(offers):
        if offer.problem:
            raise RuntimeError(f"rank {ranks.rank}: phalanx.share: rank {rank} {offer.problem}") from cause


# ---- whether all ranks have the same data --------------------------------------------------------------------------


def _refuse_different(marks: list[list[tuple[str, str]]]) -> None:
    first = dict(marks[0])
    for rank, others in enumerate(marks):
        theirs = dict(others)
        for what in {**first, **theirs}:
            one, other = first.get(what, "none"), theirs.get(what, "none")
            if one != other:
                raise ValueError(
                    f"phalanx.share: the ranks' data differs: {what} is {other} on rank {rank} and {one} on rank 0. "
                    "Pass the same data on every rank, or a function that builds it"
                )


def _marks(data: Any, name: str = "the data") -> Iterator[tuple[str, str]]:
    """Yield facts that are the same for the same data, each with its name: types, lengths, some items."""
    yield f"the type of {name}", type(data).__name__
    if isinstance(data, Mapping):
        yield f"the number of keys of {name}", f"{len(data)}"
        for key in [*data][:_COMPARED]:
            yield from _marks(data[key], f"{name}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        yield f"the length of {name}", f"{len(data)}"
        for number in _spread(len(data)):
            yield f"item {number} of {name}", _digest(data[number])
    elif isinstance(data, Tensor):
        yield f"the shape of {name}", f"{data.dtype} {list(data.shape)}"
        is_readable = data.layout is torch.strided and data.numel() > 0
        for number in _spread(len(data) if data.dim() else 1) if is_readable else ():
            row = data[number] if data.dim() else data
            yield f"row {number} of {name}", _digest(row.reshape(-1)[:_COMPARED])
    elif _is_array(data):
        yield f"the shape of {name}", f"{data.dtype} {list(data.shape)}"
        for number in _spread(len(data) if data.ndim else 0):
            yield f"row {number} of {name}", _digest(data[number].reshape(-1)[:_COMPARED])
    elif hasattr(data, "__len__"):
        yield f"the length of {name}", f"{len(data)}"


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # without it, there are no arrays
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _spread(length: int) -> list[int]:
    """Return at most 64 indices of a sequence: the first, the last, and some between them."""
    if length <= _COMPARED:
        return [*range(length)]
    return [number * (length - 1) // (_COMPARED - 1) for number in range(_COMPARED)]


def _digest(value: Any) -> str:
    """Return a short name of a value; of objects whose content has no order or is unknown, only the type counts."""
    return hashlib.blake2b(_bytes(value), digest_size=6).hexdigest()


def _bytes(value: Any, depth: int = 8) -> bytes:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value).encode(errors="replace")
    if depth and isinstance(value, (list, tuple)):
        return b"[%b]" % b",".join(_bytes(one, depth - 1) for one in value)
    if depth and isinstance(value, Mapping):
        return b"{%b}" % b",".join(_bytes(pair, depth - 1) for pair in value.items())
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        with contextlib.suppress(RuntimeError):  # of some dtypes, torch can't read the elements
            flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            return _bytes([[*value.shape], flat.tolist()], depth)
    if _is_array(value):
        return _bytes([[*value.shape], value.tobytes()], depth)
    return type(value).__name__.encode()
