"""The rank's side of ``phalanx attach``: a signal opens pdb, which talks to the terminal that the command lends.

A debugger can make Python 3.14 and newer run code from outside (PEP 768), but a signal works with every version. A rank
sets the signal's handler after the fork and before the script, unless the signal already has a handler. The command
lends its terminal through a socket and writes the socket's path into the launcher's notes, which ranks read through
``/proc``. Then the command sends the signal. The rank asks the kernel which user lends the terminal. The prompt opens
within the handler, because it may take long until the next line of the script runs. The command does not work between
containers, because the rank might not see the file system that contains the socket.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from phalanx import _env
from phalanx.debugging.terminal import borrow_terminal
from phalanx.rendezvous.launched import Launch

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9  # `phalanx run` does not support systems without SIGRTMIN
"""Signal that opens a debugger in a rank. Its default action ends a process, so check that the rank handles it."""

_is_open = False


def listen() -> None:
    """Allow ``phalanx attach`` in this process, unless the script handles the signal or there is no launcher."""
    if _launch() is not None:
        with contextlib.suppress(ValueError):  # raised in any thread but the main one
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
        return  # the sender of the signal no longer lends its terminal
    from phalanx.debugging.prompt import Prompt  # imported here, because jobs should not import pdb at their start

    def do_nothing() -> None:
        pass

    _is_open = True
    try:
        Prompt(terminal, do_nothing, do_nothing).open_at(frame)
    finally:
        _is_open = False
