"""A thread that notices the end of a connection while this rank does something else."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from phalanx.backend.deadlines import WATCH_S, WATCHER_END_S
from phalanx.backend.hosts.links import Link

_ENDS = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Watcher:
    """Sleeps until a connection ends or the host at its other end falls silent; then reports the rank.

    Args:
        links: Connections to watch, each with its rank; empty if the engine's connections can't be watched.
        notice: Function that the thread calls with the rank whose connection has ended; without connections to watch,
            it is called at intervals with -1.
    """

    def __init__(self, links: Sequence[tuple[int, Link]], notice: Callable[[int], None]) -> None:
        self._notice = notice
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._watched = {link.fileno(): (rank, link) for rank, link in links}
        self._period_s = min((link.period_s for _, link in links), default=WATCH_S)
        self._thread = threading.Thread(target=self._run, name="phalanx-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; afterwards it is safe to close the connections."""
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=WATCHER_END_S)
        os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._watched:
            poll.register(fd, _ENDS)
        has_links = bool(self._watched)
        while True:
            ended = {fd for fd, _ in poll.poll(self._period_s * 1e3)}
            if self._wake in ended:
                return
            ended |= {fd for fd, (_, link) in self._watched.items() if fd not in ended and link.look()}
            for fd in ended:
                poll.unregister(fd)
                self._notice(self._watched.pop(fd)[0])
            if not has_links:
                self._notice(-1)
