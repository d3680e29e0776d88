"""The group of ranks on several hosts: it offers what the core's group offers to `Operations`.

Ranks of one host share memory; a bridge joins hosts. Ranks with the same number on their hosts form a rail: each
carries its own slice of a message over the bridge, all rails at once, so that a host's sum crosses once.

    all_reduce: reduce-scatter on the host -> rails exchange slices and reduce them in the order of hosts -> all-gather

Where hosts have different numbers of ranks there are as many rails as the smallest has ranks. The first exchange of a
call says which call it is, and carries small messages whole: ranks that called something else learn it before any byte
of a message is misread. Reductions go by fixed orders: the same bits on all ranks and in every run.

Every wait ends by the deadline of its call, whatever else is true. An engine may never finish what a lost connection
has interrupted, so no thread of the caller's waits in it: `_look` runs between slices of waiting and raises once the
group has ended or the call is late, and what can't be waited for in slices is waited for by a thread that may be left
behind. Waits of the core keep the same deadline themselves.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch

from phalanx import _core
from phalanx._errors import GroupAborted
from phalanx.backend._calls import LATE, Call
from phalanx.backend._channels import Channel, Handle
from phalanx.backend._failures import Failures
from phalanx.backend._messages import Messages
from phalanx.backend._patience import END_S, LOOK_S, TELL_S
from phalanx.backend._place import Place
from phalanx.backend._rails import INLINE_BYTES, Buffers, Rail, Span, Transfer, bounds_of
from phalanx.backend._tasks import Task, Tasks, Watch
from phalanx.backend._types import DTYPE_CODES, REDUCE_CODES, RedOpType
from phalanx.backend._work import call_site

_SLICE = timedelta(seconds=LOOK_S)
_CALLER_BYTES = 1 << 20  # larger ones run on the group's thread, so that Ctrl-C need not wait for the network
_STAGED_BYTES = 512 * 1024  # blocks up to here are collected on their host before they cross
_SUM, _AVG = (REDUCE_CODES[op][0] for op in (RedOpType.SUM, RedOpType.AVG))
_DTYPES = [dtype for dtype, _ in sorted(DTYPE_CODES.items(), key=lambda entry: entry[1])]


class BridgedGroup:
    """Collectives and messages of ranks on several hosts.

    Args:
        core: This host's ranks of the group.
        hosts: Ranks of the group by host, each in ascending order.
        place: Who this rank is, for messages.
        rail: To the ranks of the same number on all hosts, in the order of hosts; None: this rank is on none.
        everyone: To all ranks of the group.
        failures: What ends the group, on all of its hosts.
        timeout_s: Of operations that name none.
    """

    def __init__(
        self,
        core: _core.Group,
        hosts: list[list[int]],
        place: Place,
        rail: Channel | None,
        everyone: Channel,
        failures: Failures,
        timeout_s: float,
        stall_s: float,
    ) -> None:
        self._core, self._hosts, self._place = core, hosts, place
        self._rank, self._size = place.rank, len(place.pids)
        self._everyone, self._failures = everyone, failures
        self._timeout_s, self._stall_s = timeout_s, stall_s
        self._host = next(h for h, ranks in enumerate(hosts) if self._rank in ranks)
        self._here = hosts[self._host]
        self._local = self._here.index(self._rank)
        self._num_rails = min(map(len, hosts))
        self._is_even = all(len(ranks) == self._num_rails for ranks in hosts)
        self._has_peers = len(self._here) > 1
        self._buffers = Buffers()
        self._rail = (
            None
            if rail is None
            else Rail(rail, len(hosts), self._host, self._buffers, self._wait, self._land, failures)
        )
        self._seq = 0
        self._tasks = Tasks("phalanx-bridge", self._check_reach)
        self._landings = Tasks("phalanx-landing", self._check_reach)
        self._watch = Watch(self._look_unless_ended)
        self._current: Call | None = None
        self._messages = Messages(core, self._here, place, everyone, failures, timeout_s)
        channels = [channel for channel in (rail, everyone) if channel is not None]
        failures.watch(core, channels, self._messages.end)

    # ---- what surrounds a collective -------------------------------------------------------------------------------

    @property
    def seq(self) -> int:
        return self._seq

    @property
    def spins(self) -> bool:
        return self._core.spins

    @property
    def ended(self) -> bool:
        return self._failures.ended or self._core.ended

    def _run(self, call: Call, timeout: timedelta, site: str | None, work: Callable[[Call], Any]) -> Any:
        """Run a collective here, or, if it comes with a site, on the group's thread; then its task is returned."""
        self._failures.check(call.op)
        self._check_reach(call.op)
        call.timeout_s = timeout.total_seconds() if timeout.total_seconds() > 0 else self._timeout_s
        call.site = site
        if site is not None:
            return self._submit(call, work)
        call.caller = sys._getframe()
        try:
            may_run_here = call.count * call.item <= _CALLER_BYTES and not call.has_splits
            if may_run_here and self._tasks.begin_here():
                try:
                    return self._perform(call, work)
                finally:
                    self._tasks.end_here()
            task = self._submit(call, work)
            self.wait_job(task, 0)
            return task.value
        finally:
            call.caller = None  # a frame keeps the tensors of those that called it

    def _submit(self, call: Call, work: Callable[[Call], Any]) -> Task:
        try:
            return self._tasks.submit(lambda: self._perform(call, work))
        except GroupAborted as error:  # since the call
            raise self._explain(error, call) from None

    def _perform(self, call: Call, work: Callable[[Call], Any]) -> Any:
        if self._failures.ended:  # since the call
            raise self._explain(GroupAborted("the group has ended"), call)
        self._seq += 1
        call.seq = self._seq
        call.began_s = time.monotonic()
        self._current = call
        try:
            with self._watch:
                value = work(call)
                self._confirm(call)
                return value
        except BaseException as error:
            explained = self._explain(error, call)
            for transfer in call.transfers:  # the caller may free its tensors as soon as it has the error
                transfer.drain()
            raise explained from None
        finally:
            self._current = None

    def _confirm(self, call: Call) -> None:
        """Make sure, where neither the core nor a rail compares it, that the ranks of this host made the same call.

        The core knows the steps that a call is made of, and a rank of a larger host may be on no rail.
        """
        is_average = call.code == _AVG and not _is_inexact(call.dtype)
        is_compared = self._is_even and call.op != "reduce" and not is_average
        if not is_compared and not call.sizes:
            self._compare_here(call)

    def _compare_here(self, call: Call) -> None:
        """Make sure that the ranks of this host are in the same call."""
        if not self._has_peers:
            return
        head = call.head()
        room = self._buffers.span("heads", len(self._here) * len(head))
        addresses = [room.address + i * len(head) for i in range(len(self._here))]
        ctypes.memmove(addresses[self._local], head, len(head))
        byte = DTYPE_CODES[torch.uint8]
        self._core.all_gather(addresses[self._local], addresses, *byte, len(head), call.left, None)
        if any(ctypes.string_at(address, len(head)) != head for address in addresses):
            raise self._failures.mismatch(call.op, call.seq)

    def _explain(self, error: BaseException, call: Call) -> BaseException:
        """End the group on all hosts, and return the error that says why."""
        place, site = self._place, self._site(call)
        made = call.made(place.peer(place.rank), place.global_ranks, site)
        return self._failures.end(error, call.op, call.seq, site, made)

    def _site(self, call: Call) -> str:
        return call_site(call.caller) if call.site is None else call.site

    def _check_reach(self, op: str = "the wait for an operation") -> None:
        """Raise in a thread in which `op` would wait for ever: of a forked child, or inside another collective."""
        self._failures.require_own_process(op)
        if not self._tasks.runs_here:
            return
        self._failures.refuse_nested(op, call_site(), self._current)

    def wait_job(self, task: Task, timeout_s: float) -> bool:
        """Wait for a task, at most `timeout_s` (0: until it is over); raise what it failed with."""
        task.require_reachable()
        try:
            while not self._tasks.wait(task, timeout_s or LATE.total_seconds()):
                if timeout_s:
                    return False
                self._end_late()
        except BaseException as interruption:  # Ctrl-C: the others would wait for this rank
            self.abort(f"interrupted by {type(interruption).__name__}")
            raise
        error = task.error()
        if error is not None:
            raise error
        return True

    def _end_late(self) -> None:
        """End a call whose thread keeps no deadline: it is held in the engine."""
        call = self._current
        if call is not None and time.monotonic() > call.began_s + call.timeout_s + LATE.total_seconds():
            raise self._explain(self._failures.timed_out(call.op, call.seq, call.timeout_s), call)

    def _wait(self, handle: Handle) -> None:
        """Wait for an exchange; look now and then whether it can still succeed, and at signals."""
        while True:
            try:
                handle.wait(_SLICE)
                return
            except RuntimeError:
                if handle.is_completed():  # with an error, or just in time
                    handle.wait(_SLICE)
                    return
            self._look()

    def _land(self, handles: Sequence[Handle]) -> Callable[[], None]:
        """Begin to wait for messages on a thread that can be left behind; return what waits for that."""
        assert self._current is not None
        limit = self._current.limit
        task = self._landings.submit(lambda: [handle.wait(limit) for handle in handles])

        def wait() -> None:
            while not task.wait(LOOK_S):
                self._look()
            error = task.error()
            if error is not None:
                raise error

        return wait

    def _look(self) -> None:
        """Raise if the call can't succeed any more or takes too long; tell of one that waits. Called now and then."""
        call = self._current
        if call is None:
            return
        waited_s = time.monotonic() - call.began_s
        error: Exception | None = None
        if self._failures.ended:
            error = GroupAborted("the group has ended")
        elif self._core.told or self._failures.is_told():
            error = GroupAborted("another rank has ended the group")
        elif waited_s > call.timeout_s:
            error = self._failures.timed_out(call.op, call.seq, call.timeout_s)
        elif not call.has_told and waited_s > min(TELL_S, (self._stall_s or call.timeout_s) / 2, call.timeout_s / 2):
            call.has_told = True
            self._failures.tell_wait(call.seq)
        elif self._stall_s and waited_s > (call.num_reports + 1) * self._stall_s:
            call.num_reports += 1
            self._failures.report_stall(call.op, call.seq, self._site(call), waited_s, call.timeout_s)
        if error is not None:
            raise self._explain(error, call)

    def _look_unless_ended(self) -> None:
        if not self._failures.ended:  # else the waits that the watch is for end by themselves
            self._look()

    # ---- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, timeout: timedelta, site: str | None) -> Task | None:
        def work(call: Call) -> None:
            self._core.barrier(call.left, None)
            self._agree(call)
            self._core.barrier(call.left, None)

        return self._run(Call("barrier"), timeout, site, work)

    def broadcast(
        self, data: int, dtype: int, item: int, count: int, root: int, timeout: timedelta, site: str | None
    ) -> Task | None:
        def work(call: Call) -> None:
            self._broadcast(call, data, count, root)

        return self._run(Call("broadcast", dtype, item, count, root=root), timeout, site, work)

    def _broadcast(self, call: Call, data: int, count: int, root: int) -> None:
        source_host = next(h for h, ranks in enumerate(self._hosts) if root in ranks)
        message = Span(data, count * call.item)
        is_source = self._host == source_host
        if is_source and self._has_peers:
            self._core.broadcast(data, call.dtype, call.item, count, self._here.index(root), call.left, None)
        bounds = self._bounds(message, call.item)
        if self._rail is not None:
            part = message.part(*bounds[self._local])
            num_hosts = len(self._hosts)
            sends = [part if is_source else Span()] * num_hosts
            recvs = [part if h == source_host and not is_source else Span() for h in range(num_hosts)]
            self._rail.swap(call, sends, recvs)
        if not is_source:
            self._share(call, message, bounds, is_whole=message.size <= INLINE_BYTES)

    def _bounds(self, message: Span, item: int) -> list[tuple[int, int]]:
        """Return the bytes of a message that each rail carries: small ones whole, with the head of the call."""
        if message.size <= INLINE_BYTES:
            return [(0, message.size)] * self._num_rails
        return bounds_of(message.size // item, self._num_rails, item)

    def _share(self, call: Call, message: Span, bounds: list[tuple[int, int]], *, is_whole: bool) -> None:
        """Give every rank of this host the slices that its rails have got."""
        if not self._has_peers or (is_whole and self._is_even):
            return
        dtype, item = call.dtype, call.item
        if is_whole:
            self._core.broadcast(message.address, dtype, item, message.size // item, 0, call.left, None)
            return
        sizes = {high - low for low, high in bounds}
        if self._is_even and len(sizes) == 1:
            addresses = [message.address + low for low, _ in bounds]
            num = sizes.pop() // item
            self._core.all_gather(addresses[self._local], addresses, dtype, item, num, call.left, None)
            return
        for rail, (low, high) in enumerate(bounds):
            address = message.address + low
            self._core.broadcast(address, dtype, item, (high - low) // item, rail, call.left, None)

    def all_reduce(
        self, source: int, out: int, dtype: int, item: int, count: int, kernel: int, code: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            self._all_reduce(call, source, out, count, kernel)

        return self._run(Call("all_reduce", dtype, item, count, code), timeout, site, work)

    def _all_reduce(self, call: Call, source: int, out: int, count: int, kernel: int) -> None:
        dtype, item, code = call.dtype, call.item, call.code
        if kernel == _AVG and not _is_inexact(dtype):
            return self._average_integers(call, source, out, count)
        message = Span(out, count * item)
        kernel, divide = self._average(call, kernel)
        is_small = message.size <= INLINE_BYTES
        if not self._has_peers:
            if source != out:
                ctypes.memmove(out, source, message.size)
        elif not is_small and self._is_even and count % self._num_rails == 0:
            num = count // self._num_rails
            addresses = [source + i * num * item for i in range(self._num_rails)]
            low = self._local * num * item
            self._core.reduce_scatter(addresses, out + low, dtype, item, num, kernel, code, call.left, None)
        else:
            self._core.all_reduce(source, out, dtype, item, count, kernel, code, call.left, None)
        bounds = self._bounds(message, item)
        if self._rail is not None:
            part = message.part(*bounds[self._local])
            self._rail.combine(call, part, kernel)
            divide(part)
        self._share(call, message, bounds, is_whole=is_small)

    def _average(self, call: Call, kernel: int) -> tuple[int, Callable[[Span], object]]:
        """Return the kernel for the steps of a reduction, and what makes a result of theirs that of all ranks.

        An average of averages is the average where all hosts have as many ranks, and stays in a half's range.
        """
        if kernel != _AVG or self._is_even:
            return kernel, lambda result: None
        dtype, world_size = _DTYPES[call.dtype], self._size
        return _SUM, lambda result: result.tensor().view(dtype).div_(world_size)

    def _average_integers(self, call: Call, source: int, out: int, count: int) -> None:
        """Average by quotients and remainders: sums may leave the range, and averages can't be averaged."""
        dtype, is_unsigned = _DTYPES[call.dtype], _DTYPES[call.dtype] is torch.uint64
        values = Span(source, count * call.item).tensor().view(dtype).to(torch.int64)
        quotients = _quotients(values, self._size, is_unsigned=is_unsigned)
        sums = torch.stack([quotients, values - quotients * self._size])
        wide = replace(call, dtype=DTYPE_CODES[torch.int64][0], item=8, asked_dtype=call.dtype)
        self._all_reduce(wide, sums.data_ptr(), sums.data_ptr(), 2 * count, _SUM)
        carry = _quotients(sums[1], self._size, is_unsigned=False)
        rest, means = sums[1] - carry * self._size, sums[0] + carry
        if not is_unsigned:  # towards zero
            means += ((means < 0) & (rest > 0)).long() - ((means > 0) & (rest < 0)).long()
        Span(out, count * call.item).tensor().view(dtype).copy_(means.view(torch.uint64) if is_unsigned else means)

    def all_reduce_pieces(
        self, sources: list[int], outs: list[int], counts: list[int], dtype: int, item: int, kernel: int, code: int,
        num_squared: int, timeout: timedelta,
    ) -> float:  # fmt: skip
        def work(call: Call) -> float:
            flat = self._buffers.span("flat", call.count * item)
            parts = flat.tensor().split([count * item for count in counts])
            for part, source in zip(parts, sources, strict=True):
                part.copy_(Span(source, part.numel()).tensor())
            self._all_reduce(call, flat.address, flat.address, call.count, kernel)
            for part, out in zip(parts, outs, strict=True):
                Span(out, part.numel()).tensor().copy_(part)
            kinds = [part.view(_DTYPES[dtype]) for part in parts[:num_squared]]
            return sum(float(values.abs().double().square().sum()) for values in kinds)

        return self._run(Call("all_reduce", dtype, item, sum(counts), code), timeout, None, work)

    def reduce(
        self, source: int, out: int, dtype: int, item: int, count: int, kernel: int, code: int, root: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            target = out if self._rank == root else self._buffers.span("reduced", count * item).address
            self._all_reduce(call, source, target, count, kernel)

        return self._run(Call("reduce", dtype, item, count, code, root), timeout, site, work)

    def reduce_scatter(
        self, sources: list[int], out: int, dtype: int, item: int, count: int, kernel: int, code: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            num_bytes = count * item
            if not self._is_even or (kernel == _AVG and not _is_inexact(dtype)):
                self._reduce_blocks(call, sources, [count] * self._size, out, kernel)
                return
            room = self._buffers.span("mine", len(self._hosts) * num_bytes)
            mine = [room.part(h * num_bytes, (h + 1) * num_bytes) for h in range(len(self._hosts))]
            mine[self._host] = Span(out, num_bytes)
            for h, ranks in enumerate(self._hosts):
                blocks = [sources[r] for r in ranks]
                self._core.reduce_scatter(blocks, mine[h].address, dtype, item, count, kernel, code, call.left, None)
            assert self._rail is not None
            self._rail.reduce_parts(call, mine, kernel)

        return self._run(Call("reduce_scatter", dtype, item, count, code), timeout, site, work)

    def reduce_scatter_split(
        self, sources: list[int], counts: list[int], out: int, dtype: int, item: int, kernel: int, code: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            self._agree_everywhere(call)
            self._reduce_blocks(call, sources, counts, out, kernel)

        call = Call("reduce_scatter", dtype, item, code=code, has_splits=True, sizes=counts)
        return self._run(call, timeout, site, work)

    def _reduce_blocks(self, call: Call, sources: list[int], counts: list[int], out: int, kernel: int) -> None:
        """Reduce the blocks of all ranks on all of them, and take this rank's."""
        sizes = [count * call.item for count in counts]
        offsets = list(accumulate(sizes, initial=0))
        whole = self._buffers.span("whole", offsets[-1]).address
        for source, offset, size in zip(sources, offsets, sizes, strict=False):
            ctypes.memmove(whole + offset, source, size)
        self._all_reduce(call, whole, whole, sum(counts), kernel)
        ctypes.memmove(out, whole + offsets[self._rank], sizes[self._rank])

    def all_gather(
        self, source: int, outs: list[int], dtype: int, item: int, count: int, timeout: timedelta, site: str | None
    ) -> Task | None:
        def work(call: Call) -> None:
            num_bytes = count * item
            mine = [outs[r] for r in self._here]
            self._core.all_gather(source, mine, dtype, item, count, call.left, None)
            if self._rail is not None:
                self._swap_blocks(call, outs, num_bytes)
            for h, ranks in enumerate(self._hosts):
                if h == self._host or not self._has_peers:
                    continue
                if self._is_even:
                    blocks = [outs[r] for r in ranks]
                    self._core.all_gather(blocks[self._local], blocks, dtype, item, count, call.left, None)
                    continue
                for j, r in enumerate(ranks):
                    self._core.broadcast(outs[r], dtype, item, count, j % self._num_rails, call.left, None)

        return self._run(Call("all_gather", dtype, item, count), timeout, site, work)

    def all_gather_split(
        self, source: int, outs: list[int], counts: list[int], dtype: int, item: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            self._agree_everywhere(call)
            ctypes.memmove(outs[self._rank], source, counts[self._rank] * item)
            for r, (out, count) in enumerate(zip(outs, counts, strict=True)):
                if count > 0:
                    self._broadcast(call, out, count, r)

        return self._run(Call("all_gather", dtype, item, has_splits=True, sizes=counts), timeout, site, work)

    def _swap_blocks(self, call: Call, outs: list[int], num_bytes: int) -> None:
        """Get the blocks of the other hosts' ranks that this rail carries, each to its place."""
        assert self._rail is not None
        num_hosts = len(self._hosts)
        if self._is_even:
            own = [Span(outs[self._rank], num_bytes)] * num_hosts
            self._rail.swap(call, own, [Span(outs[ranks[self._local]], num_bytes) for ranks in self._hosts])
            return
        carried = [ranks[self._local :: self._num_rails] for ranks in self._hosts]
        room = [self._buffers.span(f"from {h}", len(ranks) * num_bytes) for h, ranks in enumerate(carried)]
        for i, r in enumerate(carried[self._host]):
            ctypes.memmove(room[self._host].address + i * num_bytes, outs[r], num_bytes)
        self._rail.swap(call, [room[self._host]] * num_hosts, room)
        for h in range(num_hosts):
            for i, r in enumerate(carried[h] if h != self._host else ()):
                ctypes.memmove(outs[r], room[h].address + i * num_bytes, num_bytes)

    def gather(
        self, source: int, outs: list[int], dtype: int, item: int, count: int, root: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            num_bytes = count * item
            if root in self._here:
                mine = [outs[r] for r in self._here] if self._rank == root else []
                self._core.gather(source, mine, dtype, item, count, self._here.index(root), call.left, None)
            sends, recvs = [Span()] * self._size, [Span()] * self._size
            if self._rank == root:
                recvs = self._elsewhere(outs, [num_bytes] * self._size)
            elif root not in self._here:
                sends[root] = Span(source, num_bytes)
            self._scatter_wide(call, sends, recvs)

        return self._run(Call("gather", dtype, item, count, root=root), timeout, site, work)

    def scatter(
        self, sources: list[int], out: int, dtype: int, item: int, count: int, root: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            num_bytes = count * item
            if root in self._here:
                mine = [sources[r] for r in self._here] if self._rank == root else []
                self._core.scatter(mine, out, dtype, item, count, self._here.index(root), call.left, None)
            sends, recvs = [Span()] * self._size, [Span()] * self._size
            if self._rank == root:
                sends = self._elsewhere(sources, [num_bytes] * self._size)
            elif root not in self._here:
                recvs[root] = Span(out, num_bytes)
            self._scatter_wide(call, sends, recvs)

        return self._run(Call("scatter", dtype, item, count, root=root), timeout, site, work)

    def all_to_all(
        self, sources: list[int], outs: list[int], dtype: int, item: int, count: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            mine = [[addresses[r] for r in self._here] for addresses in (sources, outs)]
            self._core.all_to_all(*mine, dtype, item, count, call.left, None)
            if self._is_even and count * item <= _STAGED_BYTES:
                self._all_to_all_by_rails(call, sources, outs)
                return
            sizes = [count * item] * self._size
            sends, recvs = self._elsewhere(sources, sizes), self._elsewhere(outs, sizes)
            self._scatter_wide(call, sends, recvs)

        return self._run(Call("all_to_all", dtype, item, count), timeout, site, work)

    def _all_to_all_by_rails(self, call: Call, sources: list[int], outs: list[int]) -> None:
        """Collect on this rank what its host sends to the ranks of its rail, and send that in one message each."""
        assert self._rail is not None
        dtype, item, count = call.dtype, call.item, call.count
        num_bytes, num_local = count * item, len(self._here)
        rooms = []
        for h, ranks in enumerate(self._hosts):
            room = self._buffers.span(f"to {h}", num_local * num_bytes)
            rooms.append(room)
            if h != self._host:
                blocks = [room.address + i * num_bytes for i in range(num_local)]
                self._core.all_to_all([sources[r] for r in ranks], blocks, dtype, item, count, call.left, None)
        received = [self._buffers.span(f"from {h}", room.size) for h, room in enumerate(rooms)]
        self._rail.swap(call, rooms, received)
        for h, ranks in enumerate(self._hosts):
            for i, r in enumerate(ranks if h != self._host else ()):
                ctypes.memmove(outs[r], received[h].address + i * num_bytes, num_bytes)

    def all_to_all_split(
        self, sources: list[int], in_counts: list[int], outs: list[int], out_counts: list[int], dtype: int, item: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: Call) -> None:
            mine = [[values[r] for r in self._here] for values in (sources, in_counts, outs, out_counts)]
            self._core.all_to_all_split(*mine, dtype, item, call.left, None)
            self._agree(call)
            self._check_splits(call, in_counts, out_counts)
            sends = self._elsewhere(sources, [num * item for num in in_counts])
            recvs = self._elsewhere(outs, [num * item for num in out_counts])
            self._scatter_wide(call, sends, recvs)

        return self._run(Call("all_to_all", dtype, item, has_splits=True), timeout, site, work)

    def _check_splits(self, call: Call, in_counts: list[int], out_counts: list[int]) -> None:
        """Compare what each rank sends with what the others expect."""
        sent = torch.tensor(in_counts)
        coming = torch.empty_like(sent)
        sizes = [sent.itemsize] * len(in_counts)
        self._wait(self._everyone.exchange(coming.view(torch.uint8), sent.view(torch.uint8), sizes, sizes, call.limit))
        for r, num in enumerate(coming.tolist()):
            if num != out_counts[r]:
                raise self._failures.wrong_split(call.op, call.seq, r, num, out_counts[r])

    def _agree(self, call: Call) -> None:
        if self._rail is not None:
            self._rail.agree(call)

    def _agree_everywhere(self, call: Call) -> None:
        """Make sure that all are in this call, before a step of it in which sizes that differ could do harm."""
        self._compare_here(call)
        self._agree(call)

    def _elsewhere(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[Span]:
        """Return the blocks of the ranks of other hosts, by rank; empty ones for those of this host."""
        blocks = enumerate(zip(addresses, sizes, strict=True))
        return [Span() if r in self._here else Span(address, size) for r, (address, size) in blocks]

    def _scatter_wide(self, call: Call, sends: Sequence[Span], recvs: Sequence[Span]) -> None:
        """Exchange bytes with every rank of the other hosts directly."""
        transfer = Transfer(self._everyone, call, self._land)
        transfer.start(range(len(sends)), sends, recvs)
        self._agree(call)
        transfer.finish()

    # ---- messages and life -----------------------------------------------------------------------------------------

    def send(self, data: int, dtype: int, item: int, count: int, peer: int, tag: int, site: str) -> Any:
        return self._messages.send(data, dtype, item, count, peer, tag, site)

    def recv(self, data: int, dtype: int, item: int, count: int, peer: int, tag: int, site: str) -> Any:
        return self._messages.recv(data, dtype, item, count, peer, tag, site)

    def wait_request(self, request: Any, timeout_s: float) -> bool:
        return self._messages.wait(request, timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        self._core.set_timeout(timeout_s)  # looks at it first
        self._timeout_s = self._messages.timeout_s = timeout_s

    def abort(self, why: str) -> None:
        self._failures.declare("aborted", why)

    def leave(self, why: str = "") -> None:
        if why and not self._failures.ended:
            self._failures.declare("rank_fell", why)
        if self._failures.is_forked:  # destroying an engine whose threads stayed in the parent would not end
            _keep_for_ever(self)
            self._failures.leave()
            self._core.leave()
            return
        may_wait = not self._tasks.runs_here  # in a signal handler, what it interrupted can't finish
        if may_wait and not why:
            self._tasks.drain(END_S)
        self._failures.leave()
        self._close_threads()
        self._core.leave()
        if may_wait:
            self._tasks.drain(END_S)  # what the end of the connections has ended
        _left.append(self)
        for group in list(_left):
            if group._release():
                _left.remove(group)
        if self in _left:
            _keep_for_ever(self)

    def _release(self) -> bool:
        """Give back the engine's threads, connections and memory, whoever refers to this group; False if it is busy.

        A call in another thread and a thread that waits in the engine use it, and Gloo may never end a receive that a
        lost connection has interrupted: such a group is looked at again when the next one is left.
        """
        is_quiet = self._tasks.is_idle and self._tasks.is_over and self._landings.is_over and self._messages.is_over
        if not is_quiet or not self._failures.release():
            return False
        gone: Any = None
        self._rail, self._everyone, self._core = None, gone, gone
        self._messages.release()
        return True

    def end_threads(self) -> None:
        """End what runs beside a script that ends, without a word to the others.

        A thread that comes back from an engine when the interpreter has gone ends the process with an abort.
        """
        if self._failures.is_forked:
            return
        self._failures.stop_watching()
        if self._messages.has_threads or not self._tasks.drain(0):
            self._failures.close_channels()
            self._close_threads()

    def _close_threads(self) -> None:
        self._watch.close()
        self._messages.close()
        self._tasks.close()
        self._landings.close()


_left: list[BridgedGroup] = []  # whose engine was busy yet when this rank left


def _keep_for_ever(group: BridgedGroup) -> None:
    """Keep an engine from being destroyed, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _is_inexact(dtype: int) -> bool:
    return _DTYPES[dtype].is_floating_point or _DTYPES[dtype].is_complex


def _quotients(sums: torch.Tensor, divisor: int, *, is_unsigned: bool) -> torch.Tensor:
    """Divide 64-bit integers towards zero; unsigned ones, for which torch has no division, lie in signed ones."""
    if not is_unsigned:
        return torch.div(sums, divisor, rounding_mode="trunc")
    halves = (sums >> 1) & torch.iinfo(torch.int64).max
    quotients = halves // divisor * 2
    return quotients + (sums - quotients * divisor >= divisor)
