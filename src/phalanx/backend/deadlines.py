"""Every time limit of the backend: how long a rank waits for something that may never happen, and how often it checks.

Deadlines are upper bounds: a wait ends as soon as it succeeds. Users set the timeouts of operations; see
`phalanx._env`. No other module of the backend defines a time limit.
"""

from __future__ import annotations

from typing import Final

# ---------------------------------------------------------------- how often a wait checks

LOOK_S: Final = 0.1
"""Pause between checks of whether a wait can still succeed."""

POLL_S: Final = 0.02
"""Pause between requests to the store, which serves all ranks."""

WATCH_S: Final = 0.2
"""Pause between a watcher's requests to the store, if the engine does not report closed connections (MPI)."""

CLOSING_POLL_S: Final = 0.001
"""Pause between checks of whether Gloo has closed its connections."""

MPI_POLL_S: Final = 0.0001
"""Pause between polls of MPI, which makes progress only when it is polled."""

FUTURES_POLL_S: Final = 0.001
"""Pause between checks of whether callbacks of futures have run; also how long `PhalanxWork.let_go` waits for its
operation to be over."""

SIGNAL_POLL_S: Final = 0.0005
"""Pause between checks for a signal, if the caller waits for the signal with a timeout of its own."""

MEMORY_LOOK_S: Final = 1.0
"""Shortest time between two checks of the memory limits; each check reads one file per limit."""

# ---------------------------------------------------------------- memory that is kept

KEPT_S: Final = 20.0
"""How long a freed block is kept for the next tensor: as long as two windows of the pool in csrc/process/blocks.h."""

# ---------------------------------------------------------------- the store

STORE_S: Final = 1.0
"""Time for the store to answer."""

TOLD_S: Final = 5.0
"""Time for the store to accept an error that all ranks must read. If the store takes longer, the ranks notice the
failure in other ways."""

LOST_STORE_S: Final = 0.2
"""Time for the store to answer if the rank that serves it may be lost."""

RECONNECT_S: Final = 5.0
"""Time to open a second connection to the store. It fails to open only if the rank that serves the store has ended."""

# ---------------------------------------------------------------- a call that waits

TELL_S: Final = 1.0
"""How long this rank waits in a call before it tells the other ranks that it is waiting."""

ASK_WHY_S: Final = 5.0
"""How long this rank waits in a call before it asks ``phalanx why``; most waits are over sooner."""

ANSWER_S: Final = 4.0
"""Time for the process that runs ``phalanx why``; it needs half a second, and longer on a machine with busy cores."""

LATE_S: Final = 5.0
"""Longest time by which a call may end after its deadline."""

HOOKS_S: Final = 60.0
"""How long a thread waits for abort hooks that run in another thread, before it raises without waiting further."""

FOR_EVER_S: Final = 30 * 86_400.0
"""Timeout of an engine's receive that must wait for the next message, however long that takes."""

# ---------------------------------------------------------------- a group that forms, fails or ends

CONNECT_S: Final = 10.0
"""Time for other hosts to accept a test connection, and then for the engine to open its connections."""

PART_S: Final = 1.0
"""Time for the other ranks to read why their group can't be created, before rank 0 ends, and with it the store."""

GRACE_S: Final = 0.5
"""Time for the rank that ended a group to write why, and for others to read it before the store ends with rank 0."""

TABLE_S: Final = 0.2
"""Time, after a mismatch, for all ranks to write which calls they made."""

NOTE_S: Final = 0.3
"""Time, after a connection has ended, for the reason to show up elsewhere: as a note in the store, as mail, or as the
end of the process itself."""

END_S: Final = 1.0
"""Time for a running call, a thread or the engine's access to memory to end after it was asked to end."""

WATCHER_END_S: Final = 2.0
"""Time for a watcher's thread to end; the thread may be busy ending its group."""

SETTLE_S: Final = 1.0
"""Time for the remaining callbacks of futures to run when the interpreter ends."""

# ---------------------------------------------------------------- connections

KEEPALIVE_S: Final = 1
"""Idle time after which a kernel probes a connection, in whole seconds: the shortest that Linux allows."""

LEAST_SILENCE_S: Final = 0.25
"""Shortest silence that may count as a lost connection; during a shorter silence, an acknowledgement may merely be
delayed or retransmitted."""

MAIL_LOOK_S: Final = 0.1
"""Limit on one read of the mailbox, however many senders have connected."""

STRANGERS_S: Final = 1.0
"""Limit on the total time, over all reads of a mailbox, spent on senders that have connected but not finished."""
