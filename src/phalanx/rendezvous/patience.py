"""Prints lines, at growing intervals, while a rank waits for other ranks before there is a group."""

from __future__ import annotations

import threading
import time

from phalanx.failure.notices import notice
from phalanx.rendezvous.asked import Asked

_FIRST_S = 5.0
# The first line can wait longer if our launcher starts all ranks: if one fails, the launcher ends the others.
_FIRST_LAUNCHED_S = 15.0
_FACTOR = 3


class Patience:
    """Prints, after 5 s, 15 s, 45 s and so on, what a rank is waiting for, until the ``with`` block ends.

    If our launcher starts all ranks, the first line is printed after 15 s, and instead of giving advice it says that
    the launcher is starting them.

    A separate thread prints the lines, because a resolver or torch's store may block the waiting thread in native code.

    Attributes:
        awaits: Phrase for what the rank is waiting for, and advice.
        awaits_ranks: Whether the rank waits for other ranks, which a launcher may be starting.
        deadline: End of the wait on the monotonic clock.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="phalanx-patience", daemon=True)
        self.awaits: tuple[str, str] = (
            f"the store at {asked.point}",
            "Check that MASTER_ADDR and MASTER_PORT are right",
        )
        self.awaits_ranks: bool = False
        self.deadline: float = self._began_s + asked.timeout_s

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        launcher = self._asked.launcher
        next_s = _FIRST_LAUNCHED_S if launcher else _FIRST_S
        while not self._ended.wait(self._began_s + next_s - time.monotonic()):
            whom, advice = self.awaits
            if launcher and self.awaits_ranks:
                advice = f"{launcher} is starting all ranks; phalanx why shows what each is doing"
            waited_s = time.monotonic() - self._began_s
            text = f"phalanx: {self._asked.name} has waited {waited_s:.0f} s for {whom}. {advice}"
            notice([f"{text} (timeout {self._asked.timeout_s:g} s)"])
            next_s *= _FACTOR
