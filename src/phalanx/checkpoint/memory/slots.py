"""Chooses the region into which a rank writes its next snapshot. Imports no torch, and waits for nothing.

One snapshot is always complete on all hosts, so that any host may be lost at any moment:

- A snapshot is **safe** once all hosts have copied their parts of it. It is kept until the next one is safe. The ranks
  learn that a snapshot is safe from the collective that the next snapshot needs anyway, in which each rank reports
  whether its host is still copying.
- Another snapshot is being **copied**. It is not overwritten, either here or on the hosts that receive the copies.
- Meanwhile, newer snapshots are written to a third region. They help if ranks fail, but not if a host is lost. If the
  ranks load such a newer snapshot, which may exist only where it was taken, they also keep the safe snapshot until a
  newer one has been copied.

The state survives the loss of as many hosts as there are replicas; ``tests/checkpoint/test_replica_rules.py`` simulates
this. If every host has the whole state, nothing is copied, and each snapshot is safe at once.

**Three regions, not two.** With two regions, a slow copy would leave two bad choices. One is to overwrite the safe
snapshot, which is needed if a host is lost. The other is to take no snapshot until the copy is done, although ranks
fail more often than hosts. The third region is allocated the first time a copy is late. If there is no memory for that
region, no snapshots are taken until the copy is done. The copied snapshot is then the safe one, and the next snapshot
overwrites the previous one.
"""

from __future__ import annotations

from phalanx.checkpoint.memory.holdings import Moment
from phalanx.checkpoint.memory.layout import NUM_SLOTS


class Slots:
    """The regions of a rank. All ranks choose the same regions if all make the same calls with the same arguments.

    Attributes:
        safe: The snapshot that is safe; None if there is none yet.
        num: Number of regions that there is memory for.
    """

    def __init__(self) -> None:
        self.safe: Moment | None = None
        self.num: int = NUM_SLOTS
        self._safe_slot = self._newest_slot = self._copying_slot = -1
        self._copying: Moment | None = None
        self._newest: Moment | None = None

    @property
    def copying(self) -> Moment | None:
        """The snapshot that is being copied."""
        return self._copying

    def loaded(self, moment: Moment, slot: int, safe: Moment | None = None, safe_slot: int = -1) -> None:
        """Record that the ranks resume from a snapshot.

        Args:
            slot: This rank's own region that holds a part of the snapshot; -1 if there is none.
            safe: Older snapshot that all hosts have copied, if the loaded one may not have been copied yet; None if
                there is none.
            safe_slot: This rank's own region that holds a part of `safe`; -1 if there is none.
        """
        self.__init__()  # type: ignore[misc]
        self._newest, self._newest_slot = moment, slot
        self.safe, self._safe_slot = (moment, slot) if safe is None else (safe, safe_slot)

    def skip(self, moment: Moment) -> None:
        """Record that the snapshot for which `next` was just called is not taken, because there is no third region."""
        if self._copying == moment:
            self._copying, self._copying_slot = None, -1
        self._newest, self._newest_slot = self._copying, self._copying_slot
        self.num = 2

    def next(self, moment: Moment, *, is_to_be_copied: bool, is_busy: bool) -> int:
        """Return the number of the region for a snapshot; -1 if no region is free until the copy in progress has ended.

        Args:
            is_to_be_copied: Whether other hosts are to have copies of the snapshot.
            is_busy: Whether any host has not yet copied the snapshot that is being copied.
        """
        if self._copying is not None and not is_busy:
            self.safe, self._safe_slot = self._copying, self._copying_slot
            self._copying, self._copying_slot = None, -1
        if not is_to_be_copied:
            self.safe, self._safe_slot = self._newest, self._newest_slot
        kept = {self._safe_slot, self._copying_slot}
        if self._copying is None:
            kept.add(self._newest_slot)
        slot = next((slot for slot in range(self.num) if slot not in kept), -1)
        if slot < 0:
            return -1
        if is_to_be_copied and self._copying is None:
            self._copying, self._copying_slot = moment, slot
        self._newest, self._newest_slot = moment, slot
        return slot
