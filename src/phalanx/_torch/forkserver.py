"""Blocks `shield.SIGNALS` in Python's fork server, which forks a rank's child processes in place of the rank.

`shield` makes the server import this module, so the import itself blocks the signals. If a signal ended the server,
torch would conclude that the workers forked from it were dead. The server ends with the rank in any case. The processes
that the server forks start with the signals blocked: a loader's worker unblocks them when its handler is installed (see
`shield`), and any other process unblocks them at its start.
"""

import signal
from multiprocessing import process, util

from phalanx._torch import shield


def _hear_again(_: object) -> None:
    if not shield.loads_data(process.current_process()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, shield.SIGNALS)


signal.pthread_sigmask(signal.SIG_BLOCK, shield.SIGNALS)
util.register_after_fork(_hear_again, _hear_again)
