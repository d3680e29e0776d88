"""Imported by the server that forks a rank's processes, if they are not forked from the rank: it ignores signals.

It forks workers of loaders, which torch takes for dead when it has ended. It ends with the rank in any case.
"""

import os
import signal

_IGNORED = tuple(
    number
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    if signal.getsignal(number) == signal.SIG_DFL
)  # the server itself ignores SIGINT


def _hear_again() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


for _number in _IGNORED:
    signal.signal(_number, signal.SIG_IGN)
os.register_at_fork(after_in_child=_hear_again)
