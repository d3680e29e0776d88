"""Losses of ranks and hosts, and how jobs resumed: saved beside the black boxes of the attempts that they ended.

Each launcher saves a loss when it learns of it, and again with the phases of the recovery, so a loss is recorded even
if no step completed after it. A Trainer's report merges the records of several launchers: two records describe one loss
if they name the same rank or node, and their times differ by no more than the clocks of two hosts can differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from phalanx._errors import printable
from phalanx._text import counted, named, signal_name
from phalanx.failure.ending import Ending
from phalanx.wire.files import read_json, write_whole
from phalanx.wire.messages import as_facts, between, read_value

_NAME = "loss.json"
_FOLDER = "blackbox"
_END_OF_TIME_S = 253_402_300_800.0  # the year 10000; Python's dates end before it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss that ended an attempt, and how long it took until the ranks completed a step again.

    Attributes:
        ending: Ending of the lost rank; for a node, only its host and first rank.
        num_ranks: Number of ranks of the lost node.
        node_sign: Sign by which the loss of a node was noticed; empty if a rank was lost.
        silent_s: Seconds for which the node was silent.
        at_s: Time of the first sign, in seconds since 1970.
        phases_s: Seconds of each phase by name, in order. Time between two phases belongs to the later phase.
        step: Number of the first step completed after the loss, counted in the run; None if the ranks record no such
            numbers.
        loaded_step: Step of the checkpoint that was loaded; 0 if there was none, so that training starts over; None if
            unknown.
        num_repeated: Number of steps that were done twice; None if unknown.
    """

    ending: Ending
    num_ranks: int = 1
    node_sign: Literal["", "refused", "silent", "left"] = ""
    silent_s: float = 0.0
    at_s: Annotated[float, between(0, _END_OF_TIME_S)] = 0.0
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
        """Whether the job is known to have resumed."""
        return any(name.startswith("first ") for name in self.phases_s)

    def as_document(self) -> dict[str, Any]:
        """Return the loss as ``phalanx why --json`` prints it."""
        end = self.ending
        sign = self.node_sign or ("signal" if end.signal else "raised" if end.raised else "exit")
        number = self.silent_s if self.node_sign else int(end.signal or end.exit_code)
        who = {"rank": end.rank, "num_ranks": self.num_ranks, "is_node": bool(self.node_sign), "host": end.host}
        after = ("at_s", "phases_s", "step", "loaded_step", "num_repeated")
        return {
            **who, "how": sign, "number": number, "error": end.raised, **{name: getattr(self, name) for name in after},
        }  # fmt: skip


# ---------------------------------------------------------------- words


def who_of(loss: Loss) -> str:
    """Return a phrase for the rank or node that was lost."""
    end = loss.ending
    if loss.node_sign:
        return f"node {end.host} ({named('rank', range(end.rank, end.rank + max(loss.num_ranks, 1)))})"
    return f"{end.name} on {end.host}" if end.host else end.name


def sign_of(loss: Loss) -> str:
    """Return a phrase for how a loss was noticed."""
    if loss.node_sign == "silent":
        return f"silent for {loss.silent_s:.1f} s"
    if loss.node_sign:
        return "its process has ended" if loss.node_sign == "refused" else "it could not reach the others"
    end = loss.ending
    if end.signal:
        return f"killed by {signal_name(end.signal)}"
    return f"raised {end.raised}" if end.raised else f"exit code {end.exit_code}"


def place_of(loss: Loss, number: str = "") -> str:
    """Return a phrase for where the job resumed; `number` is the format specification for the step's number."""
    if loss.step is not None:
        return f"at step {loss.step:{number}}"
    if loss.loaded_step is None:
        return ""
    return f"from step {loss.loaded_step:{number}}" if loss.loaded_step else "from the beginning"


def repeated(loss: Loss) -> str:
    """Return a phrase for how many steps were done twice; "" if that is unknown."""
    if loss.num_repeated is None:
        return ""
    return f"{counted(loss.num_repeated, 'step') if loss.num_repeated else 'no step'} repeated"


def words_of(loss: Loss, verb: str = "resuming") -> str:
    """Return how a job resumed after a loss, or how far it got.

    Args:
        verb: Verb of the phrase; "resuming" does not fit if the phrase is read after the job has ended.
    """
    phases = [f"{name} {_seconds(value)}" for name, value in loss.phases_s.items()]
    if not loss.is_over:
        lasted = ", ".join(f"{phase} s" for phase in phases)
        return f"no step has completed since{f' ({lasted})' * bool(lasted)}"
    took = ", ".join(phases)
    where, again = place_of(loss), repeated(loss)
    return f"{verb} {where}{' ' * bool(where)}after {_seconds(loss.total_s)} s ({took}){f'; {again}' if again else ''}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


# ---------------------------------------------------------------- on disk


def folder_of(run: Path, attempt: int) -> Path:
    """Return the folder in which a run keeps the records of an attempt's end."""
    return run / _FOLDER / f"attempt_{attempt}"


def save_loss(loss: Loss, run: Path, attempt: int) -> None:
    """Save the loss that ended an attempt, replacing an earlier record of it.

    Raises:
        OSError: The folder or the file can't be written.
    """
    folder = folder_of(run, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    loss = dataclasses.replace(loss, ending=loss.ending.for_others())
    write_whole(str(folder / _NAME), json.dumps(as_facts(loss)))


def load_losses(run: Path) -> list[Loss]:
    """Return the losses of a run in order, without those that can't be read."""
    found = []
    for path in run.glob(f"{_FOLDER}/attempt_*/{_NAME}"):
        with contextlib.suppress(OSError, ValueError):
            found.append((int(path.parent.name.rpartition("_")[2]), _printable(read_value(read_json(path), Loss))))
    return [loss for _, loss in sorted(found, key=lambda pair: pair[0])]


def _printable(loss: Loss) -> Loss:
    end = loss.ending
    words = dataclasses.replace(end.last_words, kind=printable(end.last_words.kind))
    ending = dataclasses.replace(end, host=printable(end.host), last_words=words)
    return dataclasses.replace(
        loss, ending=ending, phases_s={printable(name): value for name, value in loss.phases_s.items()}
    )
