"""The rank's side of `phalanx.spawn`: the data that a rank receives, how it starts, and how it reports."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import re
import reprlib
import sys
import time
from collections.abc import Callable
from multiprocessing import connection, forkserver, reduction
from typing import Any, NoReturn

from phalanx import _env
from phalanx._text import class_and_message, is_terminal, shortened
from phalanx._torch import replace
from phalanx.failure.last_words import LastWords
from phalanx.host.block_pool import MemoryPolicy, obey_launcher, of_rank
from phalanx.launch.environment import Attempt, rank_environment
from phalanx.launch.processes.descendants import die_with_parent
from phalanx.launch.processes.forker import draw_anew
from phalanx.launch.rank import watch_torch
from phalanx.launch.spawn.cleaner import cleaner


@dataclasses.dataclass
class Assignment:
    """Data that the parent sends to a rank; the same for all ranks of one call.

    Attributes:
        call: Function and arguments, pickled by `dumps` in the parent so that tensors travel by value and not by shared
            descriptors. A rank that is forked from the parent itself gets them without pickling.
        folder: Folder for the files of this call's ranks.
        notes: File in which the parent records the ranks that have ended.
        environ: Environment of every rank, apart from the variables that follow from `attempt`.
        memory: Policy for large blocks of memory that ranks free.
        start_method: The parent's start method, which a rank uses for its own processes, such as a data loader's
            workers.
    """

    call: bytes | tuple[Callable[..., Any], tuple[Any, ...]]
    folder: str
    attempt: Attempt
    notes: str
    environ: dict[str, str]
    memory: MemoryPolicy
    cpus: set[int]
    num_threads: int
    start_method: str


@dataclasses.dataclass
class Function:
    """A reference to a top-level function by module and name, and by file if its module is not on the path."""

    module: str
    qualname: str
    file: str | None

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Function | Callable[..., Any]:
        """Return a reference to `fn` by name, or `fn` itself if it has no name in a rank and must travel by value."""
        has_name = inspect.isfunction(fn) and "<" not in fn.__qualname__
        if not has_name or (fn.__module__ == "__main__" and not _main_can_be_imported()) or _named_by(fn) is not fn:
            return fn
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
            try:
                found = getattr(found, part)
            except AttributeError:
                if self.module != "__main__":
                    raise
                raise _below_guard(self.qualname) from None
        return found  # type: ignore[return-value]


def _below_guard(name: str) -> AttributeError:
    """Return the error for a name that a rank does not find in the script, because it is defined below the guard."""
    return AttributeError(
        f"a rank imports the script, and {name} is not there then: define it at the top level of the script, above "
        'if __name__ == "__main__":, or in a module that the script imports'
    )


def _load_call(
    call: bytes | tuple[Callable[..., Any], tuple[Any, ...]],
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and the arguments that the parent sent.

    Raises:
        AttributeError: The script defines one of them below its guard.
    """
    if not isinstance(call, bytes):
        return call
    try:
        function, args = pickle.loads(call)
    except AttributeError as error:
        if missing := re.match(r"Can't get attribute '(.+?)' on <module '__(?:mp_)?main__'", str(error)):
            raise _below_guard(missing[1]) from None
        raise
    return function.load() if isinstance(function, Function) else function, args


def _named_by(fn: Callable[..., Any]) -> object:
    """Return the object to which the name of `fn` now refers; it is not `fn` if the name was bound again."""
    found: object = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def load_function(function: Function | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind the result of `Function.of`."""
    return function.load() if isinstance(function, Function) else function


def dumps(value: object) -> bytes:
    """Return `value` pickled for another process of this group.

    Functions and classes are pickled by name if that process can import them. Otherwise, as with lambdas and with
    functions and classes of a notebook's cell or of ``python -c``, they are pickled by value.
    """
    if _main_can_be_imported():
        with contextlib.suppress(Exception):
            return pickle.dumps(value)
    import cloudpickle  # type: ignore[import-untyped]

    return bytes(cloudpickle.dumps(value))


def _main_can_be_imported() -> bool:
    """Return whether multiprocessing gives a rank the ``__main__`` of this process."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.exists(getattr(main, "__file__", None) or "")


class Inherited:
    """A descriptor of the parent, which the rank gets under the same number.

    This is needed for stdout and stderr. A rank is a fork of the server, whose own streams may lead elsewhere: pytest's
    capture, for example, changes between tests.
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


def channel_to_parent() -> connection.Connection:
    """Return the pipe to the process that started this rank.

    Raises:
        RuntimeError: This process is not a spawned rank.
    """
    if _to_parent is None:
        raise RuntimeError("nobody listens: call this in a function that spawn_ranks runs")
    return _to_parent


def worker_main(
    rank: int, assignment: Assignment, pipe: connection.Connection, _stdout: object, _stderr: object
) -> None:
    """Run the assignment's function as `rank` and send its value, or its error, to the parent."""
    global _to_parent
    _to_parent = pipe
    _settle(rank, assignment)
    try:
        import torch

        torch.set_num_threads(assignment.num_threads)
        function, args = _load_call(assignment.call)
        answer = _answer(_call(function, rank, args, is_script=isinstance(assignment.call, bytes)))
    except BaseException as error:
        _report(pipe, error)
        code = error.code if isinstance(error, SystemExit) else 1
        # End without finalizers: in a broken group, they could hang and hide the failure.
        _leave(code if isinstance(code, int) else 1)
    if isinstance(answer, Exception):
        _report(pipe, answer)
        _leave(1)
    with contextlib.suppress(OSError):  # the parent is gone
        pipe.send_bytes(answer)
    # multiprocessing now ends this process as usual, with its finalizers.


def _answer(value: Any) -> bytes | Exception:
    """Return the message with a rank's result, or an error if the result can't be sent."""
    try:
        return dumps(("returned", value))
    except Exception as error:
        return TypeError(
            f"its result, of type {type(value).__name__}, can't be sent back: {error}; return what can be pickled, "
            "such as numbers, strings, tensors, and lists or dictionaries of these"
        )


def call(fn: Callable[..., Any], form: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the user's function and return its result.

    Args:
        form: Form of the call, such as ``rank, *args``; shown in the error if `fn` does not accept these arguments.
    """
    try:
        return fn(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # the function itself raised it
            raise
        name = getattr(fn, "__name__", type(fn).__name__)
        named = (f"{key}={shortened(reprlib.repr(value))}" for key, value in kwargs.items())
        given = ", ".join([*(shortened(reprlib.repr(arg)) for arg in args), *named])
        raise TypeError(f"{error}; it is called as {name}({form}), here {name}({given})") from None


def _call(fn: Callable[..., Any], rank: int, args: tuple[Any, ...], *, is_script: bool) -> Any:
    """Call a rank's function and return its result; ``sys.exit()`` is a failure unless `is_script`."""
    try:
        return call(fn, "rank, *args", rank, *args)
    except SystemExit as end:
        if is_script and end.code in (None, 0):
            return None
        raise


def _settle(rank: int, assignment: Assignment) -> None:
    """Make the forked process look as if the parent had started it."""
    die_with_parent(os.getppid())  # the parent here is the server, which itself ends with the spawning process
    os.setpgid(0, 0)  # out of the terminal's group: the spawning process passes Ctrl-C on
    _let_go_of_server()
    cleaner.let_go()
    if isinstance(assignment.call, bytes):  # not in a test, which continues with its parent's random state
        draw_anew()
    os.sched_setaffinity(0, assignment.cpus)
    stacks = open(os.path.join(assignment.folder, f"stacks_{rank}"), "w")  # noqa: SIM115 until the end
    faulthandler.enable(stacks, all_threads=True)
    own = rank_environment(assignment.attempt, rank, os.path.join(assignment.folder, f"error_{rank}.json"))
    launch = assignment.attempt.launch("phalanx.spawn", assignment.notes, rank)
    own[_env.PROCESS_VARIABLE] = str(os.getpid())
    _env.replace_all({**assignment.environ, **own, **launch, **of_rank(assignment.memory)})
    obey_launcher()
    replace.obey()  # PHALANX_REPLACE, which was unset while the server imported torch
    watch_torch()
    # With the server's own start method, children of this rank would import everything again.
    multiprocessing.set_start_method(assignment.start_method, force=True)
    for stream in (sys.stdout, sys.stderr):
        if is_terminal(stream):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _let_go_of_server() -> None:
    """Close this rank's copy of the descriptor that keeps the server running: only the parent may keep it running.

    multiprocessing passes the descriptor's number on to children of this rank, so the number stays open, on /dev/null.
    """
    alive_fd = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if alive_fd is not None:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, alive_fd)
        os.close(null)


def _report(pipe: connection.Connection, error: BaseException) -> None:
    when_s = time.monotonic()
    words = LastWords.of_error(error)
    from phalanx.record import writer  # not at the top: it loads the core, which not every parent needs

    writer.note(words.note)
    stand_in = RuntimeError(class_and_message(error))
    try:
        raised = dumps(error)
    except Exception:
        raised = b""
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(("raised", raised, stand_in, words, when_s)))


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
