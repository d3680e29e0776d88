"""The flags about nodes and their meeting place: completed, checked for contradictions, and put into the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phalanx._command_line import UsageError
from phalanx._text import counted
from phalanx.host.schedulers import Placement
from phalanx.launch.command.flags import Setting

STATIC_PORT = 29500
"""Default port of the static rendezvous. This port and `_C10D_PORT` are torchrun's defaults."""
_C10D_PORT = 29400
_MOST_MEETING_PLACES = 4  # limit for meeting places from a scheduler: each new node connects to all of them


def scheduled_flags(place: Placement | None) -> dict[str, str]:
    """Return the values that the scheduler gives to flags, as text, by flag."""
    if place is None or place.num_nodes == 1:
        return {}
    found = {"nnodes": str(place.num_nodes), "node-rank": str(place.node_rank)}
    if place.master_addr:
        found["master-addr"] = ",".join(place.hosts[:_MOST_MEETING_PLACES]) or place.master_addr
    if place.master_port:
        found["master-port"] = str(place.master_port)
    return found


def with_spares(settings: dict[str, Setting], place: Placement | None) -> dict[str, Setting]:
    """Return the settings, adjusted for --spares.

    A scheduler counts the spares among the nodes that it has started, so they are subtracted. A node that takes the
    place of another node can't have a fixed number, so the rendezvous backend becomes c10d unless the user has named
    one.
    """
    spares, nnodes, changed = settings["spares"], settings["nnodes"], {}
    if not spares.value or settings["standalone"].value:
        return settings
    if place is not None and nnodes.origin == place.scheduler:
        if spares.value >= place.num_nodes:
            started = f"{place.scheduler} started {counted(place.num_nodes, 'node')} in all"
            raise UsageError(f"{spares.origin} {spares.value}, and {started}")
        most = place.num_nodes - spares.value
        changed["nnodes"] = Setting((most, most), nnodes.origin)
    if not settings["rdzv-backend"].is_given:
        changed["rdzv-backend"] = Setting("c10d", spares.origin)
        if settings["master-addr"].is_given and not settings["rdzv-endpoint"].is_given:
            hosts, port = settings["master-addr"], settings["master-port"].value or _C10D_PORT
            places = ",".join(f"{host}:{port}" for host in hosts.value.split(","))
            changed["rdzv-endpoint"] = Setting(places, hosts.origin)
    return settings | changed


def check_nodes(settings: Mapping[str, Setting], place: Placement | None) -> None:
    """Reject settings about nodes that contradict each other or the scheduler."""
    nnodes, backend = settings["nnodes"], settings["rdzv-backend"].value
    least, most = nnodes.value
    replicas = settings["replicas"]
    if replicas.is_given and replicas.value and replicas.value >= most:
        how = "leave it out" if most == 1 else f"{most - 1} is the most"
        raise UsageError(
            f"{replicas.origin} {replicas.value} needs {counted(replicas.value, 'other node')}, but this job has at "
            f"most {counted(most, 'node')} (--nnodes): {how}"
        )
    if settings["standalone"].value:
        if most > 1 and nnodes.origin.startswith("--"):
            raise UsageError(f"--standalone is a job of one node, and --nnodes asks for {most}")
        return
    if place is not None and most > 1 and not least <= place.num_nodes <= most + settings["spares"].value:
        started = f"{place.scheduler} started {place.num_nodes}"
        raise UsageError(f"{nnodes.origin} asks for {most} nodes, and {started}")
    if most == 1 and settings["spares"].value:
        raise UsageError("--spares is for jobs of at least 2 nodes: --nnodes 2 --spares 1, and 3 nodes in all")
    if most == 1:
        return
    if settings["spares"].value and backend == "static":
        raise UsageError(
            "--spares needs nodes without fixed numbers, and --rdzv-backend static gives them: leave that out"
        )
    if backend == "static":
        _check_static(settings, nnodes)
    elif not settings["rdzv-endpoint"].value:
        needs = "needs --rdzv-endpoint HOST:PORT, the same on all"
        raise UsageError(f"--rdzv-backend c10d with several nodes {needs}")


def _check_static(settings: Mapping[str, Setting], nnodes: Setting) -> None:
    least, most = nnodes.value
    if least != most:
        needs = "needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT"
        raise UsageError(f"{nnodes.origin} {least}:{most} {needs}")
    node_rank = settings["node-rank"]
    if node_rank.value >= most:
        raise UsageError(f"{node_rank.origin} must lie in [0, {most}), got {node_rank.value}")
    if not any(settings[name].is_given for name in ("master-addr", "rdzv-endpoint")):
        raise UsageError(f"{most} nodes need --master-addr HOST, the same on all, where node 0 listens")


def rendezvous(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the job's fields that say how nodes and ranks meet."""
    value = {name: setting.value for name, setting in settings.items()}
    least, most = (1, 1) if value["standalone"] else value["nnodes"]
    endpoint, backend = value["rdzv-endpoint"], value["rdzv-backend"]
    host, port = value["master-addr"], value["master-port"]
    run_id = value["rdzv-id"]
    if most == 1:
        host = host.split(",")[0]
        if endpoint and backend == "static" and not value["standalone"]:
            host, port = _host_and_port(endpoint.split(",")[0], 0)
        if not settings["rdzv-id"].is_given or value["standalone"]:
            run_id = os.urandom(8).hex()
        if value["standalone"]:
            host, port = "127.0.0.1", 0
        return {"master_addr": host, "master_port": port, "run_id": run_id}
    default_port = STATIC_PORT if backend == "static" else _C10D_PORT
    texts = endpoint.split(",") if endpoint else [f"{one}:{port or STATIC_PORT}" for one in host.split(",")]
    places = [_host_and_port(text, default_port) for text in texts]
    return {
        "min_nodes": least,
        "max_nodes": most,
        "node_rank": value["node-rank"],
        "rdzv_backend": backend,
        "rdzv_endpoint": ",".join(f"{host}:{port}" for host, port in places),
        "spares": value["spares"],
        "rdzv_conf": value["rdzv-conf"],
        "run_id": run_id,
        "num_replicas": value["replicas"],
    }


def _host_and_port(endpoint: str, default_port: int) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):  # an IPv6 address without a port
        return endpoint, default_port
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint!r}")
    return host, int(port)
