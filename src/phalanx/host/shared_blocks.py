"""Memory of this host that several processes map: how it is made, handed over, held and counted.

A **block** is a memfd. It has no name, so nothing is left when its last holder has ended, even if that holder was
killed, and the size of ``/dev/shm`` does not matter. `Block.create` first checks the limits of the host and of cgroups,
because the kernel does not refuse memory beyond a limit, but kills a process. Then it allocates every page before a
process uses one, so a shortage causes an OSError here and never a SIGBUS later. It also seals the size, so no process
can take pages away from another process.

**Hand-over.** `Block.address` is plain data that fits into JSON: the process, the number of the descriptor, the file's
inode and size. A peer of the same user on this host calls `Block.open(address)`, which opens ``/proc/PID/fd`` and
compares inode, size and seal with the address. So the holder needs no serving thread, and the peer gets an OSError if
the holder has ended or its pid was reused. The alternative is to pass the descriptor over a socket (SCM_RIGHTS). That
works across pid namespaces, but needs a thread, or a time at which both sides are ready. Only the job's segment
(``csrc/memory/segment.h``) is passed over a socket, because it is handed over before ranks know each other.

**Who holds it.** A block exists as long as a process maps it or has it open. The creator is the owner: it may `close`
the block, and processes that have mapped the block keep their mappings. To let a block outlive a rank, a process that
lives longer (the supervisor of ``phalanx run``) opens the block and passes on the `address` of its own descriptor. This
module does not import torch, so the supervisor can use it.

**Who reads it now.** A block whose content changes after other processes have mapped it also needs a lock. `Block.hold`
takes a lock of the kernel (``flock``) on the memfd: several readers share the lock, or one writer has it alone. The
lock belongs to the open file, which the mapping keeps open. So the lock lasts until the last tensor of the mapping is
gone, in forked children too, and a killed process holds no lock. Counters in the memory, by contrast, would keep the
value that a dead reader left. ``/proc/locks`` names the holders of locks.

**How to use it.** A rank that publishes data calls ``block = Block.create(size, "dataset")``, writes into
`block.memory`, sends `block.address` to the other ranks through a store or a collective, and keeps the block. A reader
calls ``Block.open(address, "dataset")``, then ``torch.frombuffer(block.memory, ...)``; the tensor keeps the mapping, so
the reader need not keep the block. A block that was handed over is never used for other data, because other processes
may map it without a time limit. Memory that only its owner has mapped may be used again
(`phalanx.backend.windows.tensors` keeps such blocks, and frees them when memory is short). If peers are to read torch's
blocks directly, the pool of ``csrc/process/blocks.h`` can be placed in one block, whose address is handed over once.

**Counting.** `held_bytes` counts the bytes that this process maps, by purpose. The kernel charges the pages to the
cgroup of the process that created them. It also counts pages in the RSS of each process that maps and has touched them
(``RssShmem`` in ``/proc/PID/status``), so ``phalanx top`` counts shared memory once for each rank that uses it.
``/proc/PID/fd`` shows ``/memfd:phalanx-PURPOSE`` for each block that a process holds.

`unnamed_file` makes the other memfds of this library, which are used as ordinary files: boxes, notes, snapshots.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import weakref
from typing import NamedTuple

from phalanx._text import in_units
from phalanx.host.cgroups import known_memory

_LEAST_LEFT = 32 << 20  # bytes that a new block must leave free in every cgroup and on the host
_SMALL = 1 << 20  # for blocks of fewer bytes, checking the limits would cost more than making the block

_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)  # pages that are never written take no memory

_mapped: weakref.WeakKeyDictionary[mmap.mmap, str] = weakref.WeakKeyDictionary()
"""The mappings of this process, and the purpose of each."""


class Address(NamedTuple):
    """The process and descriptor through which other processes open a block, with facts that identify the block."""

    pid: int
    fd: int
    inode: int
    size_bytes: int


def unnamed_file(name: str, *, can_seal: bool = False) -> int:
    """Return the descriptor of a new empty memfd. Programs that this process starts do not inherit it.

    Raises:
        OSError: The kernel, a sandbox or the limit on descriptors does not allow it.
    """
    return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_seal else 0))


def path_of(fd: int, pid: int | None = None) -> str:
    """Return the path at which processes of the same user can open descriptor `fd` of this process, or of `pid`."""
    return f"/proc/{os.getpid() if pid is None else pid}/fd/{fd}"


def open_descriptor(address: Address, access: int = os.O_RDWR) -> int:
    """Return a new descriptor of a block that another process of this host holds.

    Raises:
        OSError: As `Block.open`.
    """
    fd = open_file_of(address.pid, address.fd, address.inode, access)
    try:
        is_whole = os.fstat(fd).st_size == address.size_bytes
        if not is_whole or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise _stale(address.pid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file_of(pid: int, fd: int, inode: int, access: int = os.O_RDONLY) -> int:
    """Return a new descriptor of a file in memory that another process of this host has open.

    Raises:
        OSError: As `Block.open`.
    """
    # By now, the descriptor's number may belong to a pipe or a terminal, which these flags make harmless to open.
    opened = os.open(path_of(fd, pid), access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    found = os.fstat(opened)
    if stat.S_ISREG(found.st_mode) and found.st_ino == inode:
        return opened
    os.close(opened)
    raise _stale(pid)


def _stale(pid: int) -> OSError:
    return OSError(errno.ESTALE, f"process {pid} no longer holds that memory, or is another process")


def held_bytes() -> dict[str, int]:
    """Return the bytes of all blocks that this process maps, including other processes' blocks, by purpose."""
    total: dict[str, int] = {}
    for memory, purpose in list(_mapped.items()):
        total[purpose] = total.get(purpose, 0) + len(memory)
    return total


def map_part(fd: int, purpose: str, size_bytes: int, offset: int = 0, *, is_private: bool = True) -> mmap.mmap:
    """Map a part of a file in memory.

    Args:
        purpose: Word under which `held_bytes` counts the mapping.
        offset: Place in the file, a multiple of the page size.
        is_private: Whether this process's writes stay private: the kernel copies each page before the first write.
    """
    memory = mmap.mmap(fd, size_bytes, flags=_PRIVATE if is_private else mmap.MAP_SHARED, offset=offset)
    _mapped[memory] = purpose
    return memory


class Block:
    """Memory of this host that this process holds; see `create` and `open`.

    Attributes:
        purpose: Word for the block's use; `held_bytes` counts the block under this word.
        size_bytes: Size, at least 1.
        memory: The mapping, readable and writable. Tensors and views of it keep it alive, even without this block.
        is_closed: Whether the block can't be handed over any more.
    """

    def __init__(self, fd: int, purpose: str, size_bytes: int, flags: int = mmap.MAP_SHARED) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self.purpose, self.size_bytes = purpose, size_bytes
        self.is_closed = False
        try:
            self.memory = mmap.mmap(fd, size_bytes, flags=flags)
        except BaseException:
            os.close(fd)
            raise
        _mapped[self.memory] = purpose

    @classmethod
    def create(cls, size_bytes: int, purpose: str) -> Block:
        """Return a new block, zeroed and allocated.

        Args:
            size_bytes: Size, at least 1.
            purpose: Word for the block's use; it is part of the memory's name in ``/proc``.

        Raises:
            OSError: The host, a cgroup or a limit of this process (``ulimit -f``, ``-n``, ``-v``) has no room for the
                block.
        """
        if size_bytes >= _SMALL:
            require_room(size_bytes)
        fd = unnamed_file(f"phalanx-{purpose}", can_seal=True)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, purpose, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    @classmethod
    def open(cls, address: Address, purpose: str, *, is_private: bool = False) -> Block:
        """Return a block that another process of this host holds.

        Args:
            address: Address that the block's holder has passed on.
            purpose: Word for the block's use.
            is_private: Whether this process's writes stay private: the kernel copies each page before the first write
                to that page, and no write reaches the block.

        Raises:
            OSError: The holder belongs to another user, runs in another container or has ended, so that its pid may be
                another process's; or a limit of this process (``ulimit -n``, ``-v``) has no room for the block.
        """
        fd = open_descriptor(address, os.O_RDONLY if is_private else os.O_RDWR)
        return cls(fd, purpose, address.size_bytes, _PRIVATE if is_private else mmap.MAP_SHARED)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the process that made or opened the block."""
        return self._pid != os.getpid()

    @property
    def address(self) -> Address:
        """Address at which another process can open the block while this process holds it."""
        assert not self.is_closed, "a closed block can't be handed over"
        return Address(os.getpid(), self._fd, os.fstat(self._fd).st_ino, self.size_bytes)

    @property
    def path(self) -> str:
        """Path at which this process can open the block's file again, for locks of its own."""
        assert not self.is_closed, "a closed block can't be opened"
        return path_of(self._fd)

    def hold(self, *, alone: bool = False) -> bool:
        """Try to lock the content against changes or, with `alone`, in order to change it; return without waiting.

        The lock lasts until `release`, or until this block is closed and its mapping is gone, in this process and in
        forked children.

        Returns:
            Whether the lock was taken. It is not taken if another process has it alone or, with `alone`, if any other
            process has it.
        """
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock on the content."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Stop holding the block. Mappings in all processes remain; the memory is freed with the last mapping."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self._fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # the interpreter is ending, or `__init__` failed
            self.close()


def holders_of(inode: int) -> set[int]:
    """Return the processes that `hold` the content of a block, if ``/proc/locks`` shows them."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/locks") as file:
        for line in file:
            fields = line.split()  # such as: 1: FLOCK ADVISORY READ 315 00:01:72696 0 EOF
            if "FLOCK" in fields and fields[-3].rpartition(":")[2] == str(inode):
                found.add(int(fields[-4]))
    return {pid for pid in found if pid > 0}


def require_room(size_bytes: int) -> None:
    """Raise an OSError if the host or a cgroup has no room for `size_bytes` more bytes."""
    for memory in known_memory():
        if size_bytes + _LEAST_LEFT > memory.left_bytes:
            raise OSError(
                errno.ENOMEM,
                f"{in_units(memory.left_bytes)} of {in_units(memory.limit_bytes)} of memory are left, and "
                f"{in_units(size_bytes)} are needed",
            )
