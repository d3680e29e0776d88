"""Shields processes that load data for a rank from the signals that ask the rank to save.

A launcher, a service manager or Slurm may send a signal to every process of a job. If it ended a loader's worker, torch
would take that for a failure, and the rank would have no time left to save. So workers, torch's own included, are
shielded by a handler in C (``csrc/process/shield.h``). A rank ends its workers by SIGTERM, so the handler obeys a
signal only if the sender's pid is the rank's; once the rank is gone, it obeys every sender.

- **Not by ignoring the signals:** torch and multiprocessing end workers by a signal, and wait until they have ended.
- **Not by blocking them for good:** a program that a worker starts would inherit the mask.
- **When.** The handler is installed when a worker begins, and again after torch has installed its own. Until then,
  which takes seconds if a worker imports torch anew, the signals are blocked: the rank blocks them around
  `Process.start`, and the mask survives fork and exec. A signal that arrives meanwhile is delivered later with its
  sender's pid, so it is handled like any other. If a module starts a program while a worker imports it, the signals
  stay blocked in that program.
- **How.** Every start method calls `Process.start`, which is wrapped so that the worker's target installs the handler
  first. Neither a variable nor a plugin is needed.
- **Python's fork server**, the default since Python 3.14, blocks the signals for good (see `forkserver`). Loader
  workers that it forks unblock them when the handler is installed, other processes at their start. At its end, a rank
  kills workers that still have them blocked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from phalanx import _torch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_LOADS_DATA = "_phalanx_loads_data"
_AGAIN_S = 0.5


@functools.cache
def watch() -> None:
    """Shield the loader workers that this process starts from now on, including those of torch's own loaders.

    A worker obeys only signals from this process, and after the end of this process those of every sender. Until the
    worker's handler is installed, the signals are blocked: a process inherits the mask from the thread that starts it,
    also through exec.
    """
    if not sys.platform.startswith("linux"):
        return
    from multiprocessing import forkserver
    from multiprocessing.process import BaseProcess

    start = BaseProcess.start

    @functools.wraps(start)
    def start_shielded(process: Any) -> None:
        target: Any = getattr(process, "_target", None)
        if getattr(target, "__name__", "") != _torch.worker_loop.__name__:  # torchdata's worker loop has the same name
            return start(process)
        process._target = functools.partial(_work, target)
        setattr(process, _LOADS_DATA, True)
        with _held_back():
            _start_tracker(process)
            start(process)

    setattr(BaseProcess, "start", start_shielded)  # noqa: B010  mypy
    atexit.register(_end_workers, os.getpid())
    server: Any = forkserver._forkserver
    if "phalanx._torch.forkserver" not in server._preload_modules:
        forkserver.set_forkserver_preload(["phalanx._torch.forkserver", *server._preload_modules])


def loads_data(process: object) -> bool:
    """Whether a process of multiprocessing is a data loader's worker that was started shielded."""
    return hasattr(process, _LOADS_DATA)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # within try, because a Python handler may raise in this call
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker(process: Any) -> None:
    """Start multiprocessing's resource tracker, which unblocks signals, so that a worker's start need not start it.

    Only a worker that is not forked needs the tracker.
    """
    import multiprocessing
    from multiprocessing import resource_tracker

    if (getattr(process, "_start_method", None) or multiprocessing.get_start_method()) != "fork":
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _work(loop: Callable[..., object], *args: Any) -> None:
    """Run a worker, which begins with the signals blocked."""
    _torch.begin_workers_with(_hear_owner)
    with _hear_owner():
        pass
    loop(*args)


@contextlib.contextmanager
def _hear_owner() -> Iterator[None]:
    """Install the handler, which obeys only the rank, at the end of a block in which torch may install its own."""
    import multiprocessing

    from phalanx import _core

    owner = multiprocessing.parent_process()
    obeyed = os.getppid() if owner is None or owner.pid is None else owner.pid
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    yield
    _core.obey_only(obeyed, SIGNALS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end_workers(pid: int) -> None:
    """End the workers that still run at the end of this process, before multiprocessing would do so.

    multiprocessing signals each worker once and waits forever. But its signal is lost if the same signal from another
    sender is pending, and a worker whose handler is not yet installed has the signal blocked.
    """
    import multiprocessing

    workers = [child for child in multiprocessing.active_children() if loads_data(child)] if os.getpid() == pid else []
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker is killed
    for worker in workers:
        while worker.is_alive():
            (worker.kill if _is_held_back(worker.pid) else worker.terminate)()
            worker.join(_AGAIN_S)


def _is_held_back(pid: int | None) -> bool:
    from phalanx.host.kernel import status_of

    return bool(int(status_of(pid or 0).get("SigBlk", "0"), 16) >> (signal.SIGTERM - 1) & 1)
