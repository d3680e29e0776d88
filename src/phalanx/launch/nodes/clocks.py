"""Offsets of other hosts' clocks, measured with the heartbeats.

Each heartbeat says when the other side's last heartbeat was sent and when that heartbeat arrived. With the times at
which the heartbeat itself is sent and arrives, that makes four points in time, two by each clock, as in NTP. The error
is at most half the round trip, some 0.1 ms on a local network; offsets derived from collectives would be known only to
within two training steps. The error of a measurement grows by 100 ppm of its age. The supervisor writes the offsets
beside the black boxes of each attempt.
"""

from __future__ import annotations

import dataclasses
import math

_DRIFT = 1e-4  # two clocks diverge by at most this many seconds per second


@dataclasses.dataclass(frozen=True)
class _Measured:
    ahead_s: float
    within_s: float
    at_s: float

    def error_s(self, now_s: float) -> float:
        return self.within_s + _DRIFT * (now_s - self.at_s)


class Clocks:
    """The best measurement of each host's monotonic clock."""

    def __init__(self) -> None:
        self._best: dict[str, _Measured] = {}

    def heard(self, host: str, sent_s: float, came_s: float, answered_s: float, now_s: float) -> None:
        """Record a measurement from a heartbeat that answers a heartbeat of this host.

        Args:
            sent_s: Time at which this host sent its heartbeat, by its own clock.
            came_s: Time at which that heartbeat arrived, by the other host's clock.
            answered_s: Time at which the answer was sent, by the other host's clock.
            now_s: Time at which the answer arrived, by this host's clock.
        """
        within_s = ((now_s - sent_s) - (answered_s - came_s)) / 2
        if not (0 <= within_s < math.inf):  # invalid times: monotonic clocks do not go backwards
            return
        measured = _Measured((came_s - sent_s + answered_s - now_s) / 2, within_s, now_s)
        best = self._best.get(host)
        if best is None or within_s <= best.error_s(now_s):
            self._best[host] = measured

    def told(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Return, for each host, the seconds by which its clock is ahead, and the largest error of that number."""
        return {host: (best.ahead_s, best.error_s(now_s)) for host, best in self._best.items()}
