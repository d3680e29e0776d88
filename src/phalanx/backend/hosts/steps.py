"""The steps of a collective across several hosts: some on each host, some between hosts.

Ranks of one host share memory; a bridge joins the hosts. The ranks that have the same local number on their hosts form
a rail, with a channel of its own; there are as many rails as the smallest host has ranks. All rails work at once, each
with its own slice of the message, so that the sum of a host crosses the bridge once.

    all_reduce: reduce-scatter on the host -> rails exchange slices and reduce them in the order of hosts -> all-gather

With three hosts or more, a large slice is itself reduced in parts, one per host. Between hosts, gather, scatter and
all-to-all use a channel that reaches every rank directly. An all_gather of blocks of different sizes is a broadcast
from each rank; a reduce_scatter of such blocks is an all_reduce of all blocks. The first exchange of a call also
identifies the call; see `rails`.

**The same bits on all ranks and in every run.** A sum adds the ranks of each host in rank order, then the hosts. That
order is fixed, but it is not the order in which the same ranks would add on one host. Half-precision values accumulate
in float32 on each of the two levels, and are rounded once per level. AVG of floats is the average of the hosts'
averages if all hosts have equally many ranks, which keeps half-precision values in range; otherwise the sum is divided
at the end. AVG of integers exchanges quotients and remainders, which can't overflow, and truncates once: an average of
truncated averages would differ.

**Tried and dropped: pipelining**, in which one piece crosses the bridge while the next is reduced on its host. With two
hosts of two ranks on two cores, 64 MiB took 113 ms in pieces of 4 MiB and 86 ms whole: the CPU is the bottleneck there,
and for each piece every rank must be scheduled once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from phalanx import _core
from phalanx.backend.hosts.channels import Channel
from phalanx.backend.hosts.rails import INLINE_BYTES, Buffers, Rail, Span, Transfer, bounds_of
from phalanx.backend.hosts.running import Running
from phalanx.backend.types import DTYPE_CODES, REDUCE_CODES, RedOpType, is_inexact

_STAGED_BYTES = 512 * 1024  # up to this size, blocks are collected on one rank of their host before they cross
_SUM, _AVG = (REDUCE_CODES[op][0] for op in (RedOpType.SUM, RedOpType.AVG))
_DTYPES = [dtype for dtype, _ in sorted(DTYPE_CODES.items(), key=lambda entry: entry[1])]
_BYTE = DTYPE_CODES[torch.uint8]
_LONG = DTYPE_CODES[torch.int64]

Addresses = Sequence[int]


class Steps:
    """The collectives of one group on several hosts. The methods that are named after collectives take addresses.

    Args:
        core: Core group of this host's ranks.
        hosts: Ranks of the group by host, in ascending order on each host.
        rank: This rank's number in the group.
        rail: Channel to the ranks that have the same local number on their hosts as this rank, in the order of hosts;
            None if some host has too few ranks.
        everyone: Channel to all ranks of the group.
    """

    def __init__(
        self, core: _core.Group, hosts: list[list[int]], rank: int, rail: Channel | None, everyone: Channel
    ) -> None:
        self._core, self._hosts, self._rank, self._everyone = core, hosts, rank, everyone
        self._size = sum(map(len, hosts))
        self._host = next(h for h, ranks in enumerate(hosts) if rank in ranks)
        self.here = hosts[self._host]
        self._local = self.here.index(rank)
        self._num_rails = min(map(len, hosts))
        self._is_even = all(len(ranks) == self._num_rails for ranks in hosts)
        self._has_peers = len(self.here) > 1
        self._buffers = Buffers()
        self._rail = None if rail is None else Rail(rail, len(hosts), self._host, self._buffers)

    def perform(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        """Run all steps of a collective."""
        _STEPS[running.op](self, running, ins, outs)
        self._confirm(running)

    def release(self) -> None:
        """Drop the references to the engine and the core."""
        del self._rail, self._everyone, self._core

    # ---- steps on one host, and checks that all ranks make one call ------------------------------------------------

    def _on_host(self, running: Running, op: str, ins: Addresses, outs: Addresses, count: int, **more: Any) -> None:
        """Run one step: a collective among the ranks of this host, with `count` elements per block."""
        call = _core.Call(op, running.dtype, running.item, count, **more)
        self._core.run(call, ins, outs, running.left, None)

    def _confirm(self, running: Running) -> None:
        """Check that the ranks of this host made the same call, unless the core or the rails have compared the calls.

        The core compares only the steps of a call. A rail compares only its own ranks, and some ranks may be on no
        rail.
        """
        is_average = running.call.code == _AVG and not is_inexact(_DTYPES[running.dtype])
        is_compared = self._is_even and running.op != "reduce" and not is_average
        if not is_compared and not running.sizes:
            self._compare_here(running)

    def _compare_here(self, running: Running) -> None:
        """Check that the ranks of this host are in the same call."""
        if not self._has_peers:
            return
        head = running.head()
        room = self._buffers.span("heads", len(self.here) * len(head))
        addresses = [room.address + i * len(head) for i in range(len(self.here))]
        own = addresses[self._local]
        ctypes.memmove(own, head, len(head))
        self._core.run(_core.Call("all_gather", *_BYTE, len(head)), [own], addresses, running.left, None)
        if any(ctypes.string_at(address, len(head)) != head for address in addresses):
            raise running.failures.mismatch(running.op, running.seq)

    def _agree(self, running: Running) -> None:
        if self._rail is not None:
            self._rail.agree(running)

    def _agree_everywhere(self, running: Running) -> None:
        """Check that all ranks made this call, before a step that fails if ranks use different sizes."""
        self._compare_here(running)
        self._agree(running)

    # ---- one message for all ranks ---------------------------------------------------------------------------------

    def barrier(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        self._on_host(running, "barrier", (), (), 0)
        self._agree(running)
        self._on_host(running, "barrier", (), (), 0)

    def broadcast(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        self._broadcast(running, outs[0], running.call.count, running.call.root)

    def _broadcast(self, running: Running, data: int, count: int, root: int) -> None:
        source_host = next(h for h, ranks in enumerate(self._hosts) if root in ranks)
        message = Span(data, count * running.item)
        is_source = self._host == source_host
        if is_source and self._has_peers:
            self._on_host(running, "broadcast", [data], [data], count, root=self.here.index(root))
        bounds = self._bounds(message, running.item)
        if self._rail is not None:
            part = message.part(*bounds[self._local])
            num_hosts = len(self._hosts)
            sends = [part if is_source else Span()] * num_hosts
            recvs = [part if h == source_host and not is_source else Span() for h in range(num_hosts)]
            self._rail.swap(running, sends, recvs)
        if not is_source:
            self._share(running, message, bounds, is_whole=message.size <= INLINE_BYTES)

    def _bounds(self, message: Span, item: int) -> list[tuple[int, int]]:
        """Return the range of bytes that each rail carries; every rail carries the whole of a small message."""
        if message.size <= INLINE_BYTES:
            return [(0, message.size)] * self._num_rails
        return bounds_of(message.size // item, self._num_rails, item)

    def _share(self, running: Running, message: Span, bounds: list[tuple[int, int]], *, is_whole: bool) -> None:
        """Give every rank of this host the slices that the rails have received."""
        if not self._has_peers or (is_whole and self._is_even):
            return
        if is_whole:
            at = [message.address]
            self._on_host(running, "broadcast", at, at, message.size // running.item, root=0)
            return
        addresses = [message.address + low for low, _ in bounds]
        counts = [(high - low) // running.item for low, high in bounds]
        if self._is_even and len(set(counts)) == 1:
            self._on_host(running, "all_gather", [addresses[self._local]], addresses, counts[0])
            return
        for rail, (address, count) in enumerate(zip(addresses, counts, strict=True)):
            self._on_host(running, "broadcast", [address], [address], count, root=rail)

    # ---- reductions ------------------------------------------------------------------------------------------------

    def all_reduce(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        call = running.call
        self._all_reduce(running, ins[0], outs[0], call.count, call.kernel)

    def reduce(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        call = running.call
        is_root = self._rank == call.root
        target = outs[0] if is_root else self._buffers.span("reduced", call.count * running.item).address
        self._all_reduce(running, ins[0], target, call.count, call.kernel)

    def _all_reduce(self, running: Running, source: int, out: int, count: int, kernel: int) -> None:
        item, code = running.item, running.call.code
        if kernel == _AVG and not is_inexact(_DTYPES[running.dtype]):
            return self._average_integers(running, source, out, count)
        message = Span(out, count * item)
        kernel, divide = self._average(running, kernel)
        is_small = message.size <= INLINE_BYTES
        if not self._has_peers:
            if source != out:
                ctypes.memmove(out, source, message.size)
        elif not is_small and self._is_even and count % self._num_rails == 0:
            num = count // self._num_rails
            blocks = [source + i * num * item for i in range(self._num_rails)]
            mine = out + self._local * num * item
            self._on_host(running, "reduce_scatter", blocks, [mine], num, kernel=kernel, code=code)
        else:
            self._on_host(running, "all_reduce", [source], [out], count, kernel=kernel, code=code)
        bounds = self._bounds(message, item)
        if self._rail is not None:
            part = message.part(*bounds[self._local])
            self._rail.combine(running, part, kernel)
            divide(part)
        self._share(running, message, bounds, is_whole=is_small)

    def _average(self, running: Running, kernel: int) -> tuple[int, Callable[[Span], object]]:
        """Return the kernel for the steps of a reduction, and a function that turns the steps' result into the call's.

        If all hosts have equally many ranks, the hosts' averages are averaged, which keeps half-precision values in
        range.
        """
        if kernel != _AVG or self._is_even:
            return kernel, lambda result: None
        # Real and imaginary parts are divided separately: torch rounds differently when it divides a complex number.
        dtype, world_size = _DTYPES[running.dtype].to_real(), self._size
        return _SUM, lambda result: result.tensor().view(dtype).div_(world_size)

    def _average_integers(self, running: Running, source: int, out: int, count: int) -> None:
        dtype, num_bytes = _DTYPES[running.dtype], count * running.item
        parts = _quotients_and_remainders(Span(source, num_bytes).tensor().view(dtype), self._size)
        at = parts.data_ptr()
        self._all_reduce(running.computed_in(*_LONG), at, at, 2 * count, _SUM)
        Span(out, num_bytes).tensor().view(dtype).copy_(_integer_mean(parts, self._size, dtype))

    def all_reduce_pieces(
        self, running: Running, ins: Addresses, outs: Addresses, counts: list[int], num_squared: int
    ) -> float:
        """Reduce a message of several pieces of memory; return the sum of squares of the first `num_squared` pieces."""
        call, item = running.call, running.item
        flat = self._buffers.span("flat", call.count * item)
        parts = flat.tensor().split([count * item for count in counts])
        for part, source in zip(parts, ins, strict=True):
            part.copy_(Span(source, part.numel()).tensor())
        self._all_reduce(running, flat.address, flat.address, call.count, call.kernel)
        for part, out in zip(parts, outs, strict=True):
            Span(out, part.numel()).tensor().copy_(part)
        self._confirm(running)
        kinds = [part.view(_DTYPES[call.dtype]) for part in parts[:num_squared]]
        return sum(float(values.abs().double().square().sum()) for values in kinds)

    def reduce_scatter(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        call, item = running.call, running.item
        num_bytes = call.count * item
        if running.sizes:
            self._agree_everywhere(running)
        if running.sizes or not self._is_even or (call.kernel == _AVG and not is_inexact(_DTYPES[call.dtype])):
            self._reduce_blocks(running, ins, running.sizes or [call.count] * self._size, outs[0])
            return
        room = self._buffers.span("mine", len(self._hosts) * num_bytes)
        mine = [room.part(h * num_bytes, (h + 1) * num_bytes) for h in range(len(self._hosts))]
        mine[self._host] = Span(outs[0], num_bytes)
        for h, ranks in enumerate(self._hosts):
            blocks, reduction = [ins[r] for r in ranks], {"kernel": call.kernel, "code": call.code}
            self._on_host(running, "reduce_scatter", blocks, [mine[h].address], call.count, **reduction)
        assert self._rail is not None
        self._rail.reduce_parts(running, mine, call.kernel)

    def _reduce_blocks(self, running: Running, sources: Addresses, counts: Sequence[int], out: int) -> None:
        """On every rank, reduce the blocks of all ranks; keep only this rank's own block."""
        sizes = [count * running.item for count in counts]
        offsets = list(accumulate(sizes, initial=0))
        whole = self._buffers.span("whole", offsets[-1]).address
        for source, offset, size in zip(sources, offsets, sizes, strict=False):
            ctypes.memmove(whole + offset, source, size)
        self._all_reduce(running, whole, whole, sum(counts), running.call.kernel)
        ctypes.memmove(out, whole + offsets[self._rank], sizes[self._rank])

    # ---- blocks from rank to rank ----------------------------------------------------------------------------------

    def all_gather(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        if running.sizes:
            return self._all_gather_split(running, ins[0], outs)
        count = running.call.count
        self._on_host(running, "all_gather", ins, [outs[r] for r in self.here], count)
        if self._rail is not None:
            self._swap_blocks(running, outs, count * running.item)
        for h, ranks in enumerate(self._hosts):
            if h == self._host or not self._has_peers:
                continue
            blocks = [outs[r] for r in ranks]
            if self._is_even:
                self._on_host(running, "all_gather", [blocks[self._local]], blocks, count)
                continue
            for j, block in enumerate(blocks):
                self._on_host(running, "broadcast", [block], [block], count, root=j % self._num_rails)

    def _all_gather_split(self, running: Running, source: int, outs: Addresses) -> None:
        counts = running.sizes
        self._agree_everywhere(running)
        ctypes.memmove(outs[self._rank], source, counts[self._rank] * running.item)
        for r, (out, count) in enumerate(zip(outs, counts, strict=True)):
            if count > 0:
                self._broadcast(running, out, count, r)

    def _swap_blocks(self, running: Running, outs: Addresses, num_bytes: int) -> None:
        """Fetch those blocks of ranks on other hosts that this rail carries, and put each block in its place."""
        assert self._rail is not None
        num_hosts = len(self._hosts)
        if self._is_even:
            own = [Span(outs[self._rank], num_bytes)] * num_hosts
            self._rail.swap(running, own, [Span(outs[ranks[self._local]], num_bytes) for ranks in self._hosts])
            return
        carried = [ranks[self._local :: self._num_rails] for ranks in self._hosts]
        room = [self._buffers.span(f"from {h}", len(ranks) * num_bytes) for h, ranks in enumerate(carried)]
        for i, r in enumerate(carried[self._host]):
            ctypes.memmove(room[self._host].address + i * num_bytes, outs[r], num_bytes)
        self._rail.swap(running, [room[self._host]] * num_hosts, room)
        for h in range(num_hosts):
            for i, r in enumerate(carried[h] if h != self._host else ()):
                ctypes.memmove(outs[r], room[h].address + i * num_bytes, num_bytes)

    def gather(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        count, root = running.call.count, running.call.root
        if root in self.here:
            mine = [outs[r] for r in self.here] if self._rank == root else []
            self._on_host(running, "gather", ins, mine, count, root=self.here.index(root))
        own, others = self._with_far_root(running, ins, outs)
        self._scatter_wide(running, sends=own, recvs=others)

    def scatter(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        count, root = running.call.count, running.call.root
        if root in self.here:
            mine = [ins[r] for r in self.here] if self._rank == root else []
            self._on_host(running, "scatter", mine, outs, count, root=self.here.index(root))
        own, others = self._with_far_root(running, outs, ins)
        self._scatter_wide(running, sends=others, recvs=own)

    def _with_far_root(self, running: Running, own: Addresses, all_at_root: Addresses) -> tuple[list[Span], list[Span]]:
        """Return the spans of a gather or scatter that cross hosts, by rank.

        The first list holds this rank's block, if the root is on another host; the second, filled on the root alone,
        holds the blocks of ranks on other hosts.
        """
        num_bytes, root = running.call.count * running.item, running.call.root
        mine, others = [Span()] * self._size, [Span()] * self._size
        if self._rank == root:
            others = self._elsewhere(all_at_root, [num_bytes] * self._size)
        elif root not in self.here:
            mine[root] = Span(own[0], num_bytes)
        return mine, others

    def all_to_all(self, running: Running, ins: Addresses, outs: Addresses) -> None:
        call = running.call
        sources, targets = ([addresses[r] for r in self.here] for addresses in (ins, outs))
        if running.has_splits:
            counts = [[counts[r] for r in self.here] for counts in (call.in_counts, call.out_counts)]
            self._on_host(running, "all_to_all", sources, targets, 0, in_counts=counts[0], out_counts=counts[1])
            self._agree(running)
            self._check_splits(running)
        else:
            self._on_host(running, "all_to_all", sources, targets, call.count)
            if self._is_even and call.count * running.item <= _STAGED_BYTES:
                self._all_to_all_by_rails(running, ins, outs)
                return
        even = [call.count] * self._size
        sends = self._elsewhere(ins, [num * running.item for num in call.in_counts or even])
        recvs = self._elsewhere(outs, [num * running.item for num in call.out_counts or even])
        self._scatter_wide(running, sends, recvs)

    def _all_to_all_by_rails(self, running: Running, sources: Addresses, outs: Addresses) -> None:
        """Collect this host's blocks for the other ranks of this rail; send each of these ranks a single message."""
        assert self._rail is not None
        count, num_local = running.call.count, len(self.here)
        num_bytes = count * running.item
        rooms = []
        for h, ranks in enumerate(self._hosts):
            room = self._buffers.span(f"to {h}", num_local * num_bytes)
            rooms.append(room)
            if h != self._host:
                blocks = [room.address + i * num_bytes for i in range(num_local)]
                self._on_host(running, "all_to_all", [sources[r] for r in ranks], blocks, count)
        received = [self._buffers.span(f"from {h}", room.size) for h, room in enumerate(rooms)]
        self._rail.swap(running, rooms, received)
        for h, ranks in enumerate(self._hosts):
            for i, r in enumerate(ranks if h != self._host else ()):
                ctypes.memmove(outs[r], received[h].address + i * num_bytes, num_bytes)

    def _check_splits(self, running: Running) -> None:
        """Check that the size that each rank sends to this rank is the size that this rank expects."""
        call = running.call
        sent = torch.tensor(call.in_counts)
        coming = torch.empty_like(sent)
        sizes = [sent.itemsize] * self._size
        into, out = coming.view(torch.uint8), sent.view(torch.uint8)
        running.wait(self._everyone.exchange(into, out, sizes, sizes, running.limit))
        for r, (num, expected) in enumerate(zip(coming.tolist(), call.out_counts, strict=True)):
            if num != expected:
                raise running.failures.wrong_split(running.op, running.seq, r, num, expected)

    def _elsewhere(self, addresses: Addresses, sizes: Sequence[int]) -> list[Span]:
        """Return the blocks by rank; those of this host's ranks are empty."""
        blocks = enumerate(zip(addresses, sizes, strict=True))
        return [Span() if r in self.here else Span(address, size) for r, (address, size) in blocks]

    def _scatter_wide(self, running: Running, sends: Sequence[Span], recvs: Sequence[Span]) -> None:
        """Exchange bytes directly with every rank of the other hosts."""
        transfer = Transfer(self._everyone, running)
        transfer.start(running, range(len(sends)), sends, recvs)
        self._agree(running)
        transfer.finish(running)


_STEPS: dict[str, Callable[[Steps, Running, Addresses, Addresses], None]] = {
    "barrier": Steps.barrier,
    "broadcast": Steps.broadcast,
    "all_reduce": Steps.all_reduce,
    "reduce": Steps.reduce,
    "reduce_scatter": Steps.reduce_scatter,
    "all_gather": Steps.all_gather,
    "gather": Steps.gather,
    "scatter": Steps.scatter,
    "all_to_all": Steps.all_to_all,
}

# ---------------------------------------------------------------- averages of integers
#
# Sums may overflow, and an average of truncated averages is wrong; so quotients and remainders are summed.


def _quotients_and_remainders(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the quotients and then the remainders of integers, as int64, to be summed over the ranks."""
    is_unsigned = values.dtype is torch.uint64
    wide = values.to(torch.int64)
    quotients = _divide_towards_zero(wide, divisor, is_unsigned=is_unsigned)
    return torch.stack([quotients, wide - quotients * divisor])


def _integer_mean(sums: torch.Tensor, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the averages, truncated towards zero, from the sums of all ranks' quotients and remainders."""
    is_unsigned = dtype is torch.uint64
    carry = _divide_towards_zero(sums[1], divisor, is_unsigned=False)
    rest, means = sums[1] - carry * divisor, sums[0] + carry
    if is_unsigned:
        return means.view(torch.uint64)
    return means + ((means < 0) & (rest > 0)).long() - ((means > 0) & (rest < 0)).long()


def _divide_towards_zero(values: torch.Tensor, divisor: int, *, is_unsigned: bool) -> torch.Tensor:
    """Divide int64 values, truncating towards zero. With `is_unsigned`, the values hold the bits of uint64."""
    if not is_unsigned:
        return torch.div(values, divisor, rounding_mode="trunc")
    halves = (values >> 1) & torch.iinfo(torch.int64).max
    quotients = halves // divisor * 2
    return quotients + (values - quotients * divisor >= divisor)
