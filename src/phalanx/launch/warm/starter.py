"""Hands a job to a warm process, after starting one if no running warm process fits the job."""

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
from phalanx.launch.deadlines import WARM_REPLY_S
from phalanx.launch.processes.descendants import die_with_parent
from phalanx.launch.processes.forker import SETTINGS_VARIABLE
from phalanx.launch.processes.forker_client import with_hook
from phalanx.launch.warm import client, facts
from phalanx.wire import places
from phalanx.wire.peer import peer_of

_MAX_PROCESSES = 4  # limit for a user's warm processes; beyond it, the least recently used one is ended
_NAME = "phalanx-warm"  # shown by ps in place of a script; there is no such script
_PIPE_BYTES = 1 << 20
NOT_WARM = "no warm start"
"""Beginning of each message that says why a job starts cold."""


def run_warm(
    kind: str,
    words: Sequence[str],
    environ: Mapping[str, str],
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    passes_signals: bool = True,
) -> str:
    """Let a warm process do this process's work, then end with that work's status. If none does it, return the reason.

    Args:
        kind: Argument of `client.hand_over`.
        words: Argument of `client.hand_over`.
        environ: Environment for a warm process, if one has to be started.
        settings: Variables to set while the warm process imports torch.
        passes_signals: Argument of `client.hand_over`.
    """
    if problem := _problem(kind, words, environ):
        return f"{NOT_WARM}: {problem}"
    try:
        known: set[str] = set()
        new = ""
        while True:
            with _locked():  # if several clients start at once, only one starts a process
                if known.issuperset(places.sockets()):
                    new = start(environ, settings)
                known |= set(places.sockets())
            answers = client.hand_over(kind, words, passes_signals=passes_signals)
            if new:
                stop(new)  # the new process has refused this job, and would refuse similar ones, too
                return f"{NOT_WARM}: the new process {answers[0] if answers else 'has ended'}"
    except OSError as error:
        return f"{NOT_WARM}: {_no_place(error)}"


def stand_for_server() -> str:
    """Let a warm process act as the fork server that multiprocessing has started; if none does, return why."""
    os.setpgid(0, 0)  # out of the process group of the spawning process, which may be killed as a group
    die_with_parent(os.getppid())  # the server in turn ends with this process
    return run_warm("server", sys.orig_argv, _env.environment(), passes_signals=False)


def start_in_words(kind: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a phrase that says whether the job would have a warm start."""
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
    """Return why no warm process, not even a new one, can serve this request; "" if one can."""
    if kind == "server" and _has_own_options():
        return "this interpreter was started with options of its own"
    if entry := facts.relative_path(environ):
        return f"PYTHONPATH has {entry}, which depends on the current folder"
    return client.problem(kind, words)


def _has_own_options() -> bool:
    """Return whether this interpreter was started with options that do not come from the environment."""
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
    """Start a warm process and return its socket; clients that connect wait until the process has imported torch.

    Raises:
        OSError: The socket of the process can't be made.
    """
    for path in places.sockets()[_MAX_PROCESSES - 1 :]:
        stop(path)
    path, listener = places.make_socket()
    words, output = os.pipe()
    os.set_blocking(output, False)  # if an import prints more than fits into the pipe, the rest is dropped
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
    """Become the warm process: a daemon in a session of its own, without our open files."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        places.listen(listener)
        take_streams(output)
        for fd in open_files():
            with contextlib.suppress(OSError):  # fails for the descriptor that listed the folder
                os.set_inheritable(fd, fd in (0, 1, 2, listener.fileno(), words))
        os.chdir("/")
        serves = {
            _env.WARM_SERVER_VARIABLE: f"{listener.fileno()}:{words}:{path}",
            SETTINGS_VARIABLE: json.dumps(dict(settings)),
        }
        kept = {name: value for name, value in environ.items() if name != _env.TRIAL_VARIABLE}  # meant for one job only
        os.execve(sys.executable, [sys.executable, _NAME], {**with_hook(kept), **serves})
    finally:
        os._exit(1)


def describe(path: str) -> dict[str, Any] | None:
    """Return a warm process's description of itself, or its pid and "state" if it is silent; None if it has ended."""
    return _ask(path, "list")


def stop(path: str) -> int | None:
    """End the warm process that listens at a socket; return its pid, 0 if unknown, None if no process listens.

    A process that does not answer, such as one that is still importing torch, is killed.
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
    channel = client.connect(path)
    if channel is None:
        return None
    channel.end.settimeout(WARM_REPLY_S if is_importing else places.READY_S)
    answer: dict[str, Any] | None = None
    if channel.wait() == client.HANDSHAKE:
        channel.send({"kind": what})
        answer = channel.wait()
    pid, _ = peer_of(channel.end)
    has_ended = answer is None and not channel.is_open()
    channel.close()
    if has_ended:
        return None
    return answer or {"pid": pid, "state": "still importing" if is_importing else "does not answer"}
