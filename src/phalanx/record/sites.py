"""Finds the site of a call: the innermost line that is not in torch, phalanx or the standard library."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType

import torch
import typing_extensions

from phalanx._errors import printable

_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    typing_extensions.__file__,  # its wrappers surround torch's deprecated functions
)
_PYTHON = os.path.dirname(os.__file__) + os.sep

IN_THREAD = ", in thread "
"""Separates a site from the name of its thread, if the thread runs no line of the script."""

# The displayed file of each function, "" for skipped ones. Keyed by identity, because hashing a code object costs as
# much as the rest of the call; each entry keeps its function alive, so that its id is not reused.
_shown: dict[int, tuple[str, CodeType]] = {}


def shown_file(code: CodeType) -> str:
    """Return the displayed file of a code object; empty if it is torch's, ours or the standard library's."""
    path = printable(code.co_filename)  # a file's name need not be UTF-8, and may hold control characters
    if path.startswith((*_SKIPPED, "<frozen")) or (path.startswith(_PYTHON) and "site-packages" not in path):
        return ""
    try:
        folder = os.getcwd()
    except (FileNotFoundError, PermissionError):  # the current folder was deleted, or can't be read any more
        return path
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


def call_site(frame: FrameType | None = None) -> str:
    """Return "file.py:line" of the innermost frame outside torch, phalanx and the standard library.

    A library's thread may have no such frame: then the site is torch's innermost line, with the name of the thread.

    Args:
        frame: Frame at which to start; None: the caller's frame. To ask for the site of another thread, pass a frame
            that the other thread has stored: sys._current_frames() can hang the process while a thread starts or ends
            (gh-106883, Python before 3.11.9).
    """
    start = frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _shown.get(id(code))
        if known is None:
            known = _shown[id(code)] = shown_file(code), code
        if known[0]:
            return f"{known[0]}:{frame.f_lineno}"
        frame = frame.f_back
    return _in_thread(start)


def _in_thread(frame: FrameType | None) -> str:
    """Return a site such as "torch/futures.py:31, in thread 'saver'"; "" in the main thread or outside torch."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_SKIPPED[0]):
            path = os.path.relpath(frame.f_code.co_filename, os.path.dirname(_SKIPPED[0].rstrip(os.sep)))
            return f"{printable(path)}:{frame.f_lineno}{IN_THREAD}{printable(thread.name)!r}"
        frame = frame.f_back
    return ""
