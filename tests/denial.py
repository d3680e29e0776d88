"""A process that is denied system calls, as sandboxes, old kernels and exhausted limits do it: by a seccomp filter."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import NamedTuple

_MACHINE = platform.machine()
# Number on x86_64, number on aarch64 (None: it has no such call).
_NUMBERS: dict[str, tuple[int, int | None]] = {
    "accept4": (288, 242),
    "bind": (49, 200),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "fallocate": (285, 47),
    "fcntl": (72, 25),
    "ftruncate": (77, 46),
    "getrandom": (318, 278),
    "kill": (62, 129),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mmap": (9, 222),
    "open": (2, None),
    "openat": (257, 56),
    "pidfd_open": (434, 434),
    "poll": (7, None),
    "ppoll": (271, 73),
    "prctl": (157, 167),
    "process_vm_readv": (310, 270),
    "recvmsg": (47, 212),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "socket": (41, 198),
    "userfaultfd": (323, 282),
}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _ALL_THREADS = 1, 1  # linux/seccomp.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS = 38
_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06  # linux/bpf_common.h: LD|W|ABS, JMP|JEQ|K, ALU|AND|K, RET|K
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data


class Where(NamedTuple):
    """Which calls are meant: those whose argument `index` has `value` in the bits of `mask`."""

    index: int
    value: int
    mask: int = 0xFFFFFFFF


OF_UNIX = Where(0, 1)
"""Of ``socket``: AF_UNIX alone."""
SHARED = Where(3, 1, 1)
"""Of ``mmap``: MAP_SHARED alone."""
OF_THREADS = Where(0, 0x10000, 0x10000)
"""Of ``clone``: CLONE_THREAD alone."""


def deny(*names: str, error: int = errno.EPERM, where: Where | None = None) -> None:
    """Let system calls fail with `error` from now on, in all threads of this process and in its children, for ever."""
    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURES[_MACHINE]), (_RETURN, 0, 0, _ALLOW)]
    for name in names:
        number = _NUMBERS[name][_MACHINE != "x86_64"]
        if number is None:
            continue
        denied = [(_RETURN, 0, 0, _ERRNO | error)]
        if where is not None:
            at = _ARGUMENTS_AT + 8 * where.index
            denied = [(_LOAD, 0, 0, at), (_AND, 0, 0, where.mask), (_EQUAL, 0, 1, where.value), *denied]
        program += [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, len(denied), number), *denied]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.syscall(_SECCOMP[_MACHINE], _SET_MODE_FILTER, _ALL_THREADS, filter_) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
