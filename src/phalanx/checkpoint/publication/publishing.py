"""`phalanx.publish`: versions of a trainer's state, which other processes of the host read without a copy.

**A version** lies whole in one block of shared memory (`contents` gives the layout). To publish the next one, the
publisher copies the state into a block that nobody reads, and makes it the newest by renaming a small file (`records`).
So a reader sees either the whole new version or an older one, and no process waits for another: a reader that keeps an
old version costs the publisher one more block, and nothing else.

**Who reads what** is known from a kernel lock, which each reader's mapping holds (`Block.hold` of
`phalanx.host.shared_blocks`). Before it writes, the publisher takes the same lock exclusively. So it never overwrites
what a reader may look at, even if a reader or an earlier publisher was killed. Two alternatives were rejected: counters
of readers in shared memory would stay wrong forever once a reader is killed; a socket on which the publisher hands out
descriptors would need a thread that answers while the trainer computes.

**Memory.** Two blocks serve readers that keep up. Each old version that is still read takes one more block, up to
`max_versions` blocks. Beyond that, publishing fails, and the error names the readers and the versions that they hold.
Once readers hold three old versions, a line on stderr says the same. Blocks are reused, because the kernel clears each
new page: copying 1 GiB into a new block takes four times as long.

**Without a copy.** `Publication.buffers` lends the next block as a state whose tensors are filled in place. Once the
state is published, further writes to its tensors become private to the writer (`phalanx.host.loans`). After a fork, the
child could still write to the block, so the block's content is copied to another block, and the first one is not used
again. Publishing tensors of `allocate_tensor`, or of a model in training, in place was rejected: the next optimizer
step would overwrite what readers look at.

**The interface.** The name alone identifies a publication, so ``publish(state, name)`` in a loop is all that a trainer
needs; the object adds buffers and an orderly end. If trainer and readers were a group that calls collectives, each
reader would stop the trainer.

Measured for 1 GiB by ``python -m bench.publish``, on two cores that other processes used, too: `update` takes 1.1 to
1.7 times as long as a copy into memory whose pages are present, and only 1.0 to 1.2 ms with `buffers`. A reader has the
version after 0.2 to 0.3 ms. Reading the whole version for the first time takes 1.7 to 2.7 times as long as reading
pages that are already mapped, because the kernel maps 16 pages at a time. Mapping all pages at once took as long.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from phalanx._errors import ArgumentError, OutOfSharedMemory, PhalanxError, require_linux
from phalanx._text import counted, in_units, joined
from phalanx.checkpoint.publication import contents, records
from phalanx.checkpoint.publication.contents import Content
from phalanx.host.loans import Loans
from phalanx.host.shared_blocks import Block, holders_of

_PURPOSE = "published"
_FEWEST, _MOST = 2, 1000  # limits of `max_versions`
_MANY = 3  # if readers hold this many old versions, a line on stderr says so
_SPARE = 1  # unread blocks that are kept for the next version

_ours: dict[tuple[int, str], Publication] = {}
"""Publications by process id and name; those with another process's id were inherited in a fork."""


@dataclass(eq=False)
class _Buffer:
    """A block, the version that it was last used for, and its loans."""

    block: Block
    loans: Loans
    version: int = 0


class Publication:
    """Versions of a state under one name, from `phalanx.publish`. Threads may share a publication.

    Attributes:
        name: Name under which other processes subscribe.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> with phalanx.publish(model.state_dict(), "example-1") as publication:
        ...     first = publication.version
        ...     publication.update(model.state_dict()) - first
        1
    """

    def __init__(self, name: str, max_versions: int) -> None:
        self.name = name
        self._pid = os.getpid()
        self._token = secrets.token_bytes(16)
        self._max_versions = max_versions
        self._buffers: list[_Buffer] = []
        self._newest: _Buffer | None = None
        self._record: records.Record | None = None
        self._draft: tuple[_Buffer, memoryview] | None = None
        self._most_told = 0
        self._is_closed = False
        self._busy = threading.RLock()  # admits one call at a time; reentrant, see `_alone`
        self._is_busy = False
        self._ends: bool | None = None  # whether the requested end is orderly; None without a request

    @property
    def version(self) -> int:
        """Number of the newest version, from 1; numbers continue from an earlier publication of that name."""
        return self._record.version if self._record else 0

    def update(self, state: Any) -> int:
        """Publish the next version, and return its number. If that fails, the last version stays.

        Args:
            state: New state, of any form that `phalanx.publish` accepts. A state that `buffers` returned is not copied.

        Raises:
            TypeError: A value can't be published; the message says where it is.
            OutOfSharedMemory: There is no room for another version, or readers hold too many old ones.
            PhalanxError: Another process publishes under that name, or the file that readers look for can't be written.
            ArgumentError: The publication is closed, another call of this thread still runs, or this process is a fork.
        """
        with self._alone("update"):
            try:
                content = contents.lay_out(state)
            except TypeError as error:
                raise TypeError(f"{self._call}: {error}") from None
            except ValueError as error:
                raise ValueError(f"{self._call}: {error}") from None
            if self._record is None:
                self._require_free()  # checked before anything is copied
            if self._draft and not self._draft[0].loans.are_inherited and content.is_drafted(self._draft[1]):
                self._publish_draft(content)
            else:
                self._publish_copy(content)
            if self._draft and self._draft[0].loans.are_inherited:
                self._drop(self._draft[0])
                self._draft = None
            self._give_back()
            return self.version

    def buffers(self) -> Any:
        """Return a state of the newest version's form; fill its tensors in place, then pass the state to `update`.

        This avoids the copy. The tensors' content is undefined at first; plain values are the newest version's. Once
        the state is published, nobody else sees later writes to its tensors: get new buffers for each version.

        Raises:
            OutOfSharedMemory: There is no room for another version, or readers hold too many old ones.
            ArgumentError: The publication is closed, another call of this thread still runs, or this process is a fork.

        Example:
            >>> with phalanx.publish({"weight": torch.zeros(3)}, "example-2") as publication:
            ...     state = publication.buffers()
            ...     _ = state["weight"].fill_(1.0)  # in any way that writes in place
            ...     _ = publication.update(state)
            ...     phalanx.subscribe("example-2").latest().state
            {'weight': tensor([1., 1., 1.])}
        """
        with self._alone("buffers"):
            assert self._newest is not None
            newest = self._newest.block.memory
            if self._draft is None:
                buffer = self._take(len(newest), lambda size: size == len(newest))
                try:
                    memory = buffer.loans.lend()
                except OSError as error:
                    buffer.block.release()
                    raise self._short(f"{in_units(len(newest))} of memory can't be mapped", error) from error
                self._draft = buffer, memory
            return contents.read_over(newest, self._draft[1])

    def close(self) -> None:
        """End the publication: readers keep what they have, and learn that no more versions will come. Idempotent.

        If a signal handler that interrupts `update` calls `close`, the publication ends once `update` has returned.

        Example:
            >>> publication = phalanx.publish({"step": 1}, "example-6")
            >>> publication.close()
            >>> phalanx.subscribe("example-6").has_ended
            True
        """
        self._end(is_in_order=True)

    def _end(self, *, is_in_order: bool) -> None:
        if self._pid != os.getpid():
            return
        with self._busy:
            if self._ends is None:
                self._ends = is_in_order
            if not self._is_busy:
                self._finish(is_in_order=self._ends)

    def _finish(self, *, is_in_order: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._record is not None and is_in_order:
                self._write(replace(self._record, is_closed=True))
        finally:
            for buffer in self._buffers:
                buffer.block.close()
            self._buffers, self._newest, self._draft = [], None, None
            self._forget()

    def _forget(self) -> None:
        if _ours.get((self._pid, self.name)) is self:
            del _ours[self._pid, self.name]

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(is_in_order=error is None)  # after an error, readers see an end without a close

    @contextlib.contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """Keep other threads out. A call during another call of this thread, as by a signal handler, raises at once.

        Raises:
            ArgumentError: The publication is closed, another call of this thread still runs, or this process is a fork.
        """
        self._require_own(method)
        with self._busy:
            if self._is_busy:
                raise ArgumentError(
                    f"{self._call}: {method}() was called while another call of this thread is at work, as by a signal "
                    "handler or a state_dict(): call it after that"
                )
            self._require_open()
            try:
                self._is_busy = True
                yield
            finally:
                self._is_busy = False
                if self._ends is not None:  # close() was called meanwhile
                    self._finish(is_in_order=self._ends)

    # ---- the next version ------------------------------------------------------------------------------------------

    def _publish_copy(self, content: Content) -> None:
        buffer = self._take(content.size_bytes, content.fits)
        with self._held_alone(buffer):
            content.write(buffer.block.memory, self._token)
            self._commit(buffer)

    def _publish_draft(self, content: Content) -> None:
        assert self._draft is not None
        buffer, memory = self._draft
        content.write(memory, self._token)  # the manifest, and tensors that lie elsewhere
        try:
            self._draft = None
            with self._held_alone(buffer):
                try:
                    buffer.loans.call_back()
                except OSError as error:
                    raise self._short("what `buffers` returned can't be made the writer's own", error) from error
                self._commit(buffer)
        finally:
            if buffer.loans.are_lent:  # `call_back` failed, so the block may still be written to
                self._drop(buffer)

    @contextlib.contextmanager
    def _held_alone(self, buffer: _Buffer) -> Iterator[None]:
        """Release an exclusively held block at the end; after an error, make the last version the newest again."""
        try:
            yield
        except BaseException:
            contents.stamp(buffer.block.memory, 0)
            if self._record is not None:
                with contextlib.suppress(OSError):  # an interrupt may have arrived after the record was replaced
                    records.write(self.name, self._record)
            raise
        finally:
            buffer.block.release()

    def _commit(self, buffer: _Buffer) -> None:
        """Make the content of an exclusively held block the newest version."""
        if self._record is None:
            with records.claiming():
                self._announce(buffer, self._require_free())
        else:
            self._announce(buffer, self.version)

    def _announce(self, buffer: _Buffer, last: int) -> None:
        pid, fd, inode, size_bytes = buffer.block.address
        where = records.start_of(pid), records.pid_namespace()
        record = records.Record(pid, self._token.hex(), records.after(last), fd, inode, size_bytes, *where)
        buffer.version = record.version
        contents.stamp(buffer.block.memory, record.version)
        self._write(record)
        self._record, self._newest = record, buffer

    def _write(self, record: records.Record) -> None:
        try:
            records.write(self.name, record)
        except OSError as error:
            raise PhalanxError(
                f"{self._call}: the file by which readers find it can't be written: {error}; free space or descriptors "
                "(ulimit -n), or make the folder yours alone (mode 0700)",
                entry="system",
            ) from error

    def _require_free(self) -> int:
        """Return the number of the name's last version; 0 if there is none.

        Raises:
            PhalanxError: Another process, or another publication of this process, publishes under the name.
        """
        record = records.find(self.name)
        if record is None:
            return 0
        if record.is_live and record.token != self._token.hex():
            raise PhalanxError(
                f"{self._call}: {records.described(record.pid)} publishes under that name. In a job, call it on one "
                "rank only (if rank == 0), else choose another name or end that process",
                entry="already-published",
            )
        return record.version

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def _take(self, size_bytes: int, fits: Any) -> _Buffer:
        """Return a block that nobody reads, and that this publication now holds exclusively.

        Raises:
            OutOfSharedMemory: Readers hold too many blocks, or there is no memory for another one.
        """
        for buffer in list(self._buffers):
            if (
                buffer is self._newest
                or (self._draft and buffer is self._draft[0])
                or not buffer.block.hold(alone=True)
            ):
                continue
            if fits(buffer.block.size_bytes):
                contents.stamp(buffer.block.memory, 0)
                return buffer
            self._drop(buffer)
        if len(self._buffers) >= self._max_versions:
            raise OutOfSharedMemory(
                f"{self._call}: readers hold {_in_words(*self._held())}, and max_versions={self._max_versions} allows "
                "no more: let them drop versions that they have finished with, end them, or raise max_versions",
                op="publish",
                entry="versions-held",
            )
        try:
            block = Block.create(size_bytes, _PURPOSE)
        except (OSError, OverflowError) as error:
            raise self._short(f"no {in_units(size_bytes)} of shared memory for another version", error) from error
        block.hold(alone=True)
        buffer = _Buffer(block, Loans(block.address.fd, size_bytes))
        self._buffers.append(buffer)
        return buffer

    def _short(self, what: str, error: Exception) -> OutOfSharedMemory:
        why = getattr(error, "strerror", None) or error
        last = f"; version {self.version} stays" if self.version else ""
        return OutOfSharedMemory(
            f"{self._call}: {what}: {why}{last}; free memory, or raise the limit that is named", op="publish"
        )

    def _drop(self, buffer: _Buffer) -> None:
        self._buffers.remove(buffer)
        buffer.block.close()

    def _give_back(self) -> None:
        """Free blocks that no reader holds, except one for the next version; print a line if readers hold many."""
        old = [one for one in self._buffers if one is not self._newest and not (self._draft and one is self._draft[0])]
        held = []
        num_free = 1 if self._draft else 0
        for buffer in old:
            if not buffer.block.hold(alone=True):
                held.append(buffer)
                continue
            buffer.block.release()
            num_free += 1
            if num_free > _SPARE:
                self._drop(buffer)
        if len(held) >= max(_MANY, self._most_told + 1):
            self._tell_held()

    def _tell_held(self) -> None:
        rows, total = self._held()
        if len(rows) < max(_MANY, self._most_told + 1):  # readers have dropped versions meanwhile
            return
        self._most_told = len(rows)
        text = f"phalanx: {self._call}: readers hold {_in_words(rows, total)}; max_versions={self._max_versions}"
        with contextlib.suppress(OSError):  # a closed pipe: nobody reads stderr
            print(text, file=sys.stderr, flush=True)

    def _held(self) -> tuple[list[str], int]:
        """Return a phrase for each old version that readers hold, and the size of these versions in bytes."""
        rows, total = [], 0
        for buffer in sorted(self._buffers, key=lambda buffer: buffer.version):
            if buffer is self._newest or (self._draft and buffer is self._draft[0]):
                continue
            if pids := sorted(holders_of(buffer.block.address.inode)):
                rows.append(f"version {buffer.version} by {joined([records.described(pid) for pid in pids])}")
                total += buffer.block.size_bytes
        return rows, total

    # ---- words -----------------------------------------------------------------------------------------------------

    @property
    def _call(self) -> str:
        return f"publish({self.name!r})"

    def _require_own(self, method: str) -> None:
        """Raise in a forked child, before the child takes the lock, which another thread may have held at the fork."""
        if self._pid != os.getpid():
            raise ArgumentError(
                f"{self._call}: process {self._pid} publishes it, and this is a fork, process {os.getpid()}: call "
                f"{method}() there, or publish under another name here"
            )

    def _require_open(self) -> None:
        if self._is_closed:
            raise ArgumentError(f"{self._call} is closed: call phalanx.publish again")


def _in_words(rows: list[str], total: int) -> str:
    return f"{counted(len(rows), 'old version')} ({in_units(total)}): {'; '.join(rows)}"


def publish(state: Any, name: str, *, max_versions: int = 8) -> Publication:
    """Publish a state for other processes of this user on this host, and return the publication.

    A second call with the same name publishes the next version. In a job, only one rank calls this function. Readers
    call `phalanx.subscribe`; they map the tensors, and never see half a version. The memory of a version is freed once
    this process has ended or closed the publication, and the last reader has dropped that version.

    Args:
        state: Model, or dictionaries, lists and tuples of tensors and plain values, such as ``model.state_dict()``.
            Tensors are copied, from an accelerator too; non-contiguous ones are packed. Tensors that share the same
            memory also share memory in the readers.
        name: Name of 1 to 100 letters, digits, ``-`` and ``_``.
        max_versions: Number of blocks of the state's size, at least 2, beyond which publishing fails: one for the
            newest version, one for the next, and one for each older version that is still read. Later calls with the
            same name ignore it.

    Raises:
        TypeError: A value can't be published, such as a sparse tensor or a DTensor; the message says where it is.
        ValueError: The name is not valid, or `max_versions` is out of range.
        OutOfSharedMemory: There is no room, or readers hold too many old versions. The last version stays.
        PhalanxError: Another process publishes under that name.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> publication = phalanx.publish(model.state_dict(), "example")
        >>> newest = phalanx.subscribe("example").latest()
        >>> torch.equal(newest.state["weight"], model.weight)
        True
        >>> publication.close()
    """
    require_linux("phalanx.publish", "save a checkpoint")
    records.check_name("publish", name)
    if type(max_versions) is not int or not _FEWEST <= max_versions <= _MOST:
        raise ValueError(f"publish: max_versions must lie in [{_FEWEST}, {_MOST}], got {max_versions!r}")
    publication = _ours.setdefault((os.getpid(), name), Publication(name, max_versions))
    try:
        publication.update(state)
    except BaseException:
        if not publication.version:
            publication._forget()
        raise
    return publication
