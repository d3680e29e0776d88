"""`phalanx.subscribe`: reads in place what another process of the host publishes.

A reader reads the record of the name (`records`), opens the block that the record names, takes the kernel's lock that
protects the content (`phalanx.host.shared_blocks.Block.hold`), and only then checks which version the block holds. If
the publisher has reused the block meanwhile, the reader starts again. The lock belongs to the mapping, so a version is
kept until its last tensor is gone, and no longer than the process lives.

**Writes stay private.** The mapping is private: if a reader writes into a tensor, the kernel copies the page, and only
that reader sees the change. If the mapping could not be written to, a training loop that forgot a ``clone()`` would end
with SIGSEGV in native code. Mapping and reading 1 GiB costs no more this way (287 ms; 367 ms with a shared read-only
mapping).

**Waiting** reads the record every few milliseconds, and checks every tenth of a second whether the publisher is alive.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from phalanx import _env
from phalanx._errors import ArgumentError, NotPublished, OutOfSharedMemory, PhalanxError, require_linux
from phalanx.checkpoint.publication import contents, records
from phalanx.host.shared_blocks import Block
from phalanx.wire.messages import GarbledError
from phalanx.wire.waiting import wait_until

_PURPOSE = "subscribed"
_LOOK_S = 0.005  # longest pause between two looks at the record
_LATEST_S = 30.0  # time after which `latest` gives up if every version is replaced before this process has mapped it
_GONE = (errno.ENOENT, errno.ESRCH, errno.ESTALE, errno.EINVAL, errno.ENXIO)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, eq=False)
class Published:
    """A version of what another process publishes.

    Attributes:
        version: Number of the version. A new publisher continues the numbers of the one before it, if that one's record
            is still there; otherwise, such as after a reboot, numbers start at 1 again.
        state: State as it was published. Its tensors are views of memory that other processes read, too: only read
            them, or ``clone()`` them. If this process writes into one, no other process sees the change.

    Example:
        >>> with phalanx.publish([1, 2.5, "three"], "example-3"):
        ...     newest = phalanx.subscribe("example-3").latest()
        ...     newest.state
        [1, 2.5, 'three']
    """

    version: int
    state: Any


class Subscription:
    """Versions that another process publishes under a name, from `phalanx.subscribe`. Threads must not share one.

    A subscription keeps the version that it returned last until it returns another or is closed. A subscription can be
    pickled, for example for workers of a data loader, and used in a forked child.

    Iterating waits for one version after another, skips versions that were replaced before the iteration reached them,
    and ends when the publication is closed.

    Attributes:
        name: Name of the publication.

    Example:
        >>> with phalanx.publish({"step": 7}, "example-4") as publication:
        ...     subscription = phalanx.subscribe("example-4")
        ...     print(subscription.latest().state, subscription.has_ended)
        ...     _ = publication.update({"step": 8})
        ...     print(subscription.wait(timeout_s=60).state)
        {'step': 7} False
        {'step': 8}
        >>> subscription.has_ended
        True
        >>> subscription.close()
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._last: Published | None = None
        self._last_token = ""  # token of the publication that `_last` is from
        self._seen = ""  # token of the publication that was seen alive
        self._is_closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return subscribe, (self.name,), {"_timeout_s": self._timeout_s}

    def latest(self) -> Published:
        """Return the newest version without waiting for the next; after the publisher's end, the last one received.

        Raises:
            NotPublished: There is no version.
            OutOfSharedMemory: This process has no address space or no descriptors left.
        """
        self._require_open()
        found = wait_until(self._look_now, time.monotonic() + _LATEST_S, most_s=_LOOK_S)
        newest = found[0] if found else self._last
        if newest is None:
            missing = "there is no version" if found else f"no version could be mapped for {_LATEST_S:g} s"
            raise self._error(missing, records.find(self.name))
        return newest

    def wait(self, newer_than: int | None = None, timeout_s: float | None = None) -> Published:
        """Return the newest version once it is newer than a given one.

        Args:
            newer_than: Number of a known version; the default is the version that this subscription returned last.
            timeout_s: Longest wait in seconds; the default is the subscription's limit.

        Raises:
            NotPublished: No newer version was published in time, or the publisher has ended; the error's `has_ended`
                distinguishes the two. After an end, the next call waits for another publisher.
            OutOfSharedMemory: This process has no address space or no descriptors left.
        """
        self._require_open()
        if newer_than is None:
            newer_than = self._last.version if self._last else 0
        elif not isinstance(newer_than, int):
            raise TypeError(f"{self._call}: wait: newer_than must be the number of a version, got {newer_than!r:.80}")
        limit_s = self._timeout_s if timeout_s is None else _env.seconds("wait: timeout_s", timeout_s)
        known = newer_than
        found = wait_until(
            lambda: self._look(known), time.monotonic() + limit_s, seldom=self._require_live, most_s=_LOOK_S
        )
        if found is None:
            raise self._error(f"no version newer than {known} came within {limit_s:g} s", records.find(self.name))
        return found

    @property
    def has_ended(self) -> bool:
        """Whether nobody publishes under the name now."""
        return self._live() is None

    def close(self) -> None:
        """Drop the version that the subscription keeps. Tensors that are still in use stay valid."""
        self._last, self._is_closed = None, True

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Published]:
        while True:
            try:
                newer = self.wait()
            except NotPublished as error:
                if error.is_closed:
                    return
                raise
            yield newer

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _look_now(self) -> tuple[Published | None] | None:
        """Return the newest version, or the last one received if nobody publishes; None while it is being replaced."""
        record = self._live()
        if record is None:
            return (self._last,)
        newest = self._get(record)
        return (newest,) if newest else None

    def _look(self, known: int) -> Published | None:
        record = records.find(self.name)
        # Another publication of the name may count from 1 again.
        is_other = record is not None and self._last_token not in ("", record.token)
        if record is None or (record.version <= known and not is_other):
            return None
        return self._get(record)

    def _live(self) -> records.Record | None:
        """Return the record if its publisher is alive."""
        record = records.find(self.name)
        while record is not None and not record.is_live:
            newer = records.find(self.name)
            if newer == record:
                return None
            record = newer  # the publisher has published a version meanwhile
        if record is not None:
            self._seen = record.token
        return record

    def _require_live(self) -> None:
        """Raise NotPublished if this subscription has seen the publisher alive, and the publisher has ended since."""
        seen = self._seen
        if self._live() is None and seen:
            record = records.find(self.name)
            if record is None or record.token == seen or not record.is_live:
                self._seen = ""
                raise self._error("its publisher has ended", record, has_ended=True)

    def _get(self, record: records.Record) -> Published | None:
        """Return a record's version, or a newer one; None if its memory has been reused meanwhile."""
        if self._last and (record.version, record.token) == (self._last.version, self._last_token):
            return self._last
        try:
            block = Block.open(record.address, _PURPOSE, is_private=True)
        except OSError as error:
            if error.errno in _GONE or not record.is_live:
                return None
            raise self._refusal(record, error) from error
        try:
            token = bytes.fromhex(record.token)
            if not block.hold() or (version := contents.version_in(block.memory, token)) < record.version:
                return None
            state = contents.read(block.memory)
        except GarbledError as error:
            raise PhalanxError(
                f"{self._call}: {records.described(record.pid)}: {error}", entry="not-published"
            ) from error
        finally:
            block.close()  # the mapping keeps the memory and the lock
        self._seen = self._last_token = record.token
        self._last = Published(version, state)
        return self._last

    def _refusal(self, record: records.Record, error: OSError) -> PhalanxError:
        who = f"{self._call}: the memory of {records.described(record.pid)} can't be mapped: {error.strerror}"
        if error.errno in _SHORT:
            return OutOfSharedMemory(
                f"{who}; free memory or descriptors, or raise the limit (ulimit -v, -n)", op="subscribe"
            )
        return PhalanxError(
            f"{who}; run both as one user, in one container, with the right to look into /proc/{record.pid}/fd",
            entry="not-published",
        )

    def _error(self, what: str, record: records.Record | None, *, has_ended: bool = False) -> NotPublished:
        if record is None:
            who = "nobody has published under that name: call phalanx.publish(state, name) in another process"
        elif record.is_closed:
            who = f"{records.described(record.pid)} has closed it at version {record.version}"
        elif record.is_live:
            who = f"{records.described(record.pid)} has published version {record.version}"
        else:
            who = (
                f"process {record.pid} has ended after version {record.version} without closing it, and its memory "
                "with it"
            )
        return NotPublished(
            f"{self._call}: {what}: {who}",
            op="subscribe",
            name=self.name,
            pid=record.pid if record else None,
            version=record.version if record else 0,
            has_ended=has_ended,
            is_closed=has_ended and record is not None and record.is_closed,
            entry="publisher-ended" if has_ended else "",
        )

    @property
    def _call(self) -> str:
        return f"subscribe({self.name!r})"

    def _require_open(self) -> None:
        if self._is_closed:
            raise ArgumentError(f"{self._call} is closed: call phalanx.subscribe again")


def subscribe(name: str, *, timeout_s: float = 1800.0) -> Subscription:
    """Return a subscription to what a process of this user on this host publishes, or will publish, under a name.

    A subscription costs nothing until it is used, and never slows the publisher down.

    Args:
        name: Name given to `phalanx.publish`.
        timeout_s: Longest wait for a version in seconds, unless a call of `Subscription.wait` passes another limit.

    Raises:
        ValueError: The name is not valid, or the timeout is not positive.

    Example:
        >>> with phalanx.publish({"weight": torch.ones(2)}, "example-5"), phalanx.subscribe("example-5") as policy:
        ...     policy.wait(timeout_s=60).state["weight"].sum()
        tensor(2.)
    """
    require_linux("phalanx.subscribe", "load a checkpoint")
    return Subscription(records.check_name("subscribe", name), _env.seconds("subscribe: timeout_s", timeout_s))
