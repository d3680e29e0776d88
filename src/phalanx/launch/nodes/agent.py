"""The agent of a node: it agrees with the agents of other nodes, and orders its supervisor to start and stop ranks.

The agent is a process of its own without torch, so its heartbeats continue even while the supervisor is busy. One
thread does everything except name lookups and the polls of `notices`, which may block. The agent dies with the
supervisor. Agents meet at ``--master-port``; ranks meet on a port that the node of rank 0 reserves for each attempt.
Questions of ``phalanx why`` travel over the connections between agents (`questions`).

TORCHELASTIC_RESTART_COUNT counts every attempt, as on one node. Failures and lost nodes count against
``--max-restarts``; new nodes do not. A node that joins waits for the next snapshot; otherwise the other nodes would
lose steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

from phalanx._env import host_name
from phalanx._text import named
from phalanx.host.ports import open_listener
from phalanx.launch.command.flag_values import YES
from phalanx.launch.deadlines import ANSWERS_S, JOIN_S, LEAVE_S, NAME_S
from phalanx.launch.environment import Attempt
from phalanx.launch.nodes import messages
from phalanx.launch.nodes.agreement import Agreement
from phalanx.launch.nodes.causes import OTHER_SIDE, with_own_kind
from phalanx.launch.nodes.clocks import Clocks
from phalanx.launch.nodes.handshake import Handshake
from phalanx.launch.nodes.links import Links, is_local
from phalanx.launch.nodes.questions import Questions
from phalanx.launch.nodes.views import Cause, Node, Place, Rules, State, View
from phalanx.launch.replicas.holders import told_of
from phalanx.wire.messages import as_facts, read_value, understand
from phalanx.wire.packets import PacketSocket
from phalanx.wire.waiting import wait_until

_BEATS = 4  # heartbeats sent during the time of silence after which a node counts as lost
_LAST_CALL_S = 3.0
_SILENCE_S = 2.0
_NAME_PAUSE_S = 1.0
_TOLD_AFTER_S = 2.0  # time of waiting after which a line says what this node waits for
_PEER_AGAIN_S = 0.5
_ASK_S = 1.0
_TURN_S = 5.0  # time to wait for each earlier host in the list of meeting places before leading


# Not started with -m, which would let a json.py in the current folder shadow the standard library's.
RUN_AGENT = "import sys; sys.path[:] = filter(None, sys.path); from phalanx.launch.nodes.agent import main; main()"


class _Refused(Exception):
    """A node of the job has refused this node."""


class Agent:
    """The agent of this node: connects the links, the agreement and the supervisor.

    Args:
        channel: Channel to the supervisor.
    """

    def __init__(self, channel: PacketSocket, job: messages.Settings) -> None:
        self._channel, self._job = channel, job
        config = job.rdzv_conf
        self._turn: int | None = None  # index of this host in the list of meeting places; None: this node never leads
        self._is_static = job.rdzv_backend == "static"
        self._join_s = float(config.get("timeout", NAME_S) if self._is_static else config.get("join_timeout", JOIN_S))
        self._meeting_places = [_place(text) for text in job.rdzv_endpoint.split(",")]
        self._rules = _rules(job)
        self._handshake = Handshake(job, self._rules)
        self._selector = selectors.DefaultSelector()
        self._links = Links(self._selector, self, self._rules.silence_s)
        self._questions = Questions(os.getppid(), self._selector, self._links)
        self._told: State | None = None
        self._told_s = self._dialed_s = 0.0
        self._joining_s = time.monotonic()
        self._times: dict[
            str, tuple[float, float]
        ] = {}  # by peer: time at which its last heartbeat was sent, by its clock, and time of arrival, by ours
        self._clocks = Clocks()
        self._nodes: dict[str, Node] = {}  # linked nodes by id
        self._signs: dict[str, messages.LossSign] = {}  # for each host: how this node noticed the loss of a node there
        self._num_ranks: dict[str, int] = {}  # number of ranks of each node in this node's latest attempt
        self._waits_for = ("", 0.0, False)
        self._seen: dict[str, Node] = {}  # members of the job that this node saw before it became a member
        self._num_starts = job.num_starts
        self._is_running = self._is_leaving = False
        self._is_next = True  # whether this node is the next to leave, as last reported to the supervisor
        name = json.dumps([job.run_id, job.rdzv_endpoint, job.rdzv_backend])
        self._name = hashlib.sha256(name.encode()).hexdigest()[:12]
        self._is_root = False

    @property
    def waited_s(self) -> float:
        """Seconds for which this node has waited for other nodes, or for a name to resolve."""
        return time.monotonic() - self._joining_s

    # ------------------------------------------------------------ joining

    def _enter(self) -> None:
        """Listen, and lead if this is the meeting place.

        Raises:
            OSError: The port is taken, or the name of the endpoint does not resolve.
        """
        here = self._await_name()
        if self._is_static and self._job.node_rank == 0:
            here = 0
        self._turn = None if self._is_static and here == 0 != self._job.node_rank else here
        self._endpoint = self._meeting_places[here or 0]
        is_here, may_lead = here is not None, self._turn == 0
        asked = str(self._job.rdzv_conf.get("is_host", "")).lower()
        if asked:
            may_lead = asked in YES
        has_port = may_lead or not is_here or (self._turn is not None and not asked)
        may_lead = may_lead and not self._job.joins
        port = self._endpoint[1]
        # If this node is restarted, the other nodes look for it at this port, even if this host is not the meeting
        # place. If several nodes share this host, only one of them gets the port.
        try:
            listener = open_listener(port if has_port else 0)
            self._is_root = may_lead
        except OSError as error:
            if asked and may_lead:
                raise OSError(error.errno, f"port {port} of this host: {error.strerror}") from None
            listener = open_listener(0)
        is_at_place = self._turn is not None and listener.getsockname()[1] == port
        address = self._job.local_addr or (self._endpoint[0] if is_at_place else "")
        self._me = Node(
            os.urandom(8).hex(),
            host_name(),
            address,
            listener.getsockname()[1],
            self._job.num_local_ranks,
            self._job.node_rank if self._is_static else -1,
            self._job.host_label,
            self._job.replica_port,
        )
        self._agreement = Agreement(self._me, self._rules, self, is_root=self._is_root, now_s=time.monotonic())
        if address:
            self._introduce(address)
        self._links.listen(listener)
        self._joining_s = self._alone_s = time.monotonic()

    def _introduce(self, address: str) -> None:
        self._me = self._agreement.me = dataclasses.replace(self._me, address=address)
        self._links.introduce(self._me, self._handshake.told)

    def _await_name(self) -> int | None:
        """Wait until a meeting place's name resolves; return the index of the place on this host, None if none is here.

        Raises:
            TimeoutError: No name resolved within the limit.
        """
        why = ""

        def look() -> dict[int, bool] | None:
            """Return, for each name that resolves, whether it names this host; None if no name resolves."""
            nonlocal why
            is_new, found = not why, {}
            for number, (host, _) in enumerate(self._meeting_places):
                try:
                    found[number] = is_local(host)
                except (OSError, UnicodeError) as error:
                    why = f"the name {host!r} does not resolve here ({error.args[-1]})"
                    continue
                if found[number]:
                    break
            if not found and is_new:
                given = "--master-addr (or --rdzv-endpoint)" if self._is_static else "--rdzv-endpoint"
                self._send(messages.Waiting(f"{why}: waiting for it. Correct {given}, or add it to DNS or /etc/hosts"))
            return found or None

        deadline = time.monotonic() + float(self._job.rdzv_conf.get("timeout", self._join_s))
        found = wait_until(look, deadline, least_s=_NAME_PAUSE_S, most_s=_NAME_PAUSE_S)
        if found is None:
            raise TimeoutError(why)
        return next((number for number, is_here in found.items() if is_here), None)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Take part until the job has ended.

        Raises:
            OSError: The nodes did not meet.
        """
        if self._job.drain_file or self._job.drain_url:  # watched even before the nodes meet, which may take a while
            from phalanx.launch.nodes.notices import Notices

            left = "was there before this job: it is no notice until it is touched"
            Notices(
                self._job.drain_file,
                self._job.drain_url,
                lambda why: self._send(messages.Drain(why)),
                lambda file: self._send(messages.Say(f"{file} {left}")),
            )
        self._enter()
        self._selector.register(self._channel.fileno(), selectors.EVENT_READ, self._hear_supervisor)
        self._asked_s = self._answered_s = time.monotonic()
        while self._agreement.result is None and self._agreement.out is None:
            self._links.wait(self._rules.silence_s / (2 * _BEATS))
            self._links.lose_silent()
            self._links.redial()
            self._take_turn()
            self._agreement.decide(time.monotonic())
            if (view := self._agreement.view) is not None and not self._agreement.is_member:
                self._seen |= {node.id: node for node in view.members}
            self._dial()
            self._beat()
            self._questions.look()
            self._ask_supervisor()
            self._say_what_is_missing()
            if self._is_leaving and self._is_next != self._agreement.is_next_to_leave:
                self._is_next = not self._is_next
                self._send(messages.NextToLeave(self._is_next))
            if self._is_leaving and self._agreement.all_leave:
                self._is_leaving = False
                self._send(messages.Signal("all leave"))
        if self._agreement.result is None:
            self._leave(self._agreement.out, waits=False)
            return
        cause = self._agreement.result.cause
        if cause is not None and cause.kind == OTHER_SIDE:
            self._begin_anew(cause.message)
        self._leave(cause)

    def _begin_anew(self, why: str) -> None:
        """Ask the supervisor to stop the ranks, then start over as an agent that joins the older side of this job."""
        self._send(messages.Join(why))
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and (self._agreement.others_stay or self._is_running):
            self._links.wait(self._rules.silence_s / (2 * _BEATS))
            self._links.lose_silent()
            self._beat(is_forced=True)
        job = dataclasses.replace(self._job, joins=True, num_starts=self._num_starts, local_addr=self._me.address)
        os.execv(sys.executable, [sys.executable, "-c", RUN_AGENT, sys.argv[1], json.dumps(as_facts(job))])

    def _leave(self, cause: Cause | None, *, waits: bool = True) -> None:
        """Tell the supervisor that this node is done; return once the last messages have been sent.

        Args:
            waits: Whether to wait until the other nodes know how the job has ended; False if they continue without this
                node.
        """
        deadline = time.monotonic() + LEAVE_S
        self._beat(is_forced=True)
        self._send(messages.Finish(cause))
        while waits and self._agreement.others_stay and time.monotonic() < deadline:
            self._links.wait(self._rules.silence_s / (2 * _BEATS))
            self._links.lose_silent()
            self._beat()
        self._links.flush(LEAVE_S)

    def _take_turn(self) -> None:
        """Lead the job from this meeting place if no agent answers at the earlier places."""
        job = self._job
        if self._agreement.view is not None or not self._turn or job.joins or "is_host" in job.rdzv_conf:
            return
        now_s, before = time.monotonic(), self._meeting_places[: self._turn]
        if any(peer.place in before for peer in self._links.nodes):
            self._alone_s = now_s
        self._is_root = now_s - self._alone_s >= self._turn * _TURN_S
        self._agreement.lead_first(now_s, may=self._is_root)

    def _dial(self) -> None:
        now_s = time.monotonic()
        if now_s - self._dialed_s < _PEER_AGAIN_S:
            return
        self._dialed_s = now_s
        if not self._me.address and (address := self._links.own_address()):
            self._introduce(address)
        for place in self._agreement.wanted(now_s):
            self._links.dial(place)
        if self._agreement.view is None or self._agreement.leads:
            for place in self._meeting_places:
                if place != self._me.place:
                    self._links.dial(place)

    def _beat(self, *, is_forced: bool = False) -> None:
        """Send heartbeats to all nodes: whenever the state changes, and often enough not to count as silent."""
        now_s, state = time.monotonic(), self._agreement.state
        is_due = now_s - self._told_s >= self._rules.silence_s / _BEATS
        if is_forced or is_due or state != self._told:
            self._told, self._told_s = state, now_s
            age_s, times = self._agreement.job_age_s, self._times

            def make(peer: str) -> messages.Heartbeat:
                return messages.Heartbeat(state, now_s, *times.get(peer, (0.0, 0.0)), age_s)

            self._links.tell_all(make)

    def _say_what_is_missing(self) -> None:
        now_s, what = time.monotonic(), self._agreement.waits_for()
        before, since_s, is_said = self._waits_for
        if what != before:
            self._waits_for = what, now_s, False
        elif what and not is_said and now_s - since_s >= _TOLD_AFTER_S:
            self._waits_for = what, since_s, True
            left_s = self._join_s - (now_s - self._joining_s)
            is_limited = not (self._agreement.is_under_way or self._agreement.trains)
            self._send(messages.Waiting(what, left_s if is_limited else None))
        if self._agreement.is_under_way or self._agreement.trains:
            self._joining_s = now_s
        elif now_s - self._joining_s >= self._join_s:
            raise TimeoutError(what or f"no answer within {self._join_s:g} s")

    def _hear_supervisor(self) -> None:
        for packet in self._channel.receive():
            self._answered_s = time.monotonic()
            match messages.read_packet(packet):
                case messages.Reserved(port):
                    self._agreement.reserved(port)
                case messages.Signal("interrupted"):
                    self._agreement.interrupt()
                case messages.Signal("leave"):
                    self._agreement.leave()
                    self._is_leaving = True
                case messages.AskFor(num_ranks):
                    self._agreement.ask_for(num_ranks)
                case messages.Signal("snapshot"):
                    self._agreement.snapshot_is_whole()
                case messages.Ended(how, number, cause) if number == self._num_starts:
                    self._is_running = False
                    self._agreement.ranks_ended(how, with_own_kind(cause))
        if not self._channel.alive:
            os._exit(1)

    def _ask_supervisor(self) -> None:
        """Ping the supervisor once a second; exit if it has not answered for `ANSWERS_S`.

        A supervisor that does not answer has been suspended (SIGSTOP), so the other nodes have to continue without this
        node.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s >= _ASK_S:
            if self._asked_s - self._answered_s >= ANSWERS_S:
                os._exit(1)
            self._asked_s = now_s
            self._send(messages.Ping(self._clocks.told(now_s)))

    # ------------------------------------------------------------ LinkOwner

    def linked(self, node: Node) -> None:
        self._nodes[node.id] = node
        self._agreement.linked(node, time.monotonic())
        self._told = None

    def unlinked(self, peer: str, *, has_ended: bool, since_s: float) -> None:
        gone, now_s = self._nodes.pop(peer), time.monotonic()
        num_ranks = self._num_ranks.get(peer, gone.num_ranks)
        self._signs[gone.host] = messages.LossSign("refused" if has_ended else "silent", since_s, now_s, num_ranks)
        self._times.pop(peer, None)
        self._agreement.unlinked(peer, has_ended=has_ended, now_s=now_s)

    def received(self, peer: str, message: dict[str, Any]) -> None:
        if "state" in message:
            beat, now_s = read_value(message, messages.Heartbeat), time.monotonic()
            if peer not in self._times:
                self._told = None  # so that a heartbeat is sent now: the peer waits for the echo of its own heartbeat
            if beat.echo and peer in self._nodes:
                self._clocks.heard(self._nodes[peer].host, beat.echo, beat.came, beat.at, now_s)
            self._times[peer] = beat.at, now_s
            self._agreement.heard(peer, beat.state, min(beat.echo, now_s), beat.age)
        elif "view" in message:
            new = read_value(message, messages.NewView)
            if any(node.id == self._me.id and node.num_ranks > self._me.num_ranks for node in new.view.members):
                raise ValueError("more ranks than this node has")
            self._agreement.handed(new.view, is_started=new.is_started, age_s=new.age)
        else:
            self._questions.received(peer, message)

    def refused(self, why: str) -> None:
        if self._agreement.view is None:
            raise _Refused(why)

    def problem_with(self, handshake: dict[str, Any]) -> str:
        why = self._handshake.problem_with(handshake)
        for what in [] if why else self._handshake.differences(handshake):
            self._send(messages.Waiting(what))
        return why

    # ------------------------------------------------------------ Acts

    def hand(self, peer: str, view: View, is_started: bool) -> None:
        self._links.tell(peer, messages.NewView(view, is_started, self._agreement.job_age_s))

    def start(self, view: View, port: int) -> None:
        if view.cause is not None and self._num_starts:
            self._send(messages.Restart(view.cause, view.restarts, self._signs.get(view.cause.ending.host)))
        self._num_starts += 1
        self._is_running = True
        attempt = attempt_in(view, self._me.id, port)
        attempt = dataclasses.replace(
            attempt,
            role=self._job.role,
            run_id=self._job.run_id,
            max_restarts=self._rules.max_restarts,
            epoch={**(attempt.epoch or {}), "name": self._name},
        )
        self._say_whose_place(view.members, range(attempt.first_rank, attempt.first_rank + attempt.num_local_ranks))
        before, self._num_ranks = self._num_ranks, {node.id: node.num_ranks for node in view.members}
        resized = tuple(
            messages.Resized(node.host, before[node.id], node.num_ranks)
            for node in view.members
            if node.id != self._me.id and before.get(node.id, node.num_ranks) != node.num_ranks
        )
        holders = told_of(view.members, self._me, self._job.num_replicas)
        self._send(messages.Start(attempt, self._num_starts, view.restarts, holders, resized))

    def signal(self, what: Literal["stop", "reserve", "watch"]) -> None:
        self._send(messages.Signal(what))

    def _send(self, message: Any) -> None:
        self._channel.send(messages.as_packet(message))

    def _say_whose_place(self, members: Sequence[Node], numbers: Sequence[int]) -> None:
        """If this node was a spare until now, say whose place it takes."""
        ids = [node.id for node in members]
        gone = [node.host for node in self._seen.values() if node.id not in ids]
        new = [one for one in ids if one not in self._seen]
        self._seen.clear()
        if len(gone) >= len(new) and self._me.id in new:
            place = f"this spare takes the place of {gone[new.index(self._me.id)]}"
            self._send(messages.Waiting(f"{place}, with {named('rank', [*numbers])}"))


def attempt_in(view: View, member: str, port: int) -> Attempt:
    """Return the attempt of a view for the node `member`; rank 0 serves the store on `port`."""
    number = view.ids.index(member)
    return Attempt(
        world_size=view.first_rank(len(view.members)),
        num_local_ranks=view.members[number].num_ranks,
        first_rank=view.first_rank(number),
        node_rank=number,
        num_nodes=len(view.members),
        master_addr=view.members[0].address,
        master_port=port,
        restart_count=view.attempt,
        epoch={"job": view.job, "attempt": list(view.key)},
    )


def _place(text: str) -> Place:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _rules(job: messages.Settings) -> Rules:
    config = job.rdzv_conf
    silence_s = _SILENCE_S
    if "keep_alive_interval" in config or "keep_alive_max_attempt" in config:
        silence_s = float(config.get("keep_alive_interval", 5)) * float(config.get("keep_alive_max_attempt", 3))
    return Rules(
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        max_restarts=job.max_restarts,
        silence_s=max(silence_s, 0.1),
        last_call_s=float(config.get("last_call_timeout", _LAST_CALL_S)),
        has_positions=job.rdzv_backend == "static",
        spares=job.spares,
        preempted_s=job.grace_s,
    )


def main() -> None:
    channel = PacketSocket(socket.socket(fileno=int(sys.argv[1])))
    try:
        agent = Agent(channel, understand(sys.argv[2], messages.Settings))
        agent.run()
    except _Refused as error:
        channel.send(messages.as_packet(messages.GiveUp(str(error), is_refused=True)))
    except TimeoutError as error:
        channel.send(messages.as_packet(messages.GiveUp(str(error), after_s=agent.waited_s)))
    except Exception as error:
        channel.send(messages.as_packet(messages.GiveUp(f"{type(error).__name__}: {error}")))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)
