"""Imported first by the fork server of `phalanx.spawn`, and nowhere else: puts a keeper between it and its parent."""

from __future__ import annotations

import warnings

from phalanx.launch.keeper import fork_server

fork_server()
# It reaps what it has adopted, and has nothing to warn of.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
