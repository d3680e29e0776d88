"""The metrics that a run writes while it trains: FOLDER/metrics.jsonl, one record per line; and the same data as CSV.

Every record has ``time`` (Unix seconds), ``kind`` and ``attempt``, counted from 0 over all starts in this folder:

- ``start``: ``world_size``, ``backend``, ``settings``; ``origin``: command, optimizer, versions and the like;
  ``resumed_from``: null, or ``step``, ``source`` (memory, disk)
- ``step``: ``step``, ``epoch``, ``loss``, ``lr``, ``samples_per_s``, ``grad_norm``; seconds per step as ``phases_s`` of
  rank 0, ``phases_by_rank`` and ``spread`` (slowest and fastest rank); all are means since the last such record; and
  each value that a training step returns besides the loss, under its name
- ``epoch``: ``step``, ``epoch``, ``loss``: the mean over the epoch's samples from ``first_step`` on
- ``evaluation``: ``step``, ``epoch``, and each value under its name
- ``rare_saves``: ``step``; ``least_s``, the least time between checkpoints on disk; ``num_hosts``, the number of hosts
  whose memory has the state
- ``save``: ``step``, ``blocked_s``; ``preempted``: ``step``, ``signal``; ``end``: ``step``, ``epoch``, ``seconds``,
  ``reason``: "max_epochs", "max_steps", "patience" or "stop", the last two with a ``message``
- ``not_finite``: ``step``, ``epoch``, ``ranks`` that first had such a value, ``message``
- ``replicas_differ``: ``step``, ``ranks`` that differ from the majority, ``tensors`` that differ, ``message``

``epoch`` counts from 0 here, in the CSV and for loggers, as `Trainer.epoch` does; screen and report count from 1.
Numbers that are not finite are written as Python writes them: ``NaN``, ``Infinity``. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.wire.files import open_regular, write_whole

Record = dict[str, Any]

PHASES = ("data", "forward", "backward", "exchange", "wait", "optimizer", "callbacks", "snapshot")
"""Phases of a step. "exchange" averages gradients with the other ranks, "wait" waits for the slowest of them.

Between hosts and with torch's wrappers the two can't be separated: there, "exchange" includes the wait.
"""
RECORDED = {"data": "load data"}
"""Names of phases in the black box, where they differ from those here."""

WORKERS = "loader workers"
"""Topic of a run's origin: number of processes that load the data of each rank."""

NAME = "metrics.jsonl"
"""Name of the file in the folder of a run."""
_TAIL_BYTES = 1 << 20  # bytes read from the end: enough for the last record, however many ranks there are
_END_OF_TIME_S = 253_402_300_800.0  # the year 10000, beyond which time.gmtime fails to format
_MAX_COUNT = 2**53  # every step up to here is exact as a float
_UNDONE = ("step", "epoch", "evaluation", "save")  # kinds that a resumption from an earlier step repeats


class MetricsLog:
    """Appends records to FOLDER/metrics.jsonl, on rank 0.

    Each record is written in one call, so a killed process leaves at most one incomplete line, the last. The log holds
    a shared lock while the file is open. This lock shows readers whether the run still runs or was killed.

    Args:
        folder: Folder of the run; made if missing.

    Attributes:
        attempt: Number of this start in the folder, from 0.
        last_steps: Last steps that earlier attempts have recorded, by kind of record.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder, NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):  # the file system may have no locks
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._file.seek(max(0, self._file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = self._file.read()
        earlier = _parse(tail)
        self.attempt = earlier[-1]["attempt"] + 1 if earlier else 0
        self.last_steps: dict[str, int] = {}
        for record in earlier:
            if record["kind"] in _UNDONE:
                self.last_steps[record["kind"]] = max(record["step"], self.last_steps.get(record["kind"], 0))
        self._is_torn = bool(tail) and not tail.endswith(b"\n")

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; values that are neither JSON nor numbers are written as text."""
        head = {"time": time.time(), "kind": kind, "attempt": self.attempt}
        line = json.dumps(head | values | head, default=_plain).encode() + b"\n"
        begin, self._is_torn = b"\n" * self._is_torn, True
        written = self._file.write(begin + line)
        self._is_torn = written != len(begin + line)  # a full disk may accept only part of the line

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # unlocked explicitly, because a forked worker may have the file open
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def read_metrics(folder: str | Path) -> list[Record]:
    """Return all records of a run in the order of writing, without torn lines.

    Args:
        folder: Folder of the run.

    Raises:
        FileNotFoundError: `folder` is not the folder of a run.

    Example:
        >>> [record["kind"] for record in phalanx.train.read_metrics("runs/example")]
        ['start', ...'end']
    """
    path = Path(folder, NAME)
    try:
        with open_regular(path) as file:
            return _parse(file.read())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no {NAME} in {str(folder)!r}: name the folder of a run") from None


class MetricsTail:
    """Reads the records that have been written since the last read, in parts of a megabyte.

    Args:
        folder: Folder of the run.
        most_bytes: Number of bytes at the end of the file with which the first read begins; older records are left out.

    Attributes:
        is_behind: Whether the last read has left records for the next one.
    """

    def __init__(self, folder: str | Path, most_bytes: int) -> None:
        self.is_behind = True
        self._path, self._most_bytes, self._at = Path(folder, NAME), most_bytes, -1

    def read(self) -> list[Record]:
        """Return new records, without a last line that is still being written.

        Raises:
            OSError: The file can't be read.
        """
        with open_regular(self._path) as file:
            size = file.seek(0, os.SEEK_END)
            if not 0 <= self._at <= size:  # the first read, or another file
                self._at = max(0, size - self._most_bytes)
            file.seek(self._at)
            lines = file.read(_TAIL_BYTES).rpartition(b"\n")[0]
        self._at += len(lines) + bool(lines)
        self.is_behind = bool(lines) and self._at < size
        return _parse(lines)


def is_being_written(folder: str | Path) -> bool:
    """Return whether a process has the log open, on this host or on a host that shares file locks with it."""
    with contextlib.suppress(OSError), open_regular(Path(folder, NAME)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def resumed_at(start: Record) -> int:
    """Return the step after which the attempt of a ``start`` record resumes."""
    return int((start.get("resumed_from") or {}).get("step", 0))


def without_undone(records: list[Record]) -> list[Record]:
    """Return the records as if the run had never been interrupted.

    Records of steps that a later attempt has repeated are left out; if two records have the same kind and step, the
    later one stays.
    """
    kept: list[Record] = []
    limit = math.inf  # the earliest step from which a later attempt has resumed
    for record in reversed(records):
        if record["kind"] not in _UNDONE or record["step"] <= limit:
            kept.append(record)
        if record["kind"] == "start":
            limit = min(limit, resumed_at(record))
    kept.reverse()
    named = {(r["kind"], r["step"] if r["kind"] in _UNDONE else number): r for number, r in enumerate(kept)}
    return list(named.values())


def write_csv(folder: str | Path) -> Path:
    """Write FOLDER/metrics.csv, with a row for each "step" record and the evaluation after it, and return its path.

    Args:
        folder: Folder of the run.

    Raises:
        FileNotFoundError: `folder` is not the folder of a run.

    Example:
        >>> phalanx.train.write_csv("runs/example")
        PosixPath('runs/example/metrics.csv')
    """
    records = without_undone(read_metrics(folder))
    rows = {record["step"]: _flat(record) for record in records if record["kind"] == "step"}
    for record in records:
        if record["kind"] in ("evaluation", "epoch") and record["step"] in rows:
            rows[record["step"]] |= numbers_of(record["kind"], record)
    path, table = Path(folder, "metrics.csv"), io.StringIO(newline="")
    writer = csv.DictWriter(table, list(dict.fromkeys(name for row in rows.values() for name in row)))
    writer.writeheader()
    writer.writerows(rows.values())
    write_whole(path, table.getvalue())
    return path


def numbers_of(kind: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a record, under names that differ between kinds; empty for kinds without steps.

    Numbers of a "step" keep their names; an "epoch" has ``epoch_loss``, an "evaluation" ``validation/loss`` and so on.
    """
    if kind == "epoch":
        return {"epoch_loss": float(record["loss"])} if is_number(record.get("loss")) else {}
    if kind not in ("step", "evaluation"):
        return {}
    prefix = "" if kind == "step" else "validation/"
    places = ("time", "attempt", "step", *(["epoch"] if prefix else []))
    flat = {name: value for name, value in _flat(record).items() if name not in places}
    return {f"{prefix}{name}": float(value) for name, value in flat.items() if is_number(value)}


def is_number(value: object) -> bool:
    """Return whether a value in a record is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(record: Mapping[str, Any]) -> Record:
    """Return one cell for each number, such as ``data_s`` for ``phases_s["data"]``; numbers by rank are left out."""
    row = {name: value for name, value in record.items() if not isinstance(value, (dict, list)) and name != "kind"}
    row |= {f"{phase}_s": seconds for phase, seconds in record.get("phases_s", {}).items()}
    if "spread" in record:
        row["slowest_s"], row["fastest_s"] = record["spread"]
    return row


def _parse(lines: bytes) -> list[Record]:
    """Return the records with a valid time, kind and attempt, without their invalid fields."""
    records = []
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line, parse_int=_int)
            if isinstance(record, dict) and _is_placed(record):
                if rb"\ud" in line.lower():  # for a lone surrogate, this raises ValueError
                    json.dumps(record, ensure_ascii=False).encode()
                records.append({key: value for key, value in record.items() if _FIELDS.get(key, _anything)(value)})
    return records


def _int(text: str) -> int | float:
    return int(text) if len(text) < 19 else float(text)  # plots need floats, whose range longer integers may exceed


def _is_placed(record: Record) -> bool:
    kind = record.get("kind")
    is_of_run = isinstance(kind, str) and _is_within(record.get("time"), _END_OF_TIME_S)
    return is_of_run and _is_count(record.get("attempt")) and (kind not in _UNDONE or _is_count(record.get("step")))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_within(value: object, limit: float) -> bool:
    return is_number(value) and 0 <= value < limit  # type: ignore[operator]


def _are_seconds(value: object) -> bool:
    return isinstance(value, list) and all(_is_within(item, _END_OF_TIME_S) for item in value)


def _anything(_: object) -> bool:
    return True


_FIELDS: dict[str, Callable[[Any], bool]] = {  # checks of the fields that readers rely on
    "resumed_from": lambda value: isinstance(value, dict) and _is_count(value.get("step")),
    "settings": lambda value: isinstance(value, dict),
    "origin": lambda value: isinstance(value, dict),
    "phases_s": lambda value: isinstance(value, dict) and _are_seconds([*value.values()]),
    "phases_by_rank": lambda value: isinstance(value, list) and all(map(_are_seconds, value)),
    "spread": lambda value: _are_seconds(value) and len(value) == 2,
}


def _plain(value: Any) -> float | str:
    try:
        return float(value)  # a tensor or array of one number
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)
