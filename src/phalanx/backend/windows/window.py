"""Windows of torch 2.14: memory of each rank that the other ranks of its host write (`put`) and read in place.

torch's ``Window`` has no constructor for Python, so `Window` here is a class of its own with the same methods and
names; its ranks are those of the group. torch's front end, ``dist._new_window``, returns our window unchanged.

**Registration** is collective: the ranks exchange what they offer (the address of the block that holds the tensor, its
shape and dtype, or why they refuse), map what the others offer, and exchange whether that went well. So a mistake or a
shortage on one rank raises the same error on all ranks. Afterwards, everything is mapped: if an owner frees its tensor,
the mappings of the other ranks stay valid, and their later calls still succeed.

**put** is one copy by torch into the mapping. The copy is complete when the call returns, and so is its Work. 64 MiB
take 1.3 to 1.5 times as long as a copy into huge pages, which the kernel does not use for shared memory by default
(``python -m bench.interface --only put``).

**Signals** are counters in a block of the host's first rank (``csrc/p2p/signals.h``). A signal makes earlier puts of
its sender visible to the rank that waits for the signal.

**Death**: memory stays mapped, whatever happens to its owner; the next call that names a dead rank raises RankFailed
and ends the group, like a message.

**Between hosts** nothing can be mapped: all these calls refuse a rank on another host, and the error names the rank.
There are no copies through the bridge: they would need a thread on the other host that answers while its rank
computes, and would not give the direct access that a window is for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

import torch

from phalanx import _core, _torch
from phalanx._errors import ArgumentError, CollectiveMismatch, GroupUnusable, OutOfSharedMemory
from phalanx._text import joined
from phalanx.backend.calls.collectives import UNSET
from phalanx.backend.calls.ops import Operations
from phalanx.backend.calls.work import PhalanxWork, finished
from phalanx.backend.deadlines import SIGNAL_POLL_S
from phalanx.backend.hosts.bridged import BridgedGroup
from phalanx.backend.types import DTYPE_CODES, DTYPE_NAMES
from phalanx.backend.windows.tensors import POOL
from phalanx.host.shared_blocks import Address, Block
from phalanx.wire.messages import GarbledError, between, cropped, understand
from phalanx.wire.waiting import wait_until

_OFFER_BYTES = 2048
_MOST_WORDS = 250  # characters of a refusal; in JSON, each takes at most six bytes
_STRIDE = 64  # bytes between two counters: one cache line each
_MOST = 2**62
_BYTE = DTYPE_CODES[torch.uint8]
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_NEW, _REGISTER, _DEREGISTER = "new_window", "tensor_register", "tensor_deregister"

_Place = tuple[
    Annotated[int, between(1, _MOST)],
    Annotated[int, between(0, _MOST)],
    Annotated[int, between(0, _MOST)],
    Annotated[int, between(1, _MOST)],
]


@dataclass(frozen=True)
class _Offer:
    """One rank's part in a collective call of a window.

    Attributes:
        call: The call, as its caller wrote it.
        window: Number of the window in its group.
        refusal: Reason why this rank can't continue; empty if it can.
        is_short: Whether memory or descriptors are short.
        tensor: Address of the block that holds the rank's tensor; None: no tensor, or an empty one.
        offset_bytes: Offset of the tensor in that block.
        shape: Shape of the tensor.
        dtype: Code of the tensor's dtype.
        signals: Address of the block with this host's counters; only the first rank of the host sets it.
    """

    call: Annotated[str, cropped(80)]
    window: int
    refusal: Annotated[str, cropped(_MOST_WORDS)] = ""
    is_short: bool = False
    tensor: _Place | None = None
    offset_bytes: Annotated[int, between(0, _MOST)] = 0
    shape: Annotated[list[Annotated[int, between(0, _MOST)]], cropped(64)] | None = None
    dtype: Annotated[int, between(-1, len(DTYPE_NAMES) - 1)] = -1
    signals: _Place | None = None


class Window:
    """A window of a group: memory of each rank that the others put data into, and signals between ranks.

    Ranks are those of the group. Create a window by ``dist._new_window(tensor)`` or ``group.new_window(tensor)``.
    """

    def __init__(self, operations: Operations, number: int) -> None:
        self._operations = operations
        self._number = number
        core = operations._core
        self._here = core.here if isinstance(core, BridgedGroup) else list(range(operations._size))
        self._local = {rank: place for place, rank in enumerate(self._here)}
        self._ranks = operations.ranks  # a reconfigure gives the group other ranks
        self._rank = operations._rank
        self._tensor: torch.Tensor | None = None  # kept alive if the window owns it
        self._views: dict[int, torch.Tensor] | None = None  # tensor of each rank of this host
        self._flats: dict[int, torch.Tensor] = {}  # the same tensors, flattened
        self._over = finished([])  # handle of calls that are complete when they return
        self._untouched: dict[int, Any] = {}  # mappings into which nothing has been put so far
        self._counters: torch.Tensor | None = None
        self._sends: dict[int, int] = {}  # addresses of counters
        self._receives: dict[int, int] = {}
        self._numbers = {rank: itertools.count(1) for rank in self._here}

    # ---- collective calls ------------------------------------------------------------------------------------------

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Offer a tensor of this rank to the other ranks. All must call this, with tensors of one dtype and any size.

        The errors below are raised on every rank.

        Args:
            tensor: Contiguous tensor from `allocate_tensor`, or a part of one.
            owning: Whether the window keeps the tensor alive until `tensor_deregister`. If not, its owner may free it;
                the memory stays valid for the ranks that map it.

        Raises:
            ArgumentError: The tensor of some rank is not in shared memory, or the dtypes differ.
            OutOfSharedMemory: Some rank has no address space or descriptors left for the mappings.
            CollectiveMismatch: The ranks made different calls.
        """
        self._register(_REGISTER, tensor, owning)

    def tensor_deregister(self) -> None:
        """Withdraw the tensors of all ranks from the window. Every rank must call this. Existing views stay valid."""
        refusal = "" if self._views is not None else "no tensor is registered"
        self._exchange(_Offer(_DEREGISTER, self._number, refusal))
        self._tensor = self._views = None
        self._flats, self._untouched = {}, {}

    def _register(self, op: str, tensor: torch.Tensor | None, owning: bool) -> None:
        """Make the window, or offer a tensor of this rank, or both."""
        call = op if op == _REGISTER else f"{op}({'tensor' if tensor is not None else ''})"
        facts: dict[str, Any] = {}
        refusal, is_short = "", False
        counters: Block | None = None
        try:
            if op == _NEW and self._rank == self._here[0]:
                counters = Block.create(len(self._here) ** 2 * _STRIDE, "signals")
                facts["signals"] = counters.address
            if tensor is not None or op == _REGISTER:
                facts |= self._offered(tensor)
        except ArgumentError as error:
            refusal = str(error)
        except OSError as error:
            refusal, is_short = f"{error.strerror or error}", True
        offers = self._exchange(_Offer(call, self._number, refusal, is_short, **facts))
        views: dict[int, torch.Tensor] = {}
        try:
            if op == _NEW:
                self._map_counters(offers[self._here[0]])
            if tensor is not None:
                views = {rank: self._view(rank, offers[rank]) for rank in self._here}
            refusal = ""
        except OSError as error:
            refusal = f"the memory of another rank can't be mapped: {error.strerror or error}"
        except ValueError as error:  # the numbers in an offer make no sense
            refusal = f"another rank's offer is invalid: {error}"
        # `tensor` and `counters` live here until all ranks have mapped them.
        self._exchange(_Offer(call, self._number, refusal, bool(refusal)))
        if tensor is not None:
            self._views, self._tensor = views, tensor if owning else None
            self._flats = {rank: view.view(-1) for rank, view in views.items()}

    def _offered(self, tensor: Any) -> dict[str, Any]:
        """Return the facts of a tensor to offer.

        Raises:
            ArgumentError: The tensor can't be offered.
        """
        if self._views is not None:
            raise ArgumentError("a tensor is registered already; call tensor_deregister() first")
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"a window takes a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPE_CODES or not (_core.is_plain(tensor) and tensor.is_cpu):
            raise ArgumentError(
                f"a window takes a contiguous CPU tensor, got {tensor.dtype} of shape {list(tensor.shape)} and "
                f"{tensor.layout} layout on {tensor.device}"
            )
        facts: dict[str, Any] = {"shape": list(tensor.shape), "dtype": DTYPE_CODES[tensor.dtype][0]}
        if tensor.numel() == 0:
            return facts
        found = POOL.find(tensor)
        if found is None:
            raise ArgumentError(
                "the tensor is not in memory that other ranks can map; take one from "
                "group.allocate_tensor(size, dtype=...) and copy the values into it"
            )
        block, offset = found
        return facts | {
            "tensor": block.address,
            "offset_bytes": offset + tensor.storage_offset() * tensor.dtype.itemsize,
        }

    def _map_counters(self, offer: _Offer) -> None:
        if offer.signals is None:
            raise ValueError("no counters")
        block = Block.open(Address(*offer.signals), "signals")
        block.close()
        self._counters = torch.frombuffer(block.memory, dtype=torch.uint8)
        base, me, size = self._counters.data_ptr(), self._local[self._rank], len(self._here)
        for rank, place in self._local.items():
            self._sends[rank] = base + (me * size + place) * _STRIDE
            self._receives[rank] = base + (place * size + me) * _STRIDE

    def _view(self, rank: int, offer: _Offer) -> torch.Tensor:
        """Map the tensor that a rank of this host offers, and return it."""
        dtype = next(dtype for dtype, (code, _) in DTYPE_CODES.items() if code == offer.dtype)
        shape = offer.shape or []
        if offer.tensor is None:
            return torch.empty(shape, dtype=dtype)
        block = Block.open(Address(*offer.tensor), "windows")
        block.close()
        count = 1
        for length in shape:
            count *= length
        self._untouched[rank] = block.memory
        return torch.frombuffer(block.memory, dtype=dtype, count=count, offset=offer.offset_bytes).view(shape)

    def _exchange(self, offer: _Offer) -> list[_Offer]:
        """Return the offers of all ranks, by rank.

        Raises:
            CollectiveMismatch: The offers belong to different calls.
            ArgumentError: A rank refuses.
            OutOfSharedMemory: A rank is short of memory or descriptors.
        """
        self._require_own_ranks(offer.call)
        size = self._operations._size
        text = json.dumps({name: value for name, value in asdict(_cut(offer)).items() if value is not None}).encode()
        assert len(text) <= _OFFER_BYTES, "an offer is too long"
        mine = torch.frombuffer(bytearray(text.ljust(_OFFER_BYTES)), dtype=torch.uint8)
        everyone = torch.empty(size * _OFFER_BYTES, dtype=torch.uint8)
        starts = [everyone.data_ptr() + rank * _OFFER_BYTES for rank in range(size)]
        self._operations._core.run(
            _core.Call("all_gather", *_BYTE, _OFFER_BYTES), [mine.data_ptr()], starts, UNSET, None
        )
        try:
            offers = [understand(one.numpy().tobytes().strip(), _Offer) for one in everyone.split(_OFFER_BYTES)]
        except GarbledError as error:
            raise CollectiveMismatch(f"{self._where(offer.call)}: another rank made another call: {error}") from error
        self._require_alike(offer, offers)
        return offers

    def _require_alike(self, offer: _Offer, offers: Sequence[_Offer]) -> None:
        ranks = self._operations.ranks.global_ranks
        calls = {(one.call, one.window) for one in offers}
        if len(calls) > 1:
            rows = [f"  rank {ranks[r]}: {one.call} of window {one.window}" for r, one in enumerate(offers)]
            raise CollectiveMismatch(
                "\n".join([f"{self._where(offer.call)}: the ranks of this group made different calls", *rows,
                           "Make every rank call the same methods of the same windows in the same order."]),
                op=offer.call,
            )  # fmt: skip
        refusing = {ranks[r]: one for r, one in enumerate(offers) if one.refusal}
        if refusing:
            kind = OutOfSharedMemory if any(one.is_short for one in refusing.values()) else ArgumentError
            text = "; ".join(f"rank {rank}: {one.refusal}" for rank, one in refusing.items())
            raise kind(f"{self._where(offer.call)}: {text}")
        dtypes = {one.dtype for one in offers}
        if len(dtypes) > 1:
            rows = [f"rank {ranks[r]} {DTYPE_NAMES[one.dtype]}" for r, one in enumerate(offers)]
            raise ArgumentError(
                f"{self._where(offer.call)}: the tensors of a window must have one dtype: {joined(rows)}"
            )

    def _where(self, op: str) -> str:
        return self._operations.arguments(op.partition("(")[0]).where()

    # ---- calls of one rank -----------------------------------------------------------------------------------------

    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool = False, opts: Any = None
    ) -> PhalanxWork:
        """Write a tensor into the window of a rank; the write is complete when this returns.

        Args:
            tensor: CPU tensor of the window's dtype, of any shape and strides.
            dst_rank: Rank of the group.
            target_offset_nelems: Index of the first element to write in that rank's tensor, flattened.
            async_op: Ignored: the copy is complete in any case.
            opts: torch's PutOptions; ignored, since a copy needs no timeout.

        Raises:
            ArgumentError: The tensor does not fit into the window, or that rank is on another host.
            RankFailed: That rank has ended or left the group.
        """
        target = self._target("put", "dst_rank", dst_rank)
        given = self._operations.arguments("put")
        given.check(tensor)
        if tensor.dtype != target.dtype:
            raise ArgumentError(f"{given.where()}: the window holds {target.dtype}, got a tensor of {tensor.dtype}")
        num_elems, offset = tensor.numel(), target_offset_nelems
        if type(offset) is not int or not 0 <= offset <= target.numel() - num_elems:
            raise ArgumentError(
                f"{given.where()}: {num_elems} elements at target_offset_nelems={offset!r} do not lie in the window of "
                f"rank {self._global(dst_rank)}, which has {target.numel()}"
            )
        self._core("put").require_peer(self._local[dst_rank], True)
        if (memory := self._untouched.pop(dst_rank, None)) is not None and num_elems * tensor.itemsize > 1 << 20:
            _touch(memory)
        place = self._flats[dst_rank].narrow(0, offset, num_elems)
        (place if tensor.dim() == 1 else place.view(tensor.shape)).copy_(tensor.detach())
        return self._over

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Return a view of the tensor that a rank of this host has registered. The view may outlive the window.

        Raises:
            ArgumentError: That rank is on another host, or no tensor is registered.
            RankFailed: That rank has ended or left the group.
        """
        view = self._target("map_remote_tensor", "rank", rank)
        self._core("map_remote_tensor").require_peer(self._local[rank], False)
        return view.detach()

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> PhalanxWork:
        """Send a signal to a rank; it arrives after all data that this rank has put before. Never waits."""
        place = self._place("signal", "peer_rank", peer_rank)
        self._core("signal").signal(self._sends[peer_rank], place)
        return self._over

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> PhalanxWork:
        """Wait for the next signal of a rank: the n-th call waits for that rank's n-th signal.

        Args:
            peer_rank: Rank of the group.
            async_op: Whether to return at once; the returned work then waits for the signal.
            opts: torch's WaitSignalOptions, whose timeout replaces the group's.

        Raises:
            CollectiveTimeout: No signal has arrived in time. The group has ended, as after a message that timed out.
            RankFailed: That rank has ended or left the group.
        """
        place = self._place("wait_signal", "peer_rank", peer_rank)
        timeout = UNSET if opts is None else opts.timeout
        core = self._core("wait_signal")
        number = next(self._numbers[peer_rank])
        if not async_op:
            core.wait_signal(self._receives[peer_rank], number, place, timeout)
            return self._over
        expected = _Expected(core, self._counters, self._receives[peer_rank], number, place, timeout)
        return self._operations._flight.begin(expected, _wait_for, [], None, None)

    def get_attr(self, peer_rank: int) -> Any:
        """Return torch's WindowAttr of a rank; it says that all ranks that map the memory see the same bytes."""
        self._place("get_attr", "peer_rank", peer_rank)
        return _torch.WindowAttr()

    def _global(self, rank: int) -> int:
        return self._operations.ranks.global_ranks[rank]

    def _core(self, op: str) -> Any:
        self._require_own_ranks(op)
        core = self._operations._core
        return core.of_host(op) if isinstance(core, BridgedGroup) else core

    def _require_own_ranks(self, op: str) -> None:
        if self._operations.ranks is not self._ranks:
            raise GroupUnusable(
                f"{self._where(op)}: the group's ranks have changed since the window was made; make a new one", op=op
            )

    def _place(self, op: str, name: str, rank: int) -> int:
        """Return the number of a rank among those of this host."""
        place = self._local.get(rank) if type(rank) is int else None
        if place is not None:
            return place
        size = self._operations._size
        if type(rank) is not int or not 0 <= rank < size:
            raise ArgumentError(f"{self._where(op)}: {name} must lie in [0, {size}), got {rank!r}")
        raise ArgumentError(
            f"{self._where(op)}: rank {self._global(rank)} is on another host, whose memory this rank can't map; "
            "use send and recv between hosts"
        )

    def _target(self, op: str, name: str, rank: int) -> torch.Tensor:
        self._place(op, name, rank)
        if self._views is None:
            raise ArgumentError(f"{self._where(op)}: no tensor is registered; every rank calls tensor_register() first")
        return self._views[rank]


class _Expected:
    """Handle of an asynchronous `wait_signal`, for its Work."""

    source = -1

    def __init__(self, core: Any, counters: Any, address: int, number: int, place: int, timeout: timedelta) -> None:
        self._core, self._counters = core, counters  # kept alive: the core reads the memory of `counters`
        self._address, self._number, self._place, self._timeout = address, number, place, timeout
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._error is not None or self._core.has_signal(self._address, self._number)

    def error(self) -> BaseException | None:
        return self._error

    def require_reachable(self) -> None:
        self._core.require_peer(self._place, False)

    def _look(self) -> bool | None:
        if not self.done:
            self.require_reachable()
        return self.done or None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the signal, at most `timeout_s`; 0: up to the timeout of the call or of the group."""
        if timeout_s:
            if wait_until(self._look, time.monotonic() + timeout_s, most_s=SIGNAL_POLL_S) is None:
                return False
        elif self._error is None:
            try:
                self._core.wait_signal(self._address, self._number, self._place, self._timeout)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return True

    def notify(self, completions: Any, number: int) -> None:
        """Push the number of a future once the signal has arrived. Only futures need a thread for this wait."""

        def wait() -> None:
            with contextlib.suppress(Exception):  # `error()` returns the exception
                self.wait(0)
            completions.push(number)

        threading.Thread(target=wait, name="phalanx-signal", daemon=True).start()


def _wait_for(expected: _Expected, timeout_s: float) -> bool:
    return expected.wait(timeout_s)


def _touch(memory: Any) -> None:
    """Map all pages at once, if the kernel can: that takes a third of the time that page faults take."""
    try:
        memory.madvise(_POPULATE_WRITE)
    except (OSError, ValueError):  # an older kernel, or a limit: pages are mapped one by one
        return


def _cut(offer: _Offer) -> _Offer:
    return (
        offer
        if len(offer.refusal) <= _MOST_WORDS
        else _Offer(**(asdict(offer) | {"refusal": offer.refusal[:_MOST_WORDS]}))
    )


def new_window(operations: Operations, tensor: torch.Tensor | None = None) -> Window:
    """Return a new window of a group; register this rank's tensor in it if one is given. Every rank must call this."""
    window = Window(operations, operations.num_windows + 1)
    window._register(_NEW, tensor, True)
    operations.num_windows += 1  # only now: after a mismatch, ranks that made another call have not counted a window
    return window
