"""Starts the ranks and watches them; `console` shows their output, `signals` obeys signals, `shutdown` ends the ranks.

``phalanx run train.py`` -> flags -> plan -> `Job` -> supervisor. The supervisor forks the forker at once. Within 0.1 s,
while the forker is still importing torch, the supervisor is ready for output and signals. Its loop (see
`screen.events`) wakes for output, for a signal, for a message of the forker about a rank, or at the end of a grace
period.

**Why supervisor and forker are two processes.** The supervisor handles signals, owns the terminal and imports nothing
heavy. The forker has torch in memory but no handlers, threads or output, so its forks are as clean as new processes.
`reaper` explains which process ends which when one of them is killed.
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
from phalanx._text import named
from phalanx.checkpoint.memory.layout import MEMORY_NAME
from phalanx.failure.ending import Ending, find_culprit, read_stderr
from phalanx.failure.ends import save_ends, save_reason
from phalanx.host.block_pool import of_rank
from phalanx.host.cpus import Share
from phalanx.host.descriptors import raise_descriptor_limit
from phalanx.host.shared_blocks import path_of, unnamed_file
from phalanx.launch.deadlines import IMPORT_S
from phalanx.launch.environment import Attempt, rank_environment, shared_environment
from phalanx.launch.job import Job
from phalanx.launch.processes.descendants import adopt_orphans
from phalanx.launch.processes.forkers import Forkers, Serving
from phalanx.launch.run.recovery import Recovery
from phalanx.launch.run.shutdown import Shutdown
from phalanx.launch.run.signals import HARMLESS, Signals
from phalanx.launch.run.survivors import Survivors
from phalanx.launch.screen.console import Console
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.keyboard import Keyboard
from phalanx.launch.screen.output import Screen
from phalanx.launch.screen.ranks import Rank
from phalanx.launch.screen.stragglers import StragglerWatch
from phalanx.record.clocks import save_clocks
from phalanx.record.memory import BoxMemory
from phalanx.record.run_folder import RunFolder
from phalanx.rendezvous.launched import Notes

if TYPE_CHECKING:
    from phalanx.launch.processes.spare import Spare

_LOOK_S = 0.2  # pause between two calls of `until`, see `run_attempt`


class Supervisor:
    """Owns the forker and the ranks of an attempt."""

    def __init__(self, job: Job, folder: RunFolder, spare: Spare | None = None) -> None:
        self._job = job
        self._folder = folder
        self._spare = spare
        self._terminal_pid = spare.client_pid if spare is not None else os.getpid()  # process that the shell started
        self.memory = job.memory  # the next attempt's policy for freed memory
        self.events = EventLoop(self._say_log_problem)
        self._console = Console(
            job, folder, self.events, lambda: self.signals.are_ending, lambda: self.signals.lose_reader()
        )
        self._ranks: list[Rank] = []
        self._num_attempts = 0
        self.clocks: Mapping[str, Sequence[float]] = {}  # offsets of other hosts' clocks, from `clocks.Clocks.told`
        self.began_s = 0.0  # when the ranks of this attempt were started
        self._refusals: set[str] = set()  # reasons why processes can't be kept, as reported in this attempt
        self._said_log_problem = False
        self.recovery = Recovery(Path(folder.path), self.say, agrees=job.max_nodes > 1)

    def __enter__(self) -> Supervisor:
        adopt_orphans()  # in order to end the children of a forker that is killed
        self._descriptors = raise_descriptor_limit()
        self.events.catch((*self._job.signals, *HARMLESS))
        self.snapshots_fd = unnamed_file(MEMORY_NAME)  # keeps the ranks' snapshots for the next attempt
        self._shared_fd = unnamed_file("phalanx-dataset")  # keeps what ranks share for the next attempt, too
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
        self.signals = Signals(
            self._job, self._ranks, self.events, self._forkers, self.shutdown,
            say=self.say, keep_reason=self.keep_reason, postpone=self._postpone, is_warm=self._spare is not None,
        )  # fmt: skip
        self._forkers.start(self._shared_environment(self._job.num_local_ranks), self._spare)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # see Keyboard
        return self

    def _shared_environment(self, num_ranks: int) -> dict[str, str]:
        """Return the variables that all ranks share, with the number of threads for the import of torch."""
        environ = shared_environment(_env.environment(), self._job.divide(num_ranks).shares[0])
        environ[_env.COMMAND_VARIABLE] = self._job.typed
        environ[_env.RECORD_VARIABLE] = self._boxes.path
        environ |= self._keyboard.environment()
        if not self._job.max_restarts:  # without another attempt, nobody would read what is kept
            return environ
        kept = {_env.SNAPSHOT_VARIABLE: self.snapshots_fd, _env.SHARED_VARIABLE: self._shared_fd}
        return {**environ, **{name: path_of(fd) for name, fd in kept.items()}}

    def _note_attempt(self, world_size: int) -> None:
        self._notes.note_attempt("phalanx run", self._job.typed, os.path.abspath(self._folder.path), world_size)

    def note_state(self, state: str, left_s: float | None = None) -> None:
        """Record, for ``phalanx why``, what the job is doing while no rank runs here, and for how long at most."""
        self._notes.note_state(state, left_s)

    @property
    def keep_list(self) -> list[int]:
        """Children of this process that are not ranks, and are spared when ranks are killed."""
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
        os.close(self._shared_fd)
        self._boxes.close()
        self._notes.close()
        self.events.close()

    # ------------------------------------------------------------ attempts

    @property
    def was_preempted(self) -> bool:
        """Whether every rank of the last attempt was preempted: it was asked to end, has ended and can resume."""
        return bool(self._ranks) and all(rank.end is not None and rank.end.preempted for rank in self._ranks)

    def run_attempt(
        self, attempt: Attempt, until: Callable[[], bool] | None = None, *, may_keep: bool = False
    ) -> Ending | None:
        """Run the ranks once; return the cause of their failure, None if every rank exited with 0 or was told to end.

        Args:
            until: Function called regularly while all ranks run; if it returns True, the attempt is ended.
            may_keep: Whether another attempt may follow, for which processes can be kept.
        """
        if self.signals.forbid_start():
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
        """Give kept processes their new ranks, and fork the other ranks; return False if the attempt has been ended."""
        environ = self._shared_environment(attempt.num_local_ranks)
        if not self._forkers.serves(environ) or attempt.num_local_ranks != len(self._ranks):
            self.dismiss_survivors()
        if not self._forkers.serves(environ):
            self._forkers.replace(environ)
        self._forkers.relieve()
        kept = self._open_ranks(attempt)
        self.recovery.begin(self._boxes.places(len(self._ranks)))
        self._await_forker()
        if self.signals.received is not None or self.shutdown.by is not None:
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
            environ[_env.COLUMNS_VARIABLE] = str(self._console.err.room_of(rank.rank) or "")
            if not all(output.has_room(_env.environment().get("COLUMNS", "")) for output in rank.outputs):
                environ["COLUMNS"] = ""  # the inherited width is the screen's; the prefix needs a part of it
            if rank in kept:
                self._notes.note_start(rank.rank, rank.pid)
                self._survivors.place(rank.pid, environ)
            else:
                self._start_rank(rank, local_rank, environ, shares[local_rank])
            self.wait(0)  # reads the forker's reports of starts: hundreds of unread reports would block both processes
        return True

    def _await_forker(self) -> None:
        """Wait until ranks can be forked, or until the attempt is ended, perhaps because of another node."""
        said_at_s: float | None = time.monotonic() + IMPORT_S
        while self.signals.received is None and self.shutdown.by is None and not self._forkers.is_ready:
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
        """Wait until every process that was told to end between two attempts has ended."""
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
        """Whether a rank of the last attempt has recorded a sign of training (see `attempts`)."""
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
        """Save the black boxes of this attempt, and free them for the next attempt."""
        folder = Path(self._folder.path, "blackbox", f"attempt_{self._num_attempts - 1}")
        ends = [dataclasses.replace(end, ended_by_us=self._has_obeyed(end)) for end in self.ends]
        try:
            self._boxes.save(folder)
            save_ends(ends, folder)
            save_clocks(self.clocks, folder)
        except OSError as error:
            self._say_log_problem(error.strerror or str(error))

    def _has_obeyed(self, end: Ending) -> bool:
        """Return whether a rank ended because the supervisor told it to, and not because of somebody else's SIGKILL."""
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
        """Handle events and signals; return after the first event, after `timeout_s` or at the deadline."""
        self.events.wait(self.shutdown.within(timeout_s))
        self.signals.obey()
        self.shutdown.say_who_is_late()

    def _postpone(self, stopped_s: float) -> None:
        self.began_s += stopped_s
        self.shutdown.postpone(stopped_s)

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
        end = rank.record_end(status, is_reported=self.signals.received is None and has_failure)
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
        """Handle the end of a forker; all its ranks have ended with it."""
        is_current = self._forkers.is_current(serving)
        living = [
            rank
            for rank in self._ranks
            if rank.end is None and (rank.pid in serving.pids or (is_current and not rank.pid))
        ]
        for rank in living:
            rank.asked_to_end = rank.was_killed = True
            rank.record_end(signal.SIGKILL, is_reported=self.signals.received is None)
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

    # ------------------------------------------------------------ words

    def _say_straggler(self, text: str) -> None:
        self.say(text)
        self._notes.note_straggler(text)

    def say(self, text: str) -> None:
        """Write a line on the screen and in the launcher's log."""
        self._console.say(text)

    def say_last(self, text: str) -> None:
        """Write the final report of the job, unchanged."""
        self._console.say_last(text)
