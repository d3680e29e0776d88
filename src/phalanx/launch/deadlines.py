"""Bounds on a launcher's waits for what a rank, another node or the kernel may never do.

Each is an upper bound: a wait ends as soon as it succeeds. Times that the user sets are in `command.flags`
(``--shutdown-timeout``).
"""

from __future__ import annotations

from typing import Final

CAUSE_S: Final = 3.0
"""After the failure of a victim, for the cause to appear: a rank may take that long from its exception to its end."""

SAME_S: Final = 0.5
"""For the other ranks to raise or to print what one of them has."""

AT_ONCE_S: Final = 10.0
"""Within which a failure, slow imports included, means that a rank can't start."""

STOP_S: Final = 2.0
"""For a rank that can be kept to leave its groups once another has failed; otherwise it is started anew."""

GRACE_S: Final = 5.0
"""For ranks of `phalanx.spawn`, from SIGTERM or Ctrl-C to SIGKILL."""

STACKS_S: Final = 0.5
"""From SIGABRT to SIGKILL, for a rank that hangs to write the stacks of its threads."""

CHILDREN_S: Final = 5.0
"""For killed processes to end, and what they have started."""

FORKER_S: Final = 6.0
"""For a forker whose supervisor has gone to end its ranks by itself; more than `CHILDREN_S`, or an import of torch."""

KILL_S: Final = 10.0
"""After SIGKILL, which the kernel alone can delay; and for a process that only has to end its children."""

LATE_S: Final = 5.0
"""Before the launcher names the ranks that have not ended although they were told to."""

IMPORT_S: Final = 20.0
"""Before the launcher says that ranks can't start because torch is still being imported."""

NODES_S: Final = 10.0
"""Before the launcher says that it waits for other nodes."""

NAME_S: Final = 900.0
"""For the name of the host where nodes meet to be in DNS; the limit of torch's static rendezvous."""

JOIN_S: Final = 600.0
"""For the fewest nodes to be together, at the start and after a loss; the limit of torch's c10d rendezvous."""

ANSWERS_S: Final = 10.0
"""For a supervisor and its agent to answer each other; one that does not is stopped, and its node is given up."""

AGENT_S: Final = 5.0
"""For an agent to contact its supervisor; one that does not is stopped, and other nodes may continue without it."""

LEAVE_S: Final = 5.0
"""For the agents of the other nodes to leave, once all nodes are known to be done."""

REPLICA_CONNECT_S: Final = 3.0
"""For a connection to another host's replicator."""

REPLICA_HEARD_S: Final = 5.0
"""For a replicator to say that it has heard an offer; one that does not has been stopped, or is being started again."""

REPLICA_SILENCE_S: Final = 20.0
"""For the next bytes of a copy, and for all of a message."""

REPLICA_NAMED_S: Final = 20.0
"""For a replicator to learn the name of its node, which other nodes may know before it."""

WARM_IMPORT_S: Final = 120.0
"""For a warm process to import torch."""

WARM_START_S: Final = 60.0
"""For the fork of a warm process to find out whether it can take the client's place."""

WARM_REQUEST_S: Final = 1.0
"""For a client that has connected to a warm process to say what it wants."""

WARM_REPLY_S: Final = 0.5
"""For an answer of a warm process that still imports torch, which is not to be expected."""

WARM_STAY_S: Final = 600.0
"""For a warm process to wait for the next job, unless the last one set --warm-for."""

ASK_AGAIN_S: Final = 3600.0
"""Longest single wait for ranks without a limit: poll(2) takes at most 24 days."""
