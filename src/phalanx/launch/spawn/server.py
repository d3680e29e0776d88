"""Imported first by the fork server of `phalanx.spawn`, and nowhere else: puts a reaper between it and its parent.

With a warm start, the server is a fork of a warm process, which runs this module again; the first process then only
stands for it.
"""

from __future__ import annotations

import sys
import warnings

from phalanx.launch.processes.reaper import fork_server
from phalanx.launch.warm import client

if client.is_asked_for():
    from phalanx.launch.warm.starter import stand_for_server

    print(f"phalanx: {stand_for_server()}", file=sys.stderr)
fork_server()
# It reaps what it has adopted, and has nothing to warn of.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
