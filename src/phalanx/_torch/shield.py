"""Shields processes that load data for a rank from the signals that ask the rank to save.

A launcher, a service manager or Slurm may send a signal to every process of a job. If the signal ended a loader's
worker, torch would report a failure, and the rank would have no time left to save. So workers, torch's own included,
are shielded by a handler in C (``csrc/process/shield.h``). A rank ends its workers with SIGTERM, so the handler obeys a
signal if the sender is the rank; once the rank has ended, the handler obeys every sender.

- **Not by ignoring the signals:** torch and multiprocessing end workers with a signal, and wait until they have ended.
- **Not by blocking them for good:** a program that a worker starts would inherit the mask.
- **When.** The handler is installed when a worker begins, and again after torch has installed its own handler. Until
  then, the signals are blocked, for seconds if a worker imports torch anew: the rank blocks them around
  `Process.start`, and the mask survives fork and exec. A signal that arrives while it is blocked is delivered later
  with its sender's pid, so the handler treats it like any other. If a worker imports a module that starts a program
  before the handler is installed, the signals stay blocked in that program.
- **How.** Every start method calls `Process.start`. Phalanx wraps it so that a worker first installs the handler.
  Neither a variable nor a plugin is needed.
- **Python's fork server**, the default since Python 3.14, blocks the signals for good (see `forkserver`). Loader
  workers that the server forks unblock the signals when the handler is installed; other processes unblock them at their
  start. When a rank ends, it kills workers in which the signals are still blocked.
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

    A worker obeys only signals from this process; after this process has ended, the worker obeys every sender. Until
    the worker's handler is installed, the signals are blocked: a process inherits the mask from the thread that starts
    it, also through exec.
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
    """Start multiprocessing's resource tracker now, because the start of a tracker unblocks signals; block them again.

    Otherwise, the tracker would be started, and the signals unblocked, inside the start of a worker that is not forked.
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
    """End the workers that still run when this process ends, before multiprocessing tries to end them.

    multiprocessing sends each worker one signal and then waits forever. That signal is lost if the same signal from
    another sender is pending, and it has no effect on a worker whose handler is not yet installed, because it is
    blocked there.
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
