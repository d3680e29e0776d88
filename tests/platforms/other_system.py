"""Run a script as if this were macOS: ``python -m tests.platforms.other_system script.py [args]``.

There is no core then, no ``/proc``, and nothing that Python's modules have on Linux alone.
"""

from __future__ import annotations

import builtins
import fcntl
import importlib.abc
import io
import mmap
import os
import runpy
import sys
import time

import torch  # noqa: F401 before the pretence: it is the real one, of Linux

_OF_LINUX = {
    os: ("eventfd", "eventfd_read", "eventfd_write", "memfd_create", "pidfd_open", "posix_fallocate",
         "sched_getaffinity", "sched_setaffinity"),
    mmap: ("MADV_DONTFORK", "MADV_HUGEPAGE"),
    time: ("CLOCK_BOOTTIME",),
    fcntl: ("F_ADD_SEALS", "F_SEAL_SHRINK"),
}  # fmt: skip
_OPENERS = ((builtins, "open"), (io, "open"), (os, "open"), (os, "readlink"), (os, "listdir"))


class _NoCore(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "phalanx._core":
            raise ImportError("there is no core on this system", name=fullname)


def pretend() -> None:
    """Make this process look like one of macOS from here on."""
    assert "phalanx" not in sys.modules, "set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    sys.platform = "darwin"
    sys.meta_path.insert(0, _NoCore())
    for module, names in _OF_LINUX.items():
        for name in names:
            delattr(module, name)
    for module, name in _OPENERS:
        setattr(module, name, _without_kernel_files(getattr(module, name)))


def _without_kernel_files(function):
    def wrapped(path=".", *args, **kwargs):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **kwargs)

    return wrapped


if __name__ == "__main__":
    pretend()
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
