"""Nodes that agree over a simulated network: links that delay, cables that are cut, nodes that die, stop and come back.

Time is simulated, so a minute of accidents takes milliseconds, and a seed says all that happens.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random

from phalanx.failure.ending import Ending
from phalanx.failure.last_words import LastWords
from phalanx.launch.nodes.agent import attempt_in
from phalanx.launch.nodes.agreement import Agreement
from phalanx.launch.nodes.causes import OTHER_SIDE
from phalanx.launch.nodes.views import Cause, Node, Rules

BEAT_S = 0.5
TICK_S = 0.25
STOP_S = 0.3


class Link:
    """One end of a connection: what it sends arrives at `other`, in order."""

    def __init__(self, world, owner, peer, up_s):
        self.world, self.owner, self.peer = world, owner, peer
        self.other = None
        self.heard_s = up_s
        self.last_told_s = 0.0  # when the other had sent what we heard last
        self.coming = collections.deque()  # what has been sent and has not arrived, oldest first
        self.num_held = 0  # how many of these a cut holds back, as TCP would
        self.arrives_s = 0.0
        self.is_open = True

    def send(self, message):
        self.coming.append(message)
        self._carry()

    def _carry(self):
        if self.world.is_cut(self.owner.name, self.peer.name) or self.num_held:
            self.num_held += 1
            return
        self.arrives_s = max(self.arrives_s, self.world.now_s + self.world.delay_s())
        self.world.at(self.arrives_s, self._arrive)

    def _arrive(self):
        if self.world.is_cut(self.owner.name, self.peer.name):
            self.num_held += 1
        else:
            self.peer.take(self.other, self.coming.popleft())

    def mend(self):
        num_held, self.num_held = self.num_held, 0
        for _ in range(num_held):
            self._carry()


class SimNode:
    """An agent, its connections and its ranks."""

    def __init__(self, world, name, number, is_root):
        self.world, self.name, self.number = world, name, number
        self.clock_s = world.clocks.get(name, 0.0)  # what it shows when the simulation begins
        self.is_alive, self.paused_until_s = True, 0.0
        self.missed = []
        self.links = {}  # by the peer's id
        num_ranks = world.num_ranks.get(name, 1)
        self.node = Node(f"{name}{number}", name, name, 1, num_ranks, world.positions.get(name, -1))
        self.agreement = Agreement(self.node, world.rules, self, is_root=is_root, now_s=self.now_s)
        self.training = self.started = None  # the view in which its ranks train; in which they have not ended
        self.told = None
        self.signals = []
        self.attempt = None  # of the ranks that were started last
        world.at(world.now_s + world.random.random() * TICK_S, self.tick, True)

    @property
    def now_s(self):
        """The time by this node's clock."""
        return self.world.now_s + self.clock_s

    # Acts
    def hand(self, peer, view, is_started):
        self.links[peer].send(("view", view, is_started, self.agreement.job_age_s))

    def start(self, view, port):
        assert self.training is None
        self.attempt = attempt_in(view, self.node.id, port)
        self.training = self.started = view.key
        self.world.trains(self)

    def signal(self, what):
        self.signals.append(what)
        if what == "stop":
            self.training = None
            self.world.after(self.world.random.random() * STOP_S, self.ended, "stopped", self.started)
        elif what == "watch":
            self.world.after(self.world.random.random(), self.whole)
        elif what == "reserve":
            self.world.after(0.01, self.reserved, self.agreement.view.key)

    # what happens
    def _is_away(self, *again):
        if not self.is_alive:
            return True
        if self.world.now_s < self.paused_until_s:
            self.missed.append(again)
            return True
        return False

    def resume(self):
        missed, self.missed = self.missed, []
        for function, *arguments in missed:
            function(*arguments)

    def whole(self):
        if not self._is_away(self.whole):
            self.agreement.snapshot_is_whole()
            self.decide()

    def reserved(self, key):
        if not self._is_away(self.reserved, key) and self.agreement.view.key == key:
            self.agreement.reserved(29500)
            self.decide()

    def ended(self, how, attempt, *more):
        if self._is_away(self.ended, how, attempt, *more) or attempt != self.started:
            return
        self.training = self.started = None
        end = Ending(rank=0, pid=self.number, exitcode=1, last_words=LastWords("Error", self.name))
        cause = Cause(ending=end, **dict(more))
        self.agreement.ranks_ended(how, cause if how == "failed" else None)
        self.decide()

    def tick(self, again):
        if self._is_away(self.tick, again):
            return
        now_s = self.world.now_s
        for link in [*self.links.values()]:
            if now_s - link.heard_s >= self.world.rules.silence_s:
                self.close(link)
        if again and self.agreement.result is None:
            self.world.after(TICK_S, self.tick, True)
        self.decide()
        self._tell(is_beat=True)
        for name, _ in sorted(self.agreement.wanted(self.now_s)):  # whatever the seed of hashes
            self.world.dial(self, name)
        if self.agreement.view is None or self.agreement.leads:
            self.world.dial(self, self.world.root)

    def decide(self):
        if self.agreement.result is None and self.agreement.out is None:
            self.agreement.decide(self.now_s)
        self._tell(is_beat=False)
        if self.is_alive and self.agreement.out is not None:  # it leaves: the others have heard why
            self.world.kill(self.name)
            return
        result = self.agreement.result
        if self.is_alive and result is not None and result.cause is not None and result.cause.kind == OTHER_SIDE:
            self.world.kill(self.name)  # it begins anew
            self.world.start(self.name, joins=True)

    def _tell(self, *, is_beat):
        state = self.agreement.state
        if is_beat or state != self.told:
            self.told = state
            for link in self.links.values():
                link.send(("state", state, self.now_s, link.last_told_s, self.agreement.job_age_s))

    def take(self, link, message):
        if self._is_away(self.take, link, message) or not link.is_open:
            return
        kind, *rest = message
        link.heard_s = self.world.now_s
        if kind == "handshake":
            self.greeted(link)
        elif self.links.get(link.peer.node.id) is not link:
            return
        elif kind == "end":
            self.forget(link, has_ended=True)
        elif kind == "state":
            state, told_s, echo_s, age_s = rest
            if link.last_told_s == 0.0:
                self.told = None  # so that it gets an echo
            link.last_told_s = told_s
            self.agreement.heard(link.peer.node.id, state, echo_s, age_s)
        else:
            self.agreement.handed(rest[0], is_started=rest[1], age_s=rest[2])
        self.decide()

    def greeted(self, link):
        if link.peer.node.id in self.links or self.agreement.result is not None:
            link.is_open = False
            return
        self.links[link.peer.node.id] = link
        self.agreement.linked(link.peer.node, self.now_s)
        self.told = None

    def close(self, link):
        link.send(("end",))
        self.forget(link, has_ended=False)

    def forget(self, link, *, has_ended):
        if self.links.get(link.peer.node.id) is link:
            del self.links[link.peer.node.id]
            self.agreement.unlinked(link.peer.node.id, has_ended=has_ended, now_s=self.now_s)
        link.is_open = False


class World:
    """All nodes, the cables between them and the time.

    Args:
        clocks: What the clocks of nodes show when the simulation begins.
        num_ranks: Largest number of ranks of nodes; 1 by default.
    """

    def __init__(self, seed, names, rules, positions=(), clocks=(), num_ranks=()):
        self.random = random.Random(seed)
        self.rules, self.positions = rules, dict(positions)
        self.clocks, self.num_ranks = dict(clocks), dict(num_ranks)
        self.now_s = 0.0
        self._queue, self._order, self._numbers = [], itertools.count(), itertools.count()
        self.cuts = set()  # ordered pairs: what the first sends does not reach the second
        self.links = []
        self._dialed_s = {}  # by the two ends
        self.root = names[0]
        self.nodes = {}
        self.slowness_s = 0.01
        self.starts = []  # (time, name, view) of each start of ranks
        for name in names:
            self.start(name)

    def start(self, name, *, joins=False):
        is_root = name == self.root and not joins
        self.nodes[name] = SimNode(self, name, next(self._numbers), is_root)

    def at(self, when_s, function, *arguments):
        heapq.heappush(self._queue, (when_s, next(self._order), function, arguments))

    def after(self, delay_s, function, *arguments):
        self.at(self.now_s + delay_s, function, *arguments)

    def delay_s(self):
        return self.random.random() * self.slowness_s

    def run(self, until_s):
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, function, arguments = heapq.heappop(self._queue)
            function(*arguments)
        self.now_s = until_s

    def is_cut(self, sender, receiver):
        return (sender, receiver) in self.cuts

    def dial(self, node, name):
        """Connect two nodes after a round trip, unless they are, or can't be."""
        peer = self.nodes.get(name)
        if peer is None or peer is node or peer.node.id in node.links or not peer.is_alive:
            return
        if self.is_cut(node.name, name) or self.is_cut(name, node.name) or self.now_s < peer.paused_until_s:
            return
        pair = frozenset((node.node.id, peer.node.id))
        if self._dialed_s.get(pair, -self.rules.silence_s) + self.rules.silence_s > self.now_s:
            return  # a handshake is on its way
        self._dialed_s[pair] = self.now_s
        self.after(2 * self.delay_s(), self._connect, node, peer)

    def _connect(self, node, peer):
        ids = node.node.id, peer.node.id
        if not (node.is_alive and peer.is_alive) or ids[1] in node.links or ids[0] in peer.links:
            return
        if max(node.paused_until_s, peer.paused_until_s) > self.now_s:
            return
        if node.agreement.result is not None or peer.agreement.result is not None:
            return
        ours, theirs = Link(self, node, peer, self.now_s), Link(self, peer, node, self.now_s)
        ours.other, theirs.other = theirs, ours
        self.links += [ours, theirs]
        for end in (ours, theirs):
            end.send(("handshake",))

    # accidents

    def kill(self, name, *, is_silent=False):
        """End a node; its system tells so, unless power is lost."""
        node = self.nodes[name]
        node.is_alive, node.training = False, None
        for link in [] if is_silent else [*node.links.values()]:
            link.send(("end",))

    def pause(self, name, seconds):
        node = self.nodes[name]
        if node.is_alive:
            node.paused_until_s = self.now_s + seconds
            self.at(node.paused_until_s, node.resume)

    def cut(self, one, other, *, is_both=True):
        self.cuts |= {(one, other), *([(other, one)] if is_both else [])}

    def mend(self):
        self.cuts.clear()
        for link in self.links:
            link.mend()

    def fail(self, name, **more):
        """Let a rank fail, with something more to say of it."""
        node = self.nodes[name]
        if node.is_alive and node.training:
            node.ended("failed", node.training, *more.items())

    # what must hold

    def living(self):
        return [node for node in self.nodes.values() if node.is_alive]

    def has_survivor(self):
        """Whether a node of the last view that was started lives."""
        views = [node.agreement.view for node in self.nodes.values() if node.agreement.view is not None]
        newest = max(views, key=lambda view: view.key)
        return any(node.node.id in newest.ids for node in self.living())

    def trains(self, node):
        """Check that whoever trains in a job does so in one view."""
        self.starts.append((self.now_s, node.name, node.training))
        job = node.agreement.view.job
        awake = [it for it in self.living() if it.training and it.paused_until_s <= self.now_s]
        awake = [it for it in awake if it.agreement.view.job == job]
        views = {it.training for it in awake}
        assert len(views) == 1, (self.now_s, [(it.name, it.training) for it in awake])

    def finish(self):
        """Let all ranks that train come to their end; return the results of the living nodes."""
        for node in self.living():
            if node.training:
                node.ended("succeeded", node.training)
        self.run(self.now_s + 10)
        return [node.agreement.result for node in self.living()]


def rules(num_nodes, **changed):
    return Rules(**{"min_nodes": 1, "max_nodes": num_nodes, "max_restarts": 1000, **changed})
