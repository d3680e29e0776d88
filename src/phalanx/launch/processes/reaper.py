"""The parent of a forker: kills all processes that the forker has started, once the supervisor or the forker is gone.

Supervisor, reaper and forker watch each other: if one or two of the three are killed, a survivor ends the job. A
survivor learns of the end of the others from the supervisor's socket, from the kernel (PDEATHSIG) or from a pidfd. Each
of the three is a subreaper and each rank leads a session, so every process under the forker has a living ancestor that
kills it. When the supervisor is gone, the forker has six seconds to end the ranks on its own before the reaper kills
the forker. If the reaper killed the forker at once and were itself killed in the next millisecond, nobody would be left
to end the ranks.

The reaper does nothing else. It has a name and a command line of its own, because people kill a job by name (``pkill -9
-f train.py``), and would otherwise kill all three processes at once. If all three are killed, processes that ranks have
started stay alive, unless the whole cgroup was killed.

The fork server of `phalanx.spawn` has a reaper, too: the first module that the server imports forks. The child becomes
the server, and the process that multiprocessing started becomes the reaper. A server serves all calls of a script, so
processes that ranks leave behind are killed only when the script ends, in whatever way. Reaper and server are in a
process group of their own, because ``timeout -k`` and shells kill the whole process group of the script. The server
runs multiprocessing's loop, and can't do all that a forker does: if the reaper alone is killed, the ranks end, but
their daemons stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from typing import NoReturn

from phalanx.host.proc_stat import children_of, stat_fields
from phalanx.launch.deadlines import FORKER_S
from phalanx.launch.processes.descendants import (
    adopt_orphans,
    die_with_parent,
    end_children,
    hold_signals,
    outlive_parent,
)
from phalanx.launch.processes.endings import end_like

_PR_SET_NAME = 15
NAME = "rank-reaper"
"""Name under which tools show a reaper, instead of "python"."""
_libc = ctypes.CDLL(None)  # loaded before any fork


def fork_forker(supervisor_pid: int, told: int) -> None:
    """Return in the forker, a child of this process; this process becomes its reaper and does not return.

    Args:
        told: Pipe through which the supervisor learns the forker's pid.
    """
    supervisor, forker_pid = _fork_below(supervisor_pid)
    if forker_pid == 0:
        os.write(told, b"%d" % os.getpid())  # before the forker prints anything
        os.close(told)
        return
    _close_all_but(supervisor)
    _keep(supervisor, forker_pid, patience_s=FORKER_S)


def fork_server() -> None:
    """Return in the fork server, a child of this process; this process becomes its reaper and does not return.

    The server adopts processes that ranks leave behind, and reaps them when they end. It does not kill them while the
    spawning process lives: here, a daemon may outlive its rank.
    """
    os.setpgid(0, 0)  # out of the process group of the spawning process, which may be killed as a group
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hold_signals()
    spawner, server_pid = _fork_below(os.getppid())
    if server_pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        adopt_orphans()
        return
    _close_all_but(spawner)
    _keep(spawner, server_pid)


def _close_all_but(descriptor: int) -> None:
    """Close all inherited descriptors but one. A copy of a socket would hide from its peer that the owner has ended."""
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _fork_below(parent_pid: int) -> tuple[int, int]:
    """Become a subreaper and fork; return a pidfd of the parent, and the result of ``os.fork``."""
    reaper_pid = os.getpid()
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:  # the parent ended before the line above
        os._exit(128 + signal.SIGKILL)
    outlive_parent()  # a warm start tied us to the parent; from here on, we must outlive it to clean up
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        die_with_parent(reaper_pid)
        os.close(parent)
    return parent, pid


def _keep(parent: int, pid: int, patience_s: float = 0.0) -> NoReturn:
    """Wait until the parent or the child `pid` ends, kill all descendants, and end as the child has ended.

    Args:
        patience_s: Seconds that the child gets, after the parent's end, to end its descendants itself. If this process
            killed the child at once and were killed next, nobody would be left to end the descendants.
    """
    _take_name()
    child = os.pidfd_open(pid)
    select.select([parent, child], [], [])
    if children_of(pid):  # a child without children, such as a standby that still imports, gets no time
        select.select([child], [], [], patience_s)
    os.kill(pid, signal.SIGKILL)  # the kernel then kills the ranks, and makes us the parent of all other descendants
    # The child stays a zombie until we end, so that no other process gets its pid while the supervisor may kill it.
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    end_children((pid,))
    assert ended is not None
    end_like(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


def _take_name() -> None:
    """Give this process its own name and command line, so that `pkill -f train.py` does not kill it with the job."""
    _libc.prctl(_PR_SET_NAME, NAME.encode())
    with contextlib.suppress(OSError):
        fields = stat_fields()
        start, end = int(fields[48]), int(fields[49])  # arg_start and arg_end
        if end - start > len(NAME):  # False also if the kernel hides the addresses
            ctypes.memmove(start, NAME.encode().ljust(end - start, b"\0"), end - start)
