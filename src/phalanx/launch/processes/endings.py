"""Ends this process as another has ended. A command that only passes a job on imports it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn


def end_like(code: int) -> NoReturn:
    """End this process with an exit code, or by the signal -`code`, as ``os.waitstatus_to_exitcode`` has them."""
    if code >= 0:
        os._exit(code)
    import resource  # seldom needed

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
