"""Time limits for the steps of a rendezvous. The rendezvous as a whole has the user's timeout."""

from __future__ import annotations

from typing import Final

CONNECT_S: Final = 2.0
"""Time for one attempt to connect to the store."""
RIVAL_S: Final = 5.0
"""Time for the program that listens on rank 0's port to answer."""
FOLDER_S: Final = 3.0
"""Time for a folder on a network to appear."""
NOTE_S: Final = 0.5
"""Time before a rank notes that it waits for rank 0; also the time for the launcher to note a rank's end."""
PART_S: Final = 0.5
"""Time for the other ranks to read why the ranks can't meet, before rank 0 closes the store."""
