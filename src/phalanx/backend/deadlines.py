"""Every time of the backend: how long a rank waits for something that may never happen, and how often it looks.

Deadlines are upper bounds: a wait ends as soon as it succeeds. Those of operations belong to the user, see
`phalanx._env`. No other module of the backend defines a time, so a second value for one of these names is an error.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- how often a wait looks

LOOK_S: Final = 0.1
"""Pause between checks, within any wait, that it can still succeed."""

POLL_S: Final = 0.02
"""Pause between questions to the store, which serves all ranks."""

WATCH_S: Final = 0.2
"""Pause between questions of a watcher whose engine does not report closed connections."""

CLOSING_POLL_S: Final = 0.001
"""Pause between looks whether Gloo has closed its connections."""

MPI_POLL_S: Final = 0.0001
"""Pause between questions to MPI, which makes progress only when it is asked."""

FUTURES_POLL_S: Final = 0.001
"""Pause between looks whether callbacks of futures have run, and the time for a work to say whether it is over."""

# ---------------------------------------------------------------- the store

STORE_S: Final = 1.0
"""Time for the store to answer."""

LOST_STORE_S: Final = 0.2
"""Time for the store to answer if the rank that serves it may be lost."""

RECONNECT_S: Final = 5.0
"""Time for one more connection to the store, which is there unless the rank that serves it has gone."""

# ---------------------------------------------------------------- a call that waits

TELL_S: Final = 1.0
"""Time in a call before this rank tells the others that it is waiting there."""

ASK_WHY_S: Final = 5.0
"""Time in a call before this rank asks ``phalanx why``; shorter waits have an end more often than a reason."""

ANSWER_S: Final = 4.0
"""Time for the process that answers, on a machine whose cores are busy; the question itself takes half a second."""

LATE_S: Final = 5.0
"""Time beyond its deadline after which a call is over in any case."""

FOR_EVER_S: Final = 30 * 86_400.0
"""Time for threads that wait for whatever may arrive."""

# ---------------------------------------------------------------- a group that forms, fails or ends

CONNECT_S: Final = 10.0
"""Time for other hosts to accept a connection, and then for the engine to open its own."""

PART_S: Final = 1.0
"""Time for ranks whose group can't be created to read why, before rank 0 takes the store away."""

GRACE_S: Final = 0.5
"""Time for the rank that ended a group to say why, and for the others to read it before rank 0 takes the store away."""

TABLE_S: Final = 0.2
"""Time for all ranks in a mismatch to write their rows of the table."""

NOTE_S: Final = 0.3
"""Time for news that travels separately from the end of a connection: the note of a rank that leaves, mail, the end of
the process itself."""

END_S: Final = 1.0
"""Time for something that was told to end: a running call, a thread, the engine's access to memory."""

WATCHER_END_S: Final = 2.0
"""Time for a watcher to end, which may be busy ending its group."""

SETTLE_S: Final = 1.0
"""Time for callbacks of futures that are due when the interpreter ends."""

# ---------------------------------------------------------------- connections

KEEPALIVE_S: Final = 1
"""Idle time after which a kernel probes a connection; the shortest that Linux allows, in whole seconds."""

LEAST_SILENCE_S: Final = 0.25
"""Shortest silence that means anything: an acknowledgement may be delayed or retransmitted."""

MAIL_LOOK_S: Final = 0.1
"""Time for one look into the mailbox, however many senders have connected."""

STRANGERS_S: Final = 1.0
"""Time, over all looks into one mailbox, for senders that have connected but not finished."""
