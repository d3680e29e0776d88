"""A second forker, prepared while the ranks run: it has imported what the script imports, so a restart is fast.

The first forker does not know what the script imports. If restarts are allowed, each rank records after its first step
which modules of the standard library and of installed packages it has imported, and in which environment. The next
attempt is forked from a process that has imported these modules, too. Modules of the user's own folder are never
imported ahead. Nor are packages that read variables with different values in different ranks or attempts; each rank
imports these itself. Preparing the standby takes one core some seconds, once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from phalanx.launch.job import Job
from phalanx.launch.processes.forker_client import Forker
from phalanx.launch.processes.modules import modules_file
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.output import Screen
from phalanx.launch.screen.ranks import Output


class Standby:
    """Holder of at most one forker that is ready, or is getting ready.

    Args:
        screen: Screen of the launcher; the standby's output is not shown on it.
        log: Path of the standby's log.
        descriptors: RLIMIT_NOFILE of the ranks, soft and hard.
    """

    def __init__(self, job: Job, events: EventLoop, screen: Screen, log: str, descriptors: tuple[int, int]) -> None:
        self._job = job
        self._events = events
        self._screen = screen
        self._log = log
        self._descriptors = descriptors
        self._forker: Forker | None = None
        self._is_ready = False  # whether the forker has imported everything, so that its forks can be ranks
        self._environ: Mapping[str, str] = {}  # environment of the ranks of the next attempt
        self._files: Sequence[str] = ()  # files that name the modules to import
        self._left_out: tuple[str, ...] = ()  # packages not to import
        self._last_folder = ""  # folder of the first rank when a standby was last started
        self._has_relieved = False

    def prepare(self, environ: Mapping[str, str], rank_folders: Sequence[str]) -> bool:
        """Start a standby that imports what the ranks of those folders have recorded; return whether to call again.

        Call this now and then while the ranks run, until it returns False.
        """
        job = self._job
        if not (job.preload and job.max_restarts) or job.max_nodes > 1 or self._has_relieved:
            return False
        if self._forker is not None or self._last_folder == rank_folders[0]:
            return False
        files = list(map(modules_file, rank_folders))
        if all(map(os.path.exists, files)):
            self._last_folder = rank_folders[0]
            self._start(environ, files)
        return True

    def _start(self, environ: Mapping[str, str], files: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # if no process or descriptor is left, restarts are slower
            self._start_importing(environ, files)

    def _start_importing(self, environ: Mapping[str, str], files: Sequence[str]) -> None:
        # The standby's output is not shown, because the ranks have already printed what these imports print.
        self._output = Output(self._screen, b"", self._log, live=False, shown=False)
        forker = Forker(
            self._job.command,
            environ,
            preload=True,
            settings=self._job.head.settings,
            output_fd=self._output.rank_fd,
            descriptors=self._descriptors,
            modules_files=files,
            left_out=self._left_out,
        )
        self._output.hand_over()
        self._forker, self._environ, self._files, self._is_ready = forker, environ, files, False
        self._events.watch_output(self._output)
        self._events.watch(forker.channel.fileno(), self._hear)

    def _hear(self) -> None:
        assert self._forker is not None
        for packet in self._forker.channel.receive():
            self._is_ready = packet.get("can_go_on", False)
            with contextlib.suppress(OSError), open(self._log, "a") as file:
                file.write(f"{'ready' if self._is_ready else 'of no use'}: {packet}\n")
            if not self._is_ready:
                self.drop()
                if (unfit := set(packet.get("unfit", ()))) - {"torch", *self._left_out}:
                    self._left_out = (*self._left_out, *unfit)
                    self._start(self._environ, self._files)
                return
        if not self._forker.channel.alive:
            self.drop()

    def drop(self) -> None:
        """End the standby, if there is one."""
        if self._forker is not None:
            forker, self._forker = self._forker, None
            self._events.unwatch(forker.channel.fileno())
            forker.kill()
            forker.status()
            forker.channel.close()
            self._events.close_output(self._output)

    def start_over(self) -> None:
        """Allow another standby, because the job's forker was replaced and the present standby no longer fits it."""
        self.drop()
        self._has_relieved = False

    def hand_over(self, environ: Mapping[str, str]) -> tuple[Forker, Output] | None:
        """Hand over the forker and its output; None if the forker is not ready or has another environment."""
        forker = self._forker
        if forker is None or not (self._is_ready and forker.channel.alive and self._environ == environ):
            return None
        self._events.unwatch(forker.channel.fileno())
        self._forker, self._has_relieved = None, True
        return forker, self._output
