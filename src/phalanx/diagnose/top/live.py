"""The live picture on the terminal, until the user quits or the job ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from phalanx.diagnose.top.keys import Keys
from phalanx.diagnose.top.screen import draw
from phalanx.diagnose.top.watch import FIRST_S, JobView, Watch


def watch_live(watch: Watch, console: Console, interval_s: float, is_one_job: bool) -> list[JobView] | None:
    """Show jobs until the user quits.

    Args:
        watch: Source of the pictures.
        console: Terminal.
        interval_s: Seconds between two pictures.
        is_one_job: Whether to stop once the job has ended.

    Returns:
        The last picture, if the job has ended; None if the user quit.
    """
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        first, due, wait_s = 0, time.monotonic(), min(interval_s, FIRST_S)
        while True:
            jobs = watch.look()
            if is_one_job and all(not job.state and all(rank.state == "gone" for rank in job.ranks) for job in jobs):
                return jobs
            due, wait_s = max(due + wait_s, time.monotonic()), interval_s
            key = "resize"
            while key:
                first = _show(live, console, jobs, first + {"up": -1, "down": 1}.get(key, 0))
                key = keys.wait(due - time.monotonic())
                if key == "quit":
                    return None


def _show(live: Live, console: Console, jobs: Sequence[JobView], first: int) -> int:
    """Show the lines that fit, starting at `first` if not all lines fit; return the first line shown."""
    with contextlib.suppress(OSError):  # without a terminal, keep the size that was asked for
        # The terminal is asked, because COLUMNS and LINES may be out of date.
        size = os.get_terminal_size(console.file.fileno())
        if size.columns and size.lines:  # a serial line or a bare pty reports 0 x 0: keep rich's default
            console.size = size
    width, height = console.size
    lines = draw(jobs, width, console.options.ascii_only)
    room = height - 1
    first = max(0, min(first, len(lines) - room))
    below = len(lines) - first - room
    foot = f"phalanx top  {time.strftime('%H:%M:%S')}  q quits" + (f"  {below} more below: j, k" if below > 0 else "")
    shown = lines[first : first + room]
    shown += [Text()] * (room - len(shown))
    live.update(Text("\n").join([*shown, Text(foot[:width], "reverse")]), refresh=True)
    return first
