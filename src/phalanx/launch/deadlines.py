"""How long the launcher waits before it ends, tells or gives up something."""

CAUSE_S = 3.0
"""For the cause of a victim's failure to show: a rank may take that long from its exception to its end."""
SAME_CAUSE_S = 0.5
"""For the others to raise what one rank has raised, where that decides on a restart."""
SPAWN_GRACE_S = 5.0
"""Between SIGTERM or Ctrl-C and SIGKILL for `phalanx.spawn`; `phalanx run` has ``--grace``."""
KILL_S = 10.0
"""For a process to end after SIGKILL, or once its last child has ended: only the kernel can make this pass."""
LEAVE_S = 5.0
"""For all nodes to leave together, once all are known to be done."""
NEWS_S = 10.0
"""Before a node says that it still waits for others."""
