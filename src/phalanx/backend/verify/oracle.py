"""The Gloo group beside a group: runs an operation again, and lets the ranks agree on what they found.

Gloo gets only input that it can handle: contiguous memory, bytes for operations that only copy data, and dtypes that it
reduces. Integers of 16 and 32 bits for which Gloo has no kernel are converted to a wider dtype, and wrap around when
they are converted back. Bools are sent as bytes of 0 and 1, since Gloo's sum of two bools is 2; complex numbers are
sent as pairs. An average is Gloo's sum, divided here. reduce and reduce_scatter run Gloo's all_reduce, and each rank
keeps its part, as in Gloo's own reduce_scatter. Gloo has no products of complex numbers, so these are checked only
against the inputs of all ranks.

**Every wait ends** when Gloo is done, when the group ends on any rank (the core notices that), at the deadline, or by
Ctrl-C. Gloo's errors name no rank, so the core is asked which rank failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from phalanx._env import LONGEST_S
from phalanx._errors import CollectiveTimeout, PhalanxError
from phalanx.backend.calls.collectives import BARRIER
from phalanx.backend.calls.tasks import Tasks
from phalanx.backend.deadlines import CLOSING_POLL_S, END_S, LATE_S, LOOK_S
from phalanx.backend.failures.members import Ranks
from phalanx.backend.hosts.channels import GlooChannel, wait_for_gloo
from phalanx.backend.types import RedOpType
from phalanx.wire.messages import Shape, as_facts, understand
from phalanx.wire.waiting import wait_until

_DIRECT = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_OF_BOOL = {
    **dict.fromkeys((RedOpType.SUM, RedOpType.MAX, RedOpType.BOR), RedOpType.MAX),
    **dict.fromkeys((RedOpType.PRODUCT, RedOpType.MIN, RedOpType.BAND), RedOpType.MIN),
    RedOpType.BXOR: RedOpType.BXOR,
}
_LOW = (1 << 32) - 1
_PIECE_BYTES = 32 << 20  # bytes of all ranks' inputs that are examined at a time


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, shape ``(nbytes,)``."""
    made = torch.empty(0, dtype=torch.uint8, device="cpu")  # view() refuses quantized dtypes
    at = tensor.storage_offset() * tensor.itemsize
    return made.set_(tensor.untyped_storage(), at, (tensor.nbytes,), (1,))


class Unanswered(Exception):
    """Gloo delivered no message, although the group has not failed."""


class Oracle:
    """torch's own Gloo, for the ranks of one group.

    Args:
        core: Core of the group, which knows the ranks that fail.
        store: Store that nothing else uses.
        ranks: Ranks of the group.
        address: Address at which the other ranks reach this one.
        timeout: Function that returns the timeout of an operation.
        silence_s: Seconds without an answer after which a connection counts as lost.

    Raises:
        PhalanxError: Gloo can't connect the ranks.
    """

    def __init__(
        self, core: Any, store: Store, ranks: Ranks, address: str, timeout: Callable[[], timedelta], silence_s: float
    ) -> None:
        self._core, self._ranks, self._timeout = core, ranks, timeout
        self._last: Any = None  # operation that may still run
        # Threads wait for messages, because Gloo can't be asked whether a message has arrived, and because a wait that
        # times out closes the connection.
        self._sends, self._receives = (Tasks(f"phalanx-verify-{what}", lambda: None) for what in ("send", "recv"))
        everyone = list(range(ranks.size))
        self._channel = GlooChannel(store, ranks.rank, everyone, address, self._limit_s, silence_s)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self._limit_s)

    @property
    def _limit_s(self) -> float:
        seconds = self._timeout().total_seconds()
        return min(seconds, LONGEST_S) if seconds > 0 else LONGEST_S

    @property
    def _gloo(self) -> Any:
        return self._channel.engine()

    def disconnect(self) -> None:
        """Close the connections, which ends running operations on this rank and the others."""
        self._channel.close()
        for tasks in (self._sends, self._receives):
            tasks.close()

    def free(self) -> None:
        """Free the engine, unless a canceled operation is still running: the destructor would wait for it."""

        def is_over() -> bool | None:
            return self._last is None or self._last.is_completed() or None

        if wait_until(is_over, time.monotonic() + END_S, most_s=CLOSING_POLL_S):
            self._last = None
            self._channel.destroy()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._channel))

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def run(self, start: Callable[[], Any], op: str) -> None:
        """Start an operation of Gloo and wait until it is over.

        Raises:
            PhalanxError: The operation failed, or the group ended meanwhile; the error names the rank at fault.
        """
        why = self._wait(start)
        if why:
            raise self._failure(op, why)

    def _wait(self, start: Callable[[], Any]) -> str:
        """Start an operation and wait until it is over; return why it failed, or an empty text."""
        end_s = time.monotonic() + self._limit_s
        try:
            work = self._last = start()
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):  # the operation is not over yet, or has failed
                    wait_for_gloo(work, timedelta(seconds=LOOK_S))
                if self._core.told or time.monotonic() > end_s:
                    break
            if not work.is_completed():
                return "the group has failed" if self._core.told else f"it is not done after {self._limit_s:g} s"
            wait_for_gloo(work, timedelta(seconds=LOOK_S))
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def _failure(self, op: str, why: str) -> PhalanxError:
        """Return the core's error, which names the rank at fault; if it has none, end the group and return an error."""
        text = f"{op} could not be verified on Gloo: {why}"
        try:
            self._core.run(BARRIER, [], [], timedelta(seconds=LATE_S), None)
        except CollectiveTimeout:
            pass
        except PhalanxError as error:
            return error
        with contextlib.suppress(PhalanxError):
            self._core.abort(text)
        return PhalanxError(f"rank {self._ranks.global_ranks[self._ranks.rank]}: {text}", op=op, entry="wrong-result")

    # ---- transfers -------------------------------------------------------------------------------------------------

    def broadcast(self, data: torch.Tensor, size: int, root: int) -> torch.Tensor:
        opts = c10d.BroadcastOptions()
        opts.rootRank = root
        if self._ranks.rank != root:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self.run(lambda: self._gloo.broadcast([data], opts), "broadcast")
        return data

    def all_gather(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the bytes of all ranks, one after the other; `sizes` holds each rank's number of bytes."""
        most = max(sizes)
        if most == 0:
            return data
        padded = data
        if data.numel() < most:
            padded = torch.zeros(most, dtype=torch.uint8, device="cpu")
            padded[: data.numel()] = data
        outs = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in sizes]
        self.run(lambda: self._gloo.allgather([outs], [padded]), "all_gather")
        return torch.cat([out[:size] for out, size in zip(outs, sizes, strict=True)])

    def gather(self, data: torch.Tensor, root: int) -> torch.Tensor:
        opts = c10d.GatherOptions()
        opts.rootRank = root
        is_root = self._ranks.rank == root
        outs = [[torch.empty_like(data) for _ in range(self._ranks.size)]] if is_root else []
        if data.numel():
            self.run(lambda: self._gloo.gather(outs, [data], opts), "gather")
        return torch.cat(outs[0]) if is_root else data[:0]

    def scatter(self, data: torch.Tensor, size: int, root: int) -> torch.Tensor:
        opts = c10d.ScatterOptions()
        opts.rootRank = root
        ins = [list(data.split(size))] if self._ranks.rank == root and size else []
        out = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self.run(lambda: self._gloo.scatter([out], ins, opts), "scatter")
        return out

    def all_to_all(self, data: torch.Tensor, in_sizes: list[int], out_sizes: list[int]) -> torch.Tensor:
        out = torch.empty(sum(out_sizes), dtype=torch.uint8, device="cpu")
        opts = c10d.AllToAllOptions()
        self.run(lambda: self._gloo.alltoall_base(out, data, out_sizes, in_sizes, opts), "all_to_all")
        return out

    def send(self, data: torch.Tensor, peer: int, tag: int) -> None:
        """Send a message, which Gloo keeps until it is received; return at once."""
        work = self._gloo.send([data], peer, tag)
        self._sends.submit(lambda: wait_for_gloo(work, self._limit), keep=data)

    def recv(self, data: torch.Tensor, peer: int, tag: int) -> None:
        """Receive a message.

        Raises:
            Unanswered: The sender has left, and the group has not failed.
            PhalanxError: The group has failed.
        """
        error: BaseException | None = None
        try:
            work = self._gloo.recv([data], peer, tag)
        except RuntimeError as closed:  # Gloo knows already that the sender has left
            error = closed
        else:
            task = self._receives.submit(lambda: wait_for_gloo(work, self._limit), keep=data)
            while not task.wait(LOOK_S):
                if self._core.told:
                    raise self._failure("recv", "the group has failed")
            error = task.error()
        if error is not None:
            if self._core.told:
                raise self._failure("recv", str(error).partition("\n")[0])
            raise Unanswered(str(error))

    @property
    def is_quiet(self) -> bool:
        """Whether no message is on its way."""
        return self._sends.is_idle and self._receives.is_idle

    def deliver(self) -> None:
        """Wait until the messages of this rank have been received, unless the group fails or a receiver is late."""
        end_s = time.monotonic() + LATE_S
        while not self._sends.drain(LOOK_S) and not self._core.told and time.monotonic() < end_s:
            pass

    # ---- reductions ------------------------------------------------------------------------------------------------

    def all_reduce(self, given: torch.Tensor, kind: Any) -> torch.Tensor | None:
        """Return the reduction of all ranks' contiguous 1-d inputs, which stay unchanged; None: Gloo has no kernel."""
        dtype, n = given.dtype, self._ranks.size
        if kind == RedOpType.PREMUL_SUM:
            kind = RedOpType.SUM
        if dtype is torch.bool:
            return self._reduced(as_bytes(given).ne(0).to(torch.uint8), _OF_BOOL[kind]).to(torch.bool)
        if dtype.is_complex:
            if kind == RedOpType.PRODUCT:
                return None
            total = self._reduced(torch.view_as_real(given).clone(), RedOpType.SUM)
            return torch.view_as_complex(total / n if kind == RedOpType.AVG else total)
        if kind == RedOpType.AVG:
            if not dtype.is_floating_point:
                return self._average_of_integers(given)
            return self._reduced(given.clone(), RedOpType.SUM) / n
        if dtype is torch.uint64:
            is_ordered = kind in (RedOpType.MIN, RedOpType.MAX)
            flip = torch.iinfo(torch.int64).min if is_ordered else 0  # makes signed numbers sort like unsigned ones
            return (self._reduced(given.view(torch.int64) ^ flip, kind) ^ flip).view(torch.uint64)
        if dtype not in _DIRECT:
            return self._reduced(given.to(_WIDER[dtype]), kind).to(dtype)
        return self._reduced(given.clone(), kind)

    def _reduced(self, data: torch.Tensor, kind: Any) -> torch.Tensor:
        opts = c10d.AllreduceOptions()
        opts.reduceOp = kind
        if data.numel():
            self.run(lambda: self._gloo.allreduce([data], opts), "all_reduce")
        return data

    def _average_of_integers(self, given: torch.Tensor) -> torch.Tensor:
        """Return the exact averages, truncated towards zero. 32-bit halves are summed separately, without overflow."""
        n = self._ranks.size
        is_unsigned = given.dtype is torch.uint64
        whole = given.view(torch.int64) if is_unsigned else given.to(torch.int64)
        high, low = whole >> 32, whole & _LOW
        high = self._reduced(high & _LOW if is_unsigned else high, RedOpType.SUM)
        low = self._reduced(low, RedOpType.SUM)
        high, low = high + (low >> 32), low & _LOW
        quotient = high.div(n, rounding_mode="floor")
        rest = ((high - quotient * n) << 32) + low
        floor = (quotient << 32) + rest.div(n, rounding_mode="floor")
        floor += (high < 0) & (rest % n != 0)
        return floor.view(torch.uint64) if is_unsigned else floor.to(given.dtype)

    # ---- agreement -------------------------------------------------------------------------------------------------

    def union(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices at which any rank's booleans are true."""
        return self._reduced(mask.to(torch.uint8), RedOpType.MAX).nonzero().flatten()

    def most(self, number: int) -> int:
        """Return the largest `number` of any rank."""
        told = torch.tensor([number], dtype=torch.int64, device="cpu")
        return int(self._reduced(told, RedOpType.MAX))

    def pieces_of(self, given: torch.Tensor, at: torch.Tensor) -> Any:
        """Yield pieces of the indices `at`, each with the inputs of all ranks at these indices, shape ``(n, m)``."""
        n = self._ranks.size
        step = max(1, _PIECE_BYTES // (n * given.itemsize))
        for indices in at.split(step):
            mine = as_bytes(given[indices].contiguous())
            everyone = self.all_gather(mine, [mine.numel()] * n)
            yield indices, everyone.view(given.dtype).reshape(n, -1)

    def share(self, told: Any, shape: Shape) -> list[Any]:
        """Return the ranks' reports in rank order. This costs little if no rank has a report, the usual case."""
        mine = json.dumps(as_facts(told)).encode() if told is not None else b""
        most = self.most(len(mine))
        if not most:
            return []
        data = torch.zeros(most, dtype=torch.uint8, device="cpu")
        data[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else 0
        rows = self.all_gather(data, [most] * self._ranks.size).reshape(-1, most)
        texts = [bytes(row.tolist()).rstrip(b"\0") for row in rows]
        return [understand(text, shape) for text in texts if text]
