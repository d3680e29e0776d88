"""Start the ranks, carry their output, and end them all when one fails.

The loop (see `events`) wakes for output, for a signal, for news of a rank from the warden, or for the end of a grace
period.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import _env
from phalanx._launched import Notes
from phalanx._memory import of_rank
from phalanx._text import counted
from phalanx.launch.chorus import Chorus, Voice
from phalanx.launch.cpus import Share
from phalanx.launch.deadlines import CAUSE_S, KILL_S, SAME_S
from phalanx.launch.descriptors import raise_descriptor_limit
from phalanx.launch.environment import Attempt, rank_environment, shared_environment
from phalanx.launch.events import EventLoop
from phalanx.launch.job import Job
from phalanx.launch.keyboard import Keyboard
from phalanx.launch.notes import has_made_room, words_of_checkpoints
from phalanx.launch.outcome import Outcome, find_culprit, read_stderr
from phalanx.launch.output import Screen, prefix, printable
from phalanx.launch.ranks import Output, Rank
from phalanx.launch.recovery import Recovery
from phalanx.launch.run_folder import RunFolder
from phalanx.launch.standby import Standby
from phalanx.launch.stragglers import StragglerWatch
from phalanx.launch.warden import adopt_orphans
from phalanx.launch.warden_client import Warden
from phalanx.record.ends import End, save_ends
from phalanx.record.memory import BoxMemory

if TYPE_CHECKING:
    from phalanx.launch.warm.embryo import Embryo

_ONLY_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_HARMLESS = (*_ONLY_FORWARDED, signal.SIGWINCH)
_STDOUT, _STDERR = 1, 2
_LOOK_S = 0.2  # between questions whether the attempt is to end


class Supervisor:
    """Owns the warden, the ranks' streams and this process's signals."""

    def __init__(self, job: Job, folder: RunFolder, embryo: Embryo | None = None) -> None:
        self._job = job
        self._folder = folder
        self._embryo = embryo
        self._terminal_pid = embryo.client_pid if embryo is not None else os.getpid()  # whom a shell has started
        self.memory = job.memory  # what the ranks of the next attempt do about freed memory
        self._out, self._err = (Screen(fd, self._is_ending, self._lose_reader) for fd in (_STDOUT, _STDERR))
        if self._out.is_terminal and self._err.is_terminal:
            self._err = self._out  # one cursor, so one account of where it stands
        self.events = EventLoop(self._say_log_problem)
        self._ranks: list[Rank] = []
        self._num_attempts = 0
        self.received: int | None = None  # the one that ends the job
        self.drain: Callable[[], None] | None = None  # what the first SIGTERM asks for instead of the end of the job
        self.cause_before: Outcome | None = None  # of a failure that came before it
        self._late: int | None = None  # one that came when all ranks had ended
        self.began_s = 0.0  # when the ranks of this attempt were started
        self._ending_by: int | None = None  # the signal that ranks are being ended with
        self._first_failure_s: float | None = None
        self.spared: list[int] = []  # children of ours that are not the ranks'
        self._said_log_problem = False
        self.recovery = Recovery(Path(folder.path), self.say, agrees=job.max_nodes > 1)

    def __enter__(self) -> Supervisor:
        adopt_orphans()  # of a warden that is killed
        self._descriptors = raise_descriptor_limit()
        self.events.catch((*self._job.signals, *_HARMLESS))
        self._standby = Standby(
            self._job, self.events, self._err, os.path.join(self._folder.path, "standby.log"), self._descriptors
        )
        self.snapshots_fd = os.memfd_create("phalanx-snapshots")  # of ranks, for those that come after them
        self._boxes = BoxMemory(self._job.num_local_ranks)  # in which ranks record what they do
        self._notes = Notes()
        shown = next((screen for screen in (self._out, self._err) if screen.is_terminal), Screen(0))
        self._keyboard = Keyboard(self.events, shown, self._terminal_pid)
        self._start_warden(self._job.divide(self._job.num_local_ranks).shares)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # see Keyboard
        return self

    def _warden_environment(self, shares: Sequence[Share]) -> dict[str, str]:
        """Return what the ranks have in common; torch is imported with their number of threads."""
        environ = shared_environment(_env.environment(), shares[0])
        environ[_env.COMMAND_VARIABLE] = self._job.typed
        environ[_env.RECORD_VARIABLE] = self._boxes.path
        environ |= self._keyboard.environment()
        if not self._job.max_restarts:  # nobody would read them
            return environ
        return {**environ, _env.SNAPSHOT_VARIABLE: f"/proc/{os.getpid()}/fd/{self.snapshots_fd}"}

    def _start_warden(self, shares: Sequence[Share]) -> None:
        job = self._job
        self._warden_ready = False
        self._environ = self._warden_environment(shares)
        log = os.path.join(self._folder.path, "launch.log")
        self._warden_output = Output(self._err, b"phalanx run: ", log, live=False, shown=True)
        self._warden = Warden(
            job.command,
            self._environ,
            preload=job.preload,
            output_fd=self._warden_output.rank_fd,
            descriptors=self._descriptors,
            embryo=self._embryo,
        )
        self._embryo = None  # it is no process to start another from
        self._warden_output.hand_over()
        self.events.watch_output(self._warden_output)
        self.events.watch(self._warden.channel.fileno(), self._hear_warden)

    def _end_warden(self) -> None:
        if self._warden.channel.alive:
            self.events.unwatch(self._warden.channel.fileno())
        if not self._warden_ready:
            self._warden.kill()
        self._warden.close(self.spared)
        self.events.close_output(self._warden_output)

    def _wants_standby(self) -> bool:
        return self._ending_by is None and self._standby.prepare(self._environ, self._ranks[0].folder)

    def _relieve_warden(self) -> None:
        """Make the standby the warden, if it is ready; between attempts."""
        ready = self._standby.hand_over(self._environ)
        if ready is None:
            return
        warden, output = ready
        self.spared.append(warden.keeper_pid)
        self._end_warden()
        self.spared.remove(warden.keeper_pid)
        self._warden, self._warden_output, self._warden_ready = warden, output, True
        self.events.watch(warden.channel.fileno(), self._hear_warden)

    def __exit__(self, *_: object) -> None:
        self.events.hold_signals()  # until this process has ended, none may change its exit code
        self._standby.drop()
        self._end_warden()
        for output in (output for rank in self._ranks for output in rank.outputs):
            output.close()
        with contextlib.suppress(BrokenPipeError):
            self._out.show_cursor()
        self._keyboard.close()
        os.close(self.snapshots_fd)
        self._boxes.close()
        self._notes.close()
        self.events.close()

    # ------------------------------------------------------------ attempts

    @property
    def has_made_room(self) -> bool:
        """Whether every rank of the last attempt has saved because it was asked to end, and can go on."""
        return bool(self._ranks) and all(rank.end is not None and rank.end.made_room for rank in self._ranks)

    def run_attempt(self, attempt: Attempt, until: Callable[[], bool] | None = None) -> Outcome | None:
        """Start the group once and return the cause of its failure; None if every rank ended with 0 or was told to end.

        Args:
            until: Asked every now and then while all ranks run; true: they are ended although none has failed.
        """
        if self._late is not None:
            self.received = self._late
            self.say(f"{signal.Signals(self._late).name}: the ranks are not started again")
        if self.received is not None:
            return None
        self._ending_by = self._first_failure_s = None
        self.began_s = time.monotonic()
        self._warden_failure: Outcome | None = None
        shares = self._job.divide(attempt.num_local_ranks).shares
        if not self._warden.channel.alive or self._environ != self._warden_environment(shares):
            self._standby.start_over()
            self._end_warden()
            self._start_warden(shares)
        self._relieve_warden()
        self._open_ranks(attempt)
        self.recovery.begin(self._boxes.places(len(self._ranks)))
        while self.received is None and not self._warden_ready and self._warden.channel.alive:
            self.wait()
        if self.received is not None:
            return None
        self._notes.clear()
        self._notes.note_attempt("phalanx run", self._job.typed, os.path.abspath(self._folder.path), attempt.world_size)
        for local_rank, rank in enumerate(self._ranks):
            error_file = os.path.abspath(os.path.join(rank.folder, "error.json"))
            environ = rank_environment(attempt, local_rank, error_file)
            environ |= attempt.launch("phalanx run", self._notes.path, local_rank) | of_rank(self.memory)
            self._start_rank(rank, local_rank, environ, shares[local_rank])
            self.wait(0)  # the warden tells of each start: with hundreds, what nobody reads would block it, and us
        self.began_s = time.monotonic()
        stragglers = StragglerWatch(self._boxes.places(len(self._ranks)), self.say)
        while any(rank.end is None for rank in self._ranks):
            holds = self._chorus.is_waiting or any(rank.stderr.is_holding for rank in self._ranks)
            timeout_s = _LOOK_S if until or holds or self._wants_standby() else stragglers.timeout_s
            self.wait(self.recovery.within(timeout_s))
            stragglers.look()
            self.recovery.look()
            for rank in self._ranks:
                rank.stderr.release_late()
            self._chorus.flush(late_only=True)
            self._judge()
            self._repeat_lost_interrupts()
            if until and self._ending_by is None and all(rank.end is None for rank in self._ranks) and until():
                self.stop_attempt()
            self._keep_deadline()
        self.events.deadline = None
        self._chorus.flush()
        self.recovery.look(is_last=True)
        self._save_boxes()
        return self._warden_failure or find_culprit(self.ends)

    @property
    def ends(self) -> list[Outcome]:
        """How the ranks of the last attempt have ended."""
        return [rank.end for rank in self._ranks if rank.end]

    @property
    def has_progress(self) -> bool:
        """Whether a rank of the last attempt has noted that it has come far."""
        return self._notes.has_progress

    @property
    def have_trained_alone(self) -> bool:
        """Whether several ranks have trained in the last attempt, each without meeting any other."""
        return self._notes.num_alone == len(self._ranks) > 1

    def _save_boxes(self) -> None:
        """Keep what the ranks of this attempt have recorded, and make room for those of the next."""
        folder = Path(self._folder.path, "blackbox", f"attempt_{self._num_attempts - 1}")
        ends = {end.rank: End(end.exitcode or 0, end.ended_by_us, int(end.when_s * 1e9)) for end in self.ends}
        try:
            self._boxes.save(folder)
            save_ends(ends, folder)
        except OSError as error:
            self._say_log_problem(str(error))

    def _open_ranks(self, attempt: Attempt) -> None:
        job = self._job
        live_rank = job.shown_ranks[0] if job.shown_ranks else 0
        for rank in self._ranks:
            for output in rank.outputs:
                self.events.close_output(output)
        self._ranks = []
        num_shown = len(job.shown_ranks) if job.shown_ranks else attempt.num_local_ranks
        self._chorus = chorus = Chorus(self._err.write_lines, num_shown)
        for local_rank in range(attempt.num_local_ranks):
            rank_number = attempt.first_rank + local_rank
            folder = self._folder.rank_folder(self._num_attempts, rank_number)
            outputs = []
            for stream, name, screen in ((_STDOUT, "stdout", self._out), (_STDERR, "stderr", self._err)):
                shown = job.shown_ranks is None or local_rank in job.shown_ranks
                kept_off = _bits(job.redirects, local_rank) & ~_bits(job.tees, local_rank) & stream
                output = Output(
                    screen,
                    prefix(rank_number, colour=screen.is_terminal),
                    os.path.join(folder, f"{name}.log"),
                    live=screen.is_terminal and local_rank == live_rank,
                    shown=shown and not kept_off,
                    voice=partial(Voice, chorus, rank_number) if stream == _STDERR and num_shown > 1 else None,
                )
                self.events.watch_output(output)
                outputs.append(output)
            self._ranks.append(Rank(rank_number, folder, *outputs))
        self._num_attempts += 1

    def _start_rank(self, rank: Rank, local_rank: int, environ: dict[str, str], share: Share) -> None:
        job = self._job
        stdin = self._keyboard.stdin_of(rank) if local_rank == 0 else os.open(os.devnull, os.O_RDONLY)
        self._warden.start_rank(
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
        self.events.wait(timeout_s)
        self._obey_signals()

    def _say_log_problem(self, problem: str) -> None:
        if not self._said_log_problem:
            self._said_log_problem = True
            self.say(f"the logs in {self._folder.path} are incomplete: {problem}")

    def _hear_warden(self) -> None:
        for packet in self._warden.channel.receive():
            if "ready" in packet:
                self._warden_ready = True
            elif "started" in packet:
                self._rank_started(packet["rank"], packet["started"])
            else:
                self._rank_ended(packet["ended"], packet["status"])
        if not self._warden.channel.alive:
            self.events.unwatch(self._warden.channel.fileno())
            self._lose_ranks()

    def _rank_started(self, number: int, pid: int) -> None:
        rank = next(rank for rank in self._ranks if rank.rank == number)
        rank.pid = pid
        self._notes.note_start(number, pid)
        if self._ending_by is not None:
            self._warden.signal(self._ending_by, [pid])

    def _rank_ended(self, pid: int, status: int) -> None:
        rank = next(rank for rank in self._ranks if rank.pid == pid)
        has_failure = self._first_failure_s is not None or not rank.asked_to_end
        end = rank.record_end(status, is_reported=self.received is None and has_failure)
        self._notes.note_end(end.rank, end.pid, end.exitcode or 0, end.last_words.summary if end.raised else "")
        if end.failed and self._first_failure_s is None:
            self._first_failure_s = end.when_s

    def _lose_ranks(self) -> None:
        """The warden has gone, and the ranks with it."""
        living = [rank for rank in self._ranks if rank.end is None]
        for rank in living:
            rank.asked_to_end = True
            rank.record_end(signal.SIGKILL, is_reported=self.received is None)
        if living or not self._ranks:
            self._warden_output.drain(drops_last_words=True)
            self._warden_failure = Outcome(
                rank=-1,
                pid=self._warden.pid,
                exitcode=os.waitstatus_to_exitcode(self._warden.status()),
                last_words=read_stderr(self._warden_output.tail),
                folder=self._folder.path,
                when_s=time.monotonic(),
            )

    # ------------------------------------------------------------ decisions

    def _judge(self) -> None:
        """End the others once the cause of a failure is known, or has had time enough to show."""
        if self._first_failure_s is None or self._ending_by is not None:
            return
        culprit = find_culprit(self.ends)
        assert culprit is not None
        if culprit.is_victim:
            awaited = any(rank.end is None for rank in self._ranks)
        else:  # it names no reason, and another is just dying of one
            silent = not culprit.signal and not culprit.last_words.kind
            awaited = silent and any(rank.end is None and rank.said_why for rank in self._ranks)
        give_up_s = self._first_failure_s + CAUSE_S
        if self._job.max_restarts and culprit.raised and not awaited:  # the others may do the same: see attempts
            awaited, give_up_s = any(rank.end is None for rank in self._ranks), self._first_failure_s + SAME_S
        if culprit.made_room:  # and so will the others
            awaited, give_up_s = True, self._first_failure_s + self._job.grace_s
        if awaited and time.monotonic() < give_up_s:
            self.events.deadline = give_up_s
        else:
            self._end_ranks(signal.SIGTERM)

    def stop_attempt(self) -> None:
        """End the ranks although none of them failed."""
        if self._ending_by is None:
            self._end_ranks(signal.SIGTERM)

    def kill_attempt(self) -> None:
        """End the ranks at once: they may not do another step."""
        if any(rank.end is None for rank in self._ranks) and self._ending_by != signal.SIGKILL:
            self._end_ranks(signal.SIGKILL)

    def _end_ranks(self, sig: int) -> None:
        """Tell every rank that lives to end; SIGKILL follows after the grace period."""
        self.recovery.told_to_end()
        living = [rank for rank in self._ranks if rank.end is None]
        for rank in living:
            rank.asked_to_end = True
        self._ending_by = sig
        wait_s = KILL_S if sig == signal.SIGKILL else self._job.grace_s
        self.events.deadline = time.monotonic() + wait_s
        self._warden.signal(sig, [rank.pid for rank in living if rank.pid])

    def _keep_deadline(self) -> None:
        if self._ending_by is not None and self.events.is_late:
            if self._ending_by == signal.SIGKILL:
                self._warden.kill()
            self._end_ranks(signal.SIGKILL)

    def _obey_signals(self) -> None:
        while self.events.signals:
            sig = self.events.signals.pop(0)
            if sig == signal.SIGWINCH:
                for output in (output for rank in self._ranks for output in rank.outputs):
                    output.resize()
            elif sig in _ONLY_FORWARDED:  # to ranks alone: what they have started would mostly die of it
                living_pids = [rank.pid for rank in self._ranks if rank.pid and rank.end is None]
                self._warden.signal(sig, living_pids, groups=False)
            elif sig == signal.SIGTERM and self.drain is not None:
                drain, self.drain = self.drain, None
                drain()
            elif self.received not in (None, signal.SIGPIPE):  # asked a second time: at once
                self._say_kill(sig)
                self._end_ranks(signal.SIGKILL)
            elif self._job.max_nodes == 1 and self._ranks and all(rank.has_ended() for rank in self._ranks):
                self._late = sig  # the outcome is decided, unless ranks are to be started again
            else:
                self.received = sig
                self.cause_before = find_culprit([rank.end for rank in self._ranks if rank.end])
                living = [rank for rank in self._ranks if rank.end is None]
                why = "nobody reads our output any more" if sig == signal.SIGPIPE else signal.Signals(sig).name
                again = "; Ctrl-C again kills them" if sig == signal.SIGINT else ""
                self.say(f"{why}: ending {counted(len(living), 'rank')}{again}")
                if sig == signal.SIGINT:
                    for rank in self._ranks:
                        rank.stderr.hide_interrupts()
                self._end_ranks(signal.SIGTERM if sig == signal.SIGPIPE else sig)

    def _say_kill(self, sig: int) -> None:
        living = [rank for rank in self._ranks if rank.end is None]
        if living and self._ending_by != signal.SIGKILL:
            has_saved = any(has_made_room(rank.folder) for rank in self._ranks)
            saved = "the state was saved" if has_saved else "no Trainer has saved since the first"
            saved = next(filter(None, (words_of_checkpoints(rank.folder) for rank in self._ranks)), saved)
            again = " again" if sig == self.received else ""
            self.say(f"{signal.Signals(sig).name}{again}: killing {counted(len(living), 'rank')} at once; {saved}")

    def _repeat_lost_interrupts(self) -> None:
        """Send SIGINT again to ranks that have printed that they ignored its exception: an import may swallow it."""
        if self._ending_by == signal.SIGINT:
            lost = [rank.pid for rank in self._ranks if rank.end is None and rank.stderr.lost_interrupt()]
            if lost:
                self._warden.signal(signal.SIGINT, lost)

    def _lose_reader(self) -> None:
        """End as on a signal, so that ranks can save. Where one has come, it has ended our reader, too: Ctrl-C does."""
        if not self._is_ending():
            self.events.note(signal.SIGPIPE)

    def _is_ending(self) -> bool:
        """Whether we have been told to end: then output that nobody reads must not hold us up."""
        return self.received is not None or any(sig not in _HARMLESS for sig in self.events.signals)

    # ------------------------------------------------------------ words

    def say(self, text: str) -> None:
        self._out.end_line()
        self._err.end_line()
        self._err.write_lines(printable(f"phalanx run: {text}\n"))

    def say_last(self, text: str) -> None:
        """Write the last words of the job, as they are."""
        self._out.end_line()
        self._err.end_line()
        self._err.write(printable(text))


def _bits(streams: tuple[int, ...], local_rank: int) -> int:
    return streams[local_rank] if streams else 0
