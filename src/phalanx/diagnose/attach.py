"""``phalanx attach RANK``: asks the rank's process to open a debugger, and lends this terminal to the debugger."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

from phalanx._command_line import Parser, UsageError, whole_number
from phalanx._text import complain, named
from phalanx.debugging.attached import SIGNAL
from phalanx.debugging.terminal import listen_at
from phalanx.diagnose.jobs import NO_JOB, Job, NoRank, find_ranks, told_where
from phalanx.host.kernel import number_inside, status_of, threads_of
from phalanx.host.processes import off_limits
from phalanx.record.box import box_of_process
from phalanx.rendezvous.launched import note_lender, read_started, start_time
from phalanx.wire.lines import receive_line
from phalanx.wire.peer import peer_of
from phalanx.wire.places import make_path

_ANSWER_S = 2.0
_FAILED, _NO_JOB = 1, 2


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx attach`` with these arguments, and return its exit code."""
    parser = Parser(
        "phalanx attach",
        "phalanx attach RANK [--job JOB|PID]",
        "Open pdb in one rank of a job that phalanx run has started on this host. The other ranks wait for it without "
        "timing out. quit, Ctrl-D and Ctrl-C resume the rank. Exit code: 0 after that, 1 if the job has no such "
        "rank, or none that answers within two seconds, 2 if there is no such job.",
    )
    parser.add_argument("rank", metavar="RANK", type=whole_number, help="global rank of the process")
    parser.add_argument(
        "--job", metavar="JOB|PID", default="", help="run folder of the job, or the pid of phalanx run or of a rank"
    )
    try:
        given, more = parser.parse_known_args(argv)
        if len(more) == 1 and not more[0].startswith("-") and not given.job:
            raise UsageError(f"{more[0]!r} is no rank: --job names the job", more[0], ["--job", more[0]])
        if more:
            raise parser.unknown(more[0])
    except UsageError as error:
        return parser.refuse(error, argv)
    try:
        job = find_ranks(given.job, has_notes=True)
        pid = _process_of(job, given.rank)
        if where := told_where(job, given.job):
            complain(f"phalanx attach: {where}")
        try:
            connection = _ask(job, given.rank, pid)
        except (FileNotFoundError, ProcessLookupError):
            raise NoRank(f"rank {given.rank} (pid {pid}) has ended") from None
    except (LookupError, OSError) as error:
        complain(f"phalanx attach: {error}")
        return _NO_JOB if isinstance(error, LookupError) and not isinstance(error, NoRank) else _FAILED
    started = start_time(pid)
    complain(f"phalanx attach: rank {given.rank} (pid {pid}) is in the debugger; quit or Ctrl-D resumes it")
    with connection, contextlib.suppress(KeyboardInterrupt):
        _talk(connection)
    has_ended = start_time(pid) != started
    complain(f"phalanx attach: rank {given.rank} {'has ended' if has_ended else 'continues'}")
    return 0


def _process_of(job: Job, number: int) -> int:
    """Return the process of a running rank.

    Raises:
        NoRank: The rank does not run here, or ``phalanx run`` did not start its job.
    """
    if job.launcher == NO_JOB and (why_not := off_limits(job.launcher_pid)):
        raise NoRank(f"process {job.launcher_pid} ({job.name}) {why_not}")
    if not job.notes:
        is_none = job.launcher == NO_JOB
        what = f"process {job.launcher_pid} ({job.name}) is no rank of" if is_none else f"{job.name} is not"
        raise NoRank(f"{what} a job that phalanx run has started, and a debugger opens only in ranks of such a job")
    living = {rank.rank: rank.pid for rank in job.ranks if rank.process is not None and rank.process.state != "Z"}
    if number in living:
        return living[number]
    started = read_started(job.notes)
    there = f"{named('rank', list(living)) if living else 'no rank'} {'runs' if len(living) < 2 else 'run'} here"
    if started is not None and (ended := started.ended.get(number)):
        raise NoRank(f"rank {number} {ended.exit_words}; {there}")
    if number < job.world_size:
        raise NoRank(f"rank {number} does not run on this host: type phalanx attach {number} on its host; {there}")
    raise NoRank(f"{job.name} (pid {job.launcher_pid}) has no rank {number}; {there}")


def _ask(job: Job, rank: int, pid: int) -> socket.socket:
    """Return a connection to the debugger of a rank.

    Raises:
        NoRank: The debugger can't be opened now.
    """
    who = f"rank {rank} (pid {pid})"
    if number_inside(pid) != pid:
        raise NoRank(f"{who} runs in a container: type phalanx attach {rank} in there")
    _refuse_if_deaf(who, pid)
    path, listener = listen_at(make_path("attach"))
    with listener:
        try:
            note_lender(job.notes, pid, path)
            os.kill(pid, SIGNAL)
            listener.settimeout(_ANSWER_S)
            connection, _ = listener.accept()
        except TimeoutError:
            raise NoRank(
                f"{who} has not answered within {_ANSWER_S:g} s: its main thread is in native code that does not "
                f"return to Python, or a debugger is already attached{_where(pid)}"
            ) from None
        finally:
            os.unlink(path)
    if peer_of(connection) != (pid, os.geteuid()):
        connection.close()
        raise NoRank(f"{who} has not answered, but another process has")
    with contextlib.suppress(OSError, ValueError):
        receive_line(connection, _ANSWER_S)  # the reply: rank and pid, which we know
        return connection
    connection.close()
    raise NoRank(f"{who} began to answer, and has ended or stopped")


def _refuse_if_deaf(who: str, pid: int) -> None:
    """Raise `NoRank` if the signal that opens the debugger would end the process or stay pending."""
    facts = status_of(pid)
    if not facts:
        raise ProcessLookupError(f"{who} has ended")
    state = facts["State"][0]
    if state in "Tt":
        if state == "T" and facts["TracerPid"] == "0":
            raise NoRank(f"{who} is stopped; kill -CONT {pid} resumes it")
        raise NoRank(f"{who} is traced by another debugger (pid {facts['TracerPid']}); end that first")
    name, bit = f"SIGRTMIN+{SIGNAL - signal.SIGRTMIN}", 1 << (SIGNAL - 1)
    if not int(facts["SigCgt"], 16) & bit:
        raise NoRank(
            f"{who} does not take {name}, which opens a debugger: it has only just begun, its script has taken the "
            "signal, or it runs no Python"
        )
    threads = (status_of(pid, thread) for thread in threads_of(pid))
    if all(int(thread["SigBlk"], 16) & bit for thread in threads if thread):  # one unblocked thread is enough
        raise NoRank(f"{who} blocks {name}, which opens a debugger: its script has called pthread_sigmask")


def _where(pid: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        box = box_of_process(pid)
        still = [event for event in box.events if not event.ended_ns] if box else []
        if still:
            waits_s = (time.monotonic_ns() - still[-1].begun_ns) / 1e9
            return f"; it has been in {still[-1].op or still[-1].text} at {still[-1].site} for {waits_s:.0f} s"
    return ""


def _talk(connection: socket.socket) -> None:
    """Forward keyboard input to the rank and its output to the screen, until the rank hangs up."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if sys.stdin is not None:
        poll.register(0, select.POLLIN)
    else:  # stdin is closed, which counts as Ctrl-D; descriptor 0 may now be another file
        connection.shutdown(socket.SHUT_WR)
    while True:
        for fd, _ in poll.poll():
            if fd == 0 and sys.stdin is not None:
                if not _pass_on(connection):
                    poll.unregister(0)
                continue
            try:
                said = connection.recv(65536)
            except ConnectionResetError:  # the rank was killed
                said = b""
            if not said:
                return
            if sys.stdout is not None:
                sys.stdout.buffer.write(said)
                sys.stdout.buffer.flush()


def _pass_on(connection: socket.socket) -> bool:
    """Forward keyboard input to the rank; return whether more can follow."""
    typed = b""
    with contextlib.suppress(OSError):  # a file that can't be read counts as ended
        typed = os.read(0, 4096)
    with contextlib.suppress(BrokenPipeError):
        if typed:
            connection.sendall(typed)
        else:
            connection.shutdown(socket.SHUT_WR)
    return bool(typed)
