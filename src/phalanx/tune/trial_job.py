"""A job of ``phalanx run`` whose ranks wait at an optimizer step until they are asked to go on, see `rank_trial`."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import _env
from phalanx.launch import rank_trial
from phalanx.launch.processes.descendants import die_with_parent
from phalanx.wire.files import read_json

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []
_TAIL_BYTES = 64 << 10  # only the end is read: some scripts print hundreds of megabytes


def end_on_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end this command at the next look at a job, `TrialJob.who_told`.

    A handler that raised an exception could do so inside `subprocess`, after the lock of a `Popen` is taken and before
    the ``try`` that releases it. The job could then never be waited for.
    """
    for sig in _END_SIGNALS:
        if signal.getsignal(sig) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(sig, lambda got, _: _received.append(got))


class Ended(Exception):
    """A job ended before all ranks had answered."""


class TrialJob:
    """A job that has been started.

    Args:
        words: Flags, script and arguments for ``phalanx run``.
        room: Folder for the job's output; the constructor makes it.
        num_ranks: Number of the job's ranks.
        environ: Environment variables to add for the job, including those of `rank_trial.variables`.

    Attributes:
        room: Folder for the job's output.
        pid: Process number of ``phalanx run``.
    """

    def __init__(self, words: Sequence[str], room: str, num_ranks: int, environ: Mapping[str, str]) -> None:
        self.room, self._num_ranks = room, num_ranks
        os.makedirs(room)
        everything = {**_env.environment(), **environ}
        everything[_env.FOLDER_VARIABLE] = os.path.join(room, "run")
        everything["PHALANX_LOG_DIR"] = self.log_dir
        everything.pop("OMP_NUM_THREADS", None)  # each turn sets the number of threads
        command = [sys.executable, "-m", "phalanx", "run", "--shutdown-timeout", "0", *words]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                command, env=everything, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the job
                # If this process dies, so does phalanx run, whose reaper then ends the ranks.
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def log_dir(self) -> str:
        """Value of ``--log-dir``: the folder in which ``phalanx run`` makes its run folder."""
        return os.path.join(self.room, "logs")

    @property
    def _output(self) -> str:
        return os.path.join(self.room, "output.txt")

    @property
    def printed(self) -> str:
        """Last 64 KiB of the job's output; if the job has failed, the cause is at the end."""
        with open(self._output, "rb") as output:
            output.seek(max(0, os.stat(output.fileno()).st_size - _TAIL_BYTES))
            return output.read().decode(errors="replace")

    @property
    def code(self) -> int:
        """Exit code of a job that has ended."""
        code = self._process.poll()
        assert code is not None
        return code

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def multiprocess(self) -> str:
        """Reason why the job can't be measured, if its ranks train in several processes; otherwise ""."""
        try:
            with open(rank_trial.multiprocess_file(self.room)) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def who_told(self, serial: int) -> list[int]:
        """Return the ranks that have reported on turn `serial`.

        Raises:
            SystemExit: A signal has asked this command to end, see `end_on_signals`. As the exception propagates,
                context managers end the jobs and remove their folders.
        """
        if _received:
            raise SystemExit(128 + _received[0])
        return [r for r in range(self._num_ranks) if os.path.exists(rank_trial.told_file(self.room, serial, r))]

    def told(self, serial: int) -> list[Any]:
        """Return the ranks' answers for a turn, in rank order; an empty list until all have answered.

        Raises:
            Ended: The job ended before all ranks had answered.
        """
        has_ended = self.has_ended  # checked first: answers may have arrived just before the end
        if len(self.who_told(serial)) < self._num_ranks:
            if has_ended:
                raise Ended
            return []
        told = []
        for rank in range(self._num_ranks):
            told.append(read_json(rank_trial.told_file(self.room, serial, rank)))
        return told

    def ask_to_end(self) -> None:
        """Ask the job to end; `end` waits until it has ended."""
        self._process.terminate()

    def end(self) -> None:
        """End the job, and wait until it has ended."""
        self.ask_to_end()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
