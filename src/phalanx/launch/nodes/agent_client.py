"""The supervisor's handle for this node's agent, the process that decides when ranks start and stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, Literal

from phalanx._env import PREEMPTED_CODE
from phalanx.checkpoint.memory.layout import announce_restart, newest_attempt
from phalanx.failure.ending import Ending
from phalanx.host.ports import ReservedPort
from phalanx.launch.deadlines import AGENT_S, ANSWERS_S, NODES_S
from phalanx.launch.job import Job
from phalanx.launch.nodes import messages
from phalanx.launch.nodes.agent import RUN_AGENT
from phalanx.launch.nodes.causes import cause_of
from phalanx.launch.nodes.handshake import script_of
from phalanx.launch.processes.descendants import start_helper
from phalanx.launch.replicas.process import Replicas
from phalanx.launch.run.local_size import SharedSize, is_ahead, newest_steps
from phalanx.launch.run.supervisor import Supervisor
from phalanx.wire.messages import as_facts
from phalanx.wire.packets import PacketSocket

_OTHERS_S = 0.5  # time for other nodes to announce that they are leaving, too
_LOOK_S = 1.0  # time between two checks that the agent has pinged


class AgentClient:
    """The agent's process, and the agent's orders that have not been carried out yet.

    Attributes:
        may_restart: Whether a failure of the present attempt may be followed by another attempt.
    """

    def __init__(self, ranks: Supervisor, job: Job, size: SharedSize) -> None:
        self._ranks = ranks
        self._job = job
        self._size = size
        self.may_restart: bool = False
        self._pending: list[Any] = []
        self._reserved: ReservedPort | None = None
        self._replicas: Replicas | None = None
        self._running = self._stopped = False
        self._steps: dict[bytes, int] | None = None  # newest steps when the wait for newer steps began
        self._heard_s = time.monotonic()  # time of the agent's last ping
        self._stopped_s = 0.0  # longest pause between two pings
        self._num_asked = 0  # pings since the agent began
        self._how: Literal["", "succeeded", "failed", "stopped", "interrupted"] = (
            ""  # how the last attempt on this node ended
        )
        self._leaves_at_s = 0.0  # latest time to leave; 0: this node stays
        self._leaves_from_s = 0.0  # earliest time to leave: by then, other leaving nodes are known
        self._is_next = True  # whether this node is the next to leave
        self._goes = False  # whether the ranks were ended so that this node can leave
        self._old_attempt = 0  # newest attempt with snapshots when this node began to leave; 0: none

    def __enter__(self) -> AgentClient:
        ranks, job = self._ranks, self._job
        if job.num_replicas and job.max_restarts:
            self._replicas = Replicas(
                ranks.events, ranks.say, ranks.snapshots_fd, job.run_id, job.num_replicas, ranks.keep_list
            )
        self._channel, theirs = PacketSocket.pair()
        replica_port = self._replicas.port if self._replicas is not None else 0
        settings = messages.settings_of(job, script=script_of(job.command), replica_port=replica_port)
        self._pid = start_helper(RUN_AGENT, [theirs.fileno()], json.dumps(as_facts(settings)))
        theirs.close()
        if self._job.drains:
            self._ranks.signals.drain = lambda: self._leave("SIGTERM")
        self._ranks.signals.announce_interrupt = lambda: self._send(messages.Signal("interrupted"))
        self._ranks.keep_list.append(self._pid)
        self._ranks.events.watch(self._channel.fileno(), self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.signals.announce_interrupt = None
        with contextlib.suppress(KeyError):
            self._ranks.events.unwatch(self._channel.fileno())
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, 9)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        if self._reserved is not None:
            self._reserved.close()
        if self._replicas is not None:
            self._replicas.close()

    def replicate(self, told: dict[str, Any]) -> None:
        """From now on, copy this node's snapshots to other nodes of the new attempt; `told` names those nodes."""
        if self._replicas is not None:
            self._replicas.follow(told)

    def next(self) -> Any:
        """Return the next order; None when this process is told to end."""
        patience_ends_s = time.monotonic() + NODES_S
        said = False
        num_asked, num_silent = self._num_asked, 0
        while not self._pending:
            if self._ranks.signals.received is not None:
                return None
            if self._has_to_go:
                self._ranks.keep_reason("left the job on SIGTERM (--drain)")
                self._ranks.say(f"this node has left the job; exit code {PREEMPTED_CODE}, start it again to join")
                raise SystemExit(PREEMPTED_CODE)
            if not self._channel.alive:
                return messages.GiveUp(self._why_no_agent())
            if num_silent * _LOOK_S >= ANSWERS_S:
                return messages.GiveUp(f"the agent of this node (pid {self._pid}) has not answered for {ANSWERS_S:g} s")
            began_s = time.monotonic()
            self._ranks.wait(min(_LOOK_S, _LOOK_S if said else max(0.0, patience_ends_s - time.monotonic())))
            if self._num_asked != num_asked or not num_asked:
                num_asked, num_silent = self._num_asked, 0
            else:  # counts rounds, because seconds also pass while this process and the agent are suspended
                num_silent += time.monotonic() - began_s >= _LOOK_S
            if not self._pending and not said and time.monotonic() >= patience_ends_s:
                said = True
                self._ranks.say(f"waiting for the other nodes at {self._job.rdzv_endpoint}")
        order = self._pending.pop(0)
        self._running = isinstance(order, messages.Start)
        self._stopped = False
        self._steps = None
        if self._leaves_at_s:
            self._steps = newest_steps(self._ranks.snapshots_fd)
            self._old_attempt = newest_attempt(self._ranks.snapshots_fd, own=True)
        self._attempt = order.attempt.restart_count if self._running else 0
        return order

    @property
    def _has_to_go(self) -> bool:
        """Whether this node, which was asked to leave, leaves now that its ranks have ended.

        If the ranks ended for some other reason (such as a failure), the node stays for one more attempt if there is
        time, because other nodes may lack the state that it holds.
        """
        is_late = time.monotonic() > self._leaves_at_s
        return self._leaves_at_s > 0 and self._how != "succeeded" and (self._goes or not self._how or is_late)

    def _may_go(self, now_s: float) -> bool:
        """Whether it is this node's turn to leave, and its ranks have shared the state that other nodes may lack."""
        newest = newest_attempt(self._ranks.snapshots_fd, own=True)
        has_loaded = self._old_attempt <= 0 or newest > self._old_attempt
        return now_s >= self._leaves_from_s and self._is_next and has_loaded

    def report(self, number: int, culprit: Ending | None) -> None:
        """Tell the agent how this node's ranks of start `number` ended."""
        self._running = False
        if culprit is not None and culprit.ended_for_restart:  # planned, so no failure
            self._stopped, culprit = True, None
        self._how = "stopped" if self._stopped else "failed" if culprit else "succeeded"
        if self._ranks.signals.received == signal.SIGINT and not self._ranks.was_preempted:
            self._how = "interrupted"
        cause = None
        if culprit is not None:
            lived_s = culprit.when_s - self._ranks.began_s
            what_follows = self._size.after_failure(culprit, lived_s=lived_s, may_leave=self.may_restart)
            cause = cause_of(culprit, **what_follows)
        if self._how != "succeeded" and (num_ranks := self._size.wanted_after(culprit)):
            self._send(messages.AskFor(num_ranks))
        self._send(messages.Ended(self._how, number, cause))

    def await_end(self) -> None:
        """Wait until the agent says that the job has ended, at most for the grace period.

        If this node exited before the other nodes knew of the end, they would count it as lost.
        """
        deadline = time.monotonic() + self._job.grace_s
        while time.monotonic() < deadline and self._channel.alive and self._ranks.shutdown.by != signal.SIGKILL:
            if any(isinstance(order, (messages.Finish, messages.GiveUp)) for order in self._pending):
                return
            self._ranks.wait(_LOOK_S)

    def look(self) -> bool:
        """Do what is due while ranks run. The supervisor calls this regularly.

        Kills the ranks if the agent has not pinged for `AGENT_S`. Asks for more ranks when it is time to grow. If a
        newer snapshot is awaited, reports the snapshot once it is complete, or at once if the ranks take no snapshots.

        Returns:
            Whether to end the attempt on this node, because the node leaves the job.
        """
        if time.monotonic() - self._heard_s >= AGENT_S:
            self._ranks.shutdown.kill()  # the agent is suspended, and the other nodes may be continuing without us
        if num_ranks := self._size.is_to_be_asked_for(time.monotonic() - self._ranks.began_s):
            self._send(messages.AskFor(num_ranks))
        if self._steps is None:
            return False
        steps, now_s = newest_steps(self._ranks.snapshots_fd), time.monotonic()
        is_late = 0 < self._leaves_at_s < now_s
        if self._leaves_at_s and not is_late and not self._may_go(now_s):
            return False
        if not steps or is_ahead(steps, self._steps) or is_late:
            self._steps = None
            announce_restart(self._ranks.snapshots_fd, self._attempt)
            self._send(messages.Signal("snapshot"))
            self._goes = self._leaves_at_s > 0
            self._stopped |= self._goes
            return self._goes
        return False

    def _leave(self, why: str) -> None:
        """Let this node leave the job after its next snapshot, from which the other nodes then continue."""
        if self._leaves_at_s:
            return
        self._ranks.signals.drain = None  # a second SIGTERM ends the job as usual
        self._ranks.say(f"{why}: this node leaves the job after the next snapshot, and the others go on")
        self._send(messages.Signal("leave"))
        now_s, patience_s = time.monotonic(), self._job.grace_s / 2
        self._leaves_at_s, self._leaves_from_s = now_s + patience_s, now_s + min(_OTHERS_S, patience_s)
        self._steps = newest_steps(self._ranks.snapshots_fd)

    def _why_no_agent(self) -> str:
        if self._stopped_s < ANSWERS_S:
            return "the agent of this node has ended"
        return (
            f"this launcher was stopped for {self._stopped_s:.0f} s (Ctrl-Z or SIGSTOP), so the others count this "
            "node as lost: start the command again to join them"
        )

    def _take(self) -> None:
        if self._num_asked:  # the agent pings once a second after its first ping
            self._stopped_s = max(self._stopped_s, time.monotonic() - self._heard_s)
        for packet in self._channel.receive():
            self._obey(messages.read_packet(packet))
        if not self._channel.alive:
            self._ranks.events.unwatch(self._channel.fileno())
            self._ranks.shutdown.kill()  # the other nodes count this node as dead, and continue

    def _obey(self, order: Any) -> None:
        match order:
            case messages.Signal("reserve"):
                if self._reserved is not None:
                    self._reserved.close()
                self._reserved = ReservedPort()
                self._send(messages.Reserved(self._reserved.port))
            case messages.Ping(clocks):
                self._heard_s = time.monotonic()
                self._ranks.clocks = clocks
                self._num_asked += 1
                self._send(messages.Signal("pong"))
            case messages.Drain(why):
                self._leave(why)
            case messages.Say(text):
                self._ranks.say(text)
            case messages.Signal("all leave"):
                self._ranks.say("no other node stays, so the ranks are asked to save and exit")
                self._leaves_at_s, self._steps = 0.0, None
                self._ranks.events.note(signal.SIGTERM)
            case messages.NextToLeave(is_next):
                self._is_next = is_next
            case messages.Signal("watch"):
                self._steps = newest_steps(self._ranks.snapshots_fd)
            case messages.Signal("stop"):
                self._stop()
            case messages.Join():
                self._num_asked = 0  # the agent starts over, and may take long to resolve a name before it pings
                self._pending.append(order)
                self._stop()
            case _:
                self._pending.append(order)

    def _stop(self) -> None:
        self._stopped = True
        if self._running:
            self._ranks.shutdown.stop(keeps=True)
        for start in [order for order in self._pending if isinstance(order, messages.Start)]:
            self._pending.remove(start)
            self._send(messages.Ended("stopped", start.number))

    def _send(self, message: Any) -> None:
        self._channel.send(messages.as_packet(message))
