"""All operations of a group (collectives, coalesced collectives, messages), and how a rank leaves the group.

The adapters of all torch versions call these methods. Ranks are numbers in the group, not in the world.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.distributed import ReduceOp

from phalanx import _core, _env
from phalanx._env import seconds
from phalanx._errors import ArgumentError, CollectiveTimeout, Failure, GroupUnusable, PhalanxError
from phalanx._torch import is_profiling  # by name: a look-up in the module would cost half as much as the call
from phalanx.backend.calls.arguments import Arguments
from phalanx.backend.calls.collectives import UNSET, Call, Collectives, Options, Settle
from phalanx.backend.calls.extension import Extended
from phalanx.backend.calls.flight import Flight, Joined
from phalanx.backend.calls.memory import Tensors, addresses_of, do_overlap
from phalanx.backend.calls.work import Over, PhalanxWork
from phalanx.backend.failures.abort_hooks import AbortHooks
from phalanx.backend.failures.members import Ranks
from phalanx.backend.types import DTYPE_CODES, RedOpType
from phalanx.record.sites import call_site
from phalanx.rendezvous.launched import note_progress

_WRAPPED = timedelta(days=-100_000)  # a timeout below this was too large for C++ (timedelta.max) and wrapped around
_TO_BEGIN = 32  # collectives; the most that a run needs before its first step, to compare models and send weights
_ABORTED = "abort() was called"
_AVG = ReduceOp(RedOpType.AVG)


class Operations(Collectives):
    """Collectives and messages of one group.

    Args:
        core: Core group, already joined.
        segment: Shared memory of the group, kept until this rank leaves.
        name: Name of the group in messages.
        ranks: Ranks of the group.
        timeout: Timeout of operations that have none of their own; `set_timeout` changes it.

    Attributes:
        num_messages: Number of messages that this rank has sent or received.
        abort_hooks: Functions that run on this rank when the group fails; also holds the failure after it has happened.
        name: The argument `name`.
        num_windows: Number of windows that this rank has made.
    """

    def __init__(
        self, core: _core.Group, segment: _core.Segment | None, name: str, ranks: Ranks, timeout: timedelta
    ) -> None:
        super().__init__(core, ranks)
        self._segment = segment
        self.name = name
        self.timeout = timeout
        self.abort_hooks = AbortHooks(name)
        self.num_messages: int = 0
        self.num_windows: int = 0
        self._num_exchanges = 0  # sum of `num_exchanges` over the cores that this rank has left
        self._serve_flight()

    def _serve_flight(self) -> None:
        self.start_coalescing = self._flight.start_coalescing
        self.end_coalescing = self._flight.end_coalescing

    # ---- several operations as one ---------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Tensors, opts: Options) -> PhalanxWork | None:
        dense = [tensor for tensor in tensors if tensor.layout is not torch.sparse_coo]
        given = self.arguments("all_reduce")
        for tensor in dense:
            given.check(tensor)
        if do_overlap(dense, []):  # every tensor must be summed with the values that it had before the call
            tensors = [t if t.layout is torch.sparse_coo else given.copy(t) for t in tensors]
        calls = [functools.partial(self.allreduce, [t]) for t in tensors]
        return self._coalesced("all_reduce", calls, opts, tensors, tensors, given.settle)

    def _coalesced(
        self,
        op: str,
        calls: Sequence[Callable],
        opts: Options,
        result: Tensors,
        inputs: Tensors,
        settle: Callable[[], None] | None = None,
    ) -> PhalanxWork | None:
        """Run several operations as one, in order."""
        if is_profiling() and not self._in_event:
            settle = self._profiled(op, inputs, settle)
        self._in_event = True
        try:
            works = [work for call in calls if (work := call(opts)) is not None]
        finally:
            self._in_event = False
        if works:
            return Joined(works, result, settle)
        if settle is not None:
            settle()
        return self._done(opts, result)

    def _require_apart(self, op: str, targets: Sequence[Tensors], sources: Sequence[Tensors]) -> None:
        """Check, before the first operation begins, that no operation writes memory that another one uses."""
        given = self.arguments(op)
        for tensor in chain(*targets, *sources):
            given.check(tensor)
        for i, mine in enumerate(targets):
            others = [t for j in range(len(targets)) if j != i for t in (*targets[j], *sources[j])]
            if any(do_overlap([t], others) for t in mine):
                raise ArgumentError(
                    f"{given.where()}: an output of coalesced operation {i} overlaps a tensor of another one, and "
                    "their order is not defined; pass tensors that do not overlap"
                )

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> PhalanxWork | None:
        # torch's lists are ordered by rank, then by tensor
        by_tensor = [[by_rank[i] for by_rank in outputs] for i in range(len(inputs))]
        self._require_apart("all_gather", by_tensor, [[t] for t in inputs])
        calls = [functools.partial(self.allgather, [o], [i]) for o, i in zip(by_tensor, inputs, strict=True)]
        return self._coalesced("all_gather", calls, opts, [t for by_rank in outputs for t in by_rank], inputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> PhalanxWork | None:
        return self._pairs("all_gather", self.all_gather_single, outputs, inputs, opts)

    def _pairs(
        self, op: str, run: Callable[..., PhalanxWork | None], outputs: Tensors, inputs: Tensors, opts: Options
    ) -> PhalanxWork | None:
        """Run an operation for each pair of an output and an input."""
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"{self.arguments(op).where()} takes as many outputs as inputs, got {len(outputs)} and {len(inputs)}"
            )
        self._require_apart(op, [[t] for t in outputs], [[t] for t in inputs])
        calls = [functools.partial(run, o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._coalesced(op, calls, opts, outputs, inputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> PhalanxWork | None:
        return self._pairs("reduce_scatter", self.reduce_scatter_single, outputs, inputs, opts)

    def average_coalesced(self, tensors: Tensors, marks: torch.Tensor, *, with_squares: bool) -> float:
        """Replace `tensors` and `marks` by their means over the ranks. See `PhalanxGroup.average_coalesced`."""
        if not is_profiling():
            done = self._core.average_plain(tensors, marks, with_squares, UNSET)
            if done is not None:
                squares, self.average_waited_s = done
                return squares
        close = self._profiled("average_coalesced", tensors) if is_profiling() else None
        given = self.arguments("average_coalesced")
        squares = waited_s = 0.0
        by_dtype: dict[torch.dtype, Tensors] = {}
        for tensor in tensors:
            given.check(tensor)
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, alike in by_dtype.items():
            reduction = given.reduction(_AVG, dtype)
            num_squared = len(alike) if with_squares else 0
            buffers = [given.update(tensor) for tensor in alike]
            if dtype == marks.dtype:
                buffers.append(marks)
            addresses = addresses_of(buffers)
            counts = [buffer.numel() for buffer in buffers]
            call = Call("all_reduce", *DTYPE_CODES[dtype], sum(counts), **reduction)
            done = self._core.all_reduce_pieces(call, addresses, addresses, counts, num_squared, UNSET)
            squares, waited_s = squares + done[0], waited_s + done[1]
        given.settle()
        if close is not None:
            close()
        self.average_waited_s = waited_s
        return squares

    def monitored_barrier(self, opts: Options, wait_all_ranks: bool = False) -> None:
        """Block until every rank has called this.

        Rank 0's error names the first missing rank or, with `wait_all_ranks`, every missing rank.
        """
        me = self.ranks.global_ranks[self._rank]
        timeout = self.timeout if opts.timeout == UNSET else opts.timeout
        timeout_ms = int(timeout.total_seconds() * 1000)
        if _WRAPPED < timeout < timedelta(0):
            raise ArgumentError(
                f"{self.arguments('monitored_barrier').where()}: timeout must be at least 0 s, got "
                f"{timeout.total_seconds():g} s; leave it out for the group's"
            )
        if timeout_ms == 0:
            self._core.abort("monitored_barrier was given no time")
            raise CollectiveTimeout(f"Rank {me} timed out in monitoredBarrier after 0 ms", op="monitored_barrier")
        try:
            self._core.run(Call("barrier"), [], [], timeout, None)
            self.num_barriers += 1
        except GroupUnusable:
            raise  # no rank is missing
        except PhalanxError as error:
            ranks = error.ranks
            if self._rank != 0:
                text = (
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank {self.ranks.global_ranks[0]}"
                )
            elif wait_all_ranks and len(ranks) > 1:
                text = f"Ranks {', '.join(map(str, ranks))} failed to pass monitoredBarrier in {timeout_ms} ms"
            else:
                ranks = ranks[:1]
                text = f"Rank {ranks[0] if ranks else '?'} failed to pass monitoredBarrier in {timeout_ms} ms"
            kind = type(error)
            raise kind(f"{text}\n{error}", op="monitored_barrier", seq=error.seq, ranks=ranks) from error

    # ---- messages --------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> PhalanxWork:
        work = None if is_profiling() else self._started("send_plain", (tensors, dst, tag), tensors)
        if work is not None:
            return work
        given = self.arguments("send")
        return self._message(given, tensors, given.root(dst), tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> PhalanxWork:
        work = None if is_profiling() else self._started("recv_plain", (tensors, src, tag), tensors)
        if work is not None:
            return work
        given = self.arguments("recv")
        return self._message(given, tensors, given.root(src), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> PhalanxWork:
        return self._message(self.arguments("recv"), tensors, -1, tag)

    def _message(self, given: Arguments, tensors: Tensors, peer: int, tag: int) -> PhalanxWork:
        tensor = given.one(tensors)
        codes = given.check(tensor)
        buffer = given.write(tensor) if given.op == "recv" else given.read(tensor)
        args = (buffer.data_ptr(), *codes, buffer.numel(), peer, tag, call_site())
        settle: Settle = given.settle
        if is_profiling():
            settle = self._profiled("recvAnySource" if peer < 0 else given.op, tensors, settle)
        work = self._started(given.op, args, tensors, settle, buffer)
        assert work is not None
        return work

    def _started(
        self, op: str, args: tuple[Any, ...], tensors: Tensors, settle: Settle | None = None, keep: object = None
    ) -> PhalanxWork | None:
        """Start a message with the core's method `op`; return None if that method declined and did nothing."""
        self.num_messages += 1
        wait = self._core.wait_request  # looked up first: another thread may leave the group while the message starts
        try:
            request = getattr(self._core, op)(*args)
            if request is None:
                return None
            if type(request) is int:  # the peer's rank: the message is already over, as is usual for small messages
                return PhalanxWork(Over(None, request), None, tensors)
            return self._flight.begin(request, wait, tensors, settle, keep)
        except BaseException as error:
            self._flight.keep_after(error, (tensors, keep))
            raise
        finally:
            del wait

    # ---- life ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End every wait of this group, on all ranks, with an error. The group cannot be used again."""
        me = self.ranks.global_ranks[self._rank]
        self.abort_hooks.meet(Failure(kind="aborted", rank=me, group=self.name, detail=_ABORTED))
        self._core.abort(_ABORTED)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that have none of their own."""
        self._core.set_timeout(timeout.total_seconds())  # first, because the core checks the value
        self.timeout = timeout

    def extend_timeout(self, by: timedelta) -> None:
        """Add to the timeouts of operations that start from now on, until the first of them is over.

        Raises:
            ArgumentError: `by` is negative.
        """
        by_s = by.total_seconds()
        if by_s < 0:
            where = self.arguments("_add_ephemeral_timeout").where()
            raise ArgumentError(f"{where}: the extension must be at least 0 s, got {by_s:g} s")
        if by_s == 0 or isinstance(self._core, Absent):
            return
        if not isinstance(self._core, Extended):
            self._core = Extended(self._core, self.timeout.total_seconds(), self._end_extension)
        self._core.extend(by_s)

    @property
    def core(self) -> Any:
        """The core group, or the group on several hosts."""
        return self._core.core if isinstance(self._core, Extended) else self._core

    def _end_extension(self, extended: Extended) -> None:
        if self._core is extended:  # otherwise this rank has left meanwhile
            self._core = extended.core

    @property
    def is_failed(self) -> bool:
        """Whether a rank has ended the group, even if no operation of this rank has failed yet."""
        return self.abort_hooks.failure is not None or self._core.told

    def memory_stats(self) -> dict[str, int]:
        """Return the sizes of this host's segment, which groups may share: bytes in memory, and bytes mapped."""
        if self._segment is None:
            return {"segment_bytes": 0, "segment_bytes_mapped": 0}
        status = os.fstat(self._segment.fd)
        return {"segment_bytes": status.st_blocks * 512, "segment_bytes_mapped": status.st_size}

    def wait_for_all(self) -> None:
        """Wait until the operations that have started are over, whether they succeed or not."""
        self._flight.wait_for_all()

    @property
    def num_exchanges(self) -> int:
        """Number of messages and of collectives with data that this rank has begun in the group."""
        if isinstance(self._core, Absent):
            return self._num_exchanges
        return self._num_exchanges + self._core.seq - self.num_barriers + self.num_messages

    def note_progress(self) -> None:
        """Once this rank is past the start of training, tell the launcher, because a restart is then worthwhile."""
        if not isinstance(self._core, Absent) and self._core.seq > _TO_BEGIN:
            note_progress(_env.environment().get(_env.LAUNCH_VARIABLE, ""))

    def end_threads(self) -> None:
        """End Python threads that run operations, because the script is ending."""

    def shutdown(self, why: str = "") -> None:
        """Leave the group. Peers that still wait for this rank get RankFailed. Idempotent.

        Args:
            why: Error that makes this rank leave, reported to the peers; empty if there is none.
        """
        self.note_progress()
        self.abort_hooks.close()
        self._leave_core(why, _Destroyed(self.name))

    def _leave_core(self, why: str, instead: Absent) -> None:
        self._num_exchanges = self.num_exchanges
        core, self._core = self._core, instead
        core.leave(why)
        self._flight.leave()
        self._segment = None

    @property
    def is_left(self) -> bool:
        """Whether this rank has left the group for good."""
        return isinstance(self._core, _Destroyed)

    def part(self) -> None:
        """Leave the other ranks, perhaps to meet new ones; on all ranks, running operations end with an error."""
        if not isinstance(self._core, Absent):
            self._core.abort("reconfigure() was called")
        self._leave_core("", Formless(self.name, _LOST))

    def meet(self, core: Any, segment: _core.Segment, ranks: Ranks) -> None:
        """Continue with the ranks of another core group, which this rank has joined."""
        core.set_timeout(self.timeout.total_seconds())
        self._flight = Flight()
        self._serve_flight()
        self.abort_hooks.renew()
        self.ranks, self._rank, self._size = ranks, ranks.rank, ranks.size
        self.num_barriers = self.num_messages = self.num_windows = 0
        self._segment, self._core = segment, core


_LOST = (
    "has no ranks since reconfigure() began, which is under way in another thread or has failed; if it failed, call it "
    "again, with new handles and another uuid"
)


class Absent:
    """Stands in for the core while a group has no core; every call raises GroupUnusable."""

    wait_collective = wait_request = None  # callers look these up before the call that raises
    told = False

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def leave(self, why: str = "") -> None:
        pass

    def run(self, call: _core.Call, *args: object) -> None:
        self._refuse(call.op)

    run_plain = all_reduce_pieces = run

    def average_plain(self, *args: object) -> None:
        self._refuse("all_reduce")

    def send_plain(self, *args: object) -> None:
        self._refuse("send")

    def recv_plain(self, *args: object) -> None:
        self._refuse("recv")

    send_now, recv_now = send_plain, recv_plain

    def __getattr__(self, op: str) -> object:
        self._refuse(op)

    def _refuse(self, op: str) -> NoReturn:
        raise GroupUnusable(f"group '{self._name}' {self._why}", op=op)


class _Destroyed(Absent):
    """Stands in for the core of a group that this rank has left for good."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "was destroyed on this rank; call init_process_group() or new_group() again")


class Formless(Absent):
    """Stands in for the core of a group that has no ranks until `reconfigure` gives it some."""

    seq = issued = 0

    def set_timeout(self, timeout_s: float) -> None:
        seconds("timeout", timeout_s)

    def abort(self, why: str) -> None:
        pass
