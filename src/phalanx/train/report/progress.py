"""The progress bar of rank 0 on a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from phalanx import _env
from phalanx.rendezvous.launched import Launch

_BAR_WIDTH, _TIME_WIDTH = 12, len("0:00:00")
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: ")


class ProgressBar:
    """A progress bar with steps, loss and remaining time, and as much further text as there is room for."""

    def __init__(self, progress: Any, num_steps: int, step: int) -> None:
        self._progress = progress
        self._num_steps = num_steps
        self._task = progress.add_task("starting", total=num_steps, completed=step, loss="")
        progress.start()
        launch = Launch.of(_env.environment().get(_env.LAUNCH_VARIABLE, ""))
        if launch is not None and launch.launcher == "phalanx run" and hasattr(sys.stderr, "rich_proxied_file"):
            sys.stderr = _StderrBesideBar(sys.stderr)  # undone by `close`

    @staticmethod
    def open(num_steps: int, step: int = 0) -> ProgressBar | None:
        """Return a bar that begins at `step`; None without rich, or without a terminal that can move its cursor."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column
        except ImportError:
            return None
        console = Console(soft_wrap=True)  # text printed above the bar is not wrapped, which keeps the log readable
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = (
            BarColumn(bar_width=_BAR_WIDTH),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[loss]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=rest),
        )
        return ProgressBar(Progress(*columns, console=console, transient=True, expand=True), num_steps, step)

    def update(self, step: int, loss: str, parts: Sequence[str]) -> None:
        """Show a step and its loss, and as many of the other parts as fit, in order."""
        taken = _BAR_WIDTH + 2 * len(str(self._num_steps)) + 1 + len(loss) + _TIME_WIDTH + 4  # all columns and spaces
        room, text = self._progress.console.width - taken, ""
        for part in parts:
            longer = f"{text}, {part}" if text else part
            if len(longer) > room:
                break
            text = longer
        self._progress.update(self._task, completed=step, loss=loss, description=text)

    def close(self) -> None:
        self._progress.stop()


class _StderrBesideBar:
    """Replaces stderr while the bar is shown: text goes to rich, which prints it above the bar; warnings bypass rich.

    Warnings are written unchanged, because ``phalanx run`` shows the same warning of all ranks once, above the bar.
    """

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy

    def write(self, text: str) -> int:
        is_warning = _WARNING.match(text) is not None
        return int((self._proxy.rich_proxied_file if is_warning else self._proxy).write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)
