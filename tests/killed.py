"""Ranks that are all killed before their launcher, which ends the others when it sees one end, has seen any of it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from phalanx.host.processes import process_of


def kill_unseen(launcher: subprocess.Popen[Any], pids: Sequence[int]) -> None:
    """Kill the ranks of a launcher, which must have started cold: of a warm job, this process is none."""
    launcher.send_signal(signal.SIGSTOP)
    for kind, end in ((signal.SIGSTOP, "TZ"), (signal.SIGKILL, "Z")):  # stopped: no rank sees another one die
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        while any((rank := process_of(pid)) is not None and rank.state not in end for pid in pids):
            time.sleep(0.01)
    launcher.send_signal(signal.SIGCONT)
