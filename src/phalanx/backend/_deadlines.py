"""How long a rank waits for what another may never do, while a group comes together, fails or ends.

Each is a bound: a wait ends earlier if what it is for has come. The deadlines of operations are the user's, see
`phalanx._env`; how an engine is polled stands beside it.
"""

from __future__ import annotations

LOOK_S = 0.1
"""Pause between looks, from within any wait, at whether it can still succeed."""

POLL_S = 0.02
"""Pause between questions to the store, which serves all ranks."""

STORE_S = 1.0
"""Time for the store to answer."""

LOST_STORE_S = 0.2
"""Time for the store to answer where the rank that serves it may be lost."""

WATCH_S = 0.2
"""Pause between questions of a watcher whose engine tells of no end."""

TELL_S = 1.0
"""Time in a call before the ranks of other hosts are told that this one waits there."""

GRACE_S = 0.5
"""Time for whoever has ended a group to say why, and for the others to read it before rank 0 takes the store along."""

TABLE_S = 0.2
"""Time for the ranks that meet the same mismatch to write their rows of its table."""

NOTE_S = 0.3
"""Time for what takes another way than the end of a connection: the note of a rank that leaves, last words to a
mailbox, the end of the process itself."""

PART_S = 1.0
"""Time for the ranks of a group that can't be made to read why, before rank 0 takes the store with it."""

END_S = 1.0
"""Time for what was told to end: a call that runs, a thread, what the engine does in memory that is to be given
back."""

CONNECT_S = 10.0
"""Time for other hosts to take a connection, and then for the engine to make its own."""

MAIL_LOOK_S = 0.1
"""Time for one look into the mailbox, however many have connected."""

MAIL_POLL_S = 0.005
"""Pause between reads, within a look, of what those who have connected say."""

STRANGERS_S = 1.0
"""Time of all looks into a mailbox together for those who have connected and not said all."""
