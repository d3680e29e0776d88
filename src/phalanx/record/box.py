"""Reads the black boxes of running processes, saves boxes to files, and reads saved boxes.

``csrc/memory/record.h`` defines the layout; a change there must be made here, too.

This module imports neither torch nor the core, so that a job can be inspected where it could not run. The file of a
saved box may hold anything. So it is read only if it is at most twice as large as a box in memory (`GzipFile` would
read trailing zeros to their end), and the rank is taken from the file's contents, not from its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from phalanx._errors import printable
from phalanx.host.kernel import number_inside
from phalanx.host.processes import open_files
from phalanx.host.shared_blocks import path_of
from phalanx.wire.files import open_regular, write_whole

MEMORY_NAME = "phalanx-record"
"""Name of the memory in which boxes lie, as ``/proc/PID/fd`` shows it."""
SUFFIX = ".box"
"""Suffix of a saved box, which is compressed."""
ANSWER = "phalanx why: "
"""Prefix of the note with the answer that a waiting rank got from ``phalanx why``."""
FAILED = "operation failed: "
"""Prefix of the note about a collective or message that ended with an error of its group."""
LOADED = "checkpoint loaded"
"""Text of a note whose `seq` is the step of the checkpoint that a rank has loaded."""
LOADING = "load checkpoint"
"""Text of the phase in which a rank loads a checkpoint; a note with the text `LOADED` follows the phase."""
MEMORY = "resident memory"
"""Text of a note whose value is the resident memory of a rank, in bytes."""

_MAGIC = b"PHAXBOX1"
_VERSION = 1
_BEING_WRITTEN = 2**64 - 1
_PAGE = 4096
_HEADER = struct.Struct("<8sIIIiiiQqQQ64s")
_EVENT = struct.Struct("<QQQHHIIIQQ8x")
_TEXT_BYTES = 124 * 1024
BOX_BYTES = _PAGE + 8192 * _EVENT.size + _TEXT_BYTES
"""Size of a box that this phalanx writes."""
_MOST_SAVED_BYTES = 2 * BOX_BYTES
_ITEM_BYTES = (4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16)  # by Dtype, see csrc/collectives/reduce.h
_KINDS = ("", "collective", "message", "step", "phase", "note", "call")
OPS = (
    "", "join", "barrier", "broadcast", "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter",
    "all_to_all", "send", "recv", "put", "map_remote_tensor", "signal",
    "wait_signal",
)  # fmt: skip
"""Names of operations by their numbers in the core, see Op in ``csrc/control/call.h``."""


class Event(NamedTuple):
    """Something that a rank has done or is doing.

    Attributes:
        number: Number in its box, from 1.
        begun_ns: Time of its beginning, by CLOCK_MONOTONIC of the host.
        ended_ns: Time of its end; 0 if it has not ended.
        kind: "collective", "message", "step", "phase", "note", or "call" for a collective whose end is not recorded.
        op: Name of the collective or the message, such as ``all_reduce``.
        text: Name of the group or of the phase, or the text of a note; for a step, ``of N``, where N is the largest
            number that a step can have.
        site: Line of the call, such as ``train.py:31``; empty if it is not known.
        thread: The kernel's id of the thread.
        seq: Number of a collective in its group, or of a step; for a message, the peer's rank in the
            group + 1; for the note of a loaded checkpoint, its step.
        value: Elements of a collective or a message; samples of a step; bytes of a note about memory.
        dtype: Code of the elements' dtype in a collective or a message, see ``backend/types.py``.
    """

    number: int
    begun_ns: int
    ended_ns: int
    kind: str
    op: str
    text: str
    site: str
    thread: int
    seq: int
    value: int
    dtype: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the elements of a collective or a message; without arithmetic on a dtype, a byte for each element."""
        return self.value * (_ITEM_BYTES[self.dtype] if self.dtype < len(_ITEM_BYTES) else 1)


@dataclasses.dataclass(frozen=True)
class Box:
    """The record of one rank.

    Attributes:
        start_time: Start of the process in clock ticks since boot, which distinguishes processes with the same pid.
        realtime_less_monotonic_ns: Nanoseconds to add to an event's time to get the time since 1970.
        num_events: Number of events that have begun since the box was made.
        events: Events that have not been overwritten, oldest first.
    """

    rank: int
    world_size: int
    pid: int
    start_time: int
    host: str
    realtime_less_monotonic_ns: int
    num_events: int
    events: tuple[Event, ...]

    def with_events(self, events: Iterable[Event]) -> Box:
        """Return the same box with other events."""
        return dataclasses.replace(self, events=tuple(events))


def read_box(data: bytes) -> Box:
    """Return the content of a box, into which its rank may be writing.

    Raises:
        ValueError: `data` is not a box, is of another version, or is torn.
    """
    head = read_header(data)
    end = _PAGE + head.num_slots * _EVENT.size
    if len(data) < end + head.num_text_bytes:
        raise ValueError("it is torn")
    texts = ["", *_texts(data[end : end + head.num_text_bytes])]
    numbers = memoryview(data[_PAGE:end]).cast("Q")[::8]
    events = read_events(data[_PAGE:end], texts)
    return head.box(sorted(e for e in events if numbers[(e.number - 1) % head.num_slots] == e.number))


class Header(NamedTuple):
    """The header of a box, with the names of `csrc/memory/record.h`."""

    magic: bytes
    version: int
    num_slots: int
    text_bytes: int
    pid: int
    rank: int
    world_size: int
    start_time: int
    realtime_less_monotonic_ns: int
    num_events: int
    num_text_bytes: int
    host: bytes

    def box(self, events: Sequence[Event]) -> Box:
        """Return a box with these events."""
        host = printable(self.host.partition(b"\0")[0].decode(errors="replace"))
        offset_ns = self.realtime_less_monotonic_ns
        return Box(
            self.rank, self.world_size, self.pid, self.start_time, host, offset_ns, self.num_events, tuple(events)
        )  # fmt: skip


def read_header(data: bytes) -> Header:
    """Return the header of a box.

    Raises:
        ValueError: `data` is not a box, is of another version, or is torn.
    """
    if len(data) < _HEADER.size:
        raise ValueError("it is too short for a black box")
    head = Header(*_HEADER.unpack_from(data))
    if head.magic != _MAGIC:
        raise ValueError("it is no black box")
    if head.version != _VERSION:
        raise ValueError(f"it is of version {head.version}, and this phalanx reads version {_VERSION}")
    has_sizes = 0 < head.num_slots <= 1 << 20 and head.num_text_bytes <= head.text_bytes
    if not has_sizes or not 0 <= head.rank < head.world_size:
        raise ValueError("it is torn")
    return head


def read_events(slots: bytes, texts: Sequence[str], kinds: Collection[str] = ()) -> Iterator[Event]:
    """Yield the events in slots of a ring, except an event that is being written.

    Args:
        slots: Bytes of whole slots.
        texts: All texts of the box.
        kinds: Kinds of events to yield, besides unfinished events of any kind; empty: all. To read only few kinds is
            much cheaper.
    """
    if kinds:
        wanted = {_KINDS.index(kind) for kind in kinds}
        words, size = memoryview(slots).cast("Q"), _EVENT.size
        found = enumerate(zip(words[1::8], words[2::8], words[3::8], strict=True))
        chosen = [slot for slot, (begun, ended, kind) in found if ended <= begun or kind & 0xFFFF in wanted]
        slots = b"".join(slots[slot * size : (slot + 1) * size] for slot in chosen)
    for number, begun, ended, kind, code, text, site, thread, seq, value in _EVENT.iter_unpack(slots):
        op = code & 0xFF
        is_whole = 0 < number < _BEING_WRITTEN  # otherwise the slot is empty, or its event was being written
        if is_whole and 0 < kind < len(_KINDS) and op < len(OPS) and max(text, site) < len(texts):
            ended *= ended > begun  # an end before the beginning belongs to the slot's previous event
            names = _KINDS[kind], OPS[op], texts[text], texts[site]
            yield Event(number, begun, ended, *names, thread, seq, value, code >> 8)


def _texts(data: bytes) -> Iterator[str]:
    at = 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            raise ValueError("it is torn")
        yield printable(data[at + 4 : at + 4 + size].decode(errors="replace"))
        at += 4 + size


class Tail:
    """Reads only the new events of a box, in a fraction of the time that reading the whole box takes.

    Args:
        fd: Open file of the box, which the caller keeps open and closes.
        offset: Place in the file where the box begins.
        most: Largest number of events to read at a time; older ones are left out.
        kinds: Kinds of events to read, see `read_events`.
        first: Largest number of events that the first read takes.
    """

    def __init__(
        self, fd: int, offset: int = 0, most: int = 8192, kinds: Collection[str] = (), first: int = 8192
    ) -> None:
        self._fd, self._offset, self._most, self._kinds, self._first = fd, offset, most, kinds, first
        self._begin_anew((0, 0))

    def _begin_anew(self, process: tuple[int, int]) -> None:
        self._process = process
        self._num_read = 0
        self._open: list[int] = []  # numbers of events that had not ended
        self._texts, self._num_text_bytes = [""], 0

    def read(self) -> Box | None:
        """Return a box with the events that have begun or ended since the last call; None if no rank has written yet.

        Raises:
            ValueError: The box can't be read.
        """
        data = os.pread(self._fd, _HEADER.size, self._offset)
        if not data.startswith(_MAGIC):
            return None
        head = read_header(data)
        texts_at = self._offset + _PAGE + head.num_slots * _EVENT.size
        if os.fstat(self._fd).st_size < texts_at + head.num_text_bytes:
            raise ValueError("it is torn")
        if self._process != (head.pid, head.start_time):
            self._begin_anew((head.pid, head.start_time))
        most = self._most if self._num_read else min(self._first, self._most)
        oldest = head.num_events - min(most, head.num_slots)
        first = max(self._num_read, oldest) + 1
        wanted = [number for number in self._open if oldest < number < first]
        slots = [os.pread(self._fd, _EVENT.size, self._slot(head, number)) for number in wanted]
        for begin, end in _ranges_of(first, head.num_events, head.num_slots):
            slots.append(os.pread(self._fd, (end - begin + 1) * _EVENT.size, self._slot(head, begin)))
        num_new = head.num_text_bytes - self._num_text_bytes
        self._texts += _texts(os.pread(self._fd, num_new, texts_at + self._num_text_bytes))
        wanted += range(first, head.num_events + 1)
        data = b"".join(slots)
        found = {event.number: event for event in read_events(data, self._texts, self._kinds)}
        events = [found[number] for number in wanted if number in found]
        written = {*memoryview(data).cast("Q")[::8]}
        self._open = [n for n in wanted if n not in written or (n in found and not found[n].ended_ns)]
        self._num_read, self._num_text_bytes = head.num_events, head.num_text_bytes
        return head.box(events)

    def _slot(self, head: Header, number: int) -> int:
        return self._offset + _PAGE + (number - 1) % head.num_slots * _EVENT.size


def _ranges_of(first: int, last: int, num_slots: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of numbers whose slots are contiguous: two if the ring wraps around."""
    while first <= last:
        end = min(last, first + num_slots - 1 - (first - 1) % num_slots)
        yield first, end
        first = end + 1


def boxes_in(fd: int) -> Iterator[bytes]:
    """Yield the bytes of all boxes in an open file, except boxes that were never written.

    Events that are written during the call are left out.
    """
    for at in range(0, os.fstat(fd).st_size, BOX_BYTES):
        data = os.pread(fd, BOX_BYTES, at)
        if data.startswith(_MAGIC):
            yield _at_rest(data, os.pread(fd, BOX_BYTES, at))


def _at_rest(data: bytes, later: bytes) -> bytes:
    """Return `later`, a second read of the box `data`, without events that changed meanwhile (except by ending)."""
    first, second = memoryview(data), memoryview(later)
    end = min(len(data), len(later), BOX_BYTES - _TEXT_BYTES)
    if first[_PAGE:end] == second[_PAGE:end]:
        return later
    kept = bytearray(later)
    for at in range(_PAGE, end, _EVENT.size):
        began, ended = slice(at, at + 16), slice(at + 24, at + _EVENT.size)
        if first[began] != second[began] or first[ended] != second[ended]:
            kept[at : at + 8] = bytes(8)
    return bytes(kept)


def memories_of(pid: int, name: str) -> Iterator[str]:
    """Return the paths by which the open memfds of this name in a running process can be opened.

    Raises:
        FileNotFoundError: The process has ended.
        PermissionError: This user may not look into that process.
    """
    return (path_of(fd, pid) for fd, target in open_files(pid).items() if target.startswith(f"/memfd:{name} "))


def open_box(pid: int) -> tuple[int, int] | None:
    """Return an open file with the box of a running process, and the offset of the box; None if it has none.

    Raises:
        PermissionError: This user may not look into that process.
        ValueError: There is a box, but it can't be read.
    """
    inside = number_inside(pid)
    for path in memories_of(pid, MEMORY_NAME):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset in range(0, os.fstat(fd).st_size, BOX_BYTES):
                    data = os.pread(fd, _HEADER.size, offset)
                    if data.startswith(_MAGIC) and read_header(data).pid == inside:
                        return fd, offset
            except ValueError:
                os.close(fd)
                raise
            os.close(fd)
    return None


def box_of_process(pid: int) -> Box | None:
    """Return the box of a running process; None if it has none.

    The ids of the process and of its main thread are those in our pid namespace, even if the process runs in a
    container.

    Raises:
        PermissionError: This user may not look into that process.
        ValueError: There is a box, but it can't be read.
    """
    if (place := open_box(pid)) is None:
        return None
    fd, offset = place
    try:
        box = read_box(_at_rest(os.pread(fd, BOX_BYTES, offset), os.pread(fd, BOX_BYTES, offset)))
        if box.pid == pid:
            return box
        events = (event._replace(thread=pid) if event.thread == box.pid else event for event in box.events)
        return dataclasses.replace(box, pid=pid, events=tuple(events))
    finally:
        os.close(fd)


def boxes_held_by(pid: int) -> Iterator[Box]:
    """Yield the boxes in memory that a running process holds.

    A rank holds its own box. Under a launcher, each rank holds the boxes of all ranks of its host, including killed
    ones, and so does the process that started the ranks.

    Raises:
        PermissionError: This user may not look into that process.
        ValueError: There is a box, but it can't be read.
    """
    for path in memories_of(pid, MEMORY_NAME):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield from map(read_box, boxes_in(fd))
            finally:
                os.close(fd)


def save_boxes(fd: int, folder: Path) -> list[Path]:
    """Write each box of an open file into a file of its own, and return their paths."""
    saved = []
    for data in boxes_in(fd):
        with contextlib.suppress(ValueError):  # a box of another version, because the script uses another phalanx
            path = folder / _name_of(read_box(data).rank)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, gzip.compress(data, 1))
            saved.append(path)
    return saved


def load_box(path: Path) -> Box:
    """Return a saved box.

    Raises:
        ValueError: The box can't be read; the message names its file.
    """
    try:
        with open_regular(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
            if os.fstat(file.fileno()).st_size > _MOST_SAVED_BYTES:  # GzipFile would read trailing zeros to their end
                raise ValueError("it is larger than a black box")
            data = unpacked.read(BOX_BYTES + 1)  # one byte more, so that GzipFile reaches and checks the checksum
            box = read_box(data)
            if len(data) > BOX_BYTES:
                raise ValueError("it continues past the end of a black box")  # so its checksum was not checked
            return box
    except (ValueError, OSError, EOFError, struct.error, zlib.error) as error:
        raise ValueError(f"{path} can't be read: {error}") from None


@dataclasses.dataclass(frozen=True)
class SavedBoxes:
    """The content of a folder of saved boxes.

    Attributes:
        boxes: One box of each rank, in rank order.
        paths: Files of the boxes, by rank.
        problems: Message that names a file and says why it can't be used, by file.
    """

    boxes: Sequence[Box] = ()
    paths: Mapping[int, Path] = dataclasses.field(default_factory=dict)
    problems: Mapping[Path, str] = dataclasses.field(default_factory=dict)


def load_boxes(folder: Path) -> SavedBoxes:
    """Return the boxes saved in a folder. Of two boxes of one rank, the one in the file named after the rank counts."""
    found: dict[int, tuple[bool, Path, Box]] = {}
    problems: dict[Path, str] = {}
    for path in sorted(folder.glob(f"rank_*{SUFFIX}")):
        try:
            box = load_box(path)
        except ValueError as error:
            problems[path] = str(error)
            continue
        one = (path.name == _name_of(box.rank), path, box)
        kept, copy = sorted((one, found.get(box.rank, one)), key=lambda other: not other[0])
        found[box.rank] = kept
        if copy is not kept:
            problems[copy[1]] = (
                f"{copy[1]} holds the black box of rank {box.rank}, as {kept[1].name} does: delete the copy"
            )
    by_rank = sorted(found.items())
    return SavedBoxes([box for _, (_, _, box) in by_rank], {rank: path for rank, (_, path, _) in by_rank}, problems)


def _name_of(rank: int) -> str:
    return f"rank_{rank}{SUFFIX}"
