"""Starts the ranks, watches them and obeys signals; `console` shows what they print, `shutdown` ends them.

``phalanx run train.py`` -> flags -> plan -> `Job` -> supervisor. It forks the forker at once and, while torch is being
imported there, is ready for output and signals within 0.1 s. The loop (see `events`) wakes for output, for a signal,
for news of a rank from the forker, or for the end of a grace period.

**Why supervisor and forker are two processes.** The supervisor handles signals, owns the terminal and imports nothing
heavy. The forker has torch in memory, and no handlers, no threads and no output, so its forks are as clean as new
processes. `reaper` says who ends what when one of them is killed.

**Signals to everybody.** A service manager, or Slurm without cgroups, sends its signal to every process of a job. So
the forker, and the agent where there are several nodes, keep blocked what the supervisor obeys, also across the
execution of the script's interpreter, and each rank unblocks it after the fork. Once all ranks have ended, which the
kernel knows before the forker tells, the outcome is decided: a signal that arrives then only keeps the ranks from
being started again, and the supervisor blocks all signals until it has ended. Handlers would not do: Python gives them
up while the interpreter ends. SIGUSR1 and SIGUSR2 are passed on to the ranks; torchrun dies of them.

**A lost Ctrl-C.** Python prints a KeyboardInterrupt that is raised in a callback, of an import for instance, and
continues. The supervisor recognises that on the rank's stderr, does not show it, and sends SIGINT again. While the
command itself is imported, SIGINT has its default action.

**Ctrl-Z.** The launcher stops its ranks with SIGSTOP, groups and all, and then itself as its shell expects. On SIGCONT
(``fg``, ``bg``, ``kill -CONT``) they go on, and its own deadlines move by the time in which it was stopped. With a
warm start the shell stops the client. On several nodes Ctrl-Z only prints that it does nothing, since the others would
take the node for lost. Ranks leave the stopped time out of the waits of collectives within a host; torch's store,
waits across hosts and `monitored_barrier` count it.
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
_LOOK_S = 0.2  # between questions whether the attempt is to end


class Supervisor:
    """Owns the forker, the ranks' streams and this process's signals."""

    def __init__(self, job: Job, folder: RunFolder, spare: Spare | None = None) -> None:
        self._job = job
        self._folder = folder
        self._spare = spare
        self._terminal_pid = spare.client_pid if spare is not None else os.getpid()  # whom a shell has started
        self.memory = job.memory  # what the ranks of the next attempt do about freed memory
        self.events = EventLoop(self._say_log_problem)
        self._console = Console(job, folder, self.events, self._is_ending, self._lose_reader)
        self._ranks: list[Rank] = []
        self._num_attempts = 0
        self.received: int | None = None  # the one that ends the job
        self.drain: Callable[[], None] | None = None  # what the first SIGTERM asks for instead of the end of the job
        self.announce_interrupt: Callable[[], None] | None = None  # to the other nodes
        self.cause_before: Ending | None = None  # of a failure that came before it
        self.clocks: Mapping[str, Sequence[float]] = {}  # of other hosts, as `clocks.Clocks.told` has them
        self._stopped_at_s: float | None = None
        self._late: int | None = None  # one that came when all ranks had ended
        self.began_s = 0.0  # when the ranks of this attempt were started
        self._refusals: set[str] = set()  # said in this attempt
        self._said_log_problem = False
        self.recovery = Recovery(Path(folder.path), self.say, agrees=job.max_nodes > 1)

    def __enter__(self) -> Supervisor:
        adopt_orphans()  # of a forker that is killed
        self._descriptors = raise_descriptor_limit()
        self.events.catch((*self._job.signals, *_HARMLESS))
        self.snapshots_fd = os.memfd_create("phalanx-snapshots")  # of ranks, for those that come after them
        self._boxes = BoxMemory(self._job.num_local_ranks)  # in which ranks record what they do
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
        self._shutdown = Shutdown(
            self._job, self._ranks, self.events, self._forkers, self._survivors,
            say=self.say, on_end=self.recovery.told_to_end,
        )  # fmt: skip
        self._forkers.start(self._shared_environment(self._job.num_local_ranks), self._spare)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # see Keyboard
        return self

    def _shared_environment(self, num_ranks: int) -> dict[str, str]:
        """Return what the ranks have in common; torch is imported with their number of threads."""
        environ = shared_environment(_env.environment(), self._job.divide(num_ranks).shares[0])
        environ[_env.COMMAND_VARIABLE] = self._job.typed
        environ[_env.RECORD_VARIABLE] = self._boxes.path
        environ |= self._keyboard.environment()
        if not self._job.max_restarts:  # nobody would read them
            return environ
        return {**environ, _env.SNAPSHOT_VARIABLE: f"/proc/{os.getpid()}/fd/{self.snapshots_fd}"}

    def _note_attempt(self, world_size: int) -> None:
        self._notes.note_attempt("phalanx run", self._job.typed, os.path.abspath(self._folder.path), world_size)

    def note_state(self, state: str, left_s: float | None = None) -> None:
        """Tell whoever asks about the job what it does while none of its ranks runs here, and for how long at most."""
        self._notes.note_state(state, left_s)

    @property
    def keep_list(self) -> list[int]:
        """Children of this process that are nobody's rank."""
        return self._forkers.keep_list

    def _wants_standby(self) -> bool:
        return self._shutdown.by is None and self._forkers.prepare_standby([rank.folder for rank in self._ranks])

    def __exit__(self, *_: object) -> None:
        self.events.hold_signals()  # until this process has ended, none may change its exit code
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
        """Whether every rank of the last attempt has saved because it was asked to end, and can go on."""
        return bool(self._ranks) and all(rank.end is not None and rank.end.preempted for rank in self._ranks)

    @property
    def is_killing(self) -> bool:
        """Whether the ranks are being killed: a second signal asked for it, or a deadline has passed."""
        return self._shutdown.by == signal.SIGKILL

    def run_attempt(
        self, attempt: Attempt, until: Callable[[], bool] | None = None, *, may_keep: bool = False
    ) -> Ending | None:
        """Start the group once and return the cause of its failure; None if every rank ended with 0 or was told to end.

        Args:
            until: Asked every now and then while all ranks run; true: they are ended although none has failed.
            may_keep: Whether there may be another attempt, for which processes can be kept.
        """
        if self._late is not None:
            self.received = self._late
            self.say(f"{signal_name(self._late)}: the ranks are not started again")
        if self.received is not None:
            return None
        self._await_ends()
        self._shutdown.begin(may_keep=may_keep)
        self.began_s = time.monotonic()
        self._forker_failure: Ending | None = None
        self._refusals.clear()
        if not self._start_attempt(attempt, may_keep=may_keep):
            return None
        self.began_s = time.monotonic()
        self._watch_attempt(until)
        return self._forker_failure or find_culprit(self.ends)

    def _start_attempt(self, attempt: Attempt, *, may_keep: bool) -> bool:
        """Give kept processes their new places, and fork the other ranks; return whether we were not told to end."""
        environ = self._shared_environment(attempt.num_local_ranks)
        if not self._forkers.serves(environ) or attempt.num_local_ranks != len(self._ranks):
            self.dismiss_survivors()
        if not self._forkers.serves(environ):
            self._forkers.replace(environ)
        self._forkers.relieve()
        kept = self._open_ranks(attempt)
        self.recovery.begin(self._boxes.places(len(self._ranks)))
        self._await_forker()
        if self.received is not None or self._shutdown.by is not None:
            self._drop_unstarted()
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
                environ["COLUMNS"] = ""  # of our screen; the rank's terminal tells what the prefix leaves
            if rank in kept:
                self._notes.note_start(rank.rank, rank.pid)
                self._survivors.place(rank.pid, environ)
            else:
                self._start_rank(rank, local_rank, environ, shares[local_rank])
            self.wait(0)  # the forker tells of each start: with hundreds, what nobody reads would block it, and us
        return True

    def _await_forker(self) -> None:
        """Return when ranks can be forked, or need not be: another node may have ended the attempt."""
        said_at_s: float | None = time.monotonic() + IMPORT_S
        while self.received is None and self._shutdown.by is None and not self._forkers.is_ready:
            self.wait(None if said_at_s is None else max(0.0, said_at_s - time.monotonic()))
            if said_at_s is not None and time.monotonic() >= said_at_s:
                said_at_s = None
                self.say(f"no rank can start yet: process {self._forkers.pid} is still importing torch, or is stopped")

    def _drop_unstarted(self) -> None:
        for rank in self._ranks:
            if not rank.pid:
                rank.asked_to_end = rank.was_killed = True
                rank.record_end(signal.SIGKILL, is_reported=False)

    def _watch_attempt(self, until: Callable[[], bool] | None) -> None:
        """Return when every rank has ended, or waits for the next attempt."""
        stragglers = StragglerWatch(self._boxes.places(len(self._ranks)), self._say_straggler)
        while any(rank.is_running for rank in self._ranks):
            looks = until or self._console.is_holding(self._ranks) or self._wants_standby()
            timeout_s = _LOOK_S if looks else stragglers.timeout_s
            self.wait(self.recovery.within(timeout_s))
            stragglers.look()
            self.recovery.look()
            self._console.release_late(self._ranks)
            self._shutdown.judge()
            self._shutdown.repeat_lost_interrupts()
            if until and self._shutdown.by is None and all(rank.is_running for rank in self._ranks) and until():
                self.stop_attempt()
            self._shutdown.keep_deadline()
        self.events.deadline = None
        self._console.end_attempt()
        self.recovery.look(ends=self.ends)
        self._save_boxes()

    def dismiss_survivors(self) -> None:
        """End the processes that wait for the next attempt: it can't have them."""
        if any(rank.is_kept for rank in self._ranks):
            self._shutdown.end(signal.SIGTERM)
            self._await_ends()

    def _await_ends(self) -> None:
        """Return when every process has ended that was told to end between two attempts."""
        while any(rank.is_running for rank in self._ranks):
            self.wait()
            self._shutdown.keep_deadline()
        self._shutdown.has_ended()

    @property
    def ends(self) -> list[Ending]:
        """How the ranks of the last attempt have ended."""
        return [end for rank in self._ranks if (end := rank.end or rank.pause)]

    @property
    def has_progress(self) -> bool:
        """Whether a rank of the last attempt has noted that it has come far."""
        return self._notes.has_progress

    @property
    def have_trained_solo(self) -> bool:
        """Whether several ranks have trained in the last attempt, each without meeting any other."""
        return self._notes.num_solo == len(self._ranks) > 1

    @property
    def have_trained_apart(self) -> bool:
        """Whether several ranks have trained in a group in the last attempt, and exchanged nothing meanwhile."""
        return self._notes.num_apart == len(self._ranks) > 1

    def _save_boxes(self) -> None:
        """Keep what the ranks of this attempt have recorded, and make room for those of the next."""
        folder = Path(self._folder.path, "blackbox", f"attempt_{self._num_attempts - 1}")
        ends = [dataclasses.replace(end, ended_by_us=self._has_obeyed(end)) for end in self.ends]
        try:
            self._boxes.save(folder)
            save_ends(ends, folder)
            save_clocks(self.clocks, folder)
        except OSError as error:
            self._say_log_problem(error.strerror or str(error))

    def _has_obeyed(self, end: Ending) -> bool:
        """Whether a rank ended because it was told to, and not by a SIGKILL that is none of ours."""
        by_another = end.exitcode == -signal.SIGKILL and self._shutdown.by != signal.SIGKILL
        return end.ended_by_us and (not by_another or self._forker_failure is not None)

    def keep_reason(self, reason: str) -> None:
        """Keep what ends this run, if it is no rank, for whoever asks when it has ended."""
        try:
            save_reason(f"phalanx run {reason}", Path(self._folder.path, "blackbox"))
        except OSError as error:
            self._say_log_problem(error.strerror or str(error))

    def _open_ranks(self, attempt: Attempt) -> list[Rank]:
        """Make the ranks of an attempt; return those whose processes are those of the attempt before."""
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
        """Take in what has happened, signals too; return after the first news, `timeout_s` or at the deadline."""
        self.events.wait(self._shutdown.within(timeout_s))
        self._obey_signals()
        self._shutdown.say_who_is_late()

    def _say_log_problem(self, problem: str) -> None:
        if not self._said_log_problem:
            self._said_log_problem = True
            self.say(f"the logs in {self._folder.path} are incomplete: {problem}")

    def _rank_started(self, number: int, pid: int) -> None:
        rank = next(rank for rank in self._ranks if rank.rank == number)
        rank.pid = pid
        self._notes.note_start(number, pid)
        self._shutdown.catch_up(pid)

    def _rank_ended(self, pid: int, status: int) -> None:
        rank = next(rank for rank in self._ranks if rank.pid == pid)
        has_failure = self._shutdown.has_failure or not rank.asked_to_end
        end = rank.record_end(status, is_reported=self.received is None and has_failure)
        self._notes.note_end(end)
        if end.failed:
            self._shutdown.note_failure(end.when_s)

    def _rank_waits(self, pid: int) -> None:
        """A process has left its groups because another rank has failed, and can be kept."""
        rank = next((rank for rank in self._ranks if rank.pid == pid and rank.is_running), None)
        if rank is None:
            return
        pause = rank.record_pause()
        if pause.failed:
            self._shutdown.note_failure(pause.when_s)

    def _rank_refuses(self, pid: int, why: str) -> None:
        rank = next((rank for rank in self._ranks if rank.pid == pid and rank.is_running), None)
        if rank is None:
            return
        if why and why not in self._refusals:
            self._refusals.add(why)
            self.say(f"rank {rank.rank} can't be kept: {why}")
        self._shutdown.refuse(rank)

    def _lose_ranks(self, serving: Serving) -> None:
        """A forker has gone, and its ranks with it."""
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

    def stop_attempt(self, *, keeps: bool = False) -> None:
        """End the ranks although none of them failed.

        Args:
            keeps: Whether processes are kept for the next attempt, if they can be.
        """
        self._shutdown.stop(keeps=keeps)

    def kill_attempt(self) -> None:
        """End the ranks at once: they may not do another step."""
        self._shutdown.kill()

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
            elif sig in _ONLY_FORWARDED:  # to ranks alone: what they have started would mostly die of it
                self._forkers.signal(sig, [rank.pid for rank in self._ranks if rank.pid and rank.is_running])
            elif sig == signal.SIGTERM and self.drain is not None:
                drain, self.drain = self.drain, None
                drain()
            elif self.received not in (None, signal.SIGPIPE):  # asked a second time: at once
                self._say_kill(sig)
                self._shutdown.end(signal.SIGKILL)
            elif self._job.max_nodes == 1 and self._ranks and all(rank.has_ended() for rank in self._ranks):
                self._late = sig  # the outcome is decided, unless ranks are to be started again
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
                self._shutdown.end(signal.SIGTERM if sig == signal.SIGPIPE else sig)

    def _stop_all(self) -> None:
        """Stop the ranks, and then this process, until somebody sends SIGCONT: Ctrl-Z, and ``fg`` or ``bg``."""
        if self._job.max_nodes > 1:
            self.say("Ctrl-Z does nothing: the other nodes would take this one for lost")
            return
        if self._stopped_at_s is None:
            self._stopped_at_s = time.monotonic()
            self._signal_all(signal.SIGSTOP)
        if self._spare is None:  # else the client of a warm start is what the shell stops
            self.events.stop_process()
            self._continue_all()

    def _continue_all(self) -> None:
        """Let the ranks go on that were stopped with this process, with as much time as they had left."""
        if self._stopped_at_s is None:
            return
        stopped_s, self._stopped_at_s = time.monotonic() - self._stopped_at_s, None
        self.began_s += stopped_s
        self._shutdown.postpone(stopped_s)
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, sig: int) -> None:
        living = [rank.pid for rank in self._ranks if rank.pid and rank.end is None]
        self._forkers.signal(sig, living, groups=True)

    def _say_kill(self, sig: int) -> None:
        living = [rank for rank in self._ranks if rank.end is None]
        if living and self._shutdown.by != signal.SIGKILL:
            has_saved = any(was_preempted(rank.folder) for rank in self._ranks)
            saved = "the state was saved" if has_saved else "no Trainer has saved since the first"
            saved = next(filter(None, (words_of_checkpoints(rank.folder) for rank in self._ranks)), saved)
            again = " again" if sig == self.received else ""
            self.say(f"{signal_name(sig)}{again}: killing {counted(len(living), 'rank')} at once; {saved}")

    def _lose_reader(self) -> None:
        """End as on a signal, so that ranks can save. Where one has come, it has ended our reader, too: Ctrl-C does."""
        if not self._is_ending():
            self.events.note(signal.SIGPIPE)

    def _is_ending(self) -> bool:
        """Whether we have been told to end: then output that nobody reads must not hold us up."""
        return self.received is not None or any(sig not in _HARMLESS for sig in self.events.signals)

    # ------------------------------------------------------------ words

    def _say_straggler(self, text: str) -> None:
        self.say(text)
        self._notes.note_straggler(text)

    def say(self, text: str) -> None:
        """Write a line of the launcher's, on the screen and in its log."""
        self._console.say(text)

    def say_last(self, text: str) -> None:
        """Write the last words of the job, as they are."""
        self._console.say_last(text)
