"""A rank's last words: facts about the exception that ended the rank, in the error file that its launcher names.

The rank itself knows best what ended it. So when a phalanx group is made or `phalanx.init` is called, a hook is put in
front of `sys.excepthook`. The hook writes ``error.json`` in the format of torch's ``@record``, which torchrun can read,
and adds the exception's class and message, the user's line, ``is_victim`` and the `Failure`. An exception that was
raised while a victim's error was being handled counts as a victim's, too, and so does a `RuntimeError` that native code
has made from a victim's error in a future's callback.

The launcher checks the file before it uses it: the file must be whole, not too large, of the expected form and written
by the rank's own process. If a rank has left no file (another program, a crash, another excepthook, `sys.exit`), the
launcher reads the traceback on its stderr, and recognizes victims by the wording of other engines' errors (`victims`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from phalanx import _env
from phalanx._errors import Failure, PhalanxError, origins
from phalanx._text import message_of
from phalanx.wire.files import read_json, write_whole
from phalanx.wire.messages import cropped, read_value, require

_MAX_LINES = 400  # number of lines that are kept of a traceback
_MAX_LINE, _MAX_MESSAGE = 500, 20_000  # number of characters that are kept of a line, and of a message
_KIND = re.compile(r"[A-Za-z_][\w.<>]{0,199}")
_SITE = re.compile(r'^\s*(?:\| )?File "(.+)", line (\d+)')
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
_STANDARD_LIBRARY = re.compile(
    r"/lib/python3\.\d+/|^<(?!stdin>|ipython-input)"
)  # the last alternative matches generated code, such as that of dataclasses
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


@dataclasses.dataclass(frozen=True)
class LastWords:
    """The exception that ended a rank; if there was none, the last lines on its stderr.

    Attributes:
        kind: Class of the exception, with its module, as a traceback names it.
        message: First line of the message.
        lines: Traceback with the whole message.
        is_victim: Whether the rank only suffers from the failure of another rank.
        failure: Facts about the operation that failed, if phalanx knows them.
        site: User's line in the traceback that is closest to the failure, such as ``"/home/me/train.py:31"``.
        is_told: Whether the rank itself wrote this; otherwise it was read from stderr.
    """

    kind: str = ""
    message: str = ""
    lines: tuple[str, ...] = ()
    is_victim: bool = False
    failure: Failure | None = None
    site: str = ""
    is_told: bool = False

    @classmethod
    def of_error(cls, error: BaseException) -> LastWords:
        lines = tuple("".join(traceback.format_exception(error)).splitlines())
        ours = [one for one in origins(error) if isinstance(one, PhalanxError)]
        return cls(
            _name_of(type(error)),
            _first_line(message_of(error)),
            lines,
            is_victim=any(one.is_victim for one in ours),
            failure=next((one.failure for one in ours if one.failure), None),
            site=site_of(lines),
            is_told=True,
        )

    @property
    def name(self) -> str:
        """Class without its module."""
        return class_name(self.kind)

    @property
    def summary(self) -> str:
        """The exception in one line; empty if there was none."""
        return (f"{self.kind}: {self.message}" if self.message else self.kind) if self.kind else ""

    @property
    def note(self) -> str:
        """The exception in one line, for the black box, with the user's line that raised it."""
        return f"{self.summary}, raised at {self.site}" if self.site else self.summary

    def record(self, rank: int, pid: int, message: str = "") -> dict[str, Any]:
        """Return the content for ``error.json``.

        Args:
            message: Whole message, if it is known; default: `summary`.
        """
        lines = [line[:_MAX_LINE] for line in cropped_lines(self.lines)]
        # For torchrun, the earliest timestamp marks the cause. In whole seconds, a victim's could be the same, so it is
        # increased by one second.
        timestamp = str(int(time.time()) + self.is_victim)
        return {
            "message": {
                "message": (message or self.summary)[:_MAX_MESSAGE],
                "extraInfo": {"py_callstack": "\n".join(lines), "timestamp": timestamp},
            },
            "rank": rank,
            "pid": pid,
            "host": _env.host_name(),
            "exception": {
                "kind": self.kind,
                "message": self.message[:_MAX_MESSAGE],
                "is_victim": self.is_victim,
                "failure": None if self.failure is None else self.failure.to_facts(),
                "site": self.site,
            },
        }


def class_name(kind: str) -> str:
    """Return a class without its module or namespace."""
    return re.split(r"\.|::", kind)[-1]


def cropped_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a traceback; if it is very long, only its first and last lines."""
    if len(lines) <= _MAX_LINES:
        return tuple(lines)
    half = _MAX_LINES // 2
    return (*lines[:half], f"  ... {len(lines) - 2 * half} lines ...", *lines[-half:])


def owner_of(path: str) -> str:
    """Return the package that a frame's file belongs to; empty for the user's own code."""
    if path.startswith(_OURS):
        return "phalanx"
    if found := _PACKAGE.search(path):
        return found[1]
    return "Python" if _STANDARD_LIBRARY.search(path) else ""


def site_of(lines: Sequence[str]) -> str:
    """Return the user's innermost line in a traceback, or else the innermost line of all; "" if there is no frame."""
    places = [found for line in lines if (found := _SITE.match(line))]
    places = [found for found in places if not owner_of(found[1])] or places
    return f"{places[-1][1]}:{places[-1][2]}" if places else ""


# ---------------------------------------------------------------- the rank's side

_teller_pid = 0
_note: Callable[[str], None] | None = None


def tell_when_ended(note: Callable[[str], None]) -> None:
    """From now on, if an exception ends this process, write the facts about it for the launcher. Idempotent.

    The hook runs before the existing ones, which print as usual.

    Args:
        note: Function that is called with the exception in one line, even if no launcher has asked for the facts.
    """
    global _teller_pid, _note
    is_set, _teller_pid, _note = _teller_pid != 0, os.getpid(), note
    if is_set:
        return
    print_it = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None, /) -> None:
        # `last_value` is the exception that ends the interpreter; a script may call the hook only to print another.
        is_end = error is getattr(sys, "last_value", None) and isinstance(error, Exception)
        if is_end and os.getpid() == _teller_pid:  # not in a forked child
            with contextlib.suppress(Exception):  # the disk may be full, or the exception's own __str__ may fail
                _tell(error)
        print_it(kind, error, trace)

    sys.excepthook = hook


def forget_rank() -> None:
    """Remove torch's hook that prefixes tracebacks with the rank in a group: the next group installs its own hook."""
    hook: Any = sys.excepthook
    while getattr(hook, "__name__", "") == "_distributed_excepthook" and "old_hook" in hook.__code__.co_freevars:
        hook = hook.__closure__[hook.__code__.co_freevars.index("old_hook")].cell_contents
    sys.excepthook = hook


def tell(error: BaseException) -> None:
    """Write the facts about an exception for the launcher, as if the exception had ended this process."""
    with contextlib.suppress(Exception):  # for the same reasons as in the hook of `tell_when_ended`
        _tell(error)


def _tell(error: BaseException) -> None:
    words = LastWords.of_error(error)
    if _note is not None:
        _note(words.note)
    path = _error_file()
    if not path:
        return
    rank = _env.environment().get("RANK", "")
    record = words.record(int(rank) if rank.isdigit() else -1, os.getpid(), f"{words.name}: {message_of(error)}")
    before = _read(path)
    if isinstance(before, dict) and "message" in before:  # already written by @record, or by the user's handler
        record = {**before, **record, "message": before["message"]}
    write(path, record)


def write(path: str, record: dict[str, Any]) -> None:
    """Write the file atomically.

    Raises:
        OSError: The file can't be written.
    """
    write_whole(path, json.dumps(record, indent=1))


def _error_file() -> str:
    return _env.environment().get("TORCHELASTIC_ERROR_FILE", "")


def _name_of(kind: type[BaseException]) -> str:
    """Return a class as a traceback names it."""
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


# ---------------------------------------------------------------- the launcher's side


@dataclasses.dataclass(frozen=True)
class _Told:
    """The facts of `LastWords.record` that torch's format has no place for."""

    kind: str
    message: Annotated[str, cropped(_MAX_MESSAGE)]
    is_victim: Any = False
    failure: Any = None
    site: Any = ""

    def __post_init__(self) -> None:
        require(bool(_KIND.fullmatch(self.kind)), "the name of a class", self.kind)


_FORM = {"pid": int, "message": {"extraInfo": {"py_callstack": str}}, "exception": _Told}


def read(path: str, pid: int) -> LastWords | None:
    """Return the last words of the process `pid`; None if it left no file in the form of `LastWords.record`.

    The file of another process, such as a child of the rank, is ignored.
    """
    try:
        told = read_value(read_json(path), _FORM)
    except (OSError, ValueError):
        return None
    if told["pid"] != pid:
        return None
    facts, stack, failure = told["exception"], told["message"]["extraInfo"]["py_callstack"], None
    with contextlib.suppress(ValueError):
        failure = Failure.from_facts(facts.failure)
    return LastWords(
        facts.kind,
        _first_line(facts.message),
        tuple(line[:_MAX_LINE] for line in cropped_lines(stack.splitlines())),
        is_victim=facts.is_victim is True,
        failure=failure,
        site=facts.site[:_MAX_LINE] if isinstance(facts.site, str) else "",
        is_told=True,
    )


def _read(path: str) -> Any:
    """Return the JSON in a file; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return None
