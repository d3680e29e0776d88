"""The rank's side of the record: where its box lies, and the events that Python writes.

The core records the collectives of its groups, and messages that had to wait. In a group of several hosts, the core's
collectives are only steps of the group's calls, so the core does not record them, and the group records its calls
through this module. Everything else is recorded through this module, too. While a Trainer records its steps and phases
(`telling`), models and loaders record none. If an error interrupts a step or a collective, its event never gets an end
in the box, which shows where the error came from.

Every function may be called at any time: without memory, descriptors or ``/proc``, nothing is recorded and no error is
raised. A forked child forgets its parent's box.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from phalanx import _env
from phalanx.host.processes import process_of
from phalanx.host.shared_blocks import unnamed_file
from phalanx.record.box import MEMORY, MEMORY_NAME, OPS

_core: Any = None
with contextlib.suppress(ImportError, OSError):  # without the core there is no box, but training works on Gloo
    from phalanx import _core

_COLLECTIVE, _STEP, _PHASE, _NOTE, _CALL = 1, 3, 4, 5, 6  # EventKind of csrc/memory/record.h
_OP_CODES = {op: code for code, op in enumerate(OPS)}
_MOST = 2**64 - 1

_notes_warnings = False
_fd = -1  # descriptor of the box, by which other processes find it in /proc

is_told: bool = False
"""Whether a Trainer records steps and phases, so that models and loaders must not; see `telling`."""


def begin(rank: int, world_size: int) -> None:
    """Start recording this process, unless it is being recorded already.

    The box lies in the launcher's memory, which survives the ranks. Without a launcher, it lies in memory of this
    process, where other processes can read it while this process lives.
    """
    global _fd
    if _core is None or _core.is_recording():
        return
    with contextlib.suppress(OSError):  # no memory, /proc or descriptors: the job matters more than its record
        fd, offset = _place()
        try:
            _core.record_to(fd, offset, rank, world_size)
        except OSError:
            os.close(fd)
            return
        _fd = fd
        _note_warnings()


def stop() -> None:
    """Stop recording until `begin` is called again, because this process is about to become another rank."""
    global _fd
    if _core is not None and _core.is_recording():
        _core.stop_recording()
        if _fd >= 0:
            os.close(_fd)
        _fd = -1


def _note_warnings() -> None:
    """Record each warning that is shown; a forked child inherits this from its parent."""
    global _notes_warnings
    if _notes_warnings:
        return
    _notes_warnings = True
    show = warnings.showwarning

    def note_and_show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        note(f"{category.__name__}: {message} ({os.path.basename(filename)}:{lineno})")
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = note_and_show


def _place() -> tuple[int, int]:
    environ = _env.environment()
    path, local_rank = environ.get(_env.RECORD_VARIABLE, ""), environ.get("LOCAL_RANK", "")
    if path and local_rank.isdecimal() and _env.is_rank():  # a child of a rank has a box of its own
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            offset = int(local_rank) * _core.BOX_BYTES
            if offset + _core.BOX_BYTES <= os.fstat(fd).st_size:
                return fd, offset
            os.close(fd)
    fd = unnamed_file(MEMORY_NAME)
    try:
        os.ftruncate(fd, _core.BOX_BYTES)
    except OSError:  # such as RLIMIT_FSIZE, which applies to a memfd
        os.close(fd)
        raise
    return fd, 0


def _begin(kind: int, code: int, text: str, seq: int, value: int, site: str = "") -> int:
    if _core is None:
        return 0
    text, site = (words.encode(errors="backslashreplace").decode() for words in (text, site))
    return int(_core.begin_event(kind, code, text, min(max(seq, 0), _MOST), min(max(value, 0), _MOST), site))


def end(event: int) -> None:
    """Record that an event has ended; do nothing for 0."""
    if event:
        _core.end_event(event)


def begin_collective(op: str, dtype: int, group: str, seq: int, num_elems: int, site: str) -> int:
    """Record the beginning of a collective that the core does not record itself; return its event, for `end`."""
    return _begin(_COLLECTIVE, _OP_CODES[op] | dtype << 8, group, seq, num_elems, site)


def note_call(op: str, group: str, seq: int, num_elems: int, site: str) -> None:
    """Record the call of a collective whose end will not be known."""
    end(_begin(_CALL, _OP_CODES[op], group, seq, num_elems, site))


def begin_step(step: int, num_samples: int = 0, num_steps: int = 0) -> int:
    """Record that an optimizer step begins; return its event, for `end`.

    Args:
        step: Number of the step, from 1.
        num_steps: Largest number of steps that the run can have; 0: unknown.
        num_samples: Samples of the step, over all ranks; 0: unknown.
    """
    return _begin(_STEP, 0, f"of {num_steps}" if num_steps else "", step, num_samples)


def begin_phase(name: str, step: int = 0, site: str = "") -> int:
    """Record the beginning of a phase of an optimizer step, such as "load data"; return its event, for `end`."""
    return _begin(_PHASE, 0, name, step, 0, site)


@contextlib.contextmanager
def phase(name: str, step: object = 0, site: str = "") -> Iterator[None]:
    """Record how long the body takes, under a name such as "checkpoint". A `step` that is not a number is ignored."""
    event = begin_phase(name, step if isinstance(step, int) else 0, site)
    try:
        yield
    finally:
        end(event)


def note(words: str, step: int = 0) -> None:
    """Record a message, such as a warning or the last exception."""
    end(_begin(_NOTE, 0, words[:500], step, 0))


def note_memory() -> None:
    """Record the resident memory of this process in bytes, including shared memory."""
    if (process := process_of(os.getpid())) is not None:
        end(_begin(_NOTE, 0, MEMORY, 0, process.rss_bytes))


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Keep models and loaders from recording steps and phases in the body, because the body records more about them."""
    global is_told
    before, is_told = is_told, True
    try:
        yield
    finally:
        is_told = before
