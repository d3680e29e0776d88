"""Bounds on a launcher's waits for what a rank, another node or the kernel may never do.

Each is an upper bound: a wait ends as soon as it succeeds. Times that the user sets are in `command.flags`
(``--shutdown-timeout``).
"""

from __future__ import annotations

from typing import Final

CAUSE_S: Final = 3.0
"""After the failure of a victim, for its cause to show: a rank may take that long from its exception to its end."""

SAME_S: Final = 0.5
"""For the other ranks to raise or to print what one of them has."""

AT_ONCE_S: Final = 10.0
"""A rank that fails sooner can't start; slow imports are part of it."""

STOP_S: Final = 2.0
"""For a rank that can be kept to leave its groups, once another has failed; it is started anew if it does not."""

GRACE_S: Final = 5.0
"""For ranks of `phalanx.spawn`, from SIGTERM or Ctrl-C to SIGKILL."""

STACKS_S: Final = 0.5
"""From SIGABRT to SIGKILL, for a rank that hangs to write the stacks of its threads."""

KILL_S: Final = 10.0
"""After SIGKILL, which the kernel alone can delay; and for a process that only has to end its children."""

LATE_S: Final = 5.0
"""Before it is said which ranks have not ended although they were told to."""

IMPORT_S: Final = 20.0
"""Before it is said that ranks can't start because torch is still being imported."""

NODES_S: Final = 10.0
"""Before it is said that other nodes are awaited."""

NAME_S: Final = 900.0
"""For the name of the host where nodes meet to be in DNS; the limit of torch's static rendezvous."""

JOIN_S: Final = 600.0
"""For the fewest nodes to be together, at the start and after a loss; the limit of torch's c10d rendezvous."""

ANSWERS_S: Final = 10.0
"""For a supervisor and its agent to answer each other; one that does not has been stopped, and its node is given up."""

AGENT_S: Final = 5.0
"""For an agent to say something to its supervisor; then it has been stopped, and other nodes may go on without."""

LEAVE_S: Final = 5.0
"""For the agents of the other nodes to leave, once all are known to be done."""

ASK_AGAIN_S: Final = 3600.0
"""Longest single wait for ranks without a limit: the system takes no more than 24 days."""
