"""How long a rank waits for something that another may never do, while a group forms, fails or ends.

Each is an upper bound: a wait ends as soon as it succeeds. The deadlines of operations belong to the user, see
`phalanx._env`; the polling of an engine is tuned next to the engine.
"""

from __future__ import annotations

from typing import Final

LOOK_S: Final = 0.1
"""Pause between checks, within any wait, that it can still succeed."""

POLL_S: Final = 0.02
"""Pause between questions to the store, which serves all ranks."""

STORE_S: Final = 1.0
"""Time for the store to answer."""

LOST_STORE_S: Final = 0.2
"""Time for the store to answer if the rank that serves it may be lost."""

WATCH_S: Final = 0.2
"""Pause between questions of a watcher whose engine does not report closed connections."""

TELL_S: Final = 1.0
"""Time in a call before this rank tells the others that it is waiting there."""

GRACE_S: Final = 0.5
"""Time for the rank that ended a group to say why, and for the others to read it before rank 0 takes the store away."""

TABLE_S: Final = 0.2
"""Time for all ranks in a mismatch to write their rows of the table."""

RECONNECT_S: Final = 5.0
"""For a further connection to the store, which is there unless the rank that serves it has gone."""

NOTE_S: Final = 0.3
"""Time for news that travels separately from the end of a connection: the note of a rank that leaves, mail, the end of
the process itself."""

PART_S: Final = 1.0
"""Time for ranks whose group can't be created to read why, before rank 0 takes the store away."""

END_S: Final = 1.0
"""Time for something that was told to end: a running call, a thread, the engine's access to memory."""

LATE_S: Final = 5.0
"""Time beyond its deadline after which a call is over in any case."""

CONNECT_S: Final = 10.0
"""Time for other hosts to accept a connection, and then for the engine to open its own."""

MAIL_LOOK_S: Final = 0.1
"""Time for one look into the mailbox, however many senders have connected."""

MAIL_POLL_S: Final = 0.005
"""Pause between reads, within one look, from the senders that have connected."""

STRANGERS_S: Final = 1.0
"""Time, over all looks into one mailbox, for senders that have connected but not finished."""
