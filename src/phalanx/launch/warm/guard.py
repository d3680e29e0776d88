"""The parent of a warm job's supervisor. Reports the supervisor's end to the client; if the client ends, ends the job.

Guards are children of the warm process, in sessions of their own; a running job does not depend on the warm process.
The guard is the supervisor's parent, so it learns the wait status even of a supervisor that was killed. It is not the
client's parent, so it notices the client's end by the end of their connection. When the guard ends, the kernel kills
the supervisor; reaper and forker then end the job as they always do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import site
import struct
import sys
from _socket import socket
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from phalanx import _env
from phalanx._command_line import UsageError, exit_code_of
from phalanx._text import signal_name
from phalanx.launch.command.plan import Plan, make_plan
from phalanx.launch.command.run import run
from phalanx.launch.deadlines import WARM_STAY_S
from phalanx.launch.processes.descendants import die_with_parent
from phalanx.launch.processes.interpreter import show_command_line
from phalanx.launch.processes.spare import Loaded, forget_all_but, fork_spare
from phalanx.launch.warm import facts
from phalanx.launch.warm.client import interpreter_options
from phalanx.wire.packets import PacketSocket

_STREAMS = (0, 1, 2)


def guard(
    channel: PacketSocket, client_pid: int, request: Mapping[str, Any], fds: Sequence[int], loaded: Loaded
) -> None:
    """Fork the process that the client asks for, and watch that process; return only in ranks.

    Args:
        request: Request that `client.hand_over` has sent, with the descriptors `fds`.
    """
    os.setsid()
    guard_pid = os.getpid()
    begun, beginning = os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with_parent(guard_pid)
        os.close(begun)
        try:
            place = _Place(channel, request, fds, loaded.tell, beginning)
        except Exception as error:
            channel.send(f"can't start the job: {error}")
            os._exit(0)
        if request["kind"] == "server":
            _be_fork_server(place, loaded)
        return _supervise(place, client_pid, loaded)
    for fd in (*fds, loaded.tell, beginning):
        os.close(fd)
    _watch(channel, pid, begun)


def _watch(channel: PacketSocket, pid: int, begun: int) -> NoReturn:
    """Tell the client how process `pid` ends, and pass the client's signals on to that process."""
    child = os.pidfd_open(pid)
    # Until the job begins, the client talks to process `pid`, not to this process.
    if not os.read(begun, 1):
        _, status = os.waitpid(pid, 0)
        # If the process has answered as well, the client uses the answer that arrives first.
        channel.send(f"has ended with {_ending(status)} before the job began")
        os._exit(0)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if child in ready:
            _, status = os.waitpid(pid, 0)
            channel.send(status)
            os._exit(0)
        sig = channel.wait()
        if sig is None:  # the client is gone, and the job must end with it
            os._exit(0)
        os.kill(pid, sig)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal_name(-code)


class _Place:
    """Gives this process the client's folder, umask and environment, and later the open files that the client sends.

    Args:
        fds: Descriptors that arrived with the request: the client's current folder.
        tell: The pipe `Loaded.tell`.
        beginning: Pipe through which the guard learns that the job begins.
    """

    def __init__(
        self, channel: PacketSocket, request: Mapping[str, Any], fds: Sequence[int], tell: int, beginning: int
    ) -> None:
        self.request = request
        (folder,) = fds
        os.fchdir(folder)
        os.close(folder)
        os.umask(request["umask"])
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        _env.replace_all(request["environ"])
        show_command_line(request["command_line"])
        self._numbers: list[int] = request["fds"]
        self._above = above = max(self._numbers, default=0) + 1
        null = os.open(os.devnull, os.O_RDONLY)
        self._tell, self._beginning = _lifted(tell, above), _lifted(beginning, above)
        self._channel = PacketSocket(socket(fileno=_lifted(channel.end.detach(), above)), marshals=True)
        # From here on, nothing may be opened, because a new descriptor could get one of the client's numbers.
        for number in set(self._numbers).difference((*_STREAMS, null)):  # reserves these numbers
            os.dup2(null, number)
        if null not in self._numbers:
            os.close(null)

    def refuse(self, why: str) -> NoReturn:
        """Tell the client why this process does not run the job, and exit; the client then looks elsewhere."""
        self._channel.send(why)
        os._exit(0)

    def take_streams(self, stay_s: float) -> None:
        """Tell the client that the job begins here, and take over the client's files; exit if the request is a trial.

        Once the client hears that the job has begun, it no longer runs the job itself, so nothing may fail after that.

        Args:
            stay_s: Seconds for which the warm process should wait for another job after this job.
        """
        self._channel.send("go")
        if self.request["is_trial"]:
            os._exit(0)
        files: list[int] = []
        while len(files) < len(self._numbers):
            _, fds = self._channel.take()
            if not fds:  # the client is gone
                os._exit(0)
            files += [_lifted(fd, self._above) for fd in fds]
        own = os.pidfd_open(os.getpid())  # kept by the client, so that tools find this process by the client's pid
        self._channel.send("began", [own])
        os.close(own)
        if not self._channel.is_open():
            os._exit(0)
        self._channel.close()
        os.write(self._beginning, b"1")
        os.close(self._beginning)
        with contextlib.suppress(OSError):  # the warm process may have ended, or be suspended
            os.write(self._tell, struct.pack("d", stay_s))
        os.close(self._tell)
        for number, fd in zip(self._numbers, files, strict=True):  # a stream that the client lacks stays /dev/null
            os.dup2(fd, number)
            os.close(fd)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            if stream is not None:
                stream.reconfigure(line_buffering=os.isatty(number))  # type: ignore[union-attr]


def _lifted(fd: int, least: int) -> int:
    """Move a descriptor to a number of at least `least`, and mark it close-on-exec."""
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return lifted


def _supervise(place: _Place, client_pid: int, loaded: Loaded) -> None:
    """Run the supervisor of a job; return only in its ranks."""
    plan = _plan(place.request, loaded)
    if isinstance(plan, str):
        place.refuse(plan)
    place.take_streams(plan.settings["warm-for"].value)
    job = plan.job
    spare = fork_spare(loaded, client_pid)
    if spare is None:
        return
    code: object = 1
    try:
        code = exit_code_of(lambda: run(job, spare))
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(code if isinstance(code, int) else 1)


def _plan(request: Mapping[str, Any], loaded: Loaded) -> Plan | str:
    """Return the plan of the job, or why this warm process, or any warm process, can't run it."""
    try:
        plan = make_plan(request["words"], _env.environment())
    except UsageError:
        return "got a wrong command line"
    except SystemExit:
        return "got a command line that asks for help"
    if not plan.is_warm:
        return "was not asked for a warm start"
    if plan.is_dry and not request["is_trial"]:
        return "was asked to start nothing"
    if not plan.job.preload:
        return "was asked to have each rank import torch"
    _env.update(plan.variables)
    name = facts.changed_variable(loaded.environ, {**plan.shared, **plan.job.head.settings})
    return f"was started with another {name}" if name else plan


def _be_fork_server(place: _Place, loaded: Loaded) -> NoReturn:
    """Run the program that multiprocessing gave the client, as ``python -c`` would."""
    request = place.request
    name = facts.changed_variable(loaded.environ, request["environ"])
    if request["options"] != interpreter_options():
        name = "set of interpreter options"
    if name:
        place.refuse(f"was started with another {name}")
    place.take_streams(WARM_STAY_S)
    _env.withdraw([_env.WARM_VARIABLE])  # the variable is meant for this process only
    forget_all_but(loaded.shared)
    sys.argv[:], sys.orig_argv[:] = ["-c"], request["words"]
    del sys.modules["sitecustomize"]  # our own, which is running; the user's is imported next
    site.execsitecustomize()
    if site.ENABLE_USER_SITE:
        site.execusercustomize()
    sys.path.insert(0, "")
    try:
        exec(request["words"][-1], sys.modules["__main__"].__dict__)
    except BaseException as end:
        if not isinstance(end, SystemExit):
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os._exit(0)
