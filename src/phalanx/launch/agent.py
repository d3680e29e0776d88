"""One node's seat among several: it agrees with the other nodes, and has its supervisor start and stop ranks.

Runs as a process of its own: whatever the supervisor does, the other nodes hear from this one. It dies with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import sys
import time
from typing import Any

import phalanx
from phalanx.launch.agreement import Agreement, Node, Place, Rules, State
from phalanx.launch.deadlines import ANSWERS_S, JOIN_S, LEAVE_S, NAME_S
from phalanx.launch.links import Links, is_local, open_door
from phalanx.launch.messages import read_cause, read_state, read_view
from phalanx.launch.packets import PacketSocket
from phalanx.launch.questions import Questions

_PROTOCOL = 1
_BEATS = 4  # in the time after which a silent node is lost
_LAST_CALL_S = 3.0
_SILENCE_S = 2.0
_NAME_PAUSE_S = 1.0
_TOLD_AFTER_S = 2.0  # what this node waits for
_PEER_AGAIN_S = 0.5
_ASK_S = 1.0


class _Refused(Exception):
    """A node of the job does not take this one."""


class Agent:
    """Links, agreement and supervisor, tied together.

    Args:
        channel: To the supervisor.
        job: What `nodes` knows of the job.
    """

    def __init__(self, channel: PacketSocket, job: dict[str, Any]) -> None:
        self._channel, self._job = channel, job
        config = job["rdzv_conf"]
        self._is_static = job["rdzv_backend"] == "static"
        self._join_s = float(config.get("timeout", NAME_S) if self._is_static else config.get("join_timeout", JOIN_S))
        host, _, port = job["rdzv_endpoint"].rpartition(":")
        self._endpoint: Place = host.strip("[]"), int(port)
        self._rules = _rules(job)
        nodes = [self._rules.min_nodes, self._rules.max_nodes]
        self._greeting = {
            "phalanx": phalanx.__version__, "protocol": _PROTOCOL, "job": job["run_id"], "nodes": nodes,
            "backend": job["rdzv_backend"], "silence_s": self._rules.silence_s,
        }  # fmt: skip
        self._selector = selectors.DefaultSelector()
        self._links = Links(self._selector, self, self._rules.silence_s)
        self._questions = Questions(os.getppid(), self._selector, self._links)
        self._told: State | None = None
        self._told_s = self._dialed_s = self._joining_s = 0.0
        self._times: dict[str, tuple[float, float]] = {}  # of each peer: when it sent its last, ours that it had
        self._waits_for = ("", 0.0, False)
        self._num_starts = 0
        self._is_root = False

    # ------------------------------------------------------------ the way in

    def _enter(self) -> None:
        """Listen, and lead if this is where nodes look for the job.

        Raises:
            OSError: The port is taken, or the name of the endpoint does not resolve.
        """
        is_here = self._await_name()
        may_lead = self._job["node_rank"] == 0 if self._is_static else is_here
        asked = str(self._job["rdzv_conf"].get("is_host", "")).lower()
        if asked:
            may_lead = asked in ("true", "1", "t", "yes", "y")
        port = self._endpoint[1]
        # Where several nodes share a host, one of them has the port; elsewhere it is where a lost node is looked for.
        try:
            door = open_door(port if may_lead or not is_here else 0)
            self._is_root = may_lead
        except OSError as error:
            if asked and may_lead:
                raise OSError(error.errno, f"port {port} of this host: {error.strerror}") from None
            door = open_door(0)
        address = self._job["local_addr"] or (self._endpoint[0] if self._is_root else "")
        self._me = Node(
            os.urandom(8).hex(),
            socket.gethostname(),
            address,
            door.getsockname()[1],
            self._job["num_local_ranks"],
            self._job["node_rank"] if self._is_static else -1,
        )
        self._agreement = Agreement(self._me, self._rules, self, is_root=self._is_root, now_s=time.monotonic())
        if address:
            self._introduce(address)
        self._links.listen(door)
        self._joining_s = time.monotonic()

    def _introduce(self, address: str) -> None:
        self._me = self._agreement.me = dataclasses.replace(self._me, address=address)
        self._links.introduce(self._me, self._greeting)

    def _await_name(self) -> bool:
        """Return whether the endpoint is on this host, once its name has an address.

        Raises:
            TimeoutError: It has none at the limit.
        """
        deadline = time.monotonic() + float(self._job["rdzv_conf"].get("timeout", self._join_s))
        is_told = False
        while True:
            try:
                return is_local(self._endpoint[0])
            except (OSError, UnicodeError) as error:
                why = f"the name {self._endpoint[0]!r} does not resolve here ({error.args[-1]})"
            if time.monotonic() >= deadline:
                raise TimeoutError(why)
            if not is_told:
                self._channel.send({"unresolved": why})
                is_told = True
            time.sleep(_NAME_PAUSE_S)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Take part until the job has ended.

        Raises:
            OSError: The nodes did not meet.
        """
        self._enter()
        self._selector.register(self._channel.fileno(), selectors.EVENT_READ, self._hear_supervisor)
        self._asked_s = self._answered_s = time.monotonic()
        while self._agreement.result is None:
            self._links.wait(self._rules.silence_s / (2 * _BEATS))
            self._links.lose_silent()
            self._links.redial()
            self._agreement.decide(time.monotonic())
            self._dial()
            self._beat()
            self._questions.look()
            self._ask_supervisor()
            self._say_what_is_missing()
        self._leave(self._agreement.result["cause"])

    def _leave(self, cause: Any) -> None:
        """End when the others know how the job has ended, too."""
        deadline = time.monotonic() + LEAVE_S
        self._beat(is_forced=True)
        self._channel.send({"finish": cause})
        while self._agreement.others_stay and time.monotonic() < deadline:
            self._links.wait(self._rules.silence_s / (2 * _BEATS))
            self._links.lose_silent()
            self._beat()
        self._links.flush(LEAVE_S)

    def _dial(self) -> None:
        now_s = time.monotonic()
        if now_s - self._dialed_s < _PEER_AGAIN_S:
            return
        self._dialed_s = now_s
        if not self._me.address and (address := self._links.own_address()):
            self._introduce(address)
        for place in self._agreement.wanted(now_s):
            self._links.dial(place)
        if not self._is_root and (self._agreement.view is None or self._agreement.leads):
            self._links.dial(self._endpoint)

    def _beat(self, *, is_forced: bool = False) -> None:
        """Tell all what changes, and a few times in the time after which silence counts."""
        now_s, state = time.monotonic(), self._agreement.state
        is_due = now_s - self._told_s >= self._rules.silence_s / _BEATS
        if is_forced or is_due or state != self._told:
            self._told, self._told_s = state, now_s
            self._links.tell_all(lambda peer: {"state": state, "at": now_s, "echo": self._times.get(peer, (0.0,))[0]})

    def _say_what_is_missing(self) -> None:
        now_s, what = time.monotonic(), self._agreement.waits_for()
        before, since_s, is_said = self._waits_for
        if what != before:
            self._waits_for = what, now_s, False
        elif what and not is_said and now_s - since_s >= _TOLD_AFTER_S:
            self._waits_for = what, since_s, True
            self._channel.send({"waiting": what})
        if self._agreement.is_under_way or self._agreement.trains:
            self._joining_s = now_s
        elif now_s - self._joining_s >= self._join_s:
            raise TimeoutError(what or f"no answer within {self._join_s:g} s")

    def _hear_supervisor(self) -> None:
        for packet in self._channel.receive():
            self._answered_s = time.monotonic()
            if "reserved" in packet:
                self._agreement.reserved(packet["reserved"])
            elif "leave" in packet:
                self._agreement.leave()
            elif "whole" in packet:
                self._agreement.snapshot_is_whole()
            elif packet.get("number") == self._num_starts:
                self._agreement.ranks_ended(packet["ended"], packet["cause"])
        if not self._channel.alive:
            os._exit(1)

    def _ask_supervisor(self) -> None:
        """End if the supervisor does not answer: somebody has stopped it, and the others are to go on without."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= _ASK_S:
            if self._asked_s - self._answered_s >= ANSWERS_S:
                os._exit(1)
            self._asked_s = now_s
            self._channel.send({"ping": True})

    # ------------------------------------------------------------ what the links tell

    def linked(self, node: Node) -> None:
        self._agreement.linked(node, time.monotonic())
        self._told = None

    def unlinked(self, peer: str, *, has_ended: bool) -> None:
        self._times.pop(peer, None)
        self._agreement.unlinked(peer, has_ended=has_ended, now_s=time.monotonic())

    def received(self, peer: str, message: dict[str, Any]) -> None:
        if "state" in message:
            state, at_s, echo_s = read_state(message["state"]), float(message["at"]), float(message["echo"])
            if peer not in self._times:
                self._told = None  # it does not count this node's answers before one tells that we have heard from it
            self._times[peer] = at_s, echo_s
            self._agreement.heard(peer, state, min(echo_s, time.monotonic()))
        elif "view" in message:
            self._agreement.handed(read_view(message["view"]), is_started=message["is_started"] is True)
        else:
            self._questions.received(peer, message)

    def refused(self, why: str) -> None:
        if self._agreement.view is None:
            raise _Refused(why)

    def problem_with(self, greeting: dict[str, Any]) -> str:
        here, rules, ours = socket.gethostname(), self._rules, self._greeting
        if greeting.get("job") != ours["job"]:
            return f"{here} runs another job at this place: its --rdzv-id is {ours['job']!r}"
        if any(greeting.get(name) != ours[name] for name in ("phalanx", "protocol")):
            return f"{here} has phalanx {ours['phalanx']}, and this host {str(greeting.get('phalanx'))[:40]}"
        if greeting.get("nodes") != ours["nodes"]:
            return f"{here} was started with --nnodes {rules.min_nodes}:{rules.max_nodes}, and this host with another"
        if greeting.get("backend") != ours["backend"]:
            return f"{here} was started with --rdzv-backend {ours['backend']}, and this host with another"
        if greeting.get("silence_s") != ours["silence_s"]:
            return f"{here} was started with other keep_alive settings in --rdzv-conf: they must be the same on all"
        return ""

    # ------------------------------------------------------------ what the agreement orders

    def hand(self, peer: str, view: Any, is_started: bool) -> None:
        self._links.tell(peer, {"view": view, "is_started": is_started})

    def order(self, what: dict[str, Any]) -> None:
        if "start" in what:
            if what["cause"] is not None and self._num_starts:
                self._channel.send({"restart": read_cause(what["cause"]), "number": what["restarts"]})
            self._num_starts += 1
            attempt = {**what["start"], "role": self._job["role"], "run_id": self._job["run_id"]}
            self._channel.send({"start": attempt, "number": self._num_starts})
        else:
            self._channel.send(what)


def _rules(job: dict[str, Any]) -> Rules:
    config = job["rdzv_conf"]
    silence_s = _SILENCE_S
    if "keep_alive_interval" in config or "keep_alive_max_attempt" in config:
        silence_s = float(config.get("keep_alive_interval", 5)) * float(config.get("keep_alive_max_attempt", 3))
    return Rules(
        min_nodes=job["min_nodes"],
        max_nodes=job["max_nodes"],
        max_restarts=job["max_restarts"],
        silence_s=max(silence_s, 0.1),
        last_call_s=float(config.get("last_call_timeout", _LAST_CALL_S)),
        has_positions=job["rdzv_backend"] == "static",
    )


def main() -> None:
    channel = PacketSocket(socket.socket(fileno=int(sys.argv[1])))
    try:
        Agent(channel, json.loads(sys.argv[2])).run()
    except _Refused as error:
        channel.send({"give_up": str(error)})
    except TimeoutError as error:
        channel.send({"give_up": str(error), "is_alone": True})
    except Exception as error:
        channel.send({"give_up": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)
