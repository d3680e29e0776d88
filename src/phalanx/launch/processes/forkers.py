"""The forkers of a job: the current one, a standby for the next attempt, and former ones whose ranks are alive."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from phalanx.launch.job import Job
from phalanx.launch.processes.forker_client import Forker
from phalanx.launch.processes.standby import Standby
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.output import Screen
from phalanx.launch.screen.ranks import Output
from phalanx.record.run_folder import LAUNCH_LOG, RunFolder

if TYPE_CHECKING:
    from phalanx.launch.processes.spare import Spare


@dataclasses.dataclass(eq=False)
class Serving:
    """A forker, its output, and the living processes that it has forked."""

    forker: Forker
    output: Output
    is_ready: bool = False
    pids: set[int] = dataclasses.field(default_factory=set)


class Forkers:
    """Owner of every process that forks ranks.

    Args:
        screen: Screen for the output of forkers.
        descriptors: RLIMIT_NOFILE of the ranks, soft and hard.
        on_start: Function to call with the rank and the pid of a forked process.
        on_end: Function to call with the pid and the wait status of a forked process that has ended.
        on_loss: Function to call with a forker that has ended; all its processes have ended with it.

    Attributes:
        environ: Environment of the forker in use, which all its ranks share.
        keep_list: Children of this process that are not ranks, and are spared when ranks are killed.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        events: EventLoop,
        screen: Screen,
        descriptors: tuple[int, int],
        *,
        on_start: Callable[[int, int], None],
        on_end: Callable[[int, int], None],
        on_loss: Callable[[Serving], None],
    ) -> None:
        self._job, self._folder, self._events, self._screen = job, folder, events, screen
        self._descriptors = descriptors
        self._on_start, self._on_end, self._on_loss = on_start, on_end, on_loss
        self._standby = Standby(job, events, screen, os.path.join(folder.path, "standby.log"), descriptors)
        self._relieved: list[Serving] = []
        self._current: Serving
        self.environ: Mapping[str, str] = {}
        self.keep_list: list[int] = []

    def start(self, environ: Mapping[str, str], spare: Spare | None = None) -> None:
        """Start the forker of the first attempt."""
        self.environ = environ
        log = os.path.join(self._folder.path, LAUNCH_LOG)
        output = Output(self._screen, b"phalanx run: ", log, live=False, shown=True)
        forker = Forker(
            self._job.command,
            environ,
            preload=self._job.preload,
            settings=self._job.head.settings,
            output_fd=output.rank_fd,
            descriptors=self._descriptors,
            spare=spare,
        )
        output.hand_over()
        self._events.watch_output(output)
        self._serve(Serving(forker, output))

    def _serve(self, serving: Serving) -> None:
        self._current = serving
        self._events.watch(serving.forker.channel.fileno(), partial(self._hear, serving))

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Return whether the forker in use is alive and can fork ranks with this environment."""
        return self._current.forker.channel.alive and self.environ == environ

    def replace(self, environ: Mapping[str, str]) -> None:
        """Replace all forkers by a new one."""
        self._standby.start_over()
        for serving in (*self._relieved, self._current):
            self._end(serving)
        self._relieved.clear()
        self.start(environ)

    def relieve(self) -> None:
        """Replace the forker by the standby between attempts, if the standby is ready."""
        for serving in [one for one in self._relieved if not one.pids]:
            self._relieved.remove(serving)
            self._end(serving)
        self._current.forker.go_on()
        ready = self._standby.hand_over(self.environ)
        if ready is None:
            return
        before = self._current
        self._serve(Serving(*ready, is_ready=True))
        if before.pids:  # the parent of ranks that are kept must stay
            self._relieved.append(before)
        else:
            self._end(before)

    def prepare_standby(self, rank_folders: Sequence[str]) -> bool:
        """Start a standby once the ranks of those folders have recorded their imports; return whether to call again."""
        return self._standby.prepare(self.environ, rank_folders)

    @property
    def is_ready(self) -> bool:
        """Whether there is nothing to wait for: the forker in use can fork ranks, or it has ended."""
        return self._current.is_ready or not self._current.forker.channel.alive

    @property
    def pid(self) -> int:
        """Process id of the forker in use."""
        return self._current.forker.pid

    def start_rank(
        self, rank: int, environ: Mapping[str, str], fds: Sequence[int], cpus: Sequence[int], argument: str
    ) -> None:
        """Ask the forker in use to fork a rank."""
        self._current.forker.start_rank(rank, environ, fds, cpus, argument)

    def end(self, sig: int, pids: Sequence[int]) -> None:
        """Send `sig` to ranks to end them; skip ranks that have ended.

        If the ranks are Python scripts, only the ranks themselves receive the signal: to shut down, they may need
        processes that they have started, such as a logger's. Other programs do not always pass the signal on, so their
        whole process groups receive it. SIGKILL always goes to the whole group.
        """
        self.signal(sig, pids, groups=sig == signal.SIGKILL or not self._job.is_python)
        self.signal(signal.SIGCONT, pids, groups=True)  # a suspended rank would not react to `sig`

    def signal(self, sig: int, pids: Sequence[int], *, groups: bool = False) -> None:
        """Send `sig` to ranks, with `groups` also to processes that they have started; skip ranks that have ended."""
        for serving in (*self._relieved, self._current):
            if own := [pid for pid in pids if pid in serving.pids]:
                serving.forker.signal(sig, own, groups=groups)
            else:
                serving.forker.go_on()  # this forker may be about to fork one of these ranks

    def kill(self) -> None:
        """Kill all forkers, and thereby all ranks."""
        for serving in (*self._relieved, self._current):
            serving.forker.kill()

    def close(self) -> None:
        """End every forker and all descendants of forkers; return when all are gone."""
        self._standby.drop()
        for serving in (*self._relieved, self._current):
            self._end(serving)

    def is_current(self, serving: Serving) -> bool:
        """Return whether this forker would fork the next rank."""
        return serving is self._current

    def _end(self, serving: Serving) -> None:
        if serving.forker.channel.alive:
            self._events.unwatch(serving.forker.channel.fileno())
        if not serving.is_ready:
            serving.forker.kill()
        others = {one.forker.reaper_pid for one in (*self._relieved, self._current) if one is not serving}
        serving.forker.close([*self.keep_list, *others])
        self._events.close_output(serving.output)

    def _hear(self, serving: Serving) -> None:
        for packet in serving.forker.channel.receive():
            if "ready" in packet:
                serving.is_ready = True
            elif "started" in packet:
                serving.pids.add(packet["started"])
                self._on_start(packet["rank"], packet["started"])
            else:
                serving.pids.discard(packet["ended"])
                self._on_end(packet["ended"], packet["status"])
        if not serving.forker.channel.alive:
            self._events.unwatch(serving.forker.channel.fileno())
            self._on_loss(serving)
            serving.pids.clear()
