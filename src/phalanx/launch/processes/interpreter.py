"""Makes this interpreter run a script or module other than the one that it was started with.

A warm process is a Python process that waits in the site hook, before it opens its script. CPython keeps the name of
the script in a ``PyConfig``. This module changes the name there, with the functions that embedders use. So the
interpreter itself makes ``__main__``, ``sys.path`` and tracebacks; `runpy` would appear in every traceback. The layout
of ``PyConfig`` differs between versions, so its members are found by their contents, and read back by name after each
change. If this fails, there are no warm starts with this Python.

Source: PEP 587; ``pymain_run_python`` in CPython's ``Modules/main.c``; PR_SET_MM_MAP in prctl(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.host.proc_stat import stat_fields

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_CONFIG_BYTES = 1024  # the bytes to search; a PyConfig has some 450
_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
_python = ctypes.pythonapi
_libc = ctypes.CDLL(None)


class _Status(ctypes.Structure):
    """CPython's ``PyStatus``."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("function", ctypes.c_char_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class Interpreter:
    """Interpreter of this process, which was started as ``python NAME`` without arguments and waits in the site hook.

    Raises:
        RuntimeError: The interpreter's configuration is not laid out as expected.
    """

    def __init__(self) -> None:
        (name,) = sys.argv
        _python._Py_GetConfig.restype = ctypes.c_void_p
        self._config: int = _python._Py_GetConfig()
        words = memoryview(_read(self._config, _CONFIG_BYTES)).cast("P")
        full = _absolute(name)
        files = [i for i, word in enumerate(words) if _text_at(word, len(full)) == full]
        lists = [
            i for i in range(len(words) - 1) if words[i] == 1 and _text_at(_pointer_at(words[i + 1]), len(name)) == name
        ]
        if len(files) != 1 or len(lists) != 1 or any(words[files[0] - 2 : files[0]]):
            raise RuntimeError("this Python's configuration is not laid out as expected")
        self._file, self._argv = (self._config + _WORD_BYTES * found for found in (files[0], lists[0]))
        self._module = self._file - _WORD_BYTES  # the order is run_command, run_module, run_filename
        if _read_back("run_filename") != full or _read_back("run_module") is not None:
            raise RuntimeError("this Python does not tell its configuration")

    def will_run(self, command: Sequence[str]) -> None:
        """Make the interpreter continue as if it had been started with `command`.

        Raises:
            RuntimeError: The change did not take effect.
        """
        is_module = command[1] == "-m"
        path = None if is_module else _absolute(command[1])
        module = command[2] if is_module else None
        argv = ["-m", *command[3:]] if is_module else list(command[1:])
        self._set_text(self._file, path)
        self._set_text(self._module, module)
        array = (ctypes.c_wchar_p * len(argv))(*argv)
        setter = _python.PyConfig_SetWideStringList
        setter.restype = _Status
        setter(ctypes.c_void_p(self._config), ctypes.c_void_p(self._argv), ctypes.c_ssize_t(len(argv)), array)
        found = [_read_back(member) for member in ("run_filename", "run_module", "argv")]
        if found != [path, module, argv]:
            raise RuntimeError("this Python's configuration did not change as expected")
        sys.argv[:] = argv
        sys.orig_argv[:] = command

    def _set_text(self, member: int, text: str | None) -> None:
        setter = _python.PyConfig_SetString
        setter.restype = _Status
        setter(ctypes.c_void_p(self._config), ctypes.c_void_p(member), ctypes.c_wchar_p(text))


def _absolute(path: str) -> str:
    """Return a script's absolute path as CPython computes it: not normalized."""
    return path if os.path.isabs(path) else f"{os.getcwd()}/{path}"


def _read_back(member: str) -> Any:
    if hasattr(_python, "PyConfig_Get"):  # Python 3.14
        getter = _python.PyConfig_Get
        getter.restype = ctypes.py_object
        return getter(member.encode())
    getter = _python._Py_GetConfigsAsDict
    getter.restype = ctypes.py_object
    return getter()["config"][member]


def _read(address: int, size: int) -> bytes:
    """Return `size` bytes of this process's memory, or fewer if some can't be read."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            memory.seek(address)
            return memory.read(size)
        except (OSError, OverflowError, ValueError):
            return b""


def _pointer_at(address: int) -> int:
    return int.from_bytes(_read(address, _WORD_BYTES), sys.byteorder) if address else 0


def _text_at(address: int, length: int) -> str:
    """Return the wide string of that length at an address; empty if there is no such string."""
    size = ctypes.sizeof(ctypes.c_wchar)
    data = _read(address, (length + 1) * size) if address else b""
    text = data.decode(f"utf-32-{sys.byteorder[0]}e", "replace")
    return text[:-1] if len(text) == length + 1 and text[-1] == "\0" else ""


_shown_command_line: mmap.mmap | None = None  # kept alive: the kernel reads it as long as this process lives


def show_command_line(command_line: bytes) -> None:
    """Change the command line that ``ps`` and ``pkill -f`` see for this process, if the kernel allows it."""
    global _shown_command_line
    stat = stat_fields()
    _libc.sbrk.restype = ctypes.c_void_p
    text = mmap.mmap(-1, len(command_line), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    text.write(command_line)
    start = ctypes.addressof(ctypes.c_char.from_buffer(text))
    code, data, heap_start, stack, environ = (26, 27), (45, 46), 47, 28, (50, 51)
    own = [int(stat[field]) for field in (*code, *data, heap_start)]
    addresses = [*own, _libc.sbrk(0), int(stat[stack]), start, start + len(command_line)]
    addresses += [int(stat[field]) for field in environ]
    # struct prctl_mm_map: the addresses, then no new auxiliary vector and no new executable.
    layout = (ctypes.c_uint64 * 13)(*addresses, 0, 0xFFFFFFFF << 32)
    size = ctypes.c_ulong(ctypes.sizeof(layout))
    if _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(layout), size, ctypes.c_ulong(0)) == 0:
        _shown_command_line = text
