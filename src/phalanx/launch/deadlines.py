"""Time limits of a launcher's waits for what a rank, another node or the kernel may never do.

Each is an upper bound: a wait ends as soon as it succeeds. Times that the user sets, such as ``--shutdown-timeout``,
are in `command.flags`.
"""

from __future__ import annotations

from typing import Final

CAUSE_S: Final = 3.0
"""Time, after a rank has failed because of another, for that one's failure to appear: it may still be exiting."""

SAME_S: Final = 0.5
"""Time for other ranks to raise the same exception as one has, or to print the same warning."""

AT_ONCE_S: Final = 10.0
"""Time within which a failure means that a rank can't start; slow imports are allowed for."""

STOP_S: Final = 2.0
"""Time for a rank to leave its groups after another's failure; a slower one is not kept, but started anew."""

GRACE_S: Final = 5.0
"""Time from SIGTERM or Ctrl-C to SIGKILL for ranks of `phalanx.spawn`."""

STACKS_S: Final = 0.5
"""Time from SIGABRT to SIGKILL, in which a hanging rank writes the stacks of its threads."""

CHILDREN_S: Final = 5.0
"""Time for killed processes, and for what they have started, to end."""

FORKER_S: Final = 6.0
"""Time for a forker without a supervisor to end its ranks itself; longer than `CHILDREN_S` or an import of torch."""

KILL_S: Final = 10.0
"""Time for a process to end after SIGKILL, which only the kernel can delay, or to end once its children have."""

LATE_S: Final = 5.0
"""Time before the launcher names the ranks that were told to end and have not."""

IMPORT_S: Final = 20.0
"""Time before the launcher says that ranks can't start because torch is still being imported."""

NODES_S: Final = 10.0
"""Time before the launcher says that it waits for other nodes."""

NAME_S: Final = 900.0
"""Time for the name of the nodes' meeting place to appear in DNS; the limit of torch's static rendezvous."""

JOIN_S: Final = 600.0
"""Time for the minimum number of nodes to come together, also after a loss; the limit of torch's c10d rendezvous."""

ANSWERS_S: Final = 10.0
"""Time for a supervisor and its agent to answer each other. If one does not, it is stopped, and its node given up."""

AGENT_S: Final = 5.0
"""Time for an agent to ping its supervisor. If it does not, it is stopped, and other nodes may continue without it."""

LEAVE_S: Final = 5.0
"""Time for the agents of the other nodes to leave once all nodes are known to be done."""

REPLICA_CONNECT_S: Final = 3.0
"""Time for connecting to another host's replicator."""

REPLICA_HEARD_S: Final = 5.0
"""Time for a replicator to confirm an offer. One that does not is stopped, or is being started again."""

REPLICA_SILENCE_S: Final = 20.0
"""Time for the next bytes of a copy, and for the whole of a message."""

REPLICA_NAMED_S: Final = 20.0
"""Time for a replicator to learn the id of its own node, which other nodes may know before it does."""

WARM_IMPORT_S: Final = 120.0
"""Time for a warm process to import torch."""

WARM_START_S: Final = 60.0
"""Time for the fork of a warm process to find out whether it can take the client's place."""

WARM_REQUEST_S: Final = 1.0
"""Time for a client that has connected to a warm process to say what it wants."""

WARM_REPLY_S: Final = 0.5
"""Time for a warm process to describe itself; one that still imports torch can't answer."""

WARM_STAY_S: Final = 600.0
"""Time for which a warm process waits for the next job, unless the last one set --warm-for."""

ASK_AGAIN_S: Final = 3600.0
"""Longest single wait where there is no limit; it is repeated, because poll(2) takes at most 24 days."""
