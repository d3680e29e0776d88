"""The warm process: Python waits in its site hook, with torch imported, and forks a job for each client that asks.

It has no threads, and keeps no state of a job. It ends when nobody has needed it for a while, when a file that it has
imported has changed, or when it is told to end; running jobs continue.

The client that starts the warm process makes the socket, before torch is imported. So if two clients start at the same
time, the second one waits in the socket's backlog and does not start another process. The mode of the socket file says
whether torch has been imported, and thereby whether a client waits two seconds or two minutes for the greeting. The
warm process itself calls listen() once more, so that clients get its pid from the kernel, even while it is importing or
stuck. The fork server of `phalanx.spawn` can be a fork of a warm process, too.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import struct
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from phalanx.launch.deadlines import WARM_REQUEST_S, WARM_STAY_S
from phalanx.launch.processes.ahead import Imports
from phalanx.launch.processes.forker import has_threads_or_devices
from phalanx.launch.processes.interpreter import Interpreter
from phalanx.launch.processes.spare import Loaded
from phalanx.launch.warm import facts
from phalanx.launch.warm.client import HANDSHAKE
from phalanx.launch.warm.guard import guard
from phalanx.wire import places
from phalanx.wire.packets import PacketSocket
from phalanx.wire.peer import peer_of

_LOOK_S = 60.0  # time between two checks that the socket still exists
_MAX_WORDS_BYTES = 1 << 20


class WarmServer:
    """Owns the socket, and forks jobs.

    Args:
        place: Descriptor of the listening socket, descriptor of a pipe with the output of the imports, and path of the
            socket, in the form that `starter.start` writes.
        environ: Environment with which this process has imported torch.
        imports: Record of the modules that this process has imported.
        before: Modules that Python itself had loaded when it started.
        shared: Modules that ranks find already imported.
        trouble: Reason why the imports failed; empty if they succeeded.
    """

    def __init__(
        self,
        place: str,
        environ: Mapping[str, str],
        imports: Imports,
        before: Collection[str],
        shared: Collection[str],
        trouble: str,
    ) -> None:
        listener_fd, words_fd, self._path = place.split(":", 2)
        self._listener = _socket.socket(fileno=int(listener_fd))
        self._number = os.stat(self._path).st_ino
        self._living: dict[int, int] = {}  # pid of each guard, by its pidfd
        self._began_s = self._last_s = time.monotonic()
        self._stay_s = WARM_STAY_S
        self._num_jobs = 0
        self._told, tell = os.pipe()
        words = _take_words(int(words_fd))
        if trouble or has_threads_or_devices():
            self._end(trouble or "what Python imports has started threads, or a device")
        try:
            interpreter = Interpreter()
        except RuntimeError as error:
            self._end(str(error))
        self._loaded = Loaded(interpreter, environ, imports, before, shared, words, tell)
        self._watch = facts.Watch()
        places.announce_ready(self._path)

    def serve(self) -> None:
        """Fork jobs until it is time to end; return only in ranks."""
        while True:
            poll = select.poll()
            for fd in (self._listener.fileno(), self._told, *self._living):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(_LOOK_S * 1000 if self._living else self._left_s * 1000)}
            for fd in ready & self._living.keys():
                os.waitpid(self._living.pop(fd), 0)
                os.close(fd)
                self._last_s = time.monotonic()
            if self._told in ready:
                self._note_job(*struct.unpack("d", os.read(self._told, 8)))
            if self._listener.fileno() in ready:
                channel = self._accept()
                if channel is not None and self._answer(channel):
                    return
            if self._is_over:  # checked again: the socket may have been removed while this process was suspended
                self._leave()

    def _note_job(self, stay_s: float) -> None:
        self._stay_s = stay_s
        self._num_jobs += 1
        with contextlib.suppress(OSError):
            os.utime(self._path)  # because clients try the most recently used process first

    @property
    def _left_s(self) -> float:
        return min(_LOOK_S, max(0.0, self._last_s + self._stay_s - time.monotonic()))

    @property
    def _is_over(self) -> bool:
        """Whether no job is running, and this process has been idle for long enough or its socket is gone."""
        try:
            found = os.stat(self._path).st_ino == self._number
        except OSError:
            found = False
        return not self._living and (not found or self._left_s == 0)

    def _accept(self) -> PacketSocket | None:
        fd, _ = self._listener._accept()  # type: ignore[attr-defined]
        connection = _socket.socket(fileno=fd)
        if peer_of(connection)[1] == os.geteuid():
            connection.settimeout(WARM_REQUEST_S)
            return PacketSocket(connection, marshals=True)
        connection.close()
        return None

    def _answer(self, channel: PacketSocket) -> bool:
        """Serve one request; return True only in ranks."""
        channel.send(HANDSHAKE)
        packet, fds = channel.take()
        request = packet if isinstance(packet, dict) else {}
        kind = request.get("kind")
        if kind == "stop":
            channel.send(self._description())
            self._leave()
        if kind == "list":
            channel.send(self._description())
        elif kind in ("run", "server"):
            pid, _ = peer_of(channel.end)
            refusal = self._refusal(request, pid)
            if refusal:
                channel.send(refusal)
            if self._is_stale:
                self._leave()
            if not refusal and self._fork(channel, pid, request, fds):
                return True
        for fd in fds:
            os.close(fd)
        channel.close()
        return False

    def _refusal(self, request: Mapping[str, Any], pid: int) -> str:
        """Return why the client's job must not be forked from this process; "" if it may be forked."""
        changed = self._watch.changed()
        self._is_stale = bool(changed)
        if changed:
            return f"was started before {changed} changed"
        if (request.get("executable"), request.get("prefix")) != (sys.executable, sys.prefix):
            return f"is of {sys.executable}"
        different = facts.difference(pid) if pid else "pid namespace"
        return f"was started with another {different}" if different else ""

    def _fork(self, channel: PacketSocket, pid: int, request: Mapping[str, Any], fds: list[int]) -> bool:
        child = os.fork()
        if child == 0:
            channel.end.settimeout(None)
            for fd in (self._listener.detach(), self._told, *self._living):
                os.close(fd)
            try:
                facts.enter_namespaces(pid)
            except OSError as error:
                channel.send(f"can't enter the client's network: {error.strerror}")
                os._exit(0)
            guard(channel, pid, request, fds, self._loaded)
            return True
        self._living[os.pidfd_open(child)] = child
        return False

    def _description(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "executable": sys.executable,
            "threads": self._loaded.environ.get("OMP_NUM_THREADS", ""),
            "age_s": time.monotonic() - self._began_s,
            "left_s": self._last_s + self._stay_s - time.monotonic(),
            "jobs": self._num_jobs,
            "living": len(self._living),
        }

    def _leave(self) -> NoReturn:
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._number:
                os.unlink(self._path)
        os._exit(0)

    def _end(self, trouble: str) -> NoReturn:
        """Tell the clients in the backlog why this process can't serve them, and end."""
        self._listener.settimeout(0)
        with contextlib.suppress(OSError):
            while (channel := self._accept()) is not None:
                channel.send(trouble)
        self._leave()


def _take_words(fd: int) -> bytes:
    """Return the output of the imports so far, and send all later output to /dev/null."""
    os.set_blocking(fd, False)
    words = b""
    with contextlib.suppress(BlockingIOError):
        words = os.read(fd, _MAX_WORDS_BYTES)
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)
    os.close(fd)
    return words
