"""Starts the ranks, watches them and handles signals; `console` shows their output, `shutdown` ends them.

``phalanx run train.py`` -> flags -> plan -> `Job` -> supervisor. The supervisor forks the forker at once and, while
that imports torch, is ready for output and signals within 0.1 s. Its loop (see `screen.events`) wakes for output, for a
signal, for a message of the forker about a rank, or at the end of a grace period.

**Why supervisor and forker are two processes.** The supervisor handles signals, owns the terminal and imports nothing
heavy. The forker has torch in memory but no handlers, threads or output, so its forks are as clean as new processes.
`reaper` explains which process ends which when one of them is killed.

**Signals to every process.** A service manager, or Slurm without cgroups, sends its signal to every process of a job.
So the forker, and on several nodes the agent, block the signals that the supervisor handles, also across the exec of
the script's interpreter, and each rank unblocks them after the fork. Once all ranks have ended, which the kernel knows
before the forker reports it, the outcome is decided: a later signal only prevents a restart. When the job is over, the
supervisor blocks all signals until it exits; handlers would not be enough, since Python removes them while the
interpreter shuts down. SIGUSR1 and SIGUSR2 are forwarded to the ranks; torchrun dies of them.

**A lost Ctrl-C.** If a KeyboardInterrupt is raised in a callback, for instance during an import, Python prints it and
continues. The supervisor recognises the message on the rank's stderr, hides it, and sends SIGINT again. While the
command itself is imported, SIGINT has its default action.

**Ctrl-Z.** The launcher stops the process groups of its ranks with SIGSTOP, and then itself as its shell expects. On
SIGCONT (``fg``, ``bg``, ``kill -CONT``) all continue, and the launcher's deadlines move by the time for which it was
stopped. With a warm start the shell stops the client. On several nodes Ctrl-Z only prints that it does nothing, since
the others would consider the node lost. Waits of collectives within a host do not count the stopped time; torch's
store, waits across hosts and `monitored_barrier` do.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import _env
from phalanx._text import counted, named, signal_name
from phalanx.failure.ending import Ending, find_culprit, read_stderr
from phalanx.failure.ends import save_ends, save_reason
from phalanx.host.block_pool import of_rank
from phalanx.host.cpus import Share
from phalanx.host.descriptors import raise_descriptor_limit
from phalanx.launch.deadlines import IMPORT_S
from phalanx.launch.environment import Attempt, rank_environment, shared_environment
from phalanx.launch.job import Job
from phalanx.launch.processes.descendants import adopt_orphans
from phalanx.launch.processes.forkers import Forkers, Serving
from phalanx.launch.run.recovery import Recovery
from phalanx.launch.run.shutdown import Shutdown
from phalanx.launch.run.survivors import Survivors
from phalanx.launch.screen.console import Console
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.keyboard import Keyboard
from phalanx.launch.screen.output import Screen
from phalanx.launch.screen.ranks import Rank
from phalanx.launch.screen.stragglers import StragglerWatch
from phalanx.record.clocks import save_clocks
from phalanx.record.memory import BoxMemory
from phalanx.record.notes import was_preempted, words_of_checkpoints
from phalanx.record.run_folder import RunFolder
from phalanx.rendezvous.launched import Notes

if TYPE_CHECKING:
    from phalanx.launch.processes.spare import Spare

_ONLY_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_HARMLESS = (*_ONLY_FORWARDED, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
_LOOK_S = 0.2  # between two calls of `until`


class Supervisor:
    """Owns the forker, the ranks' streams and this process's signals."""

    def __init__(self, job: Job, folder: RunFolder, spare: Spare | None = None) -> None:
        self._job = job
        self._folder = folder
        self._spare = spare
        self._terminal_pid = spare.client_pid if spare is not None else os.getpid()  # which the shell has started
        self.memory = job.memory  # the next attempt's treatment of freed memory
        self.events = EventLoop(self._say_log_problem)
        self._console = Console(job, folder, self.events, self._is_ending, self._lose_reader)
        self._ranks: list[Rank] = []
        self._num_attempts = 0
        self.received: int | None = None  # the signal that ends the job
        self.drain: Callable[[], None] | None = None  # called at the first SIGTERM, which then does not end the job
        self.announce_interrupt: Callable[[], None] | None = None  # called at Ctrl-C, to tell the other nodes
        self.cause_before: Ending | None = None  # a failure that happened before the signal
        self.clocks: Mapping[str, Sequence[float]] = {}  # offsets of other hosts' clocks, from `clocks.Clocks.told`
        self._stopped_at_s: float | None = None
        self._late: int | None = None  # a signal that came after all ranks had exited
        self.began_s = 0.0  # when the ranks of this attempt were started
        self._refusals: set[str] = set()  # reasons why processes can't be kept, as reported in this attempt
        self._said_log_problem = False
        self.recovery = Recovery(Path(folder.path), self.say, agrees=job.max_nodes > 1)

    def __enter__(self) -> Supervisor:
        adopt_orphans()  # to end the children of a forker that is killed
        self._descriptors = raise_descriptor_limit()
        self.events.catch((*self._job.signals, *_HARMLESS))
        self.snapshots_fd = os.memfd_create("phalanx-snapshots")  # keeps the ranks' snapshots for the next attempt
        self._boxes = BoxMemory(self._job.num_local_ranks)  # where ranks record what they do
        self._notes = Notes()
        self._note_attempt(self._job.num_local_ranks if self._job.max_nodes == 1 else 0)
        shown = next((screen for screen in (self._console.out, self._console.err) if screen.is_terminal), Screen(0))
        self._keyboard = Keyboard(self.events, shown, self._terminal_pid)
        is_on = self._job.keeps and self._job.max_restarts > 0
        self._survivors = Survivors(self.events, self._rank_waits, self._rank_refuses, is_on=is_on)
        self._forkers = Forkers(
            self._job, self._folder, self.events, self._console.err, self._descriptors,
            on_start=self._rank_started, on_end=self._rank_ended, on_loss=self._lose_ranks,
        )  # fmt: skip
        self.shutdown = Shutdown(
            self._job, self._ranks, self.events, self._forkers, self._survivors,
            say=self.say, on_end=self.recovery.told_to_end,
        )  # fmt: skip
        self._forkers.start(self._shared_environment(self._job.num_local_ranks), self._spare)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # see Keyboard
        return self

    def _shared_environment(self, num_ranks: int) -> dict[str, str]:
        """Return the variables that all ranks share; torch is imported with their number of threads."""
        environ = shared_environment(_env.environment(), self._job.divide(num_ranks).shares[0])
        environ[_env.COMMAND_VARIABLE] = self._job.typed
        environ[_env.RECORD_VARIABLE] = self._boxes.path
        environ |= self._keyboard.environment()
        if not self._job.max_restarts:  # without another attempt, nobody would read snapshots
            return environ
        return {**environ, _env.SNAPSHOT_VARIABLE: f"/proc/{os.getpid()}/fd/{self.snapshots_fd}"}

    def _note_attempt(self, world_size: int) -> None:
        self._notes.note_attempt("phalanx run", self._job.typed, os.path.abspath(self._folder.path), world_size)

    def note_state(self, state: str, left_s: float | None = None) -> None:
        """Record, for ``phalanx why``, what the job does while no rank runs here, and for how long at most."""
        self._notes.note_state(state, left_s)

    @property
    def keep_list(self) -> list[int]:
        """Children of this process that are not ranks, and stay when ranks are ended."""
        return self._forkers.keep_list

    def _wants_standby(self) -> bool:
        return self.shutdown.by is None and self._forkers.prepare_standby([rank.folder for rank in self._ranks])

    def __exit__(self, *_: object) -> None:
        self.events.hold_signals()  # from now on, no signal may change the exit code
        self._forkers.close()
        for output in (output for rank in self._ranks for output in rank.outputs):
            output.close()
        self._console.close()
        self._keyboard.close()
        self._survivors.close()
        os.close(self.snapshots_fd)
        self._boxes.close()
        self._notes.close()
        self.events.close()

    # ------------------------------------------------------------ attempts

    @property
    def was_preempted(self) -> bool:
        """Whether every rank of the last attempt was preempted: asked to end, saved and able to resume."""
        return bool(self._ranks) and all(rank.end is not None and rank.end.preempted for rank in self._ranks)

    def run_attempt(
        self, attempt: Attempt, until: Callable[[], bool] | None = None, *, may_keep: bool = False
    ) -> Ending | None:
        """Run the ranks once; return the cause of their failure, None if every rank exited with 0 or was told to end.

        Args:
            until: Function called regularly while all ranks run; if it returns True, the attempt is ended.
            may_keep: Whether another attempt may follow, for which processes can be kept.
        """
        if self._late is not None:
            self.received = self._late
            self.say(f"{signal_name(self._late)}: the ranks are not started again")
        if self.received is not None:
            return None
        self._await_ends()
        self.shutdown.begin(may_keep=may_keep)
        self.began_s = time.monotonic()
        self._forker_failure: Ending | None = None
        self._refusals.clear()
        if not self._start_attempt(attempt, may_keep=may_keep):
            if not any(rank.is_running for rank in self._ranks):
                self.events.deadline = None  # a deadline in the past would make every later wait return at once
            return None
        self.began_s = time.monotonic()
        self._watch_attempt(until)
        return self._forker_failure or find_culprit(self.ends)

    def _start_attempt(self, attempt: Attempt, *, may_keep: bool) -> bool:
        """Give kept processes their new ranks, and fork the others; return False if told to end meanwhile."""
        environ = self._shared_environment(attempt.num_local_ranks)
        if not self._forkers.serves(environ) or attempt.num_local_ranks != len(self._ranks):
            self.dismiss_survivors()
        if not self._forkers.serves(environ):
            self._forkers.replace(environ)
        self._forkers.relieve()
        kept = self._open_ranks(attempt)
        self.recovery.begin(self._boxes.places(len(self._ranks)))
        self._await_forker()
        if self.received is not None or self.shutdown.by is not None:
            for rank in (rank for rank in self._ranks if not rank.pid):
                rank.asked_to_end = rank.was_killed = True
                rank.record_end(signal.SIGKILL, is_reported=False)
            return False
        self._notes.clear()
        self._note_attempt(attempt.world_size)
        shares = self._job.divide(attempt.num_local_ranks).shares
        for local_rank, rank in enumerate(self._ranks):
            error_file = os.path.abspath(os.path.join(rank.folder, "error.json"))
            environ = rank_environment(attempt, local_rank, error_file)
            environ |= attempt.launch("phalanx run", self._notes.path, local_rank) | of_rank(self.memory)
            environ[_env.SURVIVORS_VARIABLE] = self._survivors.path if may_keep else ""
            if not all(output.has_room(_env.environment().get("COLUMNS", "")) for output in rank.outputs):
                environ["COLUMNS"] = ""  # it was the width of our screen, of which the prefix takes a part
            if rank in kept:
                self._notes.note_start(rank.rank, rank.pid)
                self._survivors.place(rank.pid, environ)
            else:
                self._start_rank(rank, local_rank, environ, shares[local_rank])
            self.wait(0)  # reads the forker's reports of starts: hundreds of unread ones would block both processes
        return True

    def _await_forker(self) -> None:
        """Wait until ranks can be forked, or until the attempt is ended, as another node may do."""
        said_at_s: float | None = time.monotonic() + IMPORT_S
        while self.received is None and self.shutdown.by is None and not self._forkers.is_ready:
            self.wait(None if said_at_s is None else max(0.0, said_at_s - time.monotonic()))
            if said_at_s is not None and time.monotonic() >= said_at_s:
                said_at_s = None
                self.say(f"no rank can start yet: process {self._forkers.pid} is still importing torch, or is stopped")

    def _watch_attempt(self, until: Callable[[], bool] | None) -> None:
        """Wait until every rank has ended, or is waiting for the next attempt."""
        stragglers = StragglerWatch(self._boxes.places(len(self._ranks)), self._say_straggler)
        while any(rank.is_running for rank in self._ranks):
            looks = until or self._console.is_holding(self._ranks) or self._wants_standby()
            timeout_s = _LOOK_S if looks else stragglers.timeout_s
            self.wait(self.recovery.within(timeout_s))
            stragglers.look()
            self.recovery.look()
            self._console.release_late(self._ranks)
            self.shutdown.judge()
            self.shutdown.repeat_lost_interrupts()
            if until and self.shutdown.by is None and all(rank.is_running for rank in self._ranks) and until():
                self.shutdown.stop()
            self.shutdown.keep_deadline()
        self.events.deadline = None
        self._console.end_attempt()
        self.recovery.look(ends=self.ends)
        self._save_boxes()

    def dismiss_survivors(self) -> None:
        """End the processes that are waiting for the next attempt."""
        if any(rank.is_kept for rank in self._ranks):
            self.shutdown.end(signal.SIGTERM)
            self._await_ends()

    def _await_ends(self) -> None:
        """Wait until every process has ended that was told to end between two attempts."""
        while any(rank.is_running for rank in self._ranks):
            self.wait()
            self.shutdown.keep_deadline()
        self.shutdown.has_ended()

    @property
    def ends(self) -> list[Ending]:
        """Endings of the ranks of the last attempt."""
        return [end for rank in self._ranks if (end := rank.end or rank.pause)]

    @property
    def has_progress(self) -> bool:
        """Whether a rank of the last attempt has noted a sign of training, see `attempts`."""
        return self._notes.has_progress

    @property
    def have_trained_solo(self) -> bool:
        """Whether several ranks trained in the last attempt, all without a process group."""
        return self._notes.num_solo == len(self._ranks) > 1

    @property
    def have_trained_apart(self) -> bool:
        """Whether several ranks trained in a group in the last attempt without any communication."""
        return self._notes.num_apart == len(self._ranks) > 1

    def _save_boxes(self) -> None:
        """Save the black boxes of this attempt, and free them for the next."""
        folder = Path(self._folder.path, "blackbox", f"attempt_{self._num_attempts - 1}")
        ends = [dataclasses.replace(end, ended_by_us=self._has_obeyed(end)) for end in self.ends]
        try:
            self._boxes.save(folder)
            save_ends(ends, folder)
            save_clocks(self.clocks, folder)
        except OSError as error:
            self._say_log_problem(error.strerror or str(error))

    def _has_obeyed(self, end: Ending) -> bool:
        """Return whether a rank ended because the supervisor told it to, and not by somebody else's SIGKILL."""
        by_another = end.exitcode == -signal.SIGKILL and self.shutdown.by != signal.SIGKILL
        return end.ended_by_us and (not by_another or self._forker_failure is not None)

    def keep_reason(self, reason: str) -> None:
        """Save why this run ended, if the reason is not the failure of a rank."""
        try:
            save_reason(f"phalanx run {reason}", Path(self._folder.path, "blackbox"))
        except OSError as error:
            self._say_log_problem(error.strerror or str(error))

    def _open_ranks(self, attempt: Attempt) -> list[Rank]:
        """Make the ranks of an attempt; return those that keep their processes."""
        before = [*self._ranks]
        numbers_before = {rank.pid: rank.rank for rank in before}
        self._ranks.clear()
        for output in (output for rank in before if not rank.is_kept for output in rank.outputs):
            self.events.close_output(output)
        self._console.begin_attempt(attempt.num_local_ranks)
        for local_rank in range(attempt.num_local_ranks):
            number = attempt.first_rank + local_rank
            folder = self._folder.rank_folder(self._num_attempts, number)
            if local_rank < len(before) and before[local_rank].is_kept:
                self._ranks.append(self._console.keep_rank(before[local_rank], number, folder))
            else:
                self._ranks.append(self._console.open_rank(number, local_rank, folder))
        self._num_attempts += 1
        kept = [rank for rank in self._ranks if rank.pid]
        if kept:
            old, new = [numbers_before[rank.pid] for rank in kept], [rank.rank for rank in kept]
            go, others = "goes" if len(kept) == 1 else "go", "" if old == new else f", now as {named('rank', new)}"
            self.say(f"{named('rank', old)} {go} on in the same process{others}")
        return kept

    def _start_rank(self, rank: Rank, local_rank: int, environ: dict[str, str], share: Share) -> None:
        job = self._job
        stdin = self._keyboard.stdin_of(rank) if local_rank == 0 else os.open(os.devnull, os.O_RDONLY)
        self._forkers.start_rank(
            rank.rank,
            environ,
            (stdin, rank.stdout.rank_fd, rank.stderr.rank_fd),
            share.cpus,
            f"--local-rank={local_rank}" if job.local_rank_argument else "",
        )
        os.close(stdin)
        for output in rank.outputs:
            output.hand_over()

    # ------------------------------------------------------------ events

    def wait(self, timeout_s: float | None = None) -> None:
        """Handle events and signals; return after the first, after `timeout_s` or at the deadline."""
        self.events.wait(self.shutdown.within(timeout_s))
        self._obey_signals()
        self.shutdown.say_who_is_late()

    def _say_log_problem(self, problem: str) -> None:
        if not self._said_log_problem:
            self._said_log_problem = True
            self.say(f"the logs in {self._folder.path} are incomplete: {problem}")

    def _rank_started(self, number: int, pid: int) -> None:
        rank = next(rank for rank in self._ranks if rank.rank == number)
        rank.pid = pid
        self._notes.note_start(number, pid)
        self.shutdown.catch_up(pid)

    def _rank_ended(self, pid: int, status: int) -> None:
        rank = next(rank for rank in self._ranks if rank.pid == pid)
        has_failure = self.shutdown.has_failure or not rank.asked_to_end
        end = rank.record_end(status, is_reported=self.received is None and has_failure)
        self._notes.note_end(end)
        if end.failed:
            self.shutdown.note_failure(end.when_s)

    def _rank_waits(self, pid: int) -> None:
        """Handle a process that has left its groups after another rank's failure, and can be kept."""
        rank = next((rank for rank in self._ranks if rank.pid == pid and rank.is_running), None)
        if rank is None:
            return
        pause = rank.record_pause()
        if pause.failed:
            self.shutdown.note_failure(pause.when_s)

    def _rank_refuses(self, pid: int, why: str) -> None:
        rank = next((rank for rank in self._ranks if rank.pid == pid and rank.is_running), None)
        if rank is None:
            return
        if why and why not in self._refusals:
            self._refusals.add(why)
            self.say(f"rank {rank.rank} can't be kept: {why}")
        self.shutdown.refuse(rank)

    def _lose_ranks(self, serving: Serving) -> None:
        """Handle the end of a forker, with which its ranks have ended."""
        is_current = self._forkers.is_current(serving)
        living = [
            rank
            for rank in self._ranks
            if rank.end is None and (rank.pid in serving.pids or (is_current and not rank.pid))
        ]
        for rank in living:
            rank.asked_to_end = rank.was_killed = True
            rank.record_end(signal.SIGKILL, is_reported=self.received is None)
        if living or not self._ranks:
            serving.output.drain(drops_last_words=True)
            self._forker_failure = Ending(
                rank=-1,
                pid=serving.forker.pid,
                exitcode=os.waitstatus_to_exitcode(serving.forker.status()),
                last_words=read_stderr(serving.output.tail),
                folder=self._folder.path,
                when_s=time.monotonic(),
            )

    # ------------------------------------------------------------ signals

    def _obey_signals(self) -> None:
        while self.events.signals:
            sig = self.events.signals.pop(0)
            if sig == signal.SIGTSTP and sig not in self._job.signals:
                self._stop_all()
            elif sig == signal.SIGCONT:
                self._continue_all()
            elif sig == signal.SIGWINCH:
                for output in (output for rank in self._ranks for output in rank.outputs):
                    output.resize()
            elif sig in _ONLY_FORWARDED:  # goes only to ranks: most processes that they have started would die of it
                self._forkers.signal(sig, [rank.pid for rank in self._ranks if rank.pid and rank.is_running])
            elif sig == signal.SIGTERM and self.drain is not None:
                drain, self.drain = self.drain, None
                drain()
            elif self.received not in (None, signal.SIGPIPE):  # a second request to end kills at once
                self._say_kill(sig)
                self.shutdown.end(signal.SIGKILL)
            elif self._job.max_nodes == 1 and self._ranks and all(rank.has_ended() for rank in self._ranks):
                self._late = sig  # all ranks have ended: it matters only if they are about to be restarted
            else:
                self.received = sig
                self.cause_before = find_culprit([rank.end for rank in self._ranks if rank.end])
                living = [rank for rank in self._ranks if rank.end is None]
                why = "nobody reads our output any more" if sig == signal.SIGPIPE else signal_name(sig)
                self.keep_reason(f"got {signal_name(sig)}" if sig != signal.SIGPIPE else f"ended, for {why}")
                again = f"; Ctrl-C again kills {'it' if len(living) == 1 else 'them'}" if sig == signal.SIGINT else ""
                none = "stopping; no rank is running" if self._ranks else "stopping; no rank had started"
                self.say(f"{why}: ending {counted(len(living), 'rank')}{again}" if living else f"{why}: {none}")
                if sig == signal.SIGINT:
                    if self.announce_interrupt is not None:
                        self.announce_interrupt()
                    for rank in self._ranks:
                        rank.stderr.hide_interrupts()
                self.shutdown.end(signal.SIGTERM if sig == signal.SIGPIPE else sig)

    def _stop_all(self) -> None:
        """Stop the ranks and then this process until SIGCONT: Ctrl-Z, then ``fg`` or ``bg``."""
        if self._job.max_nodes > 1:
            self.say("Ctrl-Z does nothing: the other nodes would take this one for lost")
            return
        if self._stopped_at_s is None:
            self._stopped_at_s = time.monotonic()
            self._signal_all(signal.SIGSTOP)
        if self._spare is None:  # in a warm start, the shell stops the client instead
            self.events.stop_process()
            self._continue_all()

    def _continue_all(self) -> None:
        """Continue the ranks that were stopped with this process, with as much time as they had left."""
        if self._stopped_at_s is None:
            return
        stopped_s, self._stopped_at_s = time.monotonic() - self._stopped_at_s, None
        self.began_s += stopped_s
        self.shutdown.postpone(stopped_s)
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, sig: int) -> None:
        living = [rank.pid for rank in self._ranks if rank.pid and rank.end is None]
        self._forkers.signal(sig, living, groups=True)

    def _say_kill(self, sig: int) -> None:
        living = [rank for rank in self._ranks if rank.end is None]
        if living and self.shutdown.by != signal.SIGKILL:
            has_saved = any(was_preempted(rank.folder) for rank in self._ranks)
            saved = "the state was saved" if has_saved else "no Trainer has saved since the first"
            saved = next(filter(None, (words_of_checkpoints(rank.folder) for rank in self._ranks)), saved)
            again = " again" if sig == self.received else ""
            self.say(f"{signal_name(sig)}{again}: killing {counted(len(living), 'rank')} at once; {saved}")

    def _lose_reader(self) -> None:
        """End as after SIGPIPE, so that ranks can save, unless the job is ending: Ctrl-C ends the reader, too."""
        if not self._is_ending():
            self.events.note(signal.SIGPIPE)

    def _is_ending(self) -> bool:
        """Whether this process was told to end, so that it must not wait for a reader of its output."""
        return self.received is not None or any(sig not in _HARMLESS for sig in self.events.signals)

    # ------------------------------------------------------------ words

    def _say_straggler(self, text: str) -> None:
        self.say(text)
        self._notes.note_straggler(text)

    def say(self, text: str) -> None:
        """Write a line on the screen and in the launcher's log."""
        self._console.say(text)

    def say_last(self, text: str) -> None:
        """Write the final report of the job as it is."""
        self._console.say_last(text)
