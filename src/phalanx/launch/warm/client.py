"""The client of ``phalanx run --warm``: hands the job over, stands for it at the terminal, and ends as the job ends.

The job is forked elsewhere, but its streams, folder, umask, environment and open files (SCM_RIGHTS) are those of this
process. The client passes signals on, and ends with the wait status that the guard of the job reports. A command
imports this module before anything else, so the module itself imports next to nothing.

The warm process greets first, and only then does the client send its request. The child that will become the job
answers "go", the client sends the open files, and the child answers "began". The files are sent this late, because
descriptors in the queue of a suspended process would keep pipes open forever. If anything fails before "began", the
client starts the job cold; after "began", nothing depends on the warm process. With "began", the child sends a pidfd of
the supervisor. The client keeps this pidfd, so that ``phalanx why PID`` finds the job by the pid of its client.

The job has the terminal's descriptors but is in another session, so the kernel would let it read what is typed for the
shell. Therefore the supervisor checks in ``/proc``, before it reads, that the client is in the foreground.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from phalanx import _env
from phalanx.launch.deadlines import WARM_IMPORT_S, WARM_START_S
from phalanx.launch.processes.endings import end_like
from phalanx.wire import places
from phalanx.wire.packets import MAX_FDS, PacketSocket
from phalanx.wire.peer import peer_of

HANDSHAKE = "ready"
"""First packet from a warm process; any other first packet says why the process can't serve."""
_OURS = """
    SIGKILL SIGSTOP SIGCONT SIGCHLD SIGTTIN SIGTTOU SIGURG SIGSEGV SIGBUS SIGFPE SIGILL SIGTRAP SIGSYS SIGABRT SIGPIPE
"""
# Signals that are not passed on: they end this process, and thereby the job, or concern only this process.
_NOT_PASSED_ON = {getattr(signal, name) for name in _OURS.split()}


def is_asked_for(argv: Sequence[str] = ()) -> bool:
    """Return whether the user may have asked for a warm start; a script's own ``--warm`` in `argv` also counts."""
    return "--warm" in argv or _env.is_on(_env.environment().get(_env.WARM_VARIABLE, ""))


def hand_over(kind: str, words: Sequence[str], *, passes_signals: bool = True, is_trial: bool = False) -> list[str]:
    """Let a warm process do this process's work, then end with that work's status. If none does it, return the reasons.

    Args:
        kind: "run" for a job of ``phalanx run``, "server" for the fork server of ``phalanx.spawn``.
        words: Arguments of the command, or the program of a fork server.
        passes_signals: Whether signals to this process are passed on; otherwise they are blocked.
        is_trial: Whether to ask without starting anything. A process that would do the work then answers "go".
    """
    answers = []
    for path in places.sockets():
        if (channel := connect(path)) is not None:
            try:
                answer = _greeted(channel, path) or _offer(channel, kind, words, is_trial)
                if answer == "began":
                    _attend(channel, passes_signals)
                answers.append(answer)
            finally:
                channel.close()
    return answers


def connect(path: str) -> PacketSocket | None:
    """Return a connection to this user's warm process that listens at `path`; None if there is no such process."""
    end = places.connect(path)
    return None if end is None else PacketSocket(end, marshals=True)


def _greeted(channel: PacketSocket, path: str) -> str:
    """Wait for the greeting of a warm process, which may still be importing torch; return what is wrong, or "".

    A process that does not answer in time is suspended or stuck, and its socket is removed.
    """
    deadline = time.monotonic() + WARM_IMPORT_S
    while True:
        was_importing = places.is_importing(path)
        channel.end.settimeout(places.READY_S)
        if said := channel.wait():
            return "" if said == HANDSHAKE else str(said)
        if not channel.is_open():
            return "has ended"
        if not was_importing or time.monotonic() > deadline:
            places.forget(path)
            pid, _ = peer_of(channel.end)
            if sys.stderr is not None:
                print(f"phalanx: the warm process {pid} does not answer; it gets no more jobs", file=sys.stderr)
            return "does not answer"


def _offer(channel: PacketSocket, kind: str, words: Sequence[str], is_trial: bool) -> str:
    """Return "began" (for a trial, "go") if the warm process accepts the job, otherwise why it refuses.

    Open files are sent only after the process that becomes the job has answered: in the queue of a stuck process, they
    would stay open. The pidfd that the new process sends stays open here, because `diagnose.jobs` finds the job by it.
    """
    try:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        return f"the current folder can't be opened: {error.strerror}"
    request = _request(kind, words, is_trial)
    numbers = request["fds"]
    channel.end.settimeout(WARM_START_S)
    try:
        channel.send(request, [folder])
        answer, _ = channel.take()
        if answer == "go" and not is_trial:
            for i in range(0, len(numbers), MAX_FDS):
                channel.send("files", numbers[i : i + MAX_FDS])
            answer, _ = channel.take()
    except OSError as error:
        return _untold(error)
    finally:
        os.close(folder)
    channel.end.settimeout(None)
    return str(answer) if answer else "has ended, or does not answer"


def problem(kind: str, words: Sequence[str]) -> str:
    """Return why this request can't be sent to any warm process; empty if it can."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        PacketSocket(ours, marshals=True).send(_request(kind, words, is_trial=True))
    except OSError as error:
        return _untold(error)
    finally:
        ours.close()
        theirs.close()
    return ""


def _untold(error: OSError) -> str:
    return f"the environment, the arguments and the open files can't be passed on: {error.strerror}"


def _request(kind: str, words: Sequence[str], is_trial: bool) -> dict[str, Any]:
    with open("/proc/self/cmdline", "rb") as file:
        command_line = file.read()
    old_umask = os.umask(0o077)
    os.umask(old_umask)
    return {
        "kind": kind,
        "words": list(words),
        "environ": _env.environment(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "options": interpreter_options(),
        "command_line": command_line,
        "umask": old_umask,
        "blocked": [int(sig) for sig in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        # Not with `host.processes.open_files`: `host` is slow to import.
        "fds": [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_passed_on(fd)],
        "is_trial": is_trial,
    }


def interpreter_options() -> list[object]:
    """Return the options of this interpreter that ranks would inherit."""
    return [list(sys.flags), sys.warnoptions, sorted(map(repr, sys._xoptions.items()))]


def _is_passed_on(fd: int) -> bool:
    with contextlib.suppress(OSError):  # fails for the descriptor that listed the folder
        return os.get_inheritable(fd)
    return False


def _attend(channel: PacketSocket, passes_signals: bool) -> NoReturn:
    if passes_signals:
        _pass_signals_on(channel)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    status = channel.wait()
    end_like(os.waitstatus_to_exitcode(signal.SIGKILL if status is None else status))


def _pass_signals_on(channel: PacketSocket) -> None:
    def pass_on(sig: int, _: FrameType | None) -> None:
        channel.send(sig)

    def stop(sig: int, _: FrameType | None) -> None:
        """Suspend this process and the job's ranks, as Ctrl-Z does."""
        channel.send(sig)
        signal.signal(sig, signal.SIG_DFL)
        os.kill(os.getpid(), sig)
        signal.signal(sig, stop)  # reached after SIGCONT
        channel.send(int(signal.SIGCONT))

    for sig in set(range(1, signal.NSIG)) - _NOT_PASSED_ON:
        with contextlib.suppress(OSError, ValueError):  # some numbers are reserved by the C library
            if signal.getsignal(sig) != signal.SIG_IGN:  # so that a job under nohup still ignores SIGHUP
                signal.signal(sig, stop if sig == signal.SIGTSTP else pass_on)
