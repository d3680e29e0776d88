"""Handles the signals that the launcher receives: some end the job, some are forwarded, and some suspend the job.

**Signals to every process.** A service manager, or Slurm without cgroups, sends its signal to every process of a job.
So the forker, and on several nodes the agent, block the signals that the supervisor handles, even across the exec of
the script's interpreter, and each rank unblocks them after the fork. Once all ranks have ended, which the kernel knows
before the forker reports it, the outcome is decided: a later signal only prevents a restart. When the job is over, the
supervisor blocks all signals until it exits; handlers would not be enough, since Python removes them while the
interpreter shuts down. SIGUSR1 and SIGUSR2 are forwarded to the ranks; torchrun would be killed by them.

**Ctrl-Z.** The launcher suspends the process groups of its ranks with SIGSTOP, and then suspends itself, as its shell
expects. On SIGCONT (``fg``, ``bg``, ``kill -CONT``) all continue, and the launcher's deadlines move by the time for
which it was suspended. With a warm start, the shell suspends the client. On several nodes, Ctrl-Z only prints that it
does nothing, since the other nodes would consider this node lost. Waits of collectives within a host do not count the
time of the suspension; torch's store, waits across hosts and `monitored_barrier` count it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from phalanx._text import counted, signal_name
from phalanx.failure.ending import Ending, find_culprit
from phalanx.launch.job import Job
from phalanx.launch.processes.forkers import Forkers
from phalanx.launch.run.shutdown import Shutdown
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.ranks import Rank
from phalanx.record.notes import was_preempted, words_of_checkpoints

_ONLY_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
HARMLESS = (*_ONLY_FORWARDED, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
"""Signals that do not end the job."""


class Signals:
    """Handles the signals that the event loop has received.

    Args:
        ranks: Ranks of the current attempt; the supervisor changes this list.
        keep_reason: Function that saves why the run ends.
        postpone: Function that moves the deadlines by the seconds for which the ranks were suspended.
        is_warm: Whether Ctrl-Z suspends not this process but the client of a warm start.

    Attributes:
        received: Signal that ends the job; None: no such signal has arrived.
        cause_before: Failure that preceded the signal `received`; None: no rank had failed.
        drain: Function to call on the first SIGTERM, which then does not end the job.
        announce_interrupt: Function to call on Ctrl-C, to tell the other nodes.
    """

    def __init__(
        self,
        job: Job,
        ranks: Sequence[Rank],
        events: EventLoop,
        forkers: Forkers,
        shutdown: Shutdown,
        *,
        say: Callable[[str], None],
        keep_reason: Callable[[str], None],
        postpone: Callable[[float], None],
        is_warm: bool,
    ) -> None:
        self._job, self._ranks, self._events = job, ranks, events
        self._forkers, self._shutdown = forkers, shutdown
        self._say, self._keep_reason, self._postpone, self._is_warm = say, keep_reason, postpone, is_warm
        self.received: int | None = None
        self.cause_before: Ending | None = None
        self.drain: Callable[[], None] | None = None
        self.announce_interrupt: Callable[[], None] | None = None
        self._stopped_at_s: float | None = None
        self._late: int | None = None  # signal received after all ranks had ended

    @property
    def are_ending(self) -> bool:
        """Whether this process was told to end. If so, it must not wait for a reader of its output."""
        return self.received is not None or any(sig not in HARMLESS for sig in self._events.signals)

    def forbid_start(self) -> bool:
        """Return whether a signal forbids starting ranks, even a signal that arrived after the last ranks had ended."""
        if self._late is not None:
            self.received = self._late
            self._say(f"{signal_name(self._late)}: the ranks are not started again")
        return self.received is not None

    def lose_reader(self) -> None:
        """End the job as if SIGPIPE had arrived: ranks get a SIGTERM, so they can save.

        Do nothing if a signal is already ending the job. Ctrl-C also ends a reader in the same pipeline, and a second
        request to end would kill the ranks at once.
        """
        if not self.are_ending:
            self._events.note(signal.SIGPIPE)

    def obey(self) -> None:
        """Handle the received signals, in the order of their arrival."""
        while self._events.signals:
            sig = self._events.signals.pop(0)
            if sig == signal.SIGTSTP and sig not in self._job.signals:
                self._stop_all()
            elif sig == signal.SIGCONT:
                self._continue_all()
            elif sig == signal.SIGWINCH:
                for output in (output for rank in self._ranks for output in rank.outputs):
                    output.resize()
            elif sig in _ONLY_FORWARDED:  # only to ranks: the signal would kill most of the processes that they started
                self._forkers.signal(sig, [rank.pid for rank in self._ranks if rank.pid and rank.is_running])
            elif sig == signal.SIGTERM and self.drain is not None:
                drain, self.drain = self.drain, None
                drain()
            elif self.received not in (None, signal.SIGPIPE):  # after a second request to end, kill at once
                self._say_kill(sig)
                self._shutdown.end(signal.SIGKILL)
            elif self._job.max_nodes == 1 and self._ranks and all(rank.has_ended() for rank in self._ranks):
                self._late = sig  # all ranks have ended: the signal only prevents a restart
            else:
                self._end(sig)

    def _end(self, sig: int) -> None:
        self.received = sig
        self.cause_before = find_culprit([rank.end for rank in self._ranks if rank.end])
        why = "nobody reads our output any more" if sig == signal.SIGPIPE else signal_name(sig)
        self._keep_reason(f"got {signal_name(sig)}" if sig != signal.SIGPIPE else f"ended, for {why}")
        self._say(f"{why}: {self._what_ends(sig)}")
        if sig == signal.SIGINT:
            if self.announce_interrupt is not None:
                self.announce_interrupt()
            for rank in self._ranks:
                rank.stderr.hide_interrupts()
        self._shutdown.end(signal.SIGTERM if sig == signal.SIGPIPE else sig)

    def _what_ends(self, sig: int) -> str:
        living = [rank for rank in self._ranks if rank.end is None]
        if not living:
            return "stopping; no rank is running" if self._ranks else "stopping; no rank had started"
        again = f"; Ctrl-C again kills {'it' if len(living) == 1 else 'them'}" if sig == signal.SIGINT else ""
        return f"ending {counted(len(living), 'rank')}{again}"

    def _say_kill(self, sig: int) -> None:
        living = [rank for rank in self._ranks if rank.end is None]
        if living and self._shutdown.by != signal.SIGKILL:
            has_ended = any(was_preempted(rank.folder) for rank in self._ranks)
            saved = "a Trainer has ended as asked" if has_ended else "no Trainer has saved since the first"
            saved = next(filter(None, (words_of_checkpoints(rank.folder) for rank in self._ranks)), saved)
            again = " again" if sig == self.received else ""
            self._say(f"{signal_name(sig)}{again}: killing {counted(len(living), 'rank')} at once; {saved}")

    # ------------------------------------------------------------ Ctrl-Z

    def _stop_all(self) -> None:
        """Suspend the ranks, and then this process, until SIGCONT: Ctrl-Z, then ``fg`` or ``bg``."""
        if self._job.max_nodes > 1:
            self._say("Ctrl-Z has no effect: the other nodes would consider this node lost")
            return
        if self._stopped_at_s is None:
            self._stopped_at_s = time.monotonic()
            self._signal_all(signal.SIGSTOP)
        if not self._is_warm:
            self._events.stop_process()
            self._continue_all()

    def _continue_all(self) -> None:
        """Continue the ranks that were suspended together with this process; they have as much time left as before."""
        if self._stopped_at_s is None:
            return
        stopped_s, self._stopped_at_s = time.monotonic() - self._stopped_at_s, None
        self._postpone(stopped_s)
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, sig: int) -> None:
        living = [rank.pid for rank in self._ranks if rank.pid and rank.end is None]
        self._forkers.signal(sig, living, groups=True)
