"""The child's side of `phalanx.testing.fast_ranks`: makes a fork look as if it had been spawned."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Collection, Mapping
from multiprocessing import forkserver
from multiprocessing import util as multiprocessing_util
from typing import Any

from phalanx import _env
from phalanx.host.kernel import status_of
from phalanx.launch.processes.forker import draw_anew
from phalanx.launch.spawn.worker import Inherited

_RESOURCES = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


def installed_modules(besides: Collection[str] = ()) -> list[str]:
    """Return the imported modules of installed packages, except `besides`, in the order of their import.

    Tests and code that is not installed are left out, because each process must import them itself.
    """
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
    prefixes = tuple(os.path.join(folder, "") for folder in folders)
    names = []
    for name, module in list(sys.modules.items()):
        spec: Any = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name not in besides and isinstance(origin, str) and origin.startswith(prefixes) and spec.name == name:
            names.append(name)
    return names


class Settings:
    """The state that a spawned process would inherit from its parent, and that a fork of the server must be given.

    Attributes:
        folder: The server's folder, in which the child writes down its imports.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._environ = _env.environment()
        self._group = os.getpgrp()
        # Read from /proc, because os.umask would change the mask for a moment, for other threads too.
        self._umask = int(status_of(os.getpid()).get("Umask", "022"), 8)
        self._limits = {which: resource.getrlimit(which) for which in _RESOURCES}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = {one for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}

    def obey(self) -> None:
        """Give this fork of the server the state that a new process would have inherited."""
        _forget_server()
        with contextlib.suppress(OSError):  # fails if the parent is in another session
            os.setpgid(0, self._group)
        _env.replace_all(self._environ)
        time.tzset()
        os.umask(self._umask)
        for which, limits in self._limits.items():
            if resource.getrlimit(which) != limits:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(which, limits)
        for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if (signal.getsignal(one) is signal.SIG_IGN) != (one in self._ignored):
                default = signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL
                signal.signal(one, signal.SIG_IGN if one in self._ignored else default)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
        importlib.invalidate_caches()
        draw_anew()
        if plugin := sys.modules.get("phalanx._plugin"):
            plugin.autoload()  # called now, because the child's variables, which the server lacked, are set


def _forget_server() -> None:
    """Make multiprocessing forget the fork server from which this process was forked, so that it starts its own."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    fresh = vars(forkserver.ForkServer())
    vars(server).update({name: value for name, value in fresh.items() if name.startswith("_forkserver_")})


class Preparation:
    """The data that multiprocessing first sends to a child, preceded by `Settings`.

    Unpickling an object of this class applies the settings and returns multiprocessing's data.
    """

    def __init__(self, settings: Settings, told: Mapping[str, Any]) -> None:
        self._settings, self._told = settings, dict(told)

    def __reduce__(self) -> tuple[Any, ...]:
        streams = [Inherited(fd) for fd in range(3) if _is_open(fd)]
        return _prepare, (streams, self._settings, self._told)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _prepare(_streams: object, settings: Settings, told: dict[str, Any]) -> dict[str, Any]:
    settings.obey()
    return told


class Child:
    """Stands in for the process object that multiprocessing runs in a child."""

    def __init__(self, process: Any, folder: str, *, runs_exit_functions: bool) -> None:
        self._process, self._folder, self._runs_exit_functions = process, folder, runs_exit_functions

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        code: int = self._process._bootstrap(parent_sentinel)
        _note_imports(self._folder)
        if self._runs_exit_functions:  # a spawned process runs its exit functions; multiprocessing's forks do not
            with contextlib.suppress(BaseException):  # errors have already been printed
                atexit._run_exitfuncs()
        multiprocessing_util._flush_std_streams()  # type: ignore[attr-defined]
        return code


class Nobody:
    """A child that does nothing. Once it starts, the server has finished its imports, because these precede a fork."""

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        return 0


def _note_imports(folder: str) -> None:
    """Write down the modules that this process has imported and the server has not; the server imports them later."""
    if names := installed_modules(imported_by_server):
        path, line = os.path.join(folder, "imported"), f"{json.dumps(names)}\n".encode()
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(line)  # written in one call, so that lines from several children do not mix


imported_by_server: set[str] = set()
"""Modules that the server had imported before this process was forked."""
