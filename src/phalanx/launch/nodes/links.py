"""Connections between the agents of a job: plain TCP, lines of JSON, one thread.

Each connection begins with a handshake, in which both ends name their job and node. Both send a line at least twice a
second; a node that has been silent for a while is lost. Only `Links.wait` blocks.

The end of a connection says nothing about the node, since a firewall may have reset the connection. `Links` then
reconnects without telling its owner. A node is dead when its kernel refuses connections to its port, or when another
agent answers there.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phalanx.launch.nodes.views import Node, Place
from phalanx.wire.lines import as_line, read_line
from phalanx.wire.messages import read_value

_INTERACTIVE = 6  # SO_PRIORITY: ahead of bulk traffic
_MOST_BYTES = 1 << 22  # most bytes of a line, and of the data that waits to be sent
_MOST_STRANGERS = 64  # limit for connections without a completed handshake
_BUFFER_BYTES = 1 << 18


class LinkOwner(Protocol):
    """Handler of the events on the links."""

    def linked(self, node: Node) -> None:
        """Handle a completed handshake with a new node."""

    def unlinked(self, peer: str, *, has_ended: bool, since_s: float) -> None:
        """Handle the loss of a node: its kernel refused a connection, or it has been silent since `since_s`."""

    def received(self, peer: str, message: dict[str, Any]) -> None:
        """Handle a message of a node.

        Raises:
            ValueError: No agent would send this message; `Links` then closes the connection.
        """

    def refused(self, why: str) -> None:
        """Handle the rejection of our handshake by a peer."""

    def problem_with(self, handshake: dict[str, Any]) -> str:
        """Return why the sender of a handshake is not a node of this job; empty if it is a node of this job."""


class _Link:
    """One connection."""

    def __init__(self, end: socket.socket, now_s: float, dialed: Place | None = None) -> None:
        self.socket = end
        self.dialed = dialed  # the place that was dialed; None: the connection was accepted
        self.is_connecting = dialed is not None
        self.peer = ""  # the node's id, after the handshake
        self.heard_s = now_s
        self.came = bytearray()
        self.goes = bytearray()


class _Peer:
    """A node that has completed the handshake, and the connection to it.

    Attributes:
        link: Connection in use; None: the last connection has ended, and a new one is being made.
    """

    def __init__(self, node: Node, link: _Link) -> None:
        self.node = node
        self.link: _Link | None = link
        self.heard_s = link.heard_s
        self.dialed_s = 0.0  # time of the last attempt to reconnect
        self.ended_s = 0.0


_RESOLVE_AGAIN_S = 5.0
_DIAL_AGAIN_S = 0.02  # pause before reconnecting, because a dying process may still accept a connection


class Links:
    """All connections of one agent.

    Args:
        selector: Selector of the agent's loop. Other code may register descriptors, too; the data of a descriptor is
            the function to call when it is ready.
        silence_s: Seconds of silence after which a node is lost.

    Attributes:
        own: Places at which this agent has reached itself.
    """

    def __init__(self, selector: selectors.BaseSelector, owner: LinkOwner, silence_s: float) -> None:
        self._selector, self._owner, self._silence_s = selector, owner, silence_s
        self._me: Node | None = None
        self._handshake: dict[str, Any] = {}
        self._links: set[_Link] = set()
        self._peers: dict[str, _Peer] = {}
        self._listener: socket.socket | None = None
        self._names = _Names()
        self.own: set[Place] = set()

    def introduce(self, me: Node, handshake: Mapping[str, Any]) -> None:
        """Set the handshake. Before this call, nothing is sent or read."""
        self._me, self._handshake = me, {**handshake, "node": me}
        for link in [*self._links]:
            if not link.is_connecting:
                self._greet(link)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    # ------------------------------------------------------------ connecting

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            strangers = [link for link in self._links if not link.peer and link.dialed is None]
            if len(strangers) >= _MOST_STRANGERS:
                self._close(min(strangers, key=lambda link: link.heard_s))
            self._add(_Link(end, time.monotonic()))

    def _add(self, link: _Link) -> None:
        link.socket.setblocking(False)
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _INTERACTIVE)
        self._links.add(link)
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._serve(link))
        if not link.is_connecting:
            self._greet(link)
        self._watch(link)

    def _greet(self, link: _Link) -> None:
        if self._me is not None:
            self._queue(link, as_line(self._handshake))

    def dial(self, place: Place) -> str:
        """Connect to an agent unless already connected; return the problem with the host's name, or ""."""
        if place in self.own or any(link.dialed == place for link in self._links):
            return ""
        address, why = self._names.find(place)
        if address is None:
            return why
        family, target = address
        end = socket.socket(family, socket.SOCK_STREAM)
        end.setblocking(False)
        result = end.connect_ex(target)
        if result in (0, errno.EINPROGRESS):
            self._add(_Link(end, time.monotonic(), place))
        else:
            end.close()
        if result == errno.ECONNREFUSED:  # arrives immediately if the peer is on this host
            self._bury(place)
        return ""

    def own_address(self) -> str:
        """Return this host's address on one of its connections; "" if there is no connection."""
        addresses = (_plain(link.socket.getsockname()[0]) for link in self._links if not link.is_connecting)
        return next(addresses, "")

    @property
    def nodes(self) -> list[Node]:
        """All nodes that have completed the handshake and are not lost."""
        return [peer.node for peer in self._peers.values()]

    # ------------------------------------------------------------ talking

    def tell(self, peer: str, message: Any) -> None:
        """Send a message to a linked node; the message is dropped while the connection is being remade."""
        if (it := self._peers.get(peer)) is not None and it.link is not None:
            self._queue(it.link, as_line(message))

    def tell_all(self, make: Callable[[str], Any]) -> None:
        """Send each linked node the message that `make` returns for its id."""
        for peer in [*self._peers]:
            self.tell(peer, make(peer))

    def _queue(self, link: _Link, line: bytes) -> None:
        if len(link.goes) + len(line) > _MOST_BYTES:
            self._close(link)
            return
        link.goes += line
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        if link.is_connecting or link not in self._links:
            return
        try:
            while link.goes:
                del link.goes[: link.socket.send(link.goes)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(link)
        self._watch(link)

    def _watch(self, link: _Link) -> None:
        if link not in self._links:
            return
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.goes or link.is_connecting else 0)
        key = self._selector.get_key(link.socket)
        if key.events != wants:
            self._selector.modify(link.socket, wants, key.data)

    def _serve(self, link: _Link) -> None:
        if link.is_connecting:
            problem = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                self._close(link)
                if problem == errno.ECONNREFUSED:
                    self._bury(link.dialed)
                return
            link.is_connecting, link.heard_s = False, time.monotonic()
            self._greet(link)
        self._flush(link)
        if link in self._links:
            self._read(link)

    def _read(self, link: _Link) -> None:
        try:
            came = link.socket.recv(_BUFFER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self._close(link)
            return
        link.heard_s = time.monotonic()
        link.came += came
        while self._me is not None and link in self._links and (end := link.came.find(b"\n")) >= 0:
            line = bytes(link.came[:end])
            del link.came[: end + 1]
            try:
                self._take(link, read_line(line))
            except (ValueError, TypeError, KeyError, OverflowError):  # no agent would send this
                self._close(link)
        if len(link.came) > _MOST_BYTES:
            self._close(link)

    def _take(self, link: _Link, message: dict[str, Any]) -> None:
        if link.peer:
            self._peers[link.peer].heard_s = link.heard_s
            self._owner.received(link.peer, message)
            return
        if "refused" in message:
            self._close(link)
            if link.dialed is not None:  # only an agent that was dialed may refuse
                self._owner.refused(str(message["refused"])[:500])
            return
        assert self._me is not None
        node: Node = read_value(message.get("node"), Node)
        if node.id == self._me.id:
            if link.dialed is not None:
                self.own.add(link.dialed)
            self._close(link)
        elif why := self._owner.problem_with(message):
            if link.dialed is None:  # we were dialed, so we report the problem
                self._queue(link, as_line({"refused": why}))
                self._close(link)
        else:
            self._greeted(link, node)

    def _greeted(self, link: _Link, node: Node) -> None:
        """Use a new connection to a node; if there are two, keep the one that the node with the lower id dialed."""
        assert self._me is not None
        if link.dialed is not None:
            self._bury(link.dialed, but=node.id)
        peer = self._peers.get(node.id)
        if peer is None:
            link.peer = node.id
            self._peers[node.id] = _Peer(node, link)
            self._owner.linked(node)
            return
        is_ours_kept = self._me.id < node.id
        if peer.link is not None and (link.dialed is not None) != is_ours_kept:
            self._close(link)
            return
        before, peer.link = peer.link, link
        link.peer, peer.heard_s = node.id, link.heard_s
        if before is not None:
            self._close(before)

    # ------------------------------------------------------------ ends

    def _close(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()
            if link.peer and (peer := self._peers[link.peer]).link is link:
                peer.link, peer.dialed_s, peer.ended_s = None, 0.0, time.monotonic()
                self.redial()

    def _bury(self, place: Place | None, but: str = "") -> None:
        """Report the nodes at a place as dead: nothing listens there any more, or another agent (`but`) does."""
        for peer in [peer for peer in self._peers.values() if peer.node.place == place and peer.node.id != but]:
            if peer.link is None:
                del self._peers[peer.node.id]
                self._owner.unlinked(peer.node.id, has_ended=True, since_s=peer.ended_s)

    def redial(self) -> None:
        """Reconnect to nodes whose connection has ended."""
        now_s = time.monotonic()
        for peer in [*self._peers.values()]:
            if peer.link is None and now_s - peer.dialed_s >= _DIAL_AGAIN_S:
                peer.dialed_s = now_s
                self.dial(peer.node.place)

    def wait(self, timeout_s: float) -> None:
        """Call the functions of the descriptors that are ready; if none is ready, wait for at most `timeout_s`."""
        if any(peer.link is None for peer in self._peers.values()):
            timeout_s = min(timeout_s, _DIAL_AGAIN_S)
        for key, _ in self._selector.select(timeout_s):
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:  # an earlier callback may have closed the connection
                key.data()

    def lose_silent(self) -> None:
        """Drop the nodes that have been silent for too long. Call `wait` first, which reads what has arrived."""
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers.values() if now_s - peer.heard_s >= self._silence_s]:
            del self._peers[peer.node.id]
            if peer.link is not None:
                peer.link.peer = ""
                self._close(peer.link)
            self._owner.unlinked(peer.node.id, has_ended=False, since_s=peer.heard_s)
        for link in [link for link in self._links if now_s - link.heard_s >= self._silence_s]:
            self._close(link)

    def flush(self, limit_s: float) -> None:
        """Wait until everything has been sent, but for at most `limit_s`."""
        ends_s = time.monotonic() + limit_s
        while any(link.goes for link in self._links if link.peer) and time.monotonic() < ends_s:
            self.wait(0.05)


class _Names:
    """Addresses of hosts, looked up by threads, since DNS may take seconds."""

    def __init__(self) -> None:
        self._found: dict[Place, tuple[float, tuple[Any, Any] | None, str]] = {}
        self._asking: set[Place] = set()

    def find(self, place: Place) -> tuple[tuple[Any, Any] | None, str]:
        """Return a place's family and address (None: unknown yet), and the problem with the place's name, or ""."""
        asked_s, address, why = self._found.get(place, (-_RESOLVE_AGAIN_S, None, ""))
        if time.monotonic() - asked_s >= _RESOLVE_AGAIN_S and place not in self._asking:
            self._asking.add(place)
            threading.Thread(target=self._ask, args=(place,), daemon=True).start()
        return address, why

    def _ask(self, place: Place) -> None:
        address, why = None, ""
        try:
            infos = socket.getaddrinfo(place[0].strip("[]"), place[1], type=socket.SOCK_STREAM)
            address = infos[0][0], infos[0][4]
        except (OSError, ValueError, OverflowError) as error:
            why = f"the name {place[0]!r} does not resolve here ({error.args[-1]})"
            address = self._found.get(place, (0, None, ""))[1]
        self._found[place] = time.monotonic(), address, why
        self._asking.discard(place)


def is_local(host: str) -> bool:
    """Return whether a name or an address belongs to this host.

    Raises:
        OSError: The name does not resolve.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
            return True
    return False


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]
