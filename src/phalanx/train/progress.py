"""The progress bar of rank 0 on a terminal."""

from __future__ import annotations

from typing import Any


class ProgressBar:
    """Steps, loss and the time that is left; the bar itself and the rest of the text take what room there is."""

    def __init__(self, progress: Any, num_steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=num_steps, loss="")
        progress.start()

    @staticmethod
    def open(num_steps: int) -> ProgressBar | None:
        """Return a bar that shows; None where rich is not installed, or the terminal can't move its cursor."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column
        except ImportError:
            return None
        console = Console()
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = (
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[loss]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=rest),
        )
        return ProgressBar(Progress(*columns, console=console, transient=True, expand=True), num_steps)

    def update(self, step: int, loss: str, text: str) -> None:
        self._progress.update(self._task, completed=step, loss=loss, description=text)

    def close(self) -> None:
        self._progress.stop()
