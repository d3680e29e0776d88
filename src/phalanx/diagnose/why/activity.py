"""The activity of one rank, read from its stacks, its black box and the kernel: facts without words.

- **For how long** a thread has slept follows from the time at which the scheduler last ran it (``se.exec_start``),
  which any user may read. If a signal or a debugger interrupts the sleep, the scheduler counts the thread as having
  run. The time found is then a lower bound ("for at least"), unless the rank's last operation ended just before the
  sleep began. If a thread polls or computes, this time is nearly zero, and the end of the last operation in the rank's
  black box says more. The scheduler has a clock for each CPU, which stops while a hypervisor takes that CPU away. So
  the clocks of two CPUs can be seconds apart. To read the right clock, the asking thread moves for a moment to the CPU
  on which the examined thread last ran.
- **Which thread** of a rank trains is known from its black box, or from the stacks if the main thread only waits for
  another thread's end.
- **A thread that sleeps with the GIL** is recognized by py-spy's flag and the thread's state. Locks, ``input()`` and
  ``Work.wait()`` leave no Python frame; they are recognized by the source line and the system call.
- **An operation that a rank "had not begun"** may have been called all the same: an asynchronous operation is recorded
  only when its worker thread begins it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Mapping, Sequence

from phalanx.debugging import AT_BREAKPOINT
from phalanx.diagnose.stacks import Frame, Stacks, Thread, folder_of
from phalanx.diagnose.why import workers
from phalanx.host.kernel import Stand, stand_of
from phalanx.host.processes import Process, process_of
from phalanx.record.box import Box, Event

_BACKWARD = "_engine_run_backward"
_C10D = "torch/distributed/distributed_c10d.py"
_DISTRIBUTED = re.compile(r"torch/(?:distributed/|nn/parallel/distributed\.py)")
_DEBUGGERS = {"pdb.py", "bdb.py", "pudb.py"}
_LOADERS = re.compile(r"torch/utils/data/dataloader\.py|phalanx/data/")
_SLEEPING = "SDI"
_SOON_S = 1.0  # if a sleep began within this time after the last operation, nothing has interrupted that sleep
_JOINS = {"join": ("threading.py",), "result": ("_base.py",), "wait": ("_base.py",)}

JOINING = ("init_process_group", "new_group")
"""Calls in which ranks meet to make a group."""
_READING = ("", "read", "select", "pselect6", "poll", "ppoll")
"""System calls in which a prompt waits for input; "" stands for an unknown system call."""


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation in which a rank waits for others.

    Attributes:
        op: Name, such as ``all_reduce``; ``backward`` if gradients are averaged in it, ``wait`` for a ``Work.wait()``.
        site: Line of the user's script that makes the call.
        group: Name of the group; empty if it is unknown.
        seq: Number of the collective in its group; 0 if the number is unknown or the operation is a message.
        peer: The message's sender or receiver, by its rank in the group; None if it may be any rank, or if the
            operation is a collective.
        since_s: Seconds since the operation began; None if that is unknown.
        since_is_least: Whether the operation may have begun earlier, because the kernel knows only when the thread's
            last sleep began.
    """

    op: str
    site: str
    group: str = ""
    seq: int = 0
    peer: int | None = None
    since_s: float | None = None
    since_is_least: bool = False

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv", "isend", "irecv")

    def is_same(self, other: Call) -> bool:
        """Whether both may be the same operation: by their numbers if these are known, else by name, line and peer."""
        if self.seq and other.seq:
            return (self.group, self.seq) == (other.group, other.seq)
        return (self.op, self.site, self.peer) == (other.op, other.site, other.peer)


@dataclasses.dataclass(frozen=True)
class Look:
    """Everything that was seen of one process.

    Attributes:
        process: The process; None if it has ended.
        stand: The main thread as the kernel sees it.
        box: The process's black box; None if there is none, or if it can't be read.
        box_problem: Reason why the box can't be read; empty if it was read, or if there is none.
        seen_ns: Time at which the process was seen, by CLOCK_MONOTONIC.
    """

    pid: int
    process: Process | None
    stacks: Stacks = dataclasses.field(default_factory=Stacks)
    stand: Stand = dataclasses.field(default_factory=Stand)
    box: Box | None = None
    box_problem: str = ""
    seen_ns: int = dataclasses.field(default_factory=time.monotonic_ns)

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.state in "ZX"


HAS_ENDED = frozenset({"returned", "exited", "raised", "killed", "interrupted", "silent"})
"""Values of `Activity.how` for a rank that is known to have ended in a particular way."""


@dataclasses.dataclass(frozen=True)
class Activity:
    """The activity of a process.

    Attributes:
        call: Operation in which the process waits for other ranks; None if it waits for none.
        how: ``runs``, ``asleep``, ``stopped`` by a signal, ``traced`` by a debugger, waiting for the ``disk``, at a
            ``breakpoint``, waiting for its ``loader``, sleeping with the ``gil``, waiting for a GIL with which another
            thread sleeps (``starved``), waiting for a ``lock``, reading its ``input``, ``idle`` as a loader's worker
            without a batch to prepare, ``ended``, or ``unknown``. If it has ended and more is known: ``returned``,
            ``exited``, ``raised``, ``killed``, ``interrupted`` by Ctrl-C, or ``silent``.
        frame: Innermost frame of the user's code; None if it is unknown.
        within: Function of a library that this frame has called; empty if it has called none.
        depth: Number of times that the frame's function is on the stack.
        since_s: Seconds since the thread last ran; None if it runs or this is unknown.
        since_is_least: Whether the thread may have slept there for longer: after a signal or a halt (by gdb, or to
            read native frames), the kernel counts a new sleep.
        system_call, path: System call in which the thread sleeps, and the file behind the call's descriptor.
        other: Frame of the thread or the loader's worker that the process waits for; None if there is none.
        other_pid: Process or thread of that frame; 0 if there is none.
        detail: Name of the debugger or of a kernel function, or cause of the end, depending on `how`.
        progress: Number of the last collective that the rank has begun, by group; empty if that is unknown.
        has_forgotten: Whether `progress` may lack groups, because the black box has dropped the collectives of these
            groups.
        last: Last collective that the rank has completed, if that is known.
        stepped_s: Seconds since the end of the rank's last training step; None if that is unknown.
        was_in: Operation in which the rank waited when a signal killed it; None if there is none.
        gave_up: Name of the exception that ended the rank's wait for others; empty if none did.
        host: Name of the rank's host; empty for this host.
    """

    rank: int
    pid: int
    call: Call | None = None
    how: str = "unknown"
    frame: Frame | None = None
    within: str = ""
    depth: int = 1
    since_s: float | None = None
    since_is_least: bool = False
    system_call: str = ""
    path: str = ""
    other: Frame | None = None
    other_pid: int = 0
    detail: str = ""
    progress: Mapping[str, int] = dataclasses.field(default_factory=dict)
    has_forgotten: bool = False
    last: Call | None = None
    stepped_s: float | None = None
    was_in: Call | None = None
    gave_up: str = ""
    host: str = ""

    @property
    def is_halted(self) -> bool:
        """Whether the rank has ended, or something outside it must happen before it can continue."""
        return self.how in ("ended", "returned", "stopped", "traced", "disk")


def activity_of(rank: int, look: Look, helpers: Sequence[Look] = ()) -> Activity:
    """Return what a rank is doing.

    Args:
        helpers: Descendants of the rank's process, such as the workers of its data loader.
    """
    if workers.is_worker(look.stacks):
        look = dataclasses.replace(look, stacks=workers.own_part(look.stacks))
    look = _at_the_training(look)
    main = look.stacks.threads[0] if look.stacks.threads else None
    progress = {} if look.box is None else _progress(look.box)
    has_recorded = has_collectives(look.box)
    doing = Activity(
        rank=rank,
        pid=look.pid,
        call=_call(look, main, has_recorded),
        since_s=look.stand.still_s,
        system_call=look.stand.call,
        path=look.stand.path,
        progress=progress,
        has_forgotten=look.box is not None and look.box.num_events > len(look.box.events),
        last=_last(look) if has_recorded else None,
        stepped_s=_stepped_s(look),
    )
    doing = dataclasses.replace(doing, since_is_least=_may_be_longer(doing.since_s, doing.last))
    if main is not None and main.own_frames:
        library, _ = _split(main)
        frame = main.own_frames[0]
        within = next((one.function for one in reversed(library) if "<locals>" not in one.function), "")
        depth = sum((own.function, own.file) == (frame.function, frame.file) for own in main.own_frames)
        doing = dataclasses.replace(doing, frame=frame, depth=depth, within=within)
    return _halted(doing, look) or _held(doing, look) or _placed(doing, look, helpers)


def _may_be_longer(still_s: float | None, last: Call | None) -> bool:
    """Whether a thread may have waited here for longer than its present sleep.

    A signal or a halt begins a new sleep. So the present sleep is only a lower bound, unless the thread's last
    operation ended just before that sleep began.
    """
    if still_s is None:
        return False
    return last is None or last.since_s is None or last.since_s > still_s + _SOON_S


def _at_the_training(look: Look) -> Look:
    """Return the look with the training thread put first, if it is known which thread that is."""
    if len(look.stacks.threads) < 2:
        return look
    there = {thread.number: thread for thread in look.stacks.threads if thread.own_frames}
    events = look.box.events if look.box else ()
    trains = [event.thread for event in events if event.kind in ("collective", "step") and event.thread in there]
    main = look.stacks.threads[0]
    first = there[trains[-1]] if trains else main
    if first is main and _joins(main):
        others = [thread for thread in there.values() if thread is not main]
        calling = [thread for thread in others if _call_on(thread, look) is not None]
        first = (calling or others[: len(others) == 1] or [main])[0]
    if first is main:
        return look
    threads = (first, *(thread for thread in look.stacks.threads if thread is not first))
    stacks = dataclasses.replace(look.stacks, threads=threads)
    return dataclasses.replace(look, stacks=stacks, stand=stand_of(look.pid, first.number))


def _joins(thread: Thread) -> bool:
    """Whether a thread waits for another thread's end, or for its result."""
    library, _ = _split(thread)
    return any(frame.name in _JOINS and os.path.basename(frame.file) in _JOINS[frame.name] for frame in library)


# ---- operations ----------------------------------------------------------------------------------------------------


def _call(look: Look, main: Thread | None, has_recorded: bool) -> Call | None:
    """Return the operation in which a rank waits for others; None if the rank waits for none."""
    if main is not None and (call := _at_breakpoint(main)) is not None:
        return call
    found = _recorded(look) if has_recorded else None
    if found is None and main is not None and (told := _call_on(main, look)) is not None:
        is_hidden = told.is_message or (look.box is not None and any(one.kind == "call" for one in look.box.events))
        is_hidden = is_hidden and look.stand.state in _SLEEPING
        found = told if not has_recorded or told.op in JOINING or is_hidden else None  # no box shows a rank that joins
    return found


def _at_breakpoint(thread: Thread) -> Call | None:
    """Return the breakpoint at which a thread waits for the rank that has the debugger; None if there is none."""
    library, rest = _split(thread)
    waits = any(frame.file == "phalanx/debugging/breakpoints.py" and frame.name == "wait" for frame in library)
    # Without `since_s`: the wait polls, so the thread's last sleep does not tell when the wait began.
    return Call(AT_BREAKPOINT, rest[0].site if rest else "") if waits else None


def _recorded(look: Look) -> Call | None:
    """Return the operation in which a rank waits, from its box; operations in the background do not count."""
    assert look.box is not None
    threads = {thread.number for thread in look.stacks.threads}
    for event in look.box.events:
        if event.ended_ns or event.kind not in ("collective", "message"):
            continue
        if not threads or event.thread in threads or _awaits(look):
            return call_of(event, look.seen_ns)
    return None


def _awaits(look: Look) -> bool:
    """Whether the main thread waits for an operation that another thread runs."""
    library, rest = _split(look.stacks.threads[0])
    if any(frame.owner == "phalanx" or _DISTRIBUTED.search(frame.file) for frame in library):
        return True
    if any(frame.name == _BACKWARD for frame in library):  # the thread computes gradients, or waits for averages
        return look.stand.state in _SLEEPING
    return bool(rest) and not library and ".wait(" in _source(rest[0], look.pid)


def _last(look: Look) -> Call | None:
    """Return the last operation that a rank with a box has ended."""
    assert look.box is not None
    ended = [event for event in look.box.events if event.ended_ns and event.kind in ("collective", "message", "call")]
    if not ended:
        return None
    event = max(ended, key=lambda event: event.ended_ns)
    return dataclasses.replace(call_of(event, look.seen_ns), since_s=(look.seen_ns - event.ended_ns) / 1e9)


def _stepped_s(look: Look) -> float | None:
    steps = [event.ended_ns for event in look.box.events if event.kind == "step"] if look.box is not None else []
    newest_ns = max(steps, default=0)
    return (look.seen_ns - newest_ns) / 1e9 if newest_ns else None


def joining_call(group: str) -> str:
    """Return the name of the call in which a rank joins a group."""
    return "init_process_group" if group in ("", "default") else "new_group"


def call_of(event: Event, now_ns: int) -> Call:
    """Return the operation that an event of a black box records, as it stood at `now_ns`."""
    is_message = event.kind == "message"
    return Call(
        op=event.op,
        site=event.site,
        group=event.text,
        seq=0 if is_message else event.seq,
        peer=event.seq - 1 if is_message and event.seq else None,
        since_s=max(now_ns - event.begun_ns, 0) / 1e9,
    )


def has_collectives(box: Box | None) -> bool:
    """Whether a box has collectives; those of NCCL, for example, are not recorded."""
    return box is not None and bool(_progress(box))


def _progress(box: Box) -> dict[str, int]:
    return {event.text: event.seq for event in box.events if event.kind in ("collective", "call") and event.text}


def _call_on(thread: Thread, look: Look) -> Call | None:
    """Return the operation of torch.distributed on a thread's stack; its number is unknown."""
    library, rest = _split(thread)
    site = rest[0].site if rest else ""
    op = ""
    for frame in library:  # the outermost counts, because all_gather_object, for example, calls all_gather
        if frame.file.endswith(_C10D) and not frame.name.startswith("_"):
            op = frame.name
    if not op and look.stand.state in _SLEEPING:
        if any(frame.name == _BACKWARD for frame in library):
            op = "backward"
        elif any(_DISTRIBUTED.search(frame.file) for frame in library):
            op = next(frame.name for frame in reversed(library) if _DISTRIBUTED.search(frame.file)).strip("_")
        elif rest and not library and ".wait(" in _source(rest[0], look.pid) and look.stand.call == "futex":
            op = "wait"
    still_s = look.stand.still_s
    polls = look.stand.call == "nanosleep" or any(frame.name == "wait_until" for frame in library)
    if op in JOINING and polls:  # ranks poll until all have joined
        still_s = None
    return Call(op, site, since_s=still_s, since_is_least=still_s is not None) if op else None


def _split(thread: Thread) -> tuple[tuple[Frame, ...], tuple[Frame, ...]]:
    """Return the library frames above the user's code, and the rest; each innermost first."""
    number = next((number for number, frame in enumerate(thread.frames) if not frame.owner), len(thread.frames))
    return thread.frames[:number], thread.frames[number:]


def _source(frame: Frame, pid: int) -> str:
    """Return the source line of a frame without its comment; empty if it can't be read."""
    path = os.path.join(folder_of(pid), frame.file)
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return next((line for number, line in enumerate(file, 1) if number == frame.line), "").partition("#")[0]
    return ""


# ---- state of a process --------------------------------------------------------------------------------------------


def _halted(doing: Activity, look: Look) -> Activity | None:
    """Return the activity of a process that the kernel does not run; None if the kernel can run it."""
    stand = look.stand
    if look.has_ended:
        return dataclasses.replace(doing, how="ended", since_s=None)
    if stand.tracer_pid and stand.state in "tT":
        tracer = process_of(stand.tracer_pid)
        name = tracer.name if tracer is not None else ""
        return dataclasses.replace(doing, how="traced", detail=name, other_pid=stand.tracer_pid)
    if stand.state == "T":
        return dataclasses.replace(doing, how="stopped")
    if stand.state == "D":
        return dataclasses.replace(doing, how="disk", detail=stand.place)
    return None


def _held(doing: Activity, look: Look) -> Activity | None:
    """Return the activity of a process in which a thread sleeps with the GIL; None if none does."""
    holder = next((thread for thread in look.stacks.threads if thread.owns_gil and not thread.is_active), None)
    if holder is None:
        return None
    stand = stand_of(look.pid, holder.number)
    if not stand.state or stand.state not in _SLEEPING:
        return None
    is_least = _may_be_longer(stand.still_s, doing.last)
    doing = dataclasses.replace(
        doing, system_call=stand.call, path=stand.path, since_s=stand.still_s, since_is_least=is_least
    )
    if holder is look.stacks.threads[0]:
        return dataclasses.replace(doing, how="gil")
    frame = holder.own_frames[0] if holder.own_frames else None
    return dataclasses.replace(doing, how="starved", other=frame, other_pid=holder.number, detail=holder.name)


def _placed(doing: Activity, look: Look, helpers: Sequence[Look]) -> Activity:
    """Return the activity that follows from the functions on the main thread's stack."""
    if not look.stacks.threads:
        how = "runs" if look.stand.state == "R" else "asleep" if look.stand.state else "unknown"
        return dataclasses.replace(doing, how=how)
    if workers.is_idle(look.stacks.threads[0]):
        return dataclasses.replace(doing, how="idle")
    library, _ = _split(look.stacks.threads[0])
    if any(os.path.basename(frame.file) in _DEBUGGERS for frame in library):
        return dataclasses.replace(doing, how="breakpoint")
    if any(_LOADERS.search(frame.file) for frame in library):
        return _starved_by_loader(doing, helpers)
    if look.stand.state == "R":
        return dataclasses.replace(doing, how="runs")
    source = _source(doing.frame, look.pid) if doing.frame and not library else ""
    call = look.stand.call
    if (call == "read" and look.stand.descriptor == 0) or (call in _READING and re.search(r"\binput\(", source)):
        return dataclasses.replace(doing, how="input")
    if look.stand.call == "futex" and re.search(r"\bwith\b|\.acquire\(", source):
        return _locked(doing, look)
    return dataclasses.replace(doing, how="asleep", detail=look.stand.place)


def _locked(doing: Activity, look: Look) -> Activity:
    """Return the activity of a thread that waits for a lock, with another thread that waits in the user's code."""
    for thread in look.stacks.threads[1:]:
        if thread.own_frames and thread.frames[0] == thread.own_frames[0] and not thread.is_active:
            if stand_of(look.pid, thread.number).call != "futex":  # that thread waits for no lock; it may hold this one
                continue
            frame = thread.own_frames[0]
            return dataclasses.replace(doing, how="lock", other=frame, other_pid=thread.number, detail=thread.name)
    return dataclasses.replace(doing, how="lock")


def _starved_by_loader(doing: Activity, helpers: Sequence[Look]) -> Activity:
    """Return the activity of a rank that waits for its loader, with a worker that is halted or in user code."""
    of_loader = [look for look in helpers if workers.is_worker(look.stacks)]
    for worker in of_loader:
        theirs = activity_of(doing.rank, worker)
        if theirs.is_halted or theirs.frame is not None:
            return dataclasses.replace(doing, how="loader", other=theirs.frame, other_pid=worker.pid, detail=theirs.how)
    return dataclasses.replace(doing, how="loader", detail="" if of_loader else "no worker")
