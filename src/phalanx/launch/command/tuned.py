"""Settings that ``phalanx tune`` found for a script, in ``logs/<script>/tuned.json``; later runs use them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence

from phalanx.host.block_pool import CHOICES
from phalanx.host.cpus import Machine
from phalanx.record.run_folder import base_of
from phalanx.wire.files import read_json, write_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The fastest settings that ``phalanx tune`` has found.

    Attributes:
        command: Script with its arguments, without the interpreter.
        machine: Cores of the machine, in words.
        ranks: Number of ranks.
        threads: Number of threads of each rank.
        memory: Value of ``--memory``.
    """

    command: list[str]
    machine: str
    ranks: int
    threads: int
    memory: str


def remember(tuned: Tuned, file: str) -> None:
    """Write the settings to `file`, see `tuned_file`.

    Raises:
        OSError: The file can't be written.
    """
    os.makedirs(os.path.dirname(file), exist_ok=True)
    write_whole(file, json.dumps(dataclasses.asdict(tuned), indent=1) + "\n")


def recall(log_dir: str, command: Sequence[str], machine: Machine) -> Tuned | None:
    """Return the settings that were found for exactly this command on an equal machine; None if none were found."""
    with contextlib.suppress(OSError, ValueError, TypeError):  # the file may be damaged
        tuned = Tuned(**read_json(tuned_file(log_dir, command)))
        numbers = tuned.ranks, tuned.threads
        is_sound = all(type(number) is int and 1 <= number <= machine.num_cpus for number in numbers)
        if (
            is_sound
            and tuned.memory in CHOICES
            and (tuned.command, tuned.machine) == (list(command[1:]), machine.describe())
        ):
            return tuned
    return None


def tuned_file(log_dir: str, command: Sequence[str]) -> str:
    """Return the path of the file with the settings for a command."""
    return os.path.join(base_of(log_dir, command), "tuned.json")
