"""The group of ranks on several hosts: it offers what the core's group offers to `Operations`.

Ranks of one host share memory; a bridge joins hosts. Ranks with the same number on their hosts form a rail: each
carries its own slice of a message over the bridge, all rails at once, so that a host's sum crosses once.

    all_reduce: reduce-scatter on the host -> rails exchange slices and reduce them in the order of hosts -> all-gather

Where hosts have different numbers of ranks there are as many rails as the smallest has ranks. The first exchange of a
call says which call it is, and carries small messages whole: ranks that called something else learn it before any byte
of a message is misread. Reductions go by fixed orders: the same bits on all ranks and in every run.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch

from phalanx import _core
from phalanx._errors import GroupAborted
from phalanx.backend._channels import Channel, Handle
from phalanx.backend._failures import Failures, Place
from phalanx.backend._messages import Messages
from phalanx.backend._tasks import Task, Tasks
from phalanx.backend._types import DTYPE_CODES, DTYPE_NAMES, REDUCE_CODES, REDUCE_NAMES, RedOpType
from phalanx.backend._work import call_site

_SLICE = timedelta(seconds=0.1)  # of waiting, between looks at what else may have happened
_HEAD = struct.Struct("<QBBBBiQ")
_INLINE_BYTES = 4096 - 64  # a message up to here travels with the head
_SLOT_BYTES = 4096
_WHOLE_BYTES = 32 * 1024  # slices up to here are exchanged in one step, however many hosts
_SUM, _AVG = (REDUCE_CODES[op][0] for op in (RedOpType.SUM, RedOpType.AVG))
_OPS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
)
_DTYPES = [dtype for dtype, _ in sorted(DTYPE_CODES.items(), key=lambda entry: entry[1])]
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass
class _Call:
    """One collective on its way."""

    op: str
    timeout_s: float
    dtype: int = 0
    item: int = 0
    count: int = 0
    code: int = -1  # of the reduction, which ranks agree on
    root: int = -1
    has_splits: bool = False
    site: str | None = None
    seq: int = 0
    has_agreed: bool = False
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.began_s + self.timeout_s - time.monotonic(), 0.001))

    def head(self) -> bytes:
        op = _OPS.index(self.op)
        return _HEAD.pack(self.seq, op, self.dtype, self.code + 1, self.has_splits, self.root, self.count)

    def text(self, global_ranks: Sequence[int]) -> str:
        """Return the call as its caller wrote it."""
        if self.op == "barrier":
            return "barrier()"
        text = f"{self.op}({DTYPE_NAMES[self.dtype]}, "
        text += "split sizes" if self.has_splits else f"count={self.count}"
        if self.code >= 0:
            text += f", op={REDUCE_NAMES[self.code]}"
        if self.root >= 0:
            text += f", {'src' if self.op in ('broadcast', 'scatter') else 'dst'}={global_ranks[self.root]}"
        return text + ")"


class BridgedGroup:
    """Collectives and messages of ranks on several hosts.

    Args:
        core: This host's ranks of the group.
        hosts: Ranks of the group by host, each in ascending order.
        rank: Of the group.
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
        rank: int,
        place: Place,
        rail: Channel | None,
        everyone: Channel,
        failures: Failures,
        timeout_s: float,
        stall_s: float,
    ) -> None:
        self._core, self._hosts, self._rank, self._place = core, hosts, rank, place
        self._rail, self._everyone, self._failures = rail, everyone, failures
        self._timeout_s, self._stall_s = timeout_s, stall_s
        self._host = next(h for h, ranks in enumerate(hosts) if rank in ranks)
        self._here = hosts[self._host]
        self._local = self._here.index(rank)
        self._num_rails = min(map(len, hosts))
        self._is_even = all(len(ranks) == self._num_rails for ranks in hosts)
        self._has_peers = len(self._here) > 1
        self._seq = 0
        self._tasks = Tasks()
        self._scratch: dict[str, torch.Tensor] = {}
        self._messages = Messages(core, self._here, place, everyone, failures, timeout_s)
        channels = [channel for channel in (rail, everyone) if channel is not None]
        failures.watch(core, channels)

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

    def _run(self, call: _Call, timeout: timedelta, site: str | None, work: Callable[[_Call], Any]) -> Any:
        """Run a collective here, or, if it comes with a site, on the group's thread; then its task is returned."""
        self._failures.check(call.op)
        call.timeout_s = timeout.total_seconds() if timeout.total_seconds() > 0 else self._timeout_s
        call.site = site
        if site is None:
            with self._tasks.inline() as is_free:
                if is_free:
                    return self._perform(call, work)
        task = self._tasks.submit(lambda: self._perform(call, work))
        if site is not None:
            return task
        call.site = call_site()
        self.wait_job(task, 0)
        return task.value

    def _perform(self, call: _Call, work: Callable[[_Call], Any]) -> Any:
        self._seq += 1
        call.seq = self._seq
        call.began_s = time.monotonic()
        try:
            if self._failures.ended:
                raise GroupAborted("the group has ended meanwhile")
            return work(call)
        except BaseException as error:
            raise self._explain(error, call) from None

    def _explain(self, error: BaseException, call: _Call) -> BaseException:
        """End the group on all hosts, and return the error that says why."""
        where = f"{call.op} #{call.seq} of group '{self._place.group}'"
        site = call_site() if call.site is None else call.site
        where += f" at {site}" * bool(site)
        return self._failures.end(error, call.op, call.seq, where, call.text(self._place.global_ranks))

    def wait_job(self, task: Task, timeout_s: float) -> bool:
        """Wait for a task, at most `timeout_s` (0: until it is over); raise what it failed with."""
        try:
            if not task.wait(timeout_s):
                return False
        except BaseException as interruption:  # Ctrl-C: the others would wait for this rank
            self.abort(f"interrupted by {type(interruption).__name__}")
            raise
        error = task.error()
        if error is not None:
            raise error
        return True

    def _wait(self, handle: Handle, call: _Call) -> None:
        """Wait for an exchange; look now and then whether it can still succeed."""
        has_told = False
        while True:
            try:
                handle.wait(_SLICE)
                return
            except RuntimeError:
                if handle.is_completed():  # with an error, or just in time
                    handle.wait(_SLICE)
                    return
            if self._core.ended or self._failures.is_told():
                raise GroupAborted("another rank has ended the group")
            waited_s = time.monotonic() - call.began_s
            if waited_s > call.timeout_s:
                raise self._failures.timed_out(call.op, call.seq, call.timeout_s)
            if not has_told and waited_s > min(self._stall_s or call.timeout_s, call.timeout_s / 2):
                has_told = True
                self._failures.tell_stall(
                    call.op, call.seq, call.text(self._place.global_ranks), waited_s, self._stall_s
                )

    # ---- over the bridge -------------------------------------------------------------------------------------------

    def _swap(self, call: _Call, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        """Exchange bytes with the same rank of every other host: one tensor to and from each, in the order of hosts."""
        if self._rail is None:
            return
        others = [h for h in range(len(self._hosts)) if h != self._host]
        largest = max(max(sends[h].numel(), recvs[h].numel()) for h in others)
        if not call.has_agreed and self._agree(call, sends, recvs, others, largest):
            return
        if largest == 0:
            return
        out_bytes = [0 if h == self._host else recv.numel() for h, recv in enumerate(recvs)]
        in_bytes = [0 if h == self._host else send.numel() for h, send in enumerate(sends)]
        if len(others) == 1:
            self._wait(self._rail.exchange(recvs[others[0]], sends[others[0]], out_bytes, in_bytes), call)
            return
        source = torch.cat([sends[h] for h in others])
        out = self._buffer("received", sum(out_bytes))
        self._wait(self._rail.exchange(out, source, out_bytes, in_bytes), call)
        for h, part in zip(others, out.split([out_bytes[h] for h in others]), strict=True):
            recvs[h].copy_(part)

    def _agree(
        self, call: _Call, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], others: list[int], largest: int
    ) -> bool:
        """Tell the rail which call this is; return whether the messages were small enough to come along."""
        assert self._rail is not None
        num_hosts = len(self._hosts)
        slots, answers = (
            self._buffer(name, num_hosts * _SLOT_BYTES).view(num_hosts, -1) for name in ("slots", "answers")
        )
        head = call.head()
        slots[:, : len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        are_inline = largest <= _INLINE_BYTES
        for h in others if are_inline else ():
            slots[h, _SLOT_BYTES - sends[h].numel() :] = sends[h]
        sizes = [0 if h == self._host else _SLOT_BYTES for h in range(num_hosts)]
        if num_hosts == 2:  # no room for itself
            (other,) = others
            self._wait(self._rail.exchange(answers[other], slots[other], sizes, sizes), call)
        else:
            keep = torch.tensor(others)
            out = torch.empty(len(others) * _SLOT_BYTES, dtype=torch.uint8)
            self._wait(self._rail.exchange(out, slots[keep].view(-1), sizes, sizes), call)
            answers[keep] = out.view(len(others), -1)
        if any(bytes(answers[h, : len(head)].numpy()) != head for h in others):
            raise self._failures.mismatch(call.op, call.seq)
        for h in others if are_inline else ():
            recvs[h].copy_(answers[h, _SLOT_BYTES - recvs[h].numel() :])
        call.has_agreed = True
        return are_inline

    def _combine(self, call: _Call, data: torch.Tensor, kernel: int) -> None:
        """Reduce equally long bytes of the rail's ranks, in place, in the order of hosts."""
        num_hosts, item = len(self._hosts), call.item
        num_bytes = data.numel()
        if num_hosts == 2 or num_bytes <= _WHOLE_BYTES:
            theirs = self._buffer("theirs", num_hosts * num_bytes).view(num_hosts, -1)
            self._swap(call, [data] * num_hosts, list(theirs))
            self._reduce_local(call, [data if h == self._host else theirs[h] for h in range(num_hosts)], data, kernel)
            return
        # Each host reduces a part of it, and gives the others the result.
        bounds = _bounds(num_bytes // item, num_hosts, item)
        parts = [data[low:high] for low, high in bounds]
        mine = parts[self._host]
        theirs = self._buffer("theirs", num_hosts * mine.numel()).view(num_hosts, -1)
        self._swap(call, parts, list(theirs))
        self._reduce_local(call, [mine if h == self._host else theirs[h] for h in range(num_hosts)], mine, kernel)
        self._swap(call, [mine] * num_hosts, parts)

    @staticmethod
    def _reduce_local(call: _Call, sources: list[torch.Tensor], out: torch.Tensor, kernel: int) -> None:
        addresses = [source.data_ptr() for source in sources]
        _core.reduce_buffers(out.data_ptr(), addresses, call.dtype, kernel, out.numel() // call.item)

    def _buffer(self, name: str, num_bytes: int) -> torch.Tensor:
        """Return memory for the bytes of one step, kept for the next call."""
        kept = self._scratch.get(name, _NO_BYTES)
        if kept.numel() < num_bytes:
            kept = self._scratch[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return kept[:num_bytes]

    # ---- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, timeout: timedelta, site: str | None) -> Task | None:
        def work(call: _Call) -> None:
            self._core.barrier(call.left, None)
            self._swap(call, *[[_NO_BYTES] * len(self._hosts)] * 2)
            self._core.barrier(call.left, None)

        return self._run(_Call("barrier", 0), timeout, site, work)

    def broadcast(
        self, data: int, dtype: int, item: int, count: int, root: int, timeout: timedelta, site: str | None
    ) -> Task | None:
        source_host = next(h for h, ranks in enumerate(self._hosts) if root in ranks)

        def work(call: _Call) -> None:
            message = _memory(data, count * item)
            is_source = self._host == source_host
            if is_source and self._has_peers:
                self._core.broadcast(data, dtype, item, count, self._here.index(root), call.left, None)
            is_small = message.numel() <= _INLINE_BYTES
            bounds = [(0, message.numel())] * self._num_rails if is_small else _bounds(count, self._num_rails, item)
            if self._local < self._num_rails:
                low, high = bounds[self._local]
                part = message[low:high]
                none = [_NO_BYTES] * len(self._hosts)
                if is_source:
                    self._swap(call, [part] * len(self._hosts), none)
                else:
                    recvs = [part if h == source_host else _NO_BYTES for h in range(len(self._hosts))]
                    self._swap(call, none, recvs)
            if not is_source:
                self._share(call, message, bounds, is_whole=is_small)

        return self._run(_Call("broadcast", 0, dtype, item, count, root=root), timeout, site, work)

    def _share(self, call: _Call, message: torch.Tensor, bounds: list[tuple[int, int]], *, is_whole: bool) -> None:
        """Give every rank of this host the slices that its rails have got."""
        if not self._has_peers or (is_whole and self._is_even):
            return
        dtype, item = call.dtype, call.item
        if is_whole:
            self._core.broadcast(message.data_ptr(), dtype, item, message.numel() // item, 0, call.left, None)
            return
        sizes = {high - low for low, high in bounds}
        if self._is_even and len(sizes) == 1:
            addresses = [message.data_ptr() + low for low, _ in bounds]
            num = sizes.pop() // item
            self._core.all_gather(addresses[self._local], addresses, dtype, item, num, call.left, None)
            return
        for rail, (low, high) in enumerate(bounds):
            address = message.data_ptr() + low
            self._core.broadcast(address, dtype, item, (high - low) // item, rail, call.left, None)

    def all_reduce(
        self, source: int, out: int, dtype: int, item: int, count: int, kernel: int, code: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            self._all_reduce(call, source, out, count, kernel)

        return self._run(_Call("all_reduce", 0, dtype, item, count, code), timeout, site, work)

    def _all_reduce(self, call: _Call, source: int, out: int, count: int, kernel: int) -> None:
        dtype, item, code = call.dtype, call.item, call.code
        if kernel == _AVG and not _is_inexact(dtype):
            return self._average_integers(call, source, out, count)
        message = _memory(out, count * item)
        kernel, divide = self._average(call, kernel)
        is_small = message.numel() <= _INLINE_BYTES
        if not is_small and self._is_even and self._has_peers and count % self._num_rails == 0:
            num = count // self._num_rails
            addresses = [source + i * num * item for i in range(self._num_rails)]
            low = self._local * num * item
            self._core.reduce_scatter(addresses, out + low, dtype, item, num, kernel, code, call.left, None)
        else:
            self._core.all_reduce(source, out, dtype, item, count, kernel, code, call.left, None)
        bounds = [(0, message.numel())] * self._num_rails if is_small else _bounds(count, self._num_rails, item)
        if self._local < self._num_rails:
            low, high = bounds[self._local]
            self._combine(call, message[low:high], kernel)
            divide(message[low:high])
        self._share(call, message, bounds, is_whole=is_small)

    def _average(self, call: _Call, kernel: int) -> tuple[int, Callable[[torch.Tensor], object]]:
        """Return the kernel for the steps of a reduction, and what makes a result of theirs that of all ranks.

        An average of averages is the average where all hosts have as many ranks, and stays in a half's range.
        """
        if kernel != _AVG or self._is_even:
            return kernel, lambda result: None
        dtype, world_size = _DTYPES[call.dtype], sum(map(len, self._hosts))
        return _SUM, lambda result: result.view(dtype).div_(world_size)

    def _average_integers(self, call: _Call, source: int, out: int, count: int) -> None:
        """Average in 64 bits: a sum of small integers may leave their range, and averages can't be averaged."""
        dtype = _DTYPES[call.dtype]
        sums = _memory(source, count * call.item).view(dtype).to(torch.int64, copy=True)
        wide = replace(call, dtype=DTYPE_CODES[torch.int64][0], item=8)
        self._all_reduce(wide, sums.data_ptr(), sums.data_ptr(), count, _SUM)
        means = _quotients(sums, sum(map(len, self._hosts)), is_unsigned=dtype is torch.uint64)
        _memory(out, count * call.item).view(dtype).copy_(means)

    def all_reduce_pieces(
        self, sources: list[int], outs: list[int], counts: list[int], dtype: int, item: int, kernel: int, code: int,
        num_squared: int, timeout: timedelta,
    ) -> float:  # fmt: skip
        def work(call: _Call) -> float:
            flat = self._buffer("flat", call.count * item)
            parts = flat.split([count * item for count in counts])
            for part, source in zip(parts, sources, strict=True):
                part.copy_(_memory(source, part.numel()))
            self._all_reduce(call, flat.data_ptr(), flat.data_ptr(), call.count, kernel)
            for part, out in zip(parts, outs, strict=True):
                _memory(out, part.numel()).copy_(part)
            kinds = [part.view(_DTYPES[dtype]) for part in parts[:num_squared]]
            return sum(float(values.abs().double().square().sum()) for values in kinds)

        return self._run(_Call("all_reduce", 0, dtype, item, sum(counts), code), timeout, None, work)

    def reduce(
        self, source: int, out: int, dtype: int, item: int, count: int, kernel: int, code: int, root: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            target = out if self._rank == root else self._buffer("reduced", count * item).data_ptr()
            self._all_reduce(call, source, target, count, kernel)

        return self._run(_Call("reduce", 0, dtype, item, count, code, root), timeout, site, work)

    def reduce_scatter(
        self, sources: list[int], out: int, dtype: int, item: int, count: int, kernel: int, code: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            num_bytes = count * item
            if not self._is_even or (kernel == _AVG and not _is_inexact(dtype)):
                whole = self._buffer("whole", len(sources) * num_bytes)
                for i, source in enumerate(sources):
                    whole[i * num_bytes : (i + 1) * num_bytes] = _memory(source, num_bytes)
                self._all_reduce(call, whole.data_ptr(), whole.data_ptr(), len(sources) * count, kernel)
                _memory(out, num_bytes).copy_(whole[self._rank * num_bytes : (self._rank + 1) * num_bytes])
                return
            num_hosts = len(self._hosts)
            step, divide = self._average(call, kernel)
            mine = self._buffer("mine", num_hosts * num_bytes).view(num_hosts, -1)
            for h, ranks in enumerate(self._hosts):
                blocks = [sources[r] for r in ranks]
                self._core.reduce_scatter(blocks, mine[h].data_ptr(), dtype, item, count, step, code, call.left, None)
            theirs = self._buffer("theirs", num_hosts * num_bytes).view(num_hosts, -1)
            self._swap(call, list(mine), list(theirs))
            result = _memory(out, num_bytes)
            ordered = [mine[h] if h == self._host else theirs[h] for h in range(num_hosts)]
            self._reduce_local(call, ordered, result, step)
            divide(result)

        return self._run(_Call("reduce_scatter", 0, dtype, item, count, code), timeout, site, work)

    def all_gather(
        self, source: int, outs: list[int], dtype: int, item: int, count: int, timeout: timedelta, site: str | None
    ) -> Task | None:
        def work(call: _Call) -> None:
            num_bytes = count * item
            mine = [outs[r] for r in self._here]
            self._core.all_gather(source, mine, dtype, item, count, call.left, None)
            carried = [[r for j, r in enumerate(ranks) if j % self._num_rails == self._local] for ranks in self._hosts]
            if self._local < self._num_rails:
                own = torch.cat([_memory(outs[r], num_bytes) for r in carried[self._host]])
                theirs = self._buffer("theirs", sum(map(len, carried)) * num_bytes)
                parts = theirs.split([len(ranks) * num_bytes for ranks in carried])
                self._swap(call, [own] * len(self._hosts), parts)
                for h, ranks in enumerate(carried):
                    for i, r in enumerate(ranks if h != self._host else ()):
                        _memory(outs[r], num_bytes).copy_(parts[h][i * num_bytes : (i + 1) * num_bytes])
            for h, ranks in enumerate(self._hosts):
                if h == self._host or not self._has_peers:
                    continue
                if self._is_even:
                    blocks = [outs[r] for r in ranks]
                    self._core.all_gather(blocks[self._local], blocks, dtype, item, count, call.left, None)
                    continue
                for j, r in enumerate(ranks):
                    self._core.broadcast(outs[r], dtype, item, count, j % self._num_rails, call.left, None)

        return self._run(_Call("all_gather", 0, dtype, item, count), timeout, site, work)

    def gather(
        self, source: int, outs: list[int], dtype: int, item: int, count: int, root: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            num_bytes = count * item
            if root in self._here:
                mine = [outs[r] for r in self._here] if self._rank == root else []
                self._core.gather(source, mine, dtype, item, count, self._here.index(root), call.left, None)
            sends, recvs = self._nothing(), self._nothing()
            if self._rank == root:
                recvs = [_NO_BYTES if r in self._here else _memory(out, num_bytes) for r, out in enumerate(outs)]
            elif root not in self._here:
                sends[root] = _memory(source, num_bytes)
            self._scatter_wide(call, sends, recvs)

        return self._run(_Call("gather", 0, dtype, item, count, root=root), timeout, site, work)

    def scatter(
        self, sources: list[int], out: int, dtype: int, item: int, count: int, root: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            num_bytes = count * item
            if root in self._here:
                mine = [sources[r] for r in self._here] if self._rank == root else []
                self._core.scatter(mine, out, dtype, item, count, self._here.index(root), call.left, None)
            sends, recvs = self._nothing(), self._nothing()
            if self._rank == root:
                sends = [_NO_BYTES if r in self._here else _memory(a, num_bytes) for r, a in enumerate(sources)]
            elif root not in self._here:
                recvs[root] = _memory(out, num_bytes)
            self._scatter_wide(call, sends, recvs)

        return self._run(_Call("scatter", 0, dtype, item, count, root=root), timeout, site, work)

    def all_to_all(
        self, sources: list[int], outs: list[int], dtype: int, item: int, count: int, timeout: timedelta,
        site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            mine = [[addresses[r] for r in self._here] for addresses in (sources, outs)]
            self._core.all_to_all(*mine, dtype, item, count, call.left, None)
            sends, recvs = (
                [
                    _NO_BYTES if r in self._here else _memory(address, count * item)
                    for r, address in enumerate(addresses)
                ]
                for addresses in (sources, outs)
            )
            self._scatter_wide(call, sends, recvs)

        return self._run(_Call("all_to_all", 0, dtype, item, count), timeout, site, work)

    def all_to_all_split(
        self, sources: list[int], in_counts: list[int], outs: list[int], out_counts: list[int], dtype: int, item: int,
        timeout: timedelta, site: str | None,
    ) -> Task | None:  # fmt: skip
        def work(call: _Call) -> None:
            mine = [[values[r] for r in self._here] for values in (sources, in_counts, outs, out_counts)]
            self._core.all_to_all_split(*mine, dtype, item, call.left, None)
            self._swap(call, *[[_NO_BYTES] * len(self._hosts)] * 2)
            sent = torch.tensor(in_counts)
            expected = torch.empty_like(sent)
            sizes = [8] * len(sources)
            self._wait(self._everyone.exchange(expected.view(torch.uint8), sent.view(torch.uint8), sizes, sizes), call)
            wrong = [r for r, n in enumerate(expected.tolist()) if n != out_counts[r]]
            if wrong:
                raise self._failures.wrong_split(
                    call.op, call.seq, wrong[0], int(expected[wrong[0]]), out_counts[wrong[0]]
                )
            sends, recvs = (
                [
                    _NO_BYTES if r in self._here else _memory(address, counts[r] * item)
                    for r, address in enumerate(addresses)
                ]
                for addresses, counts in ((sources, in_counts), (outs, out_counts))
            )
            self._scatter_wide(call, sends, recvs)

        return self._run(_Call("all_to_all", 0, dtype, item, has_splits=True), timeout, site, work)

    def _nothing(self) -> list[torch.Tensor]:
        return [_NO_BYTES] * sum(map(len, self._hosts))

    def _scatter_wide(self, call: _Call, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        """Exchange bytes with every rank of the other hosts directly."""
        if not call.has_agreed:
            self._swap(call, *[[_NO_BYTES] * len(self._hosts)] * 2)
        out_bytes, in_bytes = ([part.numel() for part in parts] for parts in (recvs, sends))
        source = torch.cat(list(sends))
        out = self._buffer("received", sum(out_bytes))
        self._wait(self._everyone.exchange(out, source, out_bytes, in_bytes), call)
        for recv, part in zip(recvs, out.split(out_bytes), strict=True):
            recv.copy_(part)

    # ---- messages and life -----------------------------------------------------------------------------------------

    def send(self, data: int, dtype: int, item: int, count: int, peer: int, tag: int, site: str) -> Any:
        return self._messages.send(data, dtype, item, count, peer, tag, site)

    def recv(self, data: int, dtype: int, item: int, count: int, peer: int, tag: int, site: str) -> Any:
        return self._messages.recv(data, dtype, item, count, peer, tag, site)

    def wait_request(self, request: Any, timeout_s: float) -> bool:
        return self._messages.wait(request, timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = self._messages.timeout_s = timeout_s
        self._core.set_timeout(timeout_s)

    def abort(self, why: str) -> None:
        rank = self._place.global_rank
        error = GroupAborted(
            f"rank {rank} aborted the group ({why})\nLook at what rank {rank} printed last.", ranks=(rank,), is_own=True
        )
        self._failures.end(error, "abort", 0, "abort", "abort()")

    def leave(self) -> None:
        if not self._failures.is_forked:
            self._tasks.drain(1.0)
        self._failures.leave()
        if self._failures.is_forked:
            _left_in_parent.append(self)
            self._core.leave()
            return
        self._messages.close()
        self._tasks.close()
        self._core.leave()

    def end_threads(self) -> None:
        """End what runs beside a script that ends, without a word to the others.

        A thread that comes back from an engine when the interpreter has gone ends the process with an abort.
        """
        if self._failures.is_forked:
            return
        self._failures.stop_watching()
        if self._messages.has_threads or not self._tasks.drain(0):
            self._failures.close_channels()
            self._messages.close()
            self._tasks.close()


_left_in_parent: list[BridgedGroup] = []
"""Groups of a forked process: destroying an engine whose threads stayed in the parent would not end."""


def _memory(address: int, num_bytes: int) -> torch.Tensor:
    """Return the bytes at an address, which must outlive the tensor."""
    if num_bytes == 0:
        return _NO_BYTES
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def _is_inexact(dtype: int) -> bool:
    return _DTYPES[dtype].is_floating_point or _DTYPES[dtype].is_complex


def _quotients(sums: torch.Tensor, divisor: int, *, is_unsigned: bool) -> torch.Tensor:
    """Divide 64-bit integers towards zero; unsigned ones, for which torch has no division, lie in signed ones."""
    if not is_unsigned:
        return torch.div(sums, divisor, rounding_mode="trunc")
    halves = (sums >> 1) & torch.iinfo(torch.int64).max
    quotients = halves // divisor * 2
    return (quotients + (sums - quotients * divisor >= divisor)).view(torch.uint64)


def _bounds(count: int, num_parts: int, item: int) -> list[tuple[int, int]]:
    """Return the ranges, in bytes, of `count` elements in parts whose sizes differ by one element at most."""
    sizes = [count // num_parts + (i < count % num_parts) for i in range(num_parts)]
    return [(low * item, high * item) for low, high in pairwise(accumulate(sizes, initial=0))]
