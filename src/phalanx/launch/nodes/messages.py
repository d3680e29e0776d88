"""Messages between agents, and between an agent and its supervisor. Each message is validated when it is read.

Agents send each other lines of JSON. A supervisor and its agent send packets ``{kind: facts}``; each kind is a
dataclass of this module, and `read_packet` returns an object of that class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from phalanx.launch.environment import Attempt
from phalanx.launch.job import Job
from phalanx.launch.nodes.views import Cause, State, View
from phalanx.wire.messages import read_value, require

_OF_STATE = {field.name for field in dataclasses.fields(State)}

# ---------------------------------------------------------------- between agents


def read_state(value: Any) -> State:
    """Return the state of a node. Every field must be present, even a field with a default.

    Raises:
        ValueError: `value` is not a state.
    """
    require(isinstance(value, dict) and value.keys() >= _OF_STATE, "the state of a node", value)
    state: State = read_value(value, State)
    return state


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The state of the sending node, and the times from which the receiver learns the offset of the sender's clock.

    Attributes:
        at: Time of sending, by the sender's clock.
        echo: The `at` of the newest heartbeat that the sender has received from the receiver, so a time by the
            receiver's clock; 0: none has arrived on this connection yet.
        came: Time at which that heartbeat arrived, by the sender's clock; 0 if there was none.
        age: Seconds for which the sender's job has lasted.
    """

    state: Annotated[Any, read_state]
    at: float
    echo: float
    came: float
    age: float


@dataclasses.dataclass(frozen=True)
class NewView:
    """A view that the receiver does not know yet, of a job that has lasted for `age` seconds."""

    view: View
    is_started: bool
    age: float


# ---------------------------------------------------------------- between a supervisor and its agent


@dataclasses.dataclass(frozen=True)
class Signal:
    """A message without facts.

    An agent asks its supervisor to stop the ranks ("stop"), to hold a port for rank 0 ("reserve"), or to report the
    ranks' next snapshot ("watch"); "all leave" says that no other node stays in the job. A supervisor sends "snapshot"
    if the ranks have taken a snapshot or never take any, "leave" if this node is about to leave the job, "interrupted"
    after Ctrl-C on this node, and "pong" in answer to `Ping`.
    """

    what: Literal["stop", "reserve", "watch", "all leave", "snapshot", "leave", "interrupted", "pong"]


# ---------------------------------------------------------------- from the supervisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an agent: fields of its `Job`, and the attributes below.

    Attributes:
        script: Identity of the script, as `handshake.script_of` returns it.
        replica_port: Port on which this node accepts replicas of snapshots; 0: it accepts no replicas.
        joins: Whether this agent has left the younger side of a split job to join the older side.
        num_starts: Number of starts of the ranks so far; more than 0 only if the agent has started over.
    """

    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_conf: dict[str, Any]
    run_id: str
    role: str
    min_nodes: int
    max_nodes: int
    node_rank: int
    local_addr: str
    host_label: str
    num_replicas: int
    num_local_ranks: int
    max_restarts: int
    spares: int
    grace_s: float
    drain_file: str
    drain_url: str
    script: dict[str, str]
    replica_port: int = 0
    joins: bool = False
    num_starts: int = 0


def settings_of(job: Job, *, script: dict[str, str], replica_port: int) -> Settings:
    names = {field.name for field in dataclasses.fields(Job)} & {field.name for field in dataclasses.fields(Settings)}
    return Settings(script=script, replica_port=replica_port, **{name: getattr(job, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Reserved:
    """The supervisor holds this port for rank 0."""

    port: int


@dataclasses.dataclass(frozen=True)
class Ended:
    """The ranks of the start with this number have ended; `cause` is the cause of their failure, if they failed."""

    how: Literal["succeeded", "failed", "stopped", "interrupted"]
    number: int
    cause: Cause | None = None


@dataclasses.dataclass(frozen=True)
class AskFor:
    """This node could continue with `num_ranks` ranks, which are more than it has now."""

    num_ranks: int


# ---------------------------------------------------------------- from the agent


@dataclasses.dataclass(frozen=True)
class Resized:
    """A node whose number of ranks has changed."""

    host: str
    before: int
    now: int


@dataclasses.dataclass(frozen=True)
class Start:
    """Start the ranks.

    Attributes:
        number: Number of this start on this node, which `Ended` repeats.
        restarts: Failures of the job so far.
        replicas: Nodes that keep this node's snapshots, as `holders.told_of` returns them.
        resized: Other nodes whose number of ranks has changed.
    """

    attempt: Attempt
    number: int = 0
    restarts: int = 0
    replicas: dict[str, Any] = dataclasses.field(default_factory=dict)
    resized: tuple[Resized, ...] = ()


@dataclasses.dataclass(frozen=True)
class LossSign:
    """How and when this node noticed the loss of another node. Times are by this host's monotonic clock."""

    how: Literal["refused", "silent"]
    since_s: float
    noticed_s: float
    num_ranks: int


@dataclasses.dataclass(frozen=True)
class Restart:
    """An attempt has failed, and another follows.

    Attributes:
        restarts: Failures of the job so far, including this failure.
        sign: Sign by which this node noticed the failure; None: this node did not notice the failure.
    """

    cause: Cause
    restarts: int
    sign: LossSign | None


@dataclasses.dataclass(frozen=True)
class Join:
    """Stop the ranks, because this node joins the older side of the split job."""

    why: str


@dataclasses.dataclass(frozen=True)
class Finish:
    """The job has ended; `cause` is the cause of its failure, None if it succeeded."""

    cause: Cause | None


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """This node gives up the job for the reason `why`.

    The node has waited for `after_s` seconds without success, another node has refused it (`is_refused`), or its agent
    has failed.
    """

    why: str
    after_s: float | None = None
    is_refused: bool = False


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A line about what this node is waiting for, and the seconds left; None: the wait has no limit."""

    what: str
    left_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Say:
    """Show a line."""

    text: str


@dataclasses.dataclass(frozen=True)
class Ping:
    """Answer with "pong"; `clocks` are the offsets of other hosts' clocks."""

    clocks: dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Drain:
    """A notice says that this host is about to be taken away."""

    why: str


@dataclasses.dataclass(frozen=True)
class NextToLeave:
    """Whether this node is the next to leave, of all nodes that are about to leave."""

    is_next: bool


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Signal, Reserved, Ended, AskFor),
        *(Start, Restart, Join, Finish, GiveUp, Waiting, Say, Ping, Drain, NextToLeave),
    )
}


def as_packet(message: Any) -> dict[str, Any]:
    return {type(message).__name__: message}


def read_packet(packet: Mapping[str, Any]) -> Any:
    [(kind, facts)] = packet.items()
    return read_value(facts, _KINDS[kind])
