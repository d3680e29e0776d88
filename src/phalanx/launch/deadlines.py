"""Limits on how long the launcher waits for a rank, another node or the kernel; none of them is certain to respond.

A wait ends as soon as it succeeds. `LATE_S`, `IMPORT_S` and `NODES_S` are not limits but delays before a message. Times
that the user sets, such as ``--shutdown-timeout``, are in `command.flags`.
"""

from __future__ import annotations

from typing import Final

CAUSE_S: Final = 3.0
"""Time for the cause of a failure to appear, if another rank is the cause: that rank may still be exiting."""

SAME_S: Final = 0.5
"""Time for other ranks to raise the same exception, or to print the same warning, as the first rank."""

AT_ONCE_S: Final = 10.0
"""Time after a start within which a failure means that the rank can't start; long enough for slow imports."""

STOP_S: Final = 2.0
"""Time for a rank to leave its groups after another rank's failure; a slower rank gets a new process."""

GRACE_S: Final = 5.0
"""Time from SIGTERM or Ctrl-C to SIGKILL for ranks of `phalanx.spawn`."""

STACKS_S: Final = 0.5
"""Time from SIGABRT to SIGKILL, in which a hanging rank writes the stacks of its threads."""

CHILDREN_S: Final = 5.0
"""Time for killed processes and their descendants to end."""

FORKER_S: Final = 6.0
"""Time for a forker to end its ranks once its supervisor is gone; longer than `CHILDREN_S` and an import of torch."""

KILL_S: Final = 10.0
"""Time for a process to end after SIGKILL (only the kernel can delay that), or after its children have ended."""

LATE_S: Final = 5.0
"""Time before the launcher names the ranks that were told to end and are still running."""

IMPORT_S: Final = 20.0
"""Time before the launcher says that ranks can't start because torch is still being imported."""

NODES_S: Final = 10.0
"""Time before the launcher says that it is waiting for other nodes."""

NAME_S: Final = 900.0
"""Time for the name of the nodes' meeting place to appear in DNS; torch's static rendezvous has the same limit."""

JOIN_S: Final = 600.0
"""Time for the minimum number of nodes to meet, also after a loss; torch's c10d rendezvous has the same limit."""

ANSWERS_S: Final = 10.0
"""Time for a supervisor and its agent to answer each other; if either is silent for longer, the node drops out."""

AGENT_S: Final = 5.0
"""Longest silence of an agent before its supervisor kills the ranks: other nodes may be continuing without this one."""

LEAVE_S: Final = 5.0
"""Longest time that an agent, before it exits, waits for the other nodes to learn how the job has ended."""

REPLICA_CONNECT_S: Final = 3.0
"""Time for connecting to another host's replicator."""

REPLICA_HEARD_S: Final = 5.0
"""Time for a replicator to confirm an offer, unless it is suspended (SIGSTOP) or being restarted."""

REPLICA_SILENCE_S: Final = 20.0
"""Time for the next bytes of a copy, or for a whole message, to arrive."""

REPLICA_NAMED_S: Final = 20.0
"""Time for a replicator to learn the id of its own node; other nodes may know this id earlier."""

WARM_IMPORT_S: Final = 120.0
"""Time for a warm process to import torch."""

WARM_START_S: Final = 60.0
"""Time in which a child of a warm process must find out whether it can run the client's job."""

WARM_REQUEST_S: Final = 1.0
"""Time for a client that has connected to a warm process to send its request."""

WARM_REPLY_S: Final = 0.5
"""Time for a warm process to describe itself; while it is still importing torch, it can't answer."""

WARM_STAY_S: Final = 600.0
"""Time for which a warm process waits for the next job, unless the last job set --warm-for."""

ASK_AGAIN_S: Final = 3600.0
"""Timeout of one poll(2) in a wait without a limit; poll(2) accepts at most 24 days, so the wait polls repeatedly."""
