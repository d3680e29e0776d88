"""Starts a warm process where there is none that fits, and hands the job to it."""

from __future__ import annotations

import _socket
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from phalanx import _env
from phalanx.host.descriptors import take_streams
from phalanx.host.processes import command_of, open_files
from phalanx.launch.processes import job_packets
from phalanx.launch.processes.forker import SETTINGS_VARIABLE, die_with_parent
from phalanx.launch.processes.forker_client import with_hook
from phalanx.launch.warm import client, facts
from phalanx.wire import places
from phalanx.wire.peer import peer_of

_MAX_PROCESSES = 4  # of one user; the least recently used goes
_NAME = "phalanx-warm"  # what a warm process runs, for ps; there is no such script
_PIPE_BYTES = 1 << 20
_REPLY_S = 0.5  # of one that still imports torch, which is not to be expected
NOT_WARM = "no warm start"
"""How the reasons begin for which a job starts cold."""


def run_warm(
    kind: str,
    words: Sequence[str],
    environ: Mapping[str, str],
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    passes_signals: bool = True,
) -> str:
    """Have a warm process do what this one was started for, and end as that ends; return why none does it.

    Args:
        kind: Argument of `client.hand_over`.
        words: Argument of `client.hand_over`.
        environ: Environment of a process that has to be started.
        settings: Variables that are set while it imports torch.
        passes_signals: Argument of `client.hand_over`.
    """
    if problem := _problem(kind, words, environ):
        return f"{NOT_WARM}: {problem}"
    try:
        known: set[str] = set()
        new = ""
        while True:
            with _locked():  # so that of several that come at once, one starts a process, and the others wait for it
                if known.issuperset(places.sockets()):
                    new = start(environ, settings)
                known |= set(places.sockets())
            answers = client.hand_over(kind, words, passes_signals=passes_signals)
            if new:
                stop(new)  # it would not serve the next such job either
                return f"{NOT_WARM}: the new process {answers[0] if answers else 'has ended'}"
    except OSError as error:
        return f"{NOT_WARM}: {_no_place(error)}"


def stand_for_server() -> str:
    """Have a warm process be the fork server that multiprocessing has started; return why none is."""
    os.setpgid(0, 0)  # not of the group with which the process that spawns may be killed
    die_with_parent(os.getppid())  # and the server ends with us
    return run_warm("server", sys.orig_argv, _env.environment(), passes_signals=False)


def start_in_words(kind: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return, as a phrase, whether a warm process would be used."""
    problem = _problem(kind, words, environ)
    if not problem:
        try:
            places.make_folder()
        except OSError as error:
            problem = _no_place(error)
    if problem:
        return f"{NOT_WARM}: {problem}"
    answers = client.hand_over(kind, words, is_trial=True)
    if "go" in answers:
        return "warm start"
    return "; ".join(["starts a warm process first", *(f"the one there {answer}" for answer in answers)])


def _no_place(error: OSError) -> str:
    return f"no place for a socket: {error.strerror}: {error.filename}"


def _problem(kind: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return why no warm process can serve, also none that would be started; empty if one can."""
    if _env.TRIAL_VARIABLE in environ:
        return "it is a trial of phalanx check or phalanx tune"  # import torch obeys it, so later jobs would be in it
    if kind == "server" and _has_own_options():
        return "this interpreter was started with options of its own"
    if entry := facts.relative_path(environ):
        return f"PYTHONPATH has {entry}, which depends on the current folder"
    return client.problem(kind, words)


def _has_own_options() -> bool:
    """Whether this interpreter's settings are others than those that a warm process has from the environment."""
    if sys.orig_argv[1:2] == ["-c"]:
        return False
    program = f"from {client.__name__} import interpreter_options; print(interpreter_options())"
    plain = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    return plain.stdout.strip() != str(client.interpreter_options())


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    fd = os.open(places.make_folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def start(environ: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Start a warm process and return its socket; whoever connects to that waits until it has imported torch.

    Raises:
        OSError: There is no place for its socket.
    """
    for path in places.sockets()[_MAX_PROCESSES - 1 :]:
        stop(path)
    path, listener = places.make_socket()
    words, output = os.pipe()
    os.set_blocking(output, False)  # an import that prints more goes on, and the rest is lost
    with contextlib.suppress(OSError):
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    child = os.fork()
    if child == 0:
        _execute(environ, settings, listener, words, output, path)
    listener.close()
    os.close(words)
    os.close(output)
    os.waitpid(child, 0)
    return path


def _execute(
    environ: Mapping[str, str],
    settings: Mapping[str, str],
    listener: _socket.socket,
    words: int,
    output: int,
    path: str,
) -> NoReturn:
    """Become the warm process: nobody's child, in a session of its own, with nothing of ours open."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        places.listen(listener)
        take_streams(output)
        for fd in open_files():
            with contextlib.suppress(OSError):  # the listing's own
                os.set_inheritable(fd, fd in (0, 1, 2, listener.fileno(), words))
        os.chdir("/")
        serves = {
            _env.WARM_SERVER_VARIABLE: f"{listener.fileno()}:{words}:{path}",
            SETTINGS_VARIABLE: json.dumps(dict(settings)),
        }
        os.execve(sys.executable, [sys.executable, _NAME], {**with_hook(environ), **serves})
    finally:
        os._exit(1)


def describe(path: str) -> dict[str, Any] | None:
    """Return what a warm process tells of itself, or its pid and "state" if it does not; None if there is none."""
    return _ask(path, "list")


def stop(path: str) -> int | None:
    """End a warm process and return its pid, 0 if that is unknown; None if there is none.

    One that does not answer, such as one that still imports torch, is killed.
    """
    found = _ask(path, "stop")
    if found is None:
        return None
    pid = int(found["pid"])
    places.forget(path)
    if "state" in found and pid and _NAME in command_of(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return pid


def _ask(path: str, what: str) -> dict[str, Any] | None:
    is_importing = places.is_importing(path)
    connection = places.connect(path)
    if connection is None:
        return None
    connection.settimeout(_REPLY_S if is_importing else places.READY_S)
    handshake, _ = job_packets.receive(connection)
    answer: list[Any] = []
    if handshake == [job_packets.HANDSHAKE]:
        job_packets.send(connection, {"kind": what})
        answer, _ = job_packets.receive(connection)
    pid, _ = peer_of(connection)
    has_ended = not answer and not job_packets.is_open(connection)
    connection.close()
    if has_ended:
        return None
    return answer[0] if answer else {"pid": pid, "state": "still importing" if is_importing else "does not answer"}
