"""Imported last by the fork server of `phalanx.spawn`, and nowhere else: keeps its imports shared with ranks."""

from __future__ import annotations

import atexit
import gc

from phalanx.launch.processes.pages import share_pages

share_pages()
atexit.register(gc.unfreeze)  # or libraries would report as leaked what the server can't collect at its end
