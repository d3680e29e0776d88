"""The first module that the fork server of `phalanx.spawn` imports: puts a reaper between the server and its parent.

Nothing else imports this module. With a warm start, the server is a fork of a warm process, and imports this module
again; the process that multiprocessing started is then only a stand-in for the server.
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
    """Let ranks share the memory of all modules that this server has imported when it forks the first rank."""
    share_pages()
    atexit.register(gc.unfreeze)  # otherwise libraries would report frozen objects as leaked


os.register_at_fork(before=_keep_sharing)
# The server reaps processes that it has adopted; multiprocessing would warn that it does not know them.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
