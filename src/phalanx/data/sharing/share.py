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
import inspect
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx import _settings
from phalanx._errors import PhalanxError, require_linux
from phalanx._text import complain, in_units
from phalanx.data.replica import lacks_group
from phalanx.data.sharing.cached_items import limit_bytes, memory_for, new_cache, open_cache, require_items
from phalanx.data.sharing.inputs import digest_of_inputs
from phalanx.data.sharing.kept import KeptData, path_of_kept
from phalanx.data.sharing.marks import marks
from phalanx.data.sharing.packing import Address, NotPackedError, Region, open_region, pack, skeleton_bytes, unpack
from phalanx.failure.last_words import LastWords
from phalanx.host.network import host_identity
from phalanx.wire.rank_group import RankGroup, group_with_this_rank

_KIND = "the kind of argument"
_PRIVATE_BYTES = 16 << 20  # a skeleton of this size is worth a remark

_SCALARS = (type(None), bool, int, float, complex, str)

_calls = itertools.count()

T = TypeVar("T")


def share(
    data: T | Callable[[], T],
    *,
    key: str = "",
    cache: bool | int | str = False,
    group: dist.ProcessGroup | None = None,
) -> T:
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
        key: Name of what the function builds. Under ``phalanx run --max-restarts``, ranks that are started again find
            under this name what the same function with the same arguments has built before, if the files of the script
            and of its modules have not changed. What it reads otherwise, such as files, should be part of the key. With
            a cache, they find the items, too.
        cache: True to compute each item of a dataset only once on each host, by whichever rank or worker asks for it
            first; or the memory that the items may take, in bytes or as ``"8 GiB"``, instead of half of what is free.
        group: Ranks that share the data; None for all. A process without a group shares with its workers.

    Raises:
        PhalanxError: This is not Linux.
        RuntimeError: A rank has failed to build the data or to map it, or memory is short; every rank raises this. On
            the other ranks it is a PhalanxError with ``is_victim``.
        TypeError: The data is None or a number or text, or it has no items that could be cached, or the key is no text.
        ValueError: The ranks' data differs; the message names the rank and the first difference that was found.

    Example:
        >>> records = phalanx.share(lambda: [{"number": number} for number in range(5000)], key="records")
        >>> len(records), records[4321]
        (5000, {'number': 4321})
    """
    require_linux("phalanx.share", "pass the data itself to the loader")
    ranks = _ranks(group)
    builds = inspect.isroutine(data) or isinstance(data, (functools.partial, type))
    if key and not builds:
        raise ValueError(
            "phalanx.share: a key is for a function, which need not be called again: pass a lambda that makes the data"
        )
    if not isinstance(key, str):
        raise TypeError(f"phalanx.share: the key must be a str, got {type(key).__name__}: pass key={str(key)!r}")
    function: Any = data if builds else lambda: data
    if isinstance(data, _SCALARS):
        raise TypeError(
            f"phalanx.share: {_nothing(data)}; pass a dataset, list, dict, tensor, array, table or function"
        )
    if cache:
        limit_bytes(cache)  # a mistake is found before anything is built, and what is free is looked up afterwards
        if not builds:
            require_items(data)
    mine = host_identity(_settings.read_settings().host)
    of_data = [(_KIND, "a function"), ("the key", repr(key))] if builds else [(_KIND, "data"), *marks(data)]
    told = ranks.gather((mine, [("the cache", repr(cache)), *of_data]))
    _refuse_different([marks for _, marks in told])
    builder = next(rank for rank, (host, _) in enumerate(told) if host == mine)
    regions: list[Region] = []
    problem, cause = "", None
    if builder == ranks.rank:
        regions, problem, cause = _build(function, key, cache)
    offers = ranks.gather(([region.address for region in regions], problem))
    _raise_first([problem for _, problem in offers], ranks, cause)
    value, problem = _open(offers[builder][0])
    _raise_first(ranks.gather(problem), ranks, None)  # and until then, the builder keeps its mapping
    if regions and (private_bytes := skeleton_bytes(regions[0])) > _PRIVATE_BYTES:
        complain(
            f"phalanx.share: {in_units(private_bytes)} of the data stay private to each process: dicts, short lists "
            "and objects are not shared, but a list of records is"
        )
    return value


def _nothing(value: Any) -> str:
    return f"there is nothing to share in {'None' if value is None else f'a value of type {type(value).__name__}'}"


def _ranks(group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks that share; refuse a rank that would share with nobody by mistake."""
    if lacks_group():
        raise RuntimeError(
            "phalanx.share: there is no process group yet, so each rank would hold a copy of its own: call "
            "phalanx.init() or init_process_group() first"
        )
    is_initialized = dist.is_available() and dist.is_initialized()
    return RankGroup(group_with_this_rank(group, "phalanx.share") if is_initialized else None)


class _BuildError(Exception):
    """The function that builds the data has raised an exception, which is the cause of this one."""


def _build(
    function: Callable[[], Any], key: str, cache: bool | int | str
) -> tuple[list[Region], str, BaseException | None]:
    """Return the memory with the data, and that for its items if there is a cache; or why there is none."""

    def build() -> Any:
        try:
            value = function()
            memory_for(value, cache)  # raises an error if there are no items
        except Exception as error:
            raise _BuildError from error
        if isinstance(value, _SCALARS):
            raise NotPackedError(f"{_name(function)} has returned {type(value).__name__}: {_nothing(value)}")
        return value

    try:
        if key and (path := path_of_kept()):
            with contextlib.suppress(PermissionError, FileNotFoundError):  # the supervisor is in another container
                call = next(_calls)
                with KeptData(path) as kept:
                    if regions := kept.find_or_build(f"{digest_of_inputs(function)} {key}", call, build, cache):
                        return regions, "", None
        value = build()
        regions = [pack(value)]
        if cache:
            regions.append(new_cache(len(value), memory_for(value, cache)))
        return regions, "", None
    except _BuildError as error:
        cause = error.__cause__
        words = LastWords.of_error(cause) if cause else LastWords()
        return [], f"has raised {words.summary}, at {words.site} in {_name(function)}", cause
    except NotPackedError as error:
        return [], f"can't share the data: {error}", error
    except OSError as error:
        advice = "share less, or read it from disk with numpy.memmap, which is one copy, too"
        if cache is True:
            advice = 'pass a smaller cache, such as cache="1 GiB"'
        return [], f"has no memory for the data: {error.strerror or error}; {advice}", error


def _open(addresses: list[Address]) -> tuple[Any, str]:
    """Return the data at the addresses of its regions, or why that failed."""
    try:
        mapping = open_region(Address(*addresses[0]))
    except OSError as error:
        return None, f"can't map the shared data: {error.strerror or error}"
    try:
        value = unpack(mapping)
        return open_cache(value, addresses[1]) if addresses[1:] else value, ""
    except Exception as error:  # the data's own code may raise anything
        return None, f"can't make the data from its pickle: {type(error).__name__}: {error}"


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", function))


def _raise_first(problems: list[str], ranks: RankGroup, cause: BaseException | None) -> None:
    """Raise on every rank if a rank has a problem."""
    for rank, problem in enumerate(problems):
        if problem:
            message = f"rank {ranks.rank}: phalanx.share: rank {rank} {problem}"
            if rank != ranks.rank:
                raise PhalanxError(message, op="share", ranks=(rank,), is_victim=True)
            raise RuntimeError(message) from cause


def _refuse_different(of_ranks: list[list[tuple[str, str]]]) -> None:
    first = dict(of_ranks[0])
    for rank, others in enumerate(of_ranks):
        theirs = dict(others)
        for what in {**first, **theirs}:
            one, other = first.get(what, "not there"), theirs.get(what, "not there")
            if one != other:
                raise ValueError(
                    f"phalanx.share: the ranks' data differs: {what} is {other} on rank {rank} and {one} on rank 0. "
                    "Pass the same data on every rank, or a function that builds it"
                )
