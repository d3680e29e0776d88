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
from collections.abc import Collection, Iterable, Mapping
from multiprocessing import forkserver
from multiprocessing import util as multiprocessing_util
from typing import Any

from phalanx import _env
from phalanx.host.kernel import status_of
from phalanx.launch.processes.forker import draw_anew
from phalanx.launch.spawn.worker import Inherited

_RESOURCES = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


def installed_modules(besides: Collection[str] = ()) -> list[str]:
    """Return the modules of installed packages that this process has imported, first things first.

    What is being tested, and tests themselves, need not be installed: a process imports them afresh in any case.
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
    """What a spawned process inherits from its parent and a forked one has to be given.

    Attributes:
        folder: The server's, where this process notes what it has imported.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._environ = _env.environment()
        self._group = os.getpgrp()
        # os.umask would change it, which other threads would see.
        self._umask = int(status_of(os.getpid()).get("Umask", "022"), 8)
        self._limits = {which: resource.getrlimit(which) for which in _RESOURCES}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._ignored = {one for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}

    def obey(self) -> None:
        """Make this process, a fork of the server, what its parent would have made of a new one."""
        _forget_server()
        with contextlib.suppress(OSError):  # a parent in another session
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
            plugin.autoload()  # by the variables that the server had not


def _forget_server() -> None:
    """Have multiprocessing know no fork server here: a child that starts one starts its own."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    fresh = vars(forkserver.ForkServer())
    vars(server).update({name: value for name, value in fresh.items() if name.startswith("_forkserver_")})


class Preparation:
    """What multiprocessing tells a child before all else, behind `Settings`; unpickled, it is that alone."""

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
    """Stands for a process object where multiprocessing runs it."""

    def __init__(self, process: Any, folder: str, *, runs_exit_functions: bool) -> None:
        self._process, self._folder, self._runs_exit_functions = process, folder, runs_exit_functions

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        code: int = self._process._bootstrap(parent_sentinel)
        _note_imports(self._folder)
        if self._runs_exit_functions:  # which a spawned process does at its end, and a fork leaves out
            with contextlib.suppress(BaseException):  # printed
                atexit._run_exitfuncs()
        multiprocessing_util._flush_std_streams()  # type: ignore[attr-defined]
        return code


class Nobody:
    """Child that does nothing: whoever starts it learns that the server has imported what it was asked to."""

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        return 0


def _note_imports(folder: str) -> None:
    """Tell the parent what this process has imported that the server had not: the server will."""
    if names := installed_modules(imported_by_server):
        with contextlib.suppress(OSError):
            append_line(os.path.join(folder, "imported"), json.dumps(names))


def append_line(path: str, line: str) -> None:
    """Append a line to a file, whole, whoever else does."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


imported_by_server: set[str] = set()
"""Modules that the server had imported when this process was forked."""


def note_imported_by_server(names: Iterable[str]) -> None:
    """Note what need not be told to the parent."""
    imported_by_server.update(names)
