"""Evidence about a job that has ended: the black boxes, error files and logs that its run left.

If Ctrl-C ended a run, the evidence shows what its ranks were doing at that time: the interrupt itself explains nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from phalanx._errors import printable
from phalanx._text import signal_name
from phalanx.diagnose.jobs import Job
from phalanx.diagnose.stacks import Frame, Stacks
from phalanx.diagnose.subject import Run, is_run
from phalanx.diagnose.why.activity import Call, Look, activity_of, call_of
from phalanx.diagnose.why.evidence import Evidence, RankSeen
from phalanx.failure.ending import Ending, last_words_in
from phalanx.failure.ends import load_ends, load_reason
from phalanx.failure.last_words import LastWords, owner_of
from phalanx.failure.losses import load_losses
from phalanx.failure.victims import is_victim
from phalanx.record.box import ANSWER, SUFFIX, Box, load_boxes
from phalanx.record.clocks import load_clocks
from phalanx.wire.files import open_regular, read_json

_INTERRUPT = KeyboardInterrupt.__name__
_FRAME = re.compile(r'^\s*(?:\| )?File "(.+)", line \d+, in (\S+)')
_C10D = "torch/distributed/distributed_c10d.py"
_TAIL_BYTES = 256 << 10
_MOST_DIGITS = 18  # longer numbers in a file's name are not taken for ranks
_ENDED_BY_OTHERS = ("silent", "interrupted")
# Operations that no rank can finish before all have begun.
_OF_ALL = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def evidence_of(run: Run) -> Evidence:
    """Return the evidence about a run: about the last of its attempts that left a record.

    On several hosts, each launcher has its own folder for the job, and a launcher that is killed saves nothing in it.
    So if `run` was chosen only as the newest and has left no record, the evidence is taken from a folder beside it, if
    the run of that folder was active at the same time.

    Raises:
        LookupError: The folder holds no run, or no rank was started.
    """
    evidence = _evidence_in(run.folder)
    if evidence.has_record or not run.is_newest:
        return evidence
    for other in sorted(filter(is_run, run.folder.parent.glob("*")), key=lambda path: path.name, reverse=True):
        boxes = max((path.stat().st_mtime for path in other.glob("blackbox/attempt_*")), default=0.0)
        if other != run.folder and boxes >= run.folder.stat().st_ctime:
            found = _evidence_in(other)
            note = f"{run.folder}, which began last, left no record; this one ran at the same time"
            return dataclasses.replace(found, ended_by="; ".join(filter(None, (found.ended_by, note))))
    return evidence


def _evidence_in(folder: Path) -> Evidence:
    attempts = _numbered(folder, "attempt_*")
    reason = load_reason(folder / "blackbox")
    if not attempts:
        before_any = f"has ended before any rank was started: {reason}"
        raise LookupError(f"{str(folder)!r} {before_any if reason else 'holds no logs of ranks'}")
    seen: tuple[RankSeen, ...] = ()
    for logs in reversed(attempts):
        boxes = folder / "blackbox" / logs.name
        before, seen = seen, _with_waits(_ranks(logs, boxes))
        if has_record := any(one.doing.how != "unrecorded" for one in seen):
            break
        seen = before or seen
    world_size = max((one.look.box.world_size for one in seen if one.look.box), default=len(seen))
    known = logs.name.rpartition("_")[2]
    note = f"its last attempt left no record, so this is attempt {known}" * (has_record and logs != attempts[-1])
    # The folder is made before the record, so a folder without a record means that writing failed.
    is_unwritten = not has_record and bool(_numbered(folder, "blackbox/attempt_*"))
    lacks = "it could not be written, as on a full disk" * is_unwritten
    return Evidence(
        Job(folder.parent.name, "phalanx run", 0, world_size, (), str(folder)),
        seen,
        hosts=_other_hosts(boxes, seen),
        asked=_asked(seen),
        ended_by="; ".join(filter(None, (lacks, reason, note))),
        losses=tuple(load_losses(folder)),
    )


def _other_hosts(boxes: Path, seen: Sequence[RankSeen]) -> tuple[str, ...]:
    """Return the hosts that the launchers of an attempt recorded, without the hosts of the seen ranks."""
    own = {one.look.box.host for one in seen if one.look.box}
    return tuple(sorted(printable(host) for host in load_clocks(boxes) if host not in own))


def _ranks(logs: Path, boxes: Path) -> tuple[RankSeen, ...]:
    """Return the ranks of this host in an attempt."""
    ends = load_ends(boxes)
    folders = {int(path.name.rpartition("_")[2]): path for path in _numbered(logs, "rank_*")}
    saved = _saved(boxes)
    return tuple(_rank(rank, path, saved.get(rank), ends.get(rank)) for rank, path in folders.items())


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A saved box and the time at which it was saved, or the reason why the box can't be read."""

    box: Box | None
    written_ns: int = 0
    problem: str = ""


def _saved(folder: Path) -> dict[int, _Saved]:
    """Return the saved box of each rank; for an unusable file, the problem, under the rank in the file's name."""
    loaded = load_boxes(folder)
    found: dict[int, _Saved] = {}
    for path, problem in loaded.problems.items():
        number = path.name.removeprefix("rank_").removesuffix(SUFFIX)
        if number.isdecimal() and len(number) <= _MOST_DIGITS:
            found[int(number)] = _Saved(None, problem=problem)
    for box in loaded.boxes:
        with contextlib.suppress(OSError):  # the file has just been deleted
            found[box.rank] = _Saved(box, loaded.paths[box.rank].stat().st_mtime_ns)
    return found


def _with_waits(seen: Sequence[RankSeen]) -> tuple[RankSeen, ...]:
    """Return the ranks, adding to each the wait that Ctrl-C or another rank's failure cut short just before its end.

    The box has an end for that operation, but the operation can't have succeeded if a rank that it needs was missing.
    """

    def waited(one: RankSeen) -> RankSeen:
        doing, call = one.doing, _last_wait(one.look.box)
        if doing.how not in _ENDED_BY_OTHERS or doing.call is not None or call is None or call.op not in _OF_ALL:
            return one
        never_came = any(other.doing.progress.get(call.group, call.seq) < call.seq for other in seen)
        return dataclasses.replace(one, doing=dataclasses.replace(doing, call=call)) if never_came else one

    return tuple(map(waited, seen))


def _rank(rank: int, logs: Path, saved: _Saved | None, end: Ending | None) -> RankSeen:
    """Return what a rank was doing when it ended; `end` is None if nobody recorded how the rank ended."""
    box, problem = (saved.box, saved.problem) if saved else (None, "")
    seen_ns = 0
    if saved and box:
        seen_ns = int(end.when_s * 1e9) if end else saved.written_ns - box.realtime_less_monotonic_ns
    words, how = _words(logs, box)
    if end is not None and end.signal and not end.ended_by_us:  # somebody else killed the rank
        how = signal_name(end.signal)
    look = Look(box.pid if box else 0, None, Stacks(problem=problem), box=box, box_problem=problem, seen_ns=seen_ns)
    how_found = "silent" if box else "unreadable" if problem else "unrecorded"
    doing = dataclasses.replace(activity_of(rank, look), how=how_found, since_s=None)
    if words.kind and _has_waited(words):  # an exception ended its wait for others
        wait = doing.call or _cut_short(words, box) or _last_wait(box) or _call(words)
        doing = dataclasses.replace(doing, call=wait, gave_up=words.name)
    elif words.name == _INTERRUPT and (end is None or end.ended_by_us):  # Ctrl-C: show what the rank was doing
        call = doing.call or _cut_short(words, box)
        doing = dataclasses.replace(doing, how="interrupted", call=call, frame=_frame(words.site))
    elif words.kind:
        doing = dataclasses.replace(
            doing,
            how="raised",
            call=None,
            detail=words.summary.replace(f"rank {rank}: ", "", 1),
            frame=_frame(words.site),
        )
    elif how:
        frame = _frame(words.site)
        doing = dataclasses.replace(doing, how="killed", call=None, was_in=doing.call, detail=how, frame=frame)
    elif end is not None and not end.ended_by_us:
        doing = dataclasses.replace(doing, how="exited" if end.code else "returned", call=None, detail=str(end.code))
    return RankSeen(doing, look)


def _words(logs: Path, box: Box | None) -> tuple[LastWords, str]:
    """Return the exception and the signal that ended a rank; each may be empty."""
    told: object = None
    with contextlib.suppress(OSError, ValueError):
        told = read_json(logs / "error.json")
    facts = told if isinstance(told, dict) else {}
    pid = box.pid if box else facts.get("pid", 0)
    tail = b""
    with contextlib.suppress(OSError), open_regular(logs / "stderr.log") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
        tail = file.read()
    signal = facts.get("signal")
    return last_words_in(str(logs), pid, tail), signal if isinstance(signal, str) else ""


def _has_waited(words: LastWords) -> bool:
    """Whether a rank ended because other ranks were missing or had failed."""
    is_timeout = words.failure is not None and words.failure.kind == "rank_missing"
    return is_timeout or is_victim(words)


def _last_wait(box: Box | None) -> Call | None:
    """Return a rank's last collective or message with its duration; None if it recorded none."""
    events = [event for event in box.events if event.kind in ("collective", "message")] if box else []
    if not events:
        return None
    last = max(events, key=lambda event: event.ended_ns)
    return call_of(last, last.ended_ns)


def _cut_short(words: LastWords, box: Box | None) -> Call | None:
    """Return the operation of torch.distributed that an exception ended, by its traceback; None if there is none.

    The black box shows such an operation as finished, and does not show a call that makes a group.
    """
    op = ""
    for path, function in (found.groups() for line in words.lines if (found := _FRAME.match(line))):
        if not owner_of(path):
            op = ""
        elif not op and path.endswith(_C10D) and not function.startswith("_"):
            op = function
    if not op:
        return None
    last, frame = _last_wait(box), _frame(words.site)
    if last is not None and (words.site.endswith(last.site) if last.site else last.op == op):
        return last
    return Call(op, frame.site if frame else "")


def _call(words: LastWords) -> Call:
    """Return the operation that an exception ended, for a rank that recorded no operation."""
    frame = _frame(words.site)
    return Call(words.failure.op if words.failure else "a collective", frame.site if frame else "")


def _frame(site: str) -> Frame | None:
    """Return the frame of a line such as ``/home/me/train.py:31``, relative to this folder; None if there is none."""
    path, _, line = site.rpartition(":")
    if not path or not line.isdecimal():
        return None
    return Frame("", path.removeprefix(os.path.join(os.getcwd(), "")), int(line), "")


def _asked(seen: Sequence[RankSeen]) -> str:
    """Return the last answer that a waiting rank got from ``phalanx why``; empty if no rank asked."""
    notes = [event for one in seen if one.look.box for event in one.look.box.events if event.kind == "note"]
    answers = [note for note in notes if note.text.startswith(ANSWER)]
    return max(answers, key=lambda note: note.begun_ns).text.removeprefix(ANSWER) if answers else ""


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Return the paths whose names end in a number, in the order of these numbers; other paths are ignored."""
    found = [path for path in folder.glob(pattern) if path.name.rpartition("_")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))
