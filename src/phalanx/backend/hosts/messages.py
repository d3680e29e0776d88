"""Point-to-point messages of a group on several hosts: by shared memory within a host, over the bridge between hosts.

Over the bridge, a message is a head, followed by a body if the data do not fit in the head. For each rank of another
host, this rank has one thread that receives from it and one that sends to it, in order. The threads start on first use.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from phalanx import _core
from phalanx._errors import PhalanxError
from phalanx._errors.facts import MadeCall
from phalanx.backend.calls.tasks import Task
from phalanx.backend.deadlines import END_S, FOR_EVER_S, LOOK_S
from phalanx.backend.failures.members import Members
from phalanx.backend.hosts.channels import Channel
from phalanx.backend.hosts.failures import Failures
from phalanx.backend.hosts.rails import Span
from phalanx.backend.types import DTYPE_NAMES

_HEAD = struct.Struct("<qQQB")  # tag, elements, bytes, dtype; all ranks of a group run one version, see `joining`
_SLOT_BYTES = 1024
_INLINE_BYTES = _SLOT_BYTES - _HEAD.size
_HEADS, _BODIES = 1, 2  # the engine's tags
_ANY_OR_BEYOND = -2  # kAnyOrBeyond in csrc/p2p/p2p.h: any rank of this host, or a rank of another host
_FOR_EVER = timedelta(seconds=FOR_EVER_S)


class _Message(Task):
    """An unfinished message over the bridge, or a receive whose message may arrive over the bridge."""

    def __init__(
        self, check: Callable[[], object], data: torch.Tensor, dtype: int, count: int, peer: int, tag: int, site: str
    ) -> None:
        super().__init__(check)
        self.data, self.dtype, self.count, self.peer, self.tag, self.site = data, dtype, count, peer, tag, site
        self.here: Any = None  # the same receive, also posted in the core, in case a rank of this host sends

    def head(self) -> bytes:
        return _HEAD.pack(self.tag, self.count, self.data.numel(), self.dtype)


class _FromHere:
    """A message through the core, which numbers the ranks within this host."""

    def __init__(self, op: str, handle: Any, ranks: list[int], site: str) -> None:
        self.op, self.handle, self._ranks, self.site = op, handle, ranks, site

    done = property(lambda self: self.handle.done)
    source = property(lambda self: self._ranks[self.handle.source])

    def error(self) -> BaseException | None:
        return self.handle.error()

    def notify(self, completions: _core.Completions, number: int) -> None:
        self.handle.notify(completions, number)

    def require_reachable(self) -> None:
        self.handle.require_reachable()


@dataclass
class _Arrived:
    """A message that arrived before its receive was posted."""

    tag: int
    dtype: int
    count: int
    data: torch.Tensor


class Messages:
    """The messages of one group, for this rank."""

    def __init__(
        self,
        core: _core.Group,
        here: list[int],
        members: Members,
        everyone: Channel,
        failures: Failures,
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        rank = members.rank
        self._core, self._here, self._rank, self._members = core, here, rank, members
        self._everyone, self._failures = everyone, failures
        self._changed = threading.Condition()
        self._posted: list[_Message] = []
        self._arrived: dict[int, deque[_Arrived]] = {}
        self._outgoing: dict[int, deque[_Message]] = {}
        self._receiving: set[int] = set()
        self._moving: dict[int, _Message] = {}  # messages being received, by sender
        self._from_here = _core.Completions()  # numbers of finished receives that name no sender
        self._expected: dict[int, _Message] = {}
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def send(self, data: int, dtype: int, item: int, count: int, peer: int, tag: int, site: str) -> Any:
        self._check("send", site)
        if peer in self._here:
            return self._post_here("send", self._core.send, data, dtype, item, count, peer, tag, site)
        message = _Message(self._check_process, Span(data, count * item).tensor(), dtype, count, peer, tag, site)
        message.source = self._rank
        with self._changed:
            is_first = peer not in self._outgoing
            self._outgoing.setdefault(peer, deque()).append(message)
            self._changed.notify_all()
        if is_first:
            self._start(self._send_to, peer)
        return message

    def recv(self, data: int, dtype: int, item: int, count: int, peer: int, tag: int, site: str) -> Any:
        self._check("recv", site)
        if peer in self._here:
            return self._post_here("recv", self._core.recv, data, dtype, item, count, peer, tag, site)
        message = _Message(self._check_process, Span(data, count * item).tensor(), dtype, count, peer, tag, site)
        sources = [peer] if peer >= 0 else [r for r in range(len(self._members.pids)) if r not in self._here]
        with self._changed:
            new = [source for source in sources if source not in self._receiving]
            self._receiving.update(new)
            is_expected = False
            if not self._take_arrived(message, sources):
                self._posted.append(message)
                if peer < 0 and len(self._here) > 1:
                    try:
                        message.here = self._core.recv(data, dtype, item, count, _ANY_OR_BEYOND, tag, site)
                    except PhalanxError as error:
                        raise self._told(error, "recv", site) from None
                    is_expected = self._expect(message)
        for source in new:
            self._start(self._receive_from, source)
        if is_expected:
            self._start(self._take_from_here, self._rank)
        return message

    def _take_arrived(self, message: _Message, sources: list[int]) -> bool:
        """Finish a receive if its message has already arrived; return whether it has."""
        for source in sources:
            for arrived in self._arrived.get(source, ()):
                if arrived.tag == message.tag:
                    self._arrived[source].remove(arrived)
                    if self._fits(message, source, arrived.dtype, arrived.count):
                        message.data.copy_(arrived.data)
                        message.source = source
                        message.finish()
                    return True
        return False

    def _check_process(self) -> None:
        self._failures.require_own_process("a message")

    def _check(self, op: str, site: str) -> None:
        self._failures.check(op)
        if self._failures.ended:
            raise self._told(RuntimeError("the group has ended meanwhile"), op, site)

    def _post_here(
        self, op: str, post: Callable[..., Any], data: int, dtype: int, item: int, count: int, peer: int, tag: int,
        site: str,
    ) -> _FromHere:  # fmt: skip
        try:
            handle = post(data, dtype, item, count, self._here.index(peer), tag, site)
        except PhalanxError as error:
            raise self._told(error, op, site) from None
        return _FromHere(op, handle, self._here, site)

    def _expect(self, message: _Message) -> bool:
        """Let the core notify `_take_from_here` when the core finishes a receive that is also posted for the bridge.

        Returns:
            Whether a thread for `_take_from_here` must be started, because this is the first such receive.
        """
        number = next(self._numbers)
        self._expected[number] = message
        message.here.notify(self._from_here, number)
        return number == 0

    def wait(self, request: Any, timeout_s: float) -> bool:
        """Wait for a message and raise its error; return whether it is over.

        After `timeout_s`, return False; the message continues. If `timeout_s` is 0, the group's timeout applies, and
        the message fails after it.
        """
        if isinstance(request, _FromHere):
            try:
                return self._core.wait_request(request.handle, timeout_s)
            except BaseException as error:
                raise self._told(error, request.op, request.site) from None
        request.require_reachable()
        limit_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + limit_s
        try:
            while not request.wait(min(max(deadline - time.monotonic(), 0.001), LOOK_S)):
                if self._failures.ended or self._failures.is_ended_elsewhere():
                    self._fail(request, RuntimeError("another rank has ended the group"))
                elif time.monotonic() >= deadline:
                    if timeout_s:
                        return False
                    absent = [request.peer] if request.peer >= 0 else []
                    self._fail(request, self._failures.too_late("", 0, limit_s, absent, "any rank"))
        except BaseException as error:
            self._fail(request, error)
            raise
        if request.error() is not None:
            raise request.error()
        return True

    @property
    def is_over(self) -> bool:
        """Whether no thread is running."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def has_threads(self) -> bool:
        return bool(self._threads)

    def close(self) -> None:
        """End the threads; the connections must have been closed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._from_here.close()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def release(self) -> None:
        """Drop the core and the channel, once no thread is running."""
        del self._core, self._everyone

    # ---- receiving -------------------------------------------------------------------------------------------------

    def _receive_from(self, peer: int) -> None:
        slot = torch.empty(_SLOT_BYTES, dtype=torch.uint8)
        while self._receive_one(slot, peer):
            pass

    def _receive_one(self, slot: torch.Tensor, peer: int) -> bool:
        """Receive a message; return False if it does not fit its receive, which ends the group.

        This frame keeps the message's tensor alive until the engine is done with it, even if `_fail` has ended the
        message meanwhile.
        """
        self._everyone.recv(slot, peer, _HEADS).wait(_FOR_EVER)
        tag, count, num_bytes, dtype = _HEAD.unpack(bytes(slot[: _HEAD.size].numpy()))
        with self._changed:
            message = self._match(peer, tag)
            if message is not None:
                self._moving[peer] = message
        if message is not None and not self._fits(message, peer, dtype, count):
            return False
        target = message.data if message is not None else torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes <= _INLINE_BYTES:
            target.copy_(slot[_HEAD.size : _HEAD.size + num_bytes])
        else:
            self._everyone.recv(target, peer, _BODIES).wait(_FOR_EVER)
        if message is not None:
            with self._changed:
                self._moving.pop(peer, None)
            message.source = peer
            message.finish()
            return True
        with self._changed:
            late = self._match(peer, tag)  # a receive that was posted while the message arrived
            if late is None:
                self._arrived.setdefault(peer, deque()).append(_Arrived(tag, dtype, count, target))
            elif self._fits(late, peer, dtype, count):
                late.data.copy_(target)
                late.source = peer
                late.finish()
        return True

    def _match(self, peer: int, tag: int) -> _Message | None:
        """Return the first posted receive that matches a message, and remove it from the posted receives."""
        for message in self._posted:
            if message.tag != tag or message.peer not in (peer, -1):
                continue
            if message.here is not None and not self._core.cancel(message.here):
                continue  # a message from this host has already matched this receive
            message.here = None
            self._posted.remove(message)
            return message
        return None

    def _take_from_here(self, _rank: int) -> None:
        while (number := self._from_here.pop()) >= 0:
            with self._changed:
                message = self._expected.pop(number)
                if message not in self._posted:  # a message over the bridge has matched this receive
                    continue
                self._posted.remove(message)
            error = message.here.error()
            if error is not None:
                message.finish(self._told(error, "recv", message.site))
                continue
            message.source = self._here[message.here.source]
            message.finish()

    def _fits(self, message: _Message, peer: int, dtype: int, count: int) -> bool:
        if (dtype, count) == (message.dtype, message.count):
            return True
        ranks = self._members.global_ranks
        expected = MadeCall(
            rank=ranks[self._rank], op="recv", dtype=DTYPE_NAMES[message.dtype], count=message.count, root=ranks[peer],
            tag=message.tag,
        )  # fmt: skip
        sent = MadeCall(**vars(self._members.peer(peer)), op="send", dtype=DTYPE_NAMES[dtype], count=count)
        self._fail(message, self._failures.wrong_message(expected, sent))
        return False

    # ---- sending ---------------------------------------------------------------------------------------------------

    def _send_to(self, peer: int) -> None:
        queue = self._outgoing.get(peer, deque())  # empty if the group has ended meanwhile
        while self._send_one(queue, peer):
            pass

    def _send_one(self, queue: deque[_Message], peer: int) -> bool:
        """Send the next message; return False if the group is closed. This frame keeps the tensor alive meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: queue or self._is_closed)
            if not queue:
                return False
            message = queue[0]
        slot = torch.zeros(_SLOT_BYTES, dtype=torch.uint8)
        slot[: _HEAD.size] = torch.frombuffer(bytearray(message.head()), dtype=torch.uint8)
        num_bytes = message.data.numel()
        if num_bytes <= _INLINE_BYTES:
            slot[_HEAD.size : _HEAD.size + num_bytes] = message.data
            self._everyone.send(slot, peer, _HEADS).wait(_FOR_EVER)
        else:
            head = self._everyone.send(slot, peer, _HEADS)
            self._everyone.send(message.data, peer, _BODIES).wait(_FOR_EVER)
            head.wait(_FOR_EVER)
        with self._changed:
            queue.popleft()
        message.finish()
        return True

    # ---- failing ---------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[int], None], peer: int) -> None:
        """Start a thread; if that fails, end the group. The caller must not hold the lock, which the thread takes."""

        def run() -> None:
            try:
                work(peer)
            except RuntimeError as error:
                self._lose(peer, error)

        thread = threading.Thread(target=run, name="phalanx-messages", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit on processes is reached
            self._lose(peer, error)
            return
        self._threads.append(thread)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        """Fail the messages that need the rank `peer`, whose connection has ended."""
        in_order = not self._failures.ended and self._failures.notices.has_left(peer)
        with self._changed:
            self._receiving.discard(peer)
            if not self._receiving:
                for message in self._posted:
                    if message.here is not None:
                        message.here.expect_nobody_beyond()
            waiting = [
                m for m in self._posted if m.peer == peer or (m.peer < 0 and not (in_order and self._may_come(m)))
            ]
            waiting += self._outgoing.get(peer, ())
            if peer in self._moving:
                waiting.append(self._moving.pop(peer))
            self._posted = [m for m in self._posted if m not in waiting]
            self._outgoing.pop(peer, None)
        for message in waiting:
            self._fail(message, error)

    def end(self) -> None:
        """Fail all messages because the group has ended; the engine may forget some of them, see `GlooChannel`."""
        with self._changed:
            waiting = [*self._posted, *self._moving.values(), *itertools.chain(*self._outgoing.values())]
            self._posted, self._moving, self._outgoing = [], {}, {}
        if waiting:
            self._everyone.drain(())
        for message in waiting:
            self._fail(message, RuntimeError("the group has ended"))

    def _may_come(self, message: _Message) -> bool:
        """Whether a receive that names no sender may still get a message: from this host or over a live connection."""
        return message.here is not None or bool(self._receiving)

    def _fail(self, message: _Message, error: BaseException) -> None:
        op = "send" if message.source == self._rank else "recv"
        message.finish(self._told(error, op, message.site))

    def _told(self, error: BaseException, op: str, site: str) -> BaseException:
        """End the group on all hosts because of `error`; return the error to raise, which says why the group ended."""
        return self._failures.end(error, op, 0, site, None)
