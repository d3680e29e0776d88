"""The program of the fork server of `phalanx.testing.fast_ranks`: imports the packages that the tests use.

Before each fork, the server checks for requests to import more modules. It reports which environment variables its
imports have read. If an import has started a thread or initialized a device, neither of which survives a fork, the
server reports the package and ends. Only the fork server imports this module.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import sys
import warnings
from typing import Any

from phalanx import _env
from phalanx.host.kernel import threads_of
from phalanx.host.processes import open_files
from phalanx.launch.processes.ahead import Imports
from phalanx.launch.processes.pages import share_pages
from phalanx.launch.processes.reaper import fork_server
from phalanx.testing.fast_child import imported_by_server

_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/render")  # CUDA, ROCm and oneAPI keep these open


class _Server:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._read: dict[str, str | None] = {}
        self._readers: dict[str, set[str]] = {}
        self._is_importing = False
        self._num_threads = 1

    def look(self) -> None:
        """Import the requested modules, if there are any; called before each fork."""
        wanted = os.path.join(self._folder, "wanted")
        if self._is_importing or not os.path.exists(wanted):
            return
        self._is_importing = True
        try:
            with open(wanted) as file:
                asked: dict[str, Any] = json.load(file)
            os.unlink(wanted)
            path, sys.path = sys.path, asked["path"]
            try:
                self._import_all(asked["modules"])
            finally:
                sys.path = path
            share_pages()
        except Exception as error:
            self._give_up("", repr(error))
        finally:
            self._is_importing = False
        readers = {name: sorted(modules - {__name__}) for name, modules in self._readers.items()}
        self._say({"read": self._read, "readers": readers})

    def _import_all(self, names: list[str]) -> None:
        imports = Imports()
        with imports.noted({}):
            for name in names:
                # a child that needs the module gets the error when it imports the module
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
                if (num_threads := _num_threads()) > self._num_threads:
                    self._num_threads = _num_threads_after_fork()
                    if self._num_threads > 1:
                        self._give_up(name.partition(".")[0], "starts a thread when it is imported")
                    self._num_threads = num_threads
        for read in imports.read.values():
            self._read.update(read)
        for variable, modules in imports.readers.items():
            self._readers.setdefault(variable, set()).update(modules)
        if _has_touched_device():
            self._give_up("", "a package talks to the GPU when it is imported")
        imported_by_server.update(sys.modules)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # otherwise each child would print buffered output again

    def _give_up(self, package: str, why: str) -> None:
        self._say({"left_out": package, "why": why})
        os._exit(1)

    def _say(self, words: dict[str, Any]) -> None:
        path = os.path.join(self._folder, "status")
        with open(f"{path}.new", "w") as file:
            json.dump(words, file)
        os.replace(f"{path}.new", path)


def _num_threads() -> int:
    return len(threads_of(os.getpid()))


def _num_threads_after_fork() -> int:
    """Return how many threads remain after a fork: OpenBLAS ends its threads before a fork and restarts them on use."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    return _num_threads()


def _has_touched_device() -> bool:
    """Return whether a driver was initialized, rather than only its library loaded, as some packages do."""
    return any(target.startswith(_DEVICES) for target in open_files().values())


_folder = _env.take(_env.FAST_RANKS_VARIABLE)
fork_server()
# the unexpected pid is that of an adopted process
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
atexit.register(gc.unfreeze)
_server = _Server(_folder)
_server.look()
os.register_at_fork(before=_server.look)
