"""A thread that notices the end of a connection, whatever this rank does meanwhile."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Mapping

_ENDS = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Watcher:
    """Sleeps until a connection ends; then tells whose it was.

    Args:
        links: Connections, by rank.
        notice: Called on the thread with the rank, once for each connection that ended.
        period_s: If given, `notice` is called with -1 that often: for ends that no connection tells.
    """

    def __init__(
        self, links: Mapping[int, socket.socket], notice: Callable[[int], None], period_s: float | None
    ) -> None:
        self._notice, self._period_s = notice, period_s
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._ranks = {link.fileno(): rank for rank, link in links.items()}
        self._thread = threading.Thread(target=self._run, name="phalanx-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the connections may be closed then."""
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2)
        os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._ranks:
            poll.register(fd, _ENDS)
        period_ms = None if self._period_s is None else self._period_s * 1e3
        while True:
            found = poll.poll(period_ms)
            if any(fd == self._wake for fd, _ in found):
                return
            for fd, _ in found:
                poll.unregister(fd)
                self._notice(self._ranks[fd])
            if not found:
                self._notice(-1)
