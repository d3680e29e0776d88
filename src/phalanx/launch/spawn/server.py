"""Imported first by the fork server of `phalanx.spawn`, and nowhere else: puts a reaper between it and its parent.

With a warm start, the server is a fork of a warm process, which runs this module again; the first process then only
stands for it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import warnings

from phalanx.launch.processes.pages import share_pages
from phalanx.launch.processes.reaper import fork_server
from phalanx.launch.warm import client

if client.is_asked_for():
    from phalanx.launch.warm.starter import stand_for_server

    print(f"phalanx: {stand_for_server()}", file=sys.stderr)
fork_server()


@functools.cache
def _keep_sharing() -> None:
    """Have ranks go on sharing what this server has imported: all of it, by the time it forks the first."""
    share_pages()
    atexit.register(gc.unfreeze)  # or libraries would report as leaked what the server can't collect at its end


os.register_at_fork(before=_keep_sharing)
# It reaps what it has adopted, and has nothing to warn of.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
