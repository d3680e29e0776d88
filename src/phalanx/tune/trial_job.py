"""A job of ``phalanx run`` whose ranks stop at an optimizer step until asked for more, see `rank_trial`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import _env
from phalanx.launch import rank_trial
from phalanx.launch.processes.forker import die_with_parent

_TAIL_BYTES = 64 << 10  # scripts print hundreds of megabytes, which take seconds to read


class Ended(Exception):
    """A job has ended before every rank has told what it was asked."""


class TrialJob:
    """A job that has been started.

    Args:
        words: Flags, script and arguments for ``phalanx run``.
        room: Folder for what it writes, which is made now.
        num_ranks: Number of its ranks.
        environ: Variables for it, those of `_trial.variables` among them.

    Attributes:
        room: The folder.
        pid: Process of ``phalanx run``.
    """

    def __init__(self, words: Sequence[str], room: str, num_ranks: int, environ: Mapping[str, str]) -> None:
        self.room, self._num_ranks = room, num_ranks
        os.makedirs(room)
        everything = {**_env.environment(), **environ}
        everything[_env.FOLDER_VARIABLE] = os.path.join(room, "run")
        everything["PHALANX_LOG_DIR"] = self.log_dir
        everything.pop("OMP_NUM_THREADS", None)  # each turn says how many
        command = [sys.executable, "-m", "phalanx", "run", "--shutdown-timeout", "0", *words]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                command, env=everything, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, and then we end it
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # its reaper then ends the ranks
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def log_dir(self) -> str:
        """Folder of the run's folder."""
        return os.path.join(self.room, "logs")

    @property
    def _output(self) -> str:
        return os.path.join(self.room, "output.txt")

    @property
    def printed(self) -> str:
        """The last 64 KiB that the job has printed, which end with the cause of a failure."""
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
        """Why the job can't take turns: its ranks train in several processes; empty if they do not."""
        try:
            with open(rank_trial.multiprocess_file(self.room)) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def who_told(self, serial: int) -> list[int]:
        """Return the ranks that have told how a turn went."""
        return [r for r in range(self._num_ranks) if os.path.exists(rank_trial.told_file(self.room, serial, r))]

    def told(self, serial: int) -> list[Any]:
        """Return what each rank has told, in their order; nothing as long as one has not.

        Raises:
            Ended: It never will.
        """
        has_ended = self.has_ended  # asked first, for what was told before the end
        if len(self.who_told(serial)) < self._num_ranks:
            if has_ended:
                raise Ended
            return []
        told = []
        for rank in range(self._num_ranks):
            with open(rank_trial.told_file(self.room, serial, rank)) as file:
                told.append(json.load(file))
        return told

    def ask_to_end(self) -> None:
        """Let the job end; `end` waits for it."""
        self._process.terminate()

    def end(self) -> None:
        """End the job, and wait until it is gone."""
        self.ask_to_end()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
