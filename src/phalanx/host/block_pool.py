"""Decides once whether this process keeps the large blocks that torch frees, and says why.

The core keeps the blocks (``csrc/process/blocks.h`` has the reasons and numbers): a tensor's block comes from a pool
and returns to the pool, so that the next step reuses the block's pages. The pool gives unused blocks back to the
kernel, and gives all blocks back once a memory limit is near. A limit also counts as near if the file with the limit or
with the usage exists but can't be read, when the launcher decides or while a rank runs. If the OOM killer has killed a
process, the launcher's next attempt keeps no blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
from collections.abc import Mapping

from phalanx import _env
from phalanx._text import in_units
from phalanx.host.cgroups import cgroup_memory, host_memory, memory_gauges, read, unreadable

CHOICES = ("auto", "default")
# memory that must be left for each rank; with less, the pool would give blocks back all the time
_LEAST_BYTES = 1 << 30
_LEAST_SHARE = 8  # a limit is near if less than an eighth of it is left, see Headroom in block_pool.cpp
_MORE_MEMORY = "free memory, start fewer ranks, or raise the limit (docker run --memory, srun --mem, limits.memory)"
_HUGE_PAGES = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; steps may then be faster"
# if an allocator replaces any of these functions, it replaces all of them
_ALLOCATING = ("malloc", "posix_memalign", "free")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """The policy for the large blocks of memory that torch frees in a process.

    Attributes:
        keeps: Whether the blocks are kept and reused while memory is plentiful; otherwise they are given back to the
            kernel.
        huge_pages: Whether the kept blocks are in huge pages.
        why: Reason why blocks are not kept, or are not in huge pages; "" if they are kept in huge pages.
        todo: Advice on how to get blocks kept in huge pages; "" if there is no advice.
    """

    keeps: bool = False
    huge_pages: bool = False
    why: str = ""
    todo: str = ""

    def __str__(self) -> str:
        if not self.keeps:
            return f"not kept ({self.why})" if self.why else "not kept"
        return "kept, huge pages" if self.huge_pages else f"kept ({self.why})"


_in_force: MemoryPolicy | None = None  # the policy as it was applied; the core may have stopped keeping blocks since


def choose(environ: Mapping[str, str], *, wanted: str = "auto", num_ranks: int = 1, root: str = "/") -> MemoryPolicy:
    """Return the policy for `num_ranks` ranks on this host.

    Args:
        environ: Environment of the ranks.
        wanted: One of `CHOICES`.
    """
    if wanted == "default":
        return MemoryPolicy(why="--memory default")
    if other := _foreign_allocator():
        return _left_alone(other)
    if name := _set_by_user(environ):
        return MemoryPolicy(why=f"{name} is set", todo=f"unset {name} to have it kept; measure which is faster")
    if path := unreadable(root):
        return MemoryPolicy(why=f"{path} can't be read", todo="let this user read it, since it tells what is left")
    host = host_memory(root)
    if not host.limit_bytes:
        return MemoryPolicy(why="no /proc/meminfo tells what is left", todo="mount /proc")
    for memory in (host, *cgroup_memory(root)):
        if memory.left_bytes < memory.limit_bytes // _LEAST_SHARE:
            left = f"{in_units(memory.left_bytes)} of {in_units(memory.limit_bytes)} left"
            return MemoryPolicy(why=left, todo=_MORE_MEMORY)
        if memory.left_bytes // num_ranks < _LEAST_BYTES:
            left = f"{in_units(memory.left_bytes // num_ranks)} left{' for each rank' if num_ranks > 1 else ''}"
            return MemoryPolicy(why=left, todo=_MORE_MEMORY)
    if not offers_huge_pages(root):
        return MemoryPolicy(keeps=True, why="huge pages are off", todo=_HUGE_PAGES)
    return MemoryPolicy(keeps=True, huge_pages=True)


def _left_alone(allocator: str) -> MemoryPolicy:
    todo = "start without it (LD_PRELOAD) to have freed memory kept; measure which is faster"
    return MemoryPolicy(why=f"{allocator} is left alone", todo=todo)


def huge_pages(root: str = "/") -> str:
    """Return the kernel's setting for transparent huge pages: ``always``, ``madvise``, ``never``, or "" if unknown."""
    words = read(root, "sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def offers_huge_pages(root: str = "/") -> bool:
    """Whether the kernel gives huge pages to a process that asks for them."""
    return huge_pages(root) in ("madvise", "always")


def _set_by_user(environ: Mapping[str, str]) -> str:
    """Return the name of a variable with which the user has configured the allocator; empty if there is none."""
    names = [name for name in ("GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE") if environ.get(name)]
    names += sorted(name for name, value in environ.items() if value and name.startswith("MALLOC_"))
    return names[0] if names else ""


def _foreign_allocator() -> str:
    """Return the name of this process's allocator; empty if the allocator is glibc's malloc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return "a C library other than glibc"
    glibc = _file_of(libc, "gnu_get_libc_version")
    files = (_file_of(libc, name) for name in _ALLOCATING)
    return next((os.path.basename(file) or "an unknown allocator" for file in files if not file or file != glibc), "")


class _Symbol(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


def _file_of(libc: ctypes.CDLL, name: str) -> str:
    """Return the file that contains a native function of this process; the dynamic loader names it without /proc."""
    symbol = _Symbol()
    libc.dladdr(ctypes.cast(getattr(libc, name), ctypes.c_void_p), ctypes.byref(symbol))
    return os.fsdecode(symbol.file or b"")


def _apply(policy: MemoryPolicy) -> MemoryPolicy:
    """Apply `policy` in this process as far as possible; return the policy that is now in force."""
    global _in_force
    # checked here again, because the launcher may have another allocator
    if policy.keeps and (other := _foreign_allocator()):
        policy = _left_alone(other)
    if policy.keeps:
        # imported here, because the supervisor only calls `choose` and should not load the core
        from phalanx import _core

        limits = [
            (gauge.limit_bytes, *(os.path.join(gauge.folder, name) for name in (gauge.used_name, "memory.stat")),
             gauge.cache_name)
            for gauge in memory_gauges()
        ]  # fmt: skip
        try:
            # This reserves addresses, not memory: twice the size of the host's memory, because there are gaps between
            # blocks.
            done = _core.start_block_pool(2 * host_memory().limit_bytes, policy.huge_pages, limits)
            why = "" if done else "this torch allocates otherwise"
        except OSError:
            why = "the address space is limited"
        policy = MemoryPolicy(why=why) if why else policy
    _in_force = policy
    return policy


def in_force() -> MemoryPolicy:
    """Return the policy in force in this process."""
    if _in_force is None or not _in_force.keeps:
        return _in_force or MemoryPolicy(todo="start it with phalanx run, or call phalanx.tune_process()")
    from phalanx import _core

    keeps, why, _, _ = _core.block_pool()
    return _in_force if keeps else MemoryPolicy(why=why, todo=_MORE_MEMORY)


def tune_process() -> MemoryPolicy:
    """Keep the memory that torch frees in this process, as ranks of ``phalanx run`` do; for torchrun and plain python.

    A training step frees its activations and gradients, and the next step allocates them again. glibc gives large
    blocks back to the kernel each time, and the kernel then has to clear new pages. From this call on, blocks of 1 MiB
    and more of CPU tensors are kept and reused, in huge pages if the kernel offers them. The resident memory exceeds
    the most that tensors have needed at one time by at most 1/8. Blocks that are unused for 20 s are given back. When a
    memory limit of the host or of a cgroup is near, all blocks are given back, and no blocks are kept from then on.

    Call this at the beginning of the script, before other threads run. Tensors that already exist are not moved.
    Nothing is done, and the result says why, if the process has another C library or allocator, if ``GLIBC_TUNABLES``,
    ``MALLOC_*`` or ``THP_MEM_ALLOC_ENABLE`` is set in the environment, or if less than 1 GiB or an eighth of a limit is
    left. Ranks of ``phalanx run`` and `phalanx.spawn` do not need this call, and a second call does nothing.

    Returns:
        The policy that is now in force; ``str`` of the policy describes it in a few words.

    Example:
        >>> memory = phalanx.tune_process()
        >>> print(f"freed memory: {memory}")
        freed memory: ...
    """
    import torch  # noqa: F401  torch must be loaded to be tuned

    return in_force() if _in_force is not None else _apply(choose(_env.environment()))


def of_rank(policy: MemoryPolicy) -> dict[str, str]:
    """Return the environment variable through which a launcher passes its chosen policy to a rank."""
    return {_env.ALLOCATION_VARIABLE: json.dumps(dataclasses.asdict(policy))}


def obey_launcher() -> None:
    """Apply the policy that this rank's launcher has chosen, if there is a launcher and no policy is in force yet.

    The import of torch must have finished, or be about to finish.
    """
    text = _env.environment().get(_env.ALLOCATION_VARIABLE)
    if text and _in_force is None:
        with contextlib.suppress(ValueError, TypeError):  # the value may come from a launcher of another version
            _apply(MemoryPolicy(**json.loads(text)))
