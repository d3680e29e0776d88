"""The side of the rank: what crosses to it, how it starts, and how it reports."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import importlib.util
import inspect
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, reduction
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Plan:
    """What is the same on every rank of one run."""

    call: bytes  # pickled here, so that a tensor travels by value and not by a shared descriptor
    world_size: int
    backend: str | None
    init_method: str
    group_timeout_s: float | None
    folder: str
    master_port: int
    environ: dict[str, str]
    cpus: set[int]


@dataclasses.dataclass
class Function:
    """A top-level function by module and name; by file too, if its module is not on the path."""

    module: str
    qualname: str
    file: str | None

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Function | Callable[..., Any]:
        if not inspect.isfunction(fn):
            return fn  # a partial or a builtin pickles itself
        if "<" in fn.__qualname__:
            raise TypeError(
                f"{fn.__qualname__} can't reach another process: move it to the top level of "
                f"{fn.__module__} and call run_ranks(fn, world_size, *args)"
            )
        return cls(fn.__module__, fn.__qualname__, fn.__code__.co_filename)

    def load(self) -> Callable[..., Any]:
        name = "__mp_main__" if self.module == "__main__" else self.module
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}.") or not self.file:
                raise
            spec = importlib.util.spec_from_file_location(name, self.file)
            if spec is None or spec.loader is None:
                raise
            found = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found  # type: ignore[return-value]


class Inherited:
    """A descriptor of the test's process, given to the rank under the same number.

    The server was started long ago, maybe under another capture of stdout.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _adopt, (self.fd, reduction.DupFd(self.fd))


def _adopt(fd: int, passed: Any) -> int:
    received = passed.detach()
    os.dup2(received, fd)
    os.close(received)
    return fd


_to_parent: connection.Connection | None = None


def reached(point: str, payload: Any = None) -> None:
    """Tell the test that this rank has come to `point`; it meets it in `wait_until_reached`."""
    _parent().send_bytes(pickle.dumps(("reached", point, payload)))


def await_release(point: str, timeout_s: float = 30.0) -> Any:
    """Wait until the test calls ``release(point)`` and return its payload.

    Raises:
        TimeoutError: It did not within `timeout_s`.
    """
    parent = _parent()
    deadline = time.monotonic() + timeout_s
    while parent.poll(max(0.0, deadline - time.monotonic())):
        _, name, payload = pickle.loads(parent.recv_bytes())
        if name == point:
            return payload
    raise TimeoutError(f"the test did not call release({point!r}) within {timeout_s:g} s")


def _parent() -> connection.Connection:
    if _to_parent is None:
        raise RuntimeError("no test listens: call this in a function that spawn_ranks runs")
    return _to_parent


def rank_main(rank: int, plan: Plan, pipe: connection.Connection, _stdout: object, _stderr: object) -> None:
    global _to_parent
    _to_parent = pipe
    _settle(rank, plan)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        function, args = pickle.loads(plan.call)
        fn = function.load() if isinstance(function, Function) else function
        if plan.backend is not None:
            _init_process_group(rank, plan)
        value = fn(rank, plan.world_size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        answer = pickle.dumps(("returned", value))
    except BaseException as error:
        _report(pipe, error)
        code = error.code if isinstance(error, SystemExit) else 1
        # Not by the interpreter's end: a broken group could hang there and hide the failure.
        _leave(code if isinstance(code, int) else 1)
    pipe.send_bytes(answer)
    _leave(0)


def _settle(rank: int, plan: Plan) -> None:
    """Make the forked process look as if the test's process had started it."""
    # The server ends with the test's process, the ranks with the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, plan.cpus)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stacks = open(os.path.join(plan.folder, f"stacks_{rank}"), "w")  # noqa: SIM115 until the end
    faulthandler.enable(stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(plan.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(plan.world_size),
        LOCAL_WORLD_SIZE=str(plan.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(plan.master_port),
    )


def _init_process_group(rank: int, plan: Plan) -> None:
    import torch.distributed as dist

    own_addresses = {
        "file": f"file://{plan.folder}/rendezvous",
        "tcp": f"tcp://127.0.0.1:{plan.master_port}",
        "env": "env://",
    }
    limit_s = plan.group_timeout_s
    dist.init_process_group(
        plan.backend,
        init_method=own_addresses.get(plan.init_method, plan.init_method),
        rank=rank,
        world_size=plan.world_size,
        timeout=None if limit_s is None else timedelta(seconds=limit_s),
    )


def _report(pipe: connection.Connection, error: BaseException) -> None:
    when_s = time.monotonic()
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(("raised", error, text, when_s))
        pickle.loads(message)
    except Exception:  # an exception may pickle and still not come back
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        message = pickle.dumps(("raised", stand_in, text, when_s))
    with contextlib.suppress(OSError):
        pipe.send_bytes(message)


def _leave(code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
