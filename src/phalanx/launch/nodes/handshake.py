"""The handshake of two nodes: what each sends about its job, and whether both belong to the same job.

Each node connects to all meeting places of the list. A node on the host of a place may begin the job, but waits 5 s for
each place before its own in the list. If two nodes begin a job anyway, the younger job gives way when the two meet. A
scheduler's list of hosts is cut to four places, because every node connects to every place.

If the scripts of two nodes differ, both nodes report the difference, but neither refuses the other: somebody may edit a
script in a shared folder while a job runs, and a host that comes back afterwards must be let in.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import phalanx
from phalanx._env import host_name
from phalanx.launch.nodes.messages import Settings
from phalanx.launch.nodes.views import Rules

_PROTOCOL = 3


class Handshake:
    """This node's handshake, and its comparison with the handshakes of other nodes.

    Args:
        job: Settings of the job.

    Attributes:
        told: Contents of this node's handshake.
    """

    def __init__(self, job: Settings, rules: Rules) -> None:
        self.told: dict[str, Any] = {
            "phalanx": phalanx.__version__,
            "protocol": _PROTOCOL,
            "job": job.run_id,
            "nodes": [rules.min_nodes, rules.max_nodes, rules.spares],
            "backend": job.rdzv_backend,
            "silence_s": rules.silence_s,
            "script": job.script,
            "max_restarts": job.max_restarts,
        }
        self._differ: set[str] = set()  # hosts whose differences have been reported

    def problem_with(self, handshake: Mapping[str, Any]) -> str:
        """Return why the sender of a handshake is not a node of this job; empty if it is a node of this job."""
        here, ours = host_name(), self.told
        if handshake.get("job") != ours["job"]:
            return f"{here} runs another job at this place: its --rdzv-id is {ours['job']!r}"
        if any(handshake.get(name) != ours[name] for name in ("phalanx", "protocol")):
            return f"{here} has {_version(ours)}, and this host {_version(handshake)}: install the same on all"
        script = handshake.get("script")
        name = str(script.get("name"))[:100] if isinstance(script, dict) else ours["script"]["name"]
        if name != ours["script"]["name"]:
            return (
                f"{here} runs {ours['script']['name']} at this place, and this is {name}: give it an --rdzv-id or a "
                "port of its own"
            )
        if handshake.get("nodes") != ours["nodes"]:
            there, asked = _flags_of_nodes(handshake.get("nodes")), _flags_of_nodes(ours["nodes"])
            return f"{here} was started with {asked}, and this host with {there}"
        if handshake.get("backend") != ours["backend"]:
            there = str(handshake.get("backend"))[:40]
            return f"{here} was started with --rdzv-backend {ours['backend']}, and this host with {there}"
        if handshake.get("silence_s") != ours["silence_s"]:
            there = str(handshake.get("silence_s"))[:40]
            return (
                f"{here} was started with keep_alive settings in --rdzv-conf that allow {ours['silence_s']:g} s of "
                f"silence, and this host with {there} s: they must be the same on all"
            )
        return ""

    def differences(self, handshake: Mapping[str, Any]) -> list[str]:
        """Return how another node's script or --max-restarts differs, once per host. A difference may be intended."""
        node = handshake.get("node")
        host = str(node.get("host", ""))[:300] if isinstance(node, dict) else ""
        if host in self._differ:
            return []
        found = [*filter(None, [self._script_differs(handshake.get("script")), self._restarts_differ(handshake)])]
        if found:
            self._differ.add(host)
        return [f"{host} {what}" for what in found]

    def _script_differs(self, theirs: Any) -> str:
        ours = self.told["script"]
        if not isinstance(theirs, dict) or theirs == ours:
            return ""
        if theirs.get("file") == ours["file"]:
            return f"runs {ours['name']} with other arguments than this host"
        there, here = str(theirs.get("file"))[:12], ours["file"][:12]
        return f"runs another {ours['name']} than this host: its SHA-256 is {there}, here {here}"

    def _restarts_differ(self, handshake: Mapping[str, Any]) -> str:
        there, here = handshake.get("max_restarts"), self.told["max_restarts"]
        if type(there) is not int or there == here:
            return ""
        return f"was started with --max-restarts {there}, and this host with {here}: the leading node's value counts"


def _version(handshake: Mapping[str, Any]) -> str:
    """Return the versions of the package and of the protocol; builds of one package version may differ in protocol."""
    version, protocol = (str(handshake.get(name))[:40] for name in ("phalanx", "protocol"))
    return f"phalanx {version} (protocol {protocol})"


def _flags_of_nodes(told: Any) -> str:
    """Return the numbers in a node's handshake as the flags that set them, for messages."""
    if not (isinstance(told, list) and len(told) == 3 and all(type(number) is int for number in told)):
        return "another --nnodes"
    least, most, spares = told
    nodes = f"--nnodes {least}" if least == most else f"--nnodes {least}:{most}"
    return f"{nodes} --spares {spares}" if spares else nodes


def script_of(command: tuple[str, ...]) -> dict[str, str]:
    """Return the identity of a command in a form that nodes can compare without revealing its arguments."""
    is_python = command[0] == sys.executable and len(command) > 1
    is_module = is_python and command[1] == "-m"
    path, digest = command[1 if is_python and not is_module else 0], hashlib.sha256()
    with contextlib.suppress(OSError), open(path, "rb") as file:
        digest = hashlib.sha256(file.read())
    words = hashlib.sha256("\0".join(command[1:]).encode(errors="surrogateescape"))
    name = command[2] if is_module else os.path.basename(path)
    return {"name": name, "file": digest.hexdigest(), "words": words.hexdigest()}
