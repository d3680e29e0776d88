"""Whether each epoch has an order of its own."""

from __future__ import annotations

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside torch and phalanx: where the loop over the batches stands."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "phalanx"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
