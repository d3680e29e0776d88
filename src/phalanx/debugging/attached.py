"""The rank's side of ``phalanx attach``: a signal opens pdb, which talks to the terminal that the command lends.

Only Python 3.14 and newer can be told from outside to run code (PEP 768); a signal works with every version. A rank
sets the handler after the fork and before the script, unless somebody has set one. The command lends its terminal at a
socket, whose path it writes into the launcher's notes; ranks read them through ``/proc``. Then it sends the signal. The
rank asks the kernel which user lends the terminal. The prompt opens within the handler, because it may take long until
the next line of the script runs. This does not work between containers, because the socket may lie in another file
system than the rank's.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from phalanx import _env
from phalanx.debugging.terminal import borrow_terminal
from phalanx.rendezvous.launched import Launch

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9  # systems without SIGRTMIN have no phalanx run either
"""Signal that opens a debugger in a rank. By default it ends a process, so first check that the rank handles it."""

_is_open = False


def listen() -> None:
    """Allow ``phalanx attach`` in this process, unless the script handles the signal or there is no launcher."""
    if _launch() is not None:
        with contextlib.suppress(ValueError):  # raised in other threads than the main one
            if signal.getsignal(SIGNAL) == signal.SIG_DFL:
                signal.signal(SIGNAL, _open)


def _launch() -> Launch | None:
    return Launch.of(_env.environment().get(_env.LAUNCH_VARIABLE, ""))


def _open(_: int, frame: FrameType | None) -> None:
    global _is_open
    launch = _launch()
    if _is_open or frame is None or launch is None:
        return
    terminal = borrow_terminal(launch.lender_for(os.getpid()), launch.rank)
    if terminal is None:
        return  # whoever sent the signal has given up
    from phalanx.debugging.prompt import Prompt  # here, because jobs should not import pdb at their start

    def do_nothing() -> None:
        pass

    _is_open = True
    try:
        Prompt(terminal, do_nothing, do_nothing).open_at(frame)
    finally:
        _is_open = False
