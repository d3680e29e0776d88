"""``--fast-ranks``: processes that tests start by spawn or forkserver are forked from a server instead.

The server has already imported the packages that the tests use. The tests need not be changed: multiprocessing pickles
the same process object for both start methods, so one server can serve both. The server has a reaper, like that of
`phalanx.spawn`. Three rules make a fork the same as a new process:

- State that a child would inherit through exec is sent to the child and applied before any object of the test is
  unpickled (`fast_child`).
- State that can't be sent (variables that the interpreter and torch read, the CPUs, variables that packages read while
  the server imported them) determines which server is used. Once a variable has had a third value, servers no longer
  import the modules that read it, and each child imports these modules itself. Otherwise, a variable that differs in
  each test, such as the folder in torch's own tests, would need a server for each test.
- The server imports only installed packages, in a separate process, so it contains no code or state of the tests.
  Before each fork, it also imports the modules that earlier children have imported.

If a package starts a thread during its import, the server ends, and the next server does not import that package.
Threads are counted after a fork, because OpenBLAS ends its own threads before a fork. A child runs its exit functions,
but its interpreter is not finalized. If a fork can't be the same as a new process, a new process is started, and a line
says why.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn, util
from typing import Any

from phalanx import _env
from phalanx.host.proc_stat import children_of
from phalanx.launch.processes.ahead import relevant
from phalanx.launch.spawn.worker import worker_main
from phalanx.testing.fast_child import Child, Nobody, Preparation, Settings, installed_modules
from phalanx.wire.sockets import keep_paths_short

_PRELOAD = "phalanx.testing.fast_server"
_READ_BY_INTERPRETER = re.compile(r"PYTHON.*|LD_.*|MALLOC_.*|GLIBC_TUNABLES|LANG|LANGUAGE|LC_.*")
_OF_EACH_TEST = frozenset({"PYTEST_CURRENT_TEST"})  # differs in each test, so it must not determine the server
_MEASURED_BY = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
_MAX_SERVERS = 4  # maximum number of servers that run at the same time
_MAX_STARTS = 16  # maximum number of servers started in a session; further servers would cost more time than they save

_METHODS: dict[str, Any] = {"spawn": context.SpawnProcess, "forkserver": context.ForkServerProcess}


class _Stays(Exception):
    """The process must be started normally; the message says why."""


class _Server:
    """A process from which children are forked.

    Attributes:
        read: Environment variables that packages read while the server imported them, with their values.
        readers: Modules that read one of these variables, or that imported a module that did; key: the variable.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-fast-ranks-")
        self.folder = self._folder.name
        self._forks: Any = forkserver.ForkServer()
        self._forks.set_forkserver_preload([_PRELOAD])
        self._asked: set[str] = set()
        self.read: dict[str, str | None] = {}
        self.readers: dict[str, list[str]] = {}
        own = _env.environment()
        changes: dict[str, str | None] = {name: None for name in own if name.startswith("PHALANX_")}
        changes[_env.FAST_RANKS_VARIABLE] = self.folder
        keep_paths_short()
        self._write_wanted(modules)
        _env.change(changes)
        try:
            self._forks.ensure_running()
        finally:
            _env.change({name: own.get(name) for name in changes})
        try:
            self._await_imports()
        except BaseException:
            self.close()
            raise

    def ask_for(self, modules: Sequence[str]) -> None:
        """Make the server import these modules, unless it already has."""
        if new := [name for name in modules if name not in self._asked]:
            self._write_wanted(new)
            self._await_imports()

    def learned(self) -> list[str]:
        """Return the modules that the server's children have imported beyond those of the server."""
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "imported")) as file:
            return [name for line in file for name in json.loads(line)]
        return []

    @property
    def lives(self) -> bool:
        pid = self._forks._forkserver_pid
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    @property
    def is_in_use(self) -> bool:
        return any(map(children_of, children_of(self._forks._forkserver_pid)))

    def connect(self, fds: list[int]) -> tuple[int, int]:
        """Make the server fork; return the descriptors of the child's status and of its input."""
        ended = _Stays("the process that others are forked from has ended")
        if not self.lives:
            raise ended
        try:
            status, data = self._forks.connect_to_new_process(fds)
        except (ConnectionError, FileNotFoundError):  # the server has ended, but its reaper has not noticed this yet
            raise ended from None
        return status, data

    def close(self) -> None:
        """End the server and all its children."""
        if self.lives:
            # this pid is the reaper's: when the reaper ends, the kernel ends the server
            os.kill(self._forks._forkserver_pid, signal.SIGKILL)
        with contextlib.suppress(OSError, TypeError):
            self._forks._stop()
        self._folder.cleanup()

    def _write_wanted(self, modules: Sequence[str]) -> None:
        self._asked.update(modules)
        path = os.path.join(self.folder, "wanted")
        with open(f"{path}.new", "w") as file:
            json.dump({"path": [one for one in sys.path if isinstance(one, str)], "modules": list(modules)}, file)
        os.replace(f"{path}.new", path)

    def _await_imports(self) -> None:
        """Return once the server has imported the requested modules.

        Raises:
            _LeftOut: The server has ended because of one of the packages.
        """
        status, data = self.connect([])
        try:
            with open(data, "wb") as file, contextlib.suppress(BrokenPipeError):
                reduction.dump({}, file)
                reduction.dump(Nobody(), file)
            with contextlib.suppress(EOFError):
                for _ in ("pid", "exit code"):
                    forkserver.read_signed(status)
        finally:
            os.close(status)
        try:
            with open(os.path.join(self.folder, "status")) as file:
                words = json.load(file)
        except OSError:
            words = {"left_out": "", "why": "it ended while it imported them"}
        if "left_out" in words:
            raise _LeftOut(words["left_out"], words["why"])
        self.read = {name: value for name, value in words["read"].items() if not _is_own(name)}
        self.readers = words["readers"]


class _LeftOut(Exception):
    """A server has ended because of an imported package; `args` are the package, "" if unknown, and the reason."""


def _is_own(name: str) -> bool:
    return name.startswith("PHALANX_") or name in _OF_EACH_TEST


class _Servers:
    """The servers of this process, started on demand: one for each set of values of the variables that imports read."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # key: server, value: `_key` of its environment; the most recently used server is last
        self._servers: dict[_Server, object] = {}
        self._wanted: dict[str, None] = {}
        self._left_out: set[str] = set()
        # `_key` of each environment in which no server works, and the reason
        self._unfit: list[tuple[object, str]] = []
        # modules that read variables with several values; each child imports these itself
        self._varying: set[str] = set()
        self._num_starts = 0
        self.notes: dict[str, None] = {}

    def find(self) -> _Server:
        """Return a server whose forks are equivalent to new processes.

        Raises:
            _Stays: There can't be such a server.
        """
        with self._lock:
            environ = _env.environment()
            if any(environ.get(name) for name in _MEASURED_BY):
                raise _Stays("coverage is measured in new processes")
            if _has_cuda():
                raise _Stays("CUDA is initialized in the test process")
            if why := next((why for under, why in self._unfit if under == _key(environ)), ""):
                raise _Stays(why)
            self._wanted.update(dict.fromkeys(installed_modules(self._wanted)))
            for server in list(self._servers):
                self._wanted.update(dict.fromkeys(server.learned()))
            while True:
                try:
                    return self._find(environ)
                except _LeftOut as left_out:
                    self._leave_out(environ, *left_out.args)

    def _find(self, environ: Mapping[str, str]) -> _Server:
        key = _key(environ)
        modules = self._modules()
        for server, under in list(self._servers.items()):
            if not server.lives:
                self._drop(server)
            elif under == key and _agrees(server, environ):
                try:
                    server.ask_for(modules)
                except _LeftOut:
                    self._drop(server)
                    raise
                if _agrees(server, environ):
                    self._servers[server] = self._servers.pop(server)
                    return server
        if self._num_starts >= _MAX_STARTS:
            raise _Stays(f"the environment has changed {_MAX_STARTS} times in what packages read when imported")
        num_too_many = max(0, len(self._servers) - _MAX_SERVERS + 1)
        for server in [one for one in self._servers if not one.is_in_use][:num_too_many]:
            self._drop(server)
        self._num_starts += 1
        self._leave_out_readers([server for server, under in self._servers.items() if under == key], environ)
        server = _Server(self._modules())
        self._servers[server] = key
        return server

    def _modules(self) -> list[str]:
        known = (name for name in self._wanted if name not in self._varying)
        return [name for name in known if name.partition(".")[0] not in self._left_out]

    def _leave_out_readers(self, servers: Sequence[_Server], environ: Mapping[str, str]) -> None:
        """Stop importing modules that read a variable if `servers` have two values of it other than the present one."""
        for name in {name for server in servers for name in server.read}:
            others = {server.read[name] for server in servers if name in server.read} - {environ.get(name)}
            readers = {reader for server in servers for reader in server.readers.get(name, ())} - self._varying
            if len(others) > 1 and readers:
                self._varying |= readers
                self.note(f"{name} keeps changing, so each process imports {_listed(readers)} itself")

    def _leave_out(self, environ: Mapping[str, str], package: str, why: str) -> None:
        if not package or package in self._left_out:
            prepared = "the process that others are forked from can't be prepared"
            words = f"{package} {why}, even where it is left out" if package else f"{prepared}: {why}"
            self._unfit.append((_key(environ), words))
            raise _Stays(words)
        self._left_out.add(package)
        self.note(f"{package} {why}, so each process that needs it imports it anew")

    def _drop(self, server: _Server) -> None:
        del self._servers[server]
        server.close()

    def note(self, line: str) -> None:
        self.notes.setdefault(line)

    def close(self) -> None:
        with self._lock:
            for server in list(self._servers):
                self._drop(server)


def _listed(modules: Collection[str]) -> str:
    first, *others = sorted(modules, key=len)
    return f"{first} and {len(others)} more" if others else first


def _key(environ: Mapping[str, str]) -> object:
    """Return the inherited state that a fork can't be given."""
    read = {name: value for name, value in environ.items() if _READ_BY_INTERPRETER.fullmatch(name)}
    flags = tuple(util._args_from_interpreter_flags())  # type: ignore[attr-defined]
    cpus = os.sched_getaffinity(0)  # the CPUs determine the number of OpenMP's threads
    return {**read, **relevant(environ)}, flags, spawn.get_executable(), cpus, os.getsid(0)


def _agrees(server: _Server, environ: Mapping[str, str]) -> bool:
    return all(environ.get(name) == value for name, value in server.read.items())


def _has_cuda() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


class _Popen(popen_forkserver.Popen):
    """A process that is forked from a server, but otherwise like a process that `method` starts."""

    _fds: list[int]

    def __init__(self, process_obj: Any, server: _Server, method: str) -> None:
        self._server = server
        self.method = method  # type: ignore[misc] # in the base class, it is an attribute of the class
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        told = spawn.get_preparation_data(process_obj._name)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(Preparation(Settings(self._server.folder), told), buffer)
            child = Child(process_obj, self._server.folder, runs_exit_functions=self.method == "spawn")
            reduction.dump(child, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, data = self._server.connect(self._fds)
        alive = os.dup(data)  # through this descriptor, the child notices the end of its parent
        self.finalizer = util.Finalize(self, util.close_fds, (alive, self.sentinel))  # type: ignore[attr-defined]
        with open(data, "wb") as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


_servers: _Servers | None = None
_originals: dict[str, Any] = {}


def begin() -> None:
    """From now on, fork from a server all processes that are started by spawn or forkserver. Idempotent."""
    global _servers
    if _servers is not None or not sys.platform.startswith("linux"):
        return
    _servers = _Servers()
    for method, process in _METHODS.items():
        _originals[method] = process.__dict__["_Popen"]
        process._Popen = staticmethod(_start_by(method))


def end() -> list[str]:
    """Undo `begin`; end the servers and their children that still run.

    Returns:
        Lines that say which processes were started normally, and why.
    """
    global _servers
    if _servers is None:
        return []
    servers, _servers = _servers, None
    for method, process in _METHODS.items():
        process._Popen = _originals.pop(method)
    servers.close()
    return list(servers.notes)


def _start_by(method: str) -> Any:
    def start(process_obj: Any) -> Any:
        servers, original = _servers, _originals[method].__func__
        if servers is None or os.getpid() != _pid or process_obj._target is worker_main:
            return original(process_obj)
        try:
            return _Popen(process_obj, servers.find(), method)
        except _Stays as why:
            servers.note(f"{why}; so processes that tests start by {method} are not faster")
            return original(process_obj)

    _pid = os.getpid()
    return start


class Plugin:
    """The pytest plugin of ``--fast-ranks``.

    Args:
        config: Configuration of pytest.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._lines: dict[str, None] = {}

    def pytest_sessionstart(self) -> None:
        if not sys.platform.startswith("linux"):
            self._lines["it needs Linux; processes are started normally"] = None
        begin()

    def pytest_sessionfinish(self) -> None:
        self._lines.update(dict.fromkeys(end()))
        if (output := getattr(self._config, "workeroutput", None)) is not None:  # this is a worker of pytest-xdist
            output["phalanx_fast_ranks"] = list(self._lines)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._lines:
            terminalreporter.write_line(f"phalanx: --fast-ranks: {line}")


class XdistPlugin(Plugin):
    """The plugin for a process that may have workers of pytest-xdist: it also shows the lines of its workers."""

    def pytest_testnodedown(self, node: Any) -> None:
        lines = getattr(node, "workeroutput", {}).get("phalanx_fast_ranks", ())
        self._lines.update(dict.fromkeys(lines))
