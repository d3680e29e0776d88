"""Imported by the server that forks a rank's child processes, if the rank does not fork them: ignores its signals.

The server forks workers of loaders, and torch takes them for dead if the server has ended. It ends with the rank in
any case. What it forks starts with these signals blocked, too; workers of loaders unblock them when they are shielded,
others at their start.
"""

import signal
from multiprocessing import process, util

from phalanx._torch import shield


def _hear_again(_: object) -> None:
    if not shield.loads_data(process.current_process()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, shield.SIGNALS)


signal.pthread_sigmask(signal.SIG_BLOCK, shield.SIGNALS)
util.register_after_fork(_hear_again, _hear_again)
