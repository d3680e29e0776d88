"""Processes that load data for a rank do not hear the signals that ask the rank to save.

A launcher, a service manager or Slurm may send a signal to every process of a job. torch takes the death of a loader's
worker for a failure of the rank, which then has no time left to save.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from typing import Any

from phalanx import _env, _torch

_NAME_OF_WORKER = "pt_data_worker"  # which torch gives it
_AGAIN_S = 0.5


@functools.cache
def watch() -> None:
    """Shield the workers of the loaders that this process makes from here on, torch's own too.

    They obey this process, which ends them, and anybody once it has ended.
    """
    if not sys.platform.startswith("linux"):
        return
    from multiprocessing import forkserver

    _env.update({_env.SHIELD_VARIABLE: "1"})  # for those that are not forked from this one: see `_plugin.autoload`
    _torch.begin_workers_with(_shield)
    atexit.register(_end_workers, os.getpid())
    server: Any = forkserver._forkserver
    if "phalanx._forkserver" not in server._preload_modules:
        forkserver.set_forkserver_preload(["phalanx._forkserver", *server._preload_modules])


def _shield() -> None:
    """Begin a worker."""
    import multiprocessing
    import signal

    from phalanx import _core

    owner = multiprocessing.parent_process()
    obeyed = os.getppid() if owner is None or owner.pid is None else owner.pid
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    _core.obey_only(obeyed, signals)


def _end_workers(pid: int) -> None:
    """End the workers that still live at the end of this process, and so before multiprocessing does.

    It tells them once, and waits for ever: but a signal is lost while the same, from somebody else, is still pending.
    """
    import multiprocessing

    for worker in multiprocessing.active_children() if os.getpid() == pid else ():
        with contextlib.suppress(OSError), open(f"/proc/{worker.pid}/comm") as file:
            while file.read().strip() == _NAME_OF_WORKER and worker.is_alive():
                worker.terminate()
                worker.join(_AGAIN_S)
                file.seek(0)
