"""Imported last by the fork server of `phalanx.spawn`, and nowhere else: ranks go on sharing what it has imported."""

from __future__ import annotations

import atexit
import gc

gc.freeze()  # a collection in a rank would touch, and so copy, every page of it: a third of a second
atexit.register(gc.unfreeze)  # or libraries would report as leaked what the server can't collect at its end
