"""Losses of ranks and hosts, and how their jobs went on: kept beside the boxes of the attempts that they ended.

Each launcher keeps those that it saw, as soon as it knows of one and again with its phases, so that a loss after which
no step was done is known as well. They are merged when a Trainer's report is written: two are the same if they are of
the same rank or node, at times that clocks of hosts may differ by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from phalanx._errors import printable
from phalanx._text import counted, named, signal_name
from phalanx.wire.files import read_json, write_whole
from phalanx.wire.messages import read_value

_NAME = "loss.json"
_FOLDER = "blackbox"
_END_OF_TIME_S = 253_402_300_800.0  # the year 10000, which no calendar can show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss that ended an attempt, and how long it took until the ranks had done a step again.

    Attributes:
        rank: Rank that was lost, the first of a node; -1: the process that starts the ranks.
        num_ranks: Number of ranks of a node.
        is_node: Whether a whole node was lost.
        how: Sign by which it was noticed: "exit", "signal", "raised", "refused", "silent" or "left".
        number: Exit code, number of the signal, or seconds of silence; 0: it has none.
        error: Class of the exception that the rank raised; empty: none is known.
        host: Host that was lost, or on which the rank ran; empty: this one.
        at_s: Time of day of the first sign, in seconds since 1970.
        phases_s: Seconds of each phase by its name, in their order. What lies between two phases is part of the later.
        step: First step that was done again, by its number in the run; None: the ranks do not record such numbers.
        loaded_step: Step of the checkpoint that was loaded; 0: there was none, so all begins anew; None: unknown.
        num_repeated: Number of steps that were done twice; None: unknown.
    """

    rank: int
    how: str
    num_ranks: int = 1
    is_node: bool = False
    number: float = 0
    error: str = ""
    host: str = ""
    at_s: float = 0.0
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    step: int | None = None
    loaded_step: int | None = None
    num_repeated: int | None = None

    @property
    def total_s(self) -> float:
        """Seconds from the first sign to the end of the last phase that is known."""
        return sum(self.phases_s.values())

    @property
    def is_over(self) -> bool:
        """Whether the job is known to have gone on."""
        return any(name.startswith("first ") for name in self.phases_s)


# ---------------------------------------------------------------- words


def who_of(loss: Loss) -> str:
    """Return who was lost, in words."""
    if loss.is_node:
        return f"node {loss.host} ({named('rank', range(loss.rank, loss.rank + max(loss.num_ranks, 1)))})"
    name = f"rank {loss.rank}" if loss.rank >= 0 else "the process that starts the ranks"
    return f"{name} on {loss.host}" if loss.host else name


def sign_of(loss: Loss) -> str:
    """Return how a loss was noticed, in words."""
    number = int(loss.number)
    if loss.how == "signal":
        return f"killed by {signal_name(number)}"
    if loss.how == "silent":
        return f"silent for {loss.number:.1f} s"
    known = {"raised": f"raised {loss.error}", "exit": f"exit code {number}", "refused": "its process has ended"}
    return known.get(loss.how, "it could not reach the others")


def place_of(loss: Loss, number: str = "") -> str:
    """Return where the job went on, in words; `number` is the format of the step."""
    if loss.step is not None:
        return f"at step {loss.step:{number}}"
    if loss.loaded_step is None:
        return ""
    return f"from step {loss.loaded_step:{number}}" if loss.loaded_step else "from the beginning"


def repeated(loss: Loss) -> str:
    """Return how many steps were done twice, in words; empty if that is unknown."""
    if loss.num_repeated is None:
        return ""
    return f"{counted(loss.num_repeated, 'step') if loss.num_repeated else 'no step'} repeated"


def words_of(loss: Loss, goes_on: str = "going on") -> str:
    """Return how a job has gone on after a loss, or how far it has come.

    Args:
        goes_on: Verb of the sentence, since the job may have ended by then.
    """
    phases = [f"{name} {_seconds(value)}" for name, value in loss.phases_s.items()]
    if not loss.is_over:
        lasted = ", ".join(f"{phase} s" for phase in phases)
        return f"no step is known after it{f' ({lasted})' * bool(lasted)}"
    took = ", ".join(phases)
    where, again = place_of(loss), repeated(loss)
    return (
        f"{goes_on} {where}{' ' * bool(where)}after {_seconds(loss.total_s)} s ({took}){f'; {again}' if again else ''}"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


# ---------------------------------------------------------------- on disk


def folder_of(run: Path, attempt: int) -> Path:
    """Return the folder in which a run keeps what is known of an attempt's end."""
    return run / _FOLDER / f"attempt_{attempt}"


def save_loss(loss: Loss, run: Path, attempt: int) -> None:
    """Keep the loss that ended an attempt, in place of what was known of it before.

    Raises:
        OSError: The folder or the file can't be written.
    """
    folder = folder_of(run, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(str(folder / _NAME), json.dumps(dataclasses.asdict(loss)))


def load_losses(run: Path) -> list[Loss]:
    """Return the losses of a run in their order, without those that can't be read."""
    found = []
    for path in run.glob(f"{_FOLDER}/attempt_*/{_NAME}"):
        with contextlib.suppress(OSError, ValueError):
            found.append((int(path.parent.name.rpartition("_")[2]), _loss(read_json(path))))
    return [loss for _, loss in sorted(found, key=lambda pair: pair[0])]


def _loss(saved: Any) -> Loss:
    loss = read_value(saved, Loss)
    if not 0 <= loss.at_s < _END_OF_TIME_S:
        raise ValueError("at_s is no time of day")
    how, error, host = map(printable, (loss.how, loss.error, loss.host))
    phases_s = {printable(name): value for name, value in loss.phases_s.items()}
    return dataclasses.replace(loss, how=how, error=error, host=host, phases_s=phases_s)
