"""The client of ``phalanx run --warm``: hands the job over, stands for it at the terminal, and ends as it ends.

The job is forked elsewhere, but its streams, its folder, its umask, its environment and its open files (SCM_RIGHTS)
are those of this process, which passes signals on and ends by the wait status that it is told. It is imported before
anything else of a command, so it imports next to nothing itself.

The warm process greets first and only then is told what is wanted. The client's open files follow once the fork that
is to have them says "go"; that fork says "began" when it has them. Descriptors in the queue of a stopped process would
keep pipes open for good. Until "began" the client starts the job cold if anything fails; afterwards nothing needs the
warm process. With "began" comes a pidfd of the supervisor, which the client keeps: by it, ``phalanx why PID`` finds
the job of a client.

The job has the terminal's descriptors but is in another session, which may read what the shell should. So the
supervisor checks in ``/proc`` that the client is in the foreground before it reads what is typed.
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
from phalanx.host.processes import open_files
from phalanx.launch.processes import job_packets
from phalanx.launch.processes.endings import end_like
from phalanx.wire import places
from phalanx.wire.peer import peer_of

_IMPORT_S = 120.0  # in which a warm process has imported torch
_START_S = 60.0  # in which its fork has found out whether it can go on in our place
_OURS = """
    SIGKILL SIGSTOP SIGCONT SIGCHLD SIGTTIN SIGTTOU SIGURG SIGSEGV SIGBUS SIGFPE SIGILL SIGTRAP SIGSYS SIGABRT SIGPIPE
"""
# What is not passed on: it ends this process, and so the job, or it belongs to this process alone.
_NOT_PASSED_ON = {getattr(signal, name) for name in _OURS.split()}


def is_asked_for(argv: Sequence[str] = ()) -> bool:
    """Whether this may be a warm start; flags of ``phalanx run`` in `argv` are not told from those of the script."""
    environ = _env.environment()
    if _env.TRIAL_VARIABLE in environ:  # its launcher is looked into, and what it tells of itself is kept by modules
        return False
    return "--warm" in argv or _env.is_on(environ.get(_env.WARM_VARIABLE, ""))


def hand_over(kind: str, words: Sequence[str], *, passes_signals: bool = True, is_trial: bool = False) -> list[str]:
    """Have a warm process do what this one was started for, and end as that ends; return why none does it.

    Args:
        kind: "run" for a job of ``phalanx run``, "server" for the fork server of ``phalanx.spawn``.
        words: Arguments of the command, or what a fork server is to execute.
        passes_signals: Whether signals to this process are the other's; otherwise they are held back.
        is_trial: Whether only to ask: an answer of "go" is then returned too.
    """
    answers = []
    for path in places.sockets():
        if (connection := places.connect(path)) is not None:
            try:
                answer = _greeted(connection, path) or _offer(connection, kind, words, is_trial)
                if answer == "began":
                    _attend(connection, passes_signals)
                answers.append(answer)
            finally:
                connection.close()
    return answers


def _greeted(connection: _socket.socket, path: str) -> str:
    """Wait for the warm process, which may still import torch; return what is wrong with it, empty if nothing is.

    One that should answer and does not is stopped, or stuck: nobody is to find it again.
    """
    deadline = time.monotonic() + _IMPORT_S
    while True:
        was_importing = places.is_importing(path)
        connection.settimeout(places.READY_S)
        handshake, _ = job_packets.receive(connection)
        if handshake:
            return "" if handshake == [job_packets.HANDSHAKE] else str(handshake[0])
        if not job_packets.is_open(connection):
            return "has ended"
        if not was_importing or time.monotonic() > deadline:
            places.forget(path)
            pid, _ = peer_of(connection)
            if sys.stderr is not None:
                print(f"phalanx: the warm process {pid} does not answer; it gets no more jobs", file=sys.stderr)
            return "does not answer"


def _offer(connection: _socket.socket, kind: str, words: Sequence[str], is_trial: bool) -> str:
    """Return "began", or "go" for a trial, or why the warm process does not take it.

    Open files go only to the process that is to have them, once it has said that it goes on in our place: in the
    queue of one that is stuck, they would stay open. From it we keep a pidfd, by which `diagnose.jobs` finds it.
    """
    try:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        return f"the current folder can't be opened: {error.strerror}"
    request = _request(kind, words, is_trial)
    numbers = request["fds"]
    connection.settimeout(_START_S)
    try:
        job_packets.send(connection, request, fds=[folder])
        answer, _ = job_packets.receive(connection)
        if answer == ["go"] and not is_trial:
            for i in range(0, len(numbers), job_packets.MAX_FDS):
                job_packets.send(connection, fds=numbers[i : i + job_packets.MAX_FDS])
            answer, _ = job_packets.receive(connection)
    except OSError as error:
        return _untold(error)
    finally:
        os.close(folder)
    connection.settimeout(None)
    return str(answer[0]) if answer else "has ended, or does not answer"


def problem(kind: str, words: Sequence[str]) -> str:
    """Return why no warm process at all can be told what this one was started for; empty if one can."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        job_packets.send(ours, _request(kind, words, is_trial=True))
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
        "fds": [fd for fd in open_files() if _is_passed_on(fd)],
        "is_trial": is_trial,
    }


def interpreter_options() -> list[object]:
    """Return what the interpreter was started with; those of ``phalanx run`` itself do not count for ranks."""
    return [list(sys.flags), sys.warnoptions, sorted(map(repr, sys._xoptions.items()))]


def _is_passed_on(fd: int) -> bool:
    with contextlib.suppress(OSError):  # the listing's own
        return os.get_inheritable(fd)
    return False


def _attend(connection: _socket.socket, passes_signals: bool) -> NoReturn:
    if passes_signals:
        _pass_signals_on(connection)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    answer, _ = job_packets.receive(connection)
    end_like(os.waitstatus_to_exitcode(answer[0] if answer else signal.SIGKILL))


def _pass_signals_on(connection: _socket.socket) -> None:
    def pass_on(sig: int, _: FrameType | None) -> None:
        job_packets.send(connection, sig)

    def stop(sig: int, _: FrameType | None) -> None:
        """Stop as Ctrl-Z stops a process, and the job's ranks with this one."""
        job_packets.send(connection, sig)
        signal.signal(sig, signal.SIG_DFL)
        os.kill(os.getpid(), sig)
        signal.signal(sig, stop)  # from here on somebody has sent SIGCONT
        job_packets.send(connection, int(signal.SIGCONT))

    for sig in set(range(1, signal.NSIG)) - _NOT_PASSED_ON:
        with contextlib.suppress(OSError, ValueError):  # the C library's own
            if signal.getsignal(sig) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(sig, stop if sig == signal.SIGTSTP else pass_on)
