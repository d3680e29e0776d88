"""`Trainer`, and the metrics and the report of a run.

Names are loaded on first use, because reading a run's metrics and writing its report need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; when the program runs, __getattr__ does this
    from phalanx.train.metrics import read_metrics, write_csv
    from phalanx.train.report import write_report
    from phalanx.train.settings import Settings
    from phalanx.train.trainer import Trainer

__all__ = ["Settings", "Trainer", "read_metrics", "write_csv", "write_report"]

_EXPORTS = {
    "Settings": "phalanx.train.settings",
    "Trainer": "phalanx.train.trainer",
    "read_metrics": "phalanx.train.metrics",
    "write_csv": "phalanx.train.metrics",
    "write_report": "phalanx.train.report",
}


if not TYPE_CHECKING:  # or they would accept any name

    def __getattr__(name: str) -> Any:
        if name in _EXPORTS:
            return getattr(importlib.import_module(_EXPORTS[name]), name)
        raise AttributeError(f"module 'phalanx.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
