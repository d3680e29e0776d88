"""What lies in /dev/shm, for the checks that tests leave nothing there; and a /dev/shm of a process's own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from pathlib import Path

_KEPT = ("cuda.shm.", f"phalanx-{os.geteuid()}")  # CUDA's own; the folder in which publications are found
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 0x4000, 1 << 18
_DEVICES = {"null": 3, "zero": 5, "random": 8, "urandom": 9}


def files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("*") if not path.name.startswith(_KEPT)}


def unmapped(paths: set[str]) -> set[str]:
    """Return those that no living process maps: other jobs on the machine make files there too, and use them."""
    left = set(paths)
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            mapped = maps.read_text(errors="replace")
            left = {path for path in left if path not in mapped}
    return left


def own_shm(options: bytes | None, *, is_missing: bool = False) -> None:
    """Give this process another /dev/shm, or none; it needs root.

    Args:
        options: Options of its tmpfs, such as ``size=64m``; None: it is read-only.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "mount")

    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    if is_missing:
        check(libc.mount(b"tmpfs", b"/dev", b"tmpfs", 0, b""))
        for name, number in _DEVICES.items():
            os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(1, number))
        assert not os.path.exists("/dev/shm")
    else:
        check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", _MS_RDONLY if options is None else 0, options))
