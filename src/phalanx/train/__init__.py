"""`Trainer`, and the metrics and the report of a run.

Names are loaded on first use, because reading a run's metrics and writing its report need no torch.

Start with `trainer`, which holds `fit()`, then `step.stepper`. Nothing here starts ranks or supervises them, and a loop
written by hand needs nothing from this package.
"""

from typing import TYPE_CHECKING

from phalanx import _on_first_use

if TYPE_CHECKING:  # for editors and type checkers; when the program runs, __getattr__ imports the names
    from phalanx.train.report.metrics import read_metrics, write_csv
    from phalanx.train.report.report import write_report
    from phalanx.train.settings import Settings
    from phalanx.train.trainer import Trainer

__all__ = ["Settings", "Trainer", "read_metrics", "write_csv", "write_report"]

_MODULES = {
    "train.report.metrics": "read_metrics write_csv",
    "train.report.report": "write_report",
    "train.settings": "Settings",
    "train.trainer": "Trainer",
}

if not TYPE_CHECKING:  # with a module __getattr__, type checkers would accept any name
    __getattr__, __dir__ = _on_first_use(__name__, _MODULES)
