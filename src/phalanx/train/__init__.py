"""The small loop around a model, and what it shows and leaves behind.

Names are loaded on first use: reading a run's metrics and writing its report need no torch.
"""

import importlib
from typing import Any

_EXPORTS = {
    "Settings": "phalanx.train.settings",
    "Trainer": "phalanx.train.trainer",
    "read_metrics": "phalanx.train.metrics",
    "write_csv": "phalanx.train.metrics",
    "write_report": "phalanx.train.report",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'phalanx.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
