"""The offsets of other hosts' clocks from this one's, from heartbeats that are sent anyway.

Each tells when the last one of the other side was sent and came: four times, two by each clock, as NTP has them. Half
of what the way there and back took is the largest error, on a local network some 0.1 ms, where collectives bound the
error only to two steps. The best measurement ages by 100 ppm. The supervisor writes what is known beside the boxes of
each attempt.
"""

from __future__ import annotations

import dataclasses
import math

_DRIFT = 1e-4  # of two clocks against each other, at most


@dataclasses.dataclass(frozen=True)
class _Measured:
    ahead_s: float
    within_s: float
    at_s: float

    def error_s(self, now_s: float) -> float:
        return self.within_s + _DRIFT * (now_s - self.at_s)


class Clocks:
    """The best that is known of each host's monotonic clock."""

    def __init__(self) -> None:
        self._best: dict[str, _Measured] = {}

    def heard(self, host: str, sent_s: float, came_s: float, answered_s: float, now_s: float) -> None:
        """Take in an answer.

        Args:
            sent_s: Time at which this host sent what is answered, by its own clock.
            came_s: Time at which that came, by the other's.
            answered_s: Time at which the answer was sent, by the other's.
            now_s: Time at which it came, by this one's.
        """
        within_s = ((now_s - sent_s) - (answered_s - came_s)) / 2
        if not (0 <= within_s < math.inf):  # nobody's clock goes backwards
            return
        measured = _Measured((came_s - sent_s + answered_s - now_s) / 2, within_s, now_s)
        best = self._best.get(host)
        if best is None or within_s <= best.error_s(now_s):
            self._best[host] = measured

    def told(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Return, for each host, the seconds by which its clock is ahead, and how wrong that can be."""
        return {host: (best.ahead_s, best.error_s(now_s)) for host, best in self._best.items()}
