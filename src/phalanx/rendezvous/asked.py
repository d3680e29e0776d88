"""The request of a rank that calls ``init_process_group``: its rank, the world size and the meeting point."""

from __future__ import annotations

import dataclasses
import os
import sys
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from phalanx import _env, _torch
from phalanx._text import plural
from phalanx._torch import replace
from phalanx.rendezvous.launched import Launch

_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_DEFAULT_S = 300.0  # default of torch's stores, used for anything that is not a positive time
_RIGHT = 'init_process_group("{}") takes rank and world size from the launcher'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One call of ``init_process_group``.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout_s: Time limit for the meeting, in seconds.
        call: Function that the script called: ``init_process_group`` or ``phalanx.init``.
        where: Line of the script with the call, such as ``train.py:12``; empty if unknown.
        backend: Backend that the script asked for; empty if it left the choice to torch, None if unknown.
        host: Host on which rank 0 serves `port`; empty: the ranks meet in the file `path`.
        port: Port of the store.
        path: Path of the file, if the ranks meet in one.
        use_libuv: Whether the store is served by libuv.
        is_served: Whether torchrun's agent serves the store, instead of rank 0.
        launch: Launch of this process, if phalanx started it and all ranks are on this host.
        launcher: Name of the launcher that starts all ranks, ``phalanx run`` or ``phalanx.spawn``; empty if neither
            does.
    """

    rank: int
    world_size: int
    timeout_s: float
    call: str = "init_process_group"
    where: str = ""
    backend: str | None = None
    host: str = ""
    port: int = 0
    path: str = ""
    use_libuv: bool = True
    is_served: bool = False
    launch: Launch | None = None
    launcher: str = ""

    @property
    def point(self) -> str:
        return f"{self.host}:{self.port}" if self.host else f"file://{self.path}"

    @property
    def name(self) -> str:
        """The rank, the call and its line, with which every message begins."""
        return f"rank {self.rank}: {self.call}{f' at {self.where}' if self.where else ''}"

    @property
    def own_launch(self) -> Launch | None:
        """The launch whose ranks alone make up this world; None if other ranks may join."""
        launch = self.launch
        is_its_world = launch is not None and _env.is_rank() and launch.is_world(self.rank, self.world_size)
        return launch if is_its_world else self.launch_here

    @property
    def launch_here(self) -> Launch | None:
        """The launch that chose this meeting point, where only its own ranks meet; None at any other meeting point.

        At another meeting point, a rank may meet other programs, and ranks may have other numbers.
        """
        launch = self.launch
        return launch if launch is not None and self.host and launch.meets_at(self.host, self.port) else None

    @property
    def is_in_place(self) -> bool:
        """Whether the script asked for Gloo and phalanx replaces it."""
        return self.backend is not None and cpu_backend(self.backend) == "gloo" and bool(replace.origin())

    def check(self, backend: str = "phalanx") -> None:
        """Raise ValueError for an impossible rank or world size."""
        right = _RIGHT.format(backend)
        if self.world_size < 1:
            raise ValueError(
                f"{self.name}: world_size must be at least 1, got {self.world_size}; right: {right}, and "
                "rank=0, world_size=1 is a world of one"
            )
        launch = self.own_launch
        started = f" ({launch.launcher} started {launch.world_size} ranks)" if launch else ""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{self.name}: rank must lie in [0, {self.world_size}), as world_size is {self.world_size}, got "
                f"{self.rank}{started}; give world_size the number of all ranks: {right}"
            )
        if launch and self.world_size > launch.world_size:
            raise ValueError(
                f"{self.name}: world_size is {self.world_size}, and {launch.launcher} started {launch.world_size} "
                f"{plural(launch.world_size, 'rank')}: no other rank can join. Leave rank and world_size out "
                f"({right}), or start as many ranks"
            )


def read_url(url: str, timeout: Any, where: str, call: str = "init_process_group") -> Asked | None:
    """Return the request that a URL describes; None if it is incomplete, or of a kind that only torch knows."""
    parts, environ = urlsplit(url), _env.environment()
    query = dict(parse_qsl(parts.query))
    if parts.scheme == "env":
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        rank, size = (query.get(key, environ.get(key.upper(), "")) for key in ("rank", "world_size"))
    else:
        rank, size = (query.get(key, "") for key in ("rank", "world_size"))
        host, port = parts.hostname or "", str(parts.port or "") if parts.scheme == "tcp" else ""
    try:
        numbers: dict[str, Any] = {
            "rank": int(rank),
            "world_size": int(size),
            "port": int(port) if parts.scheme != "file" else 0,
        }
    except ValueError:
        return None
    is_file = parts.scheme == "file"
    if not (parts.path if is_file else host and 0 < numbers["port"] < 1 << 16):
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else _DEFAULT_S
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (host, port) == (
        environ.get("MASTER_ADDR"),
        environ.get("MASTER_PORT"),
    )
    asked = Asked(
        **numbers,
        # An invalid time is only replaced here: the backend refuses it later, when it can tell the other ranks.
        timeout_s=min(seconds, _env.LONGEST_S) if seconds > 0 else _DEFAULT_S,
        call=call,
        where=where,
        host="" if is_file else host,
        path=parts.path if is_file else "",
        use_libuv=query.get("use_libuv", environ.get("USE_LIBUV", "1")) == "1",
        is_served=is_agents,
        launch=launch_of(environ),
    )
    return dataclasses.replace(asked, launcher=_launcher_of(asked, environ))


def _launcher_of(asked: Asked, environ: dict[str, str]) -> str:
    """Return the name of our launcher if it starts all ranks of this world, on all hosts; otherwise ""."""
    if asked.own_launch is not None:
        return asked.own_launch.launcher
    its_point = (environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))
    is_a_part = bool(environ.get(_env.EPOCH_VARIABLE)) and (asked.host, str(asked.port)) == its_point
    return "phalanx run" if is_a_part else ""


def cpu_backend(backend: str) -> str:
    """Return the backend that handles CPU tensors if ``init_process_group`` is called with `backend`.

    Different values may mean the same: ``cpu:gloo,cuda:nccl``, ``gloo``, or an empty text.
    """
    names = backend.lower()
    if ":" in names:
        names = dict(part.split(":", 1) for part in names.split(",") if ":" in part).get("cpu", "none")
    return names or dist.Backend.default_device_backend_map["cpu"]


def launch_of(environ: dict[str, str]) -> Launch | None:
    """Return the launch of which this process is a rank."""
    return Launch.of(environ.get(_env.LAUNCH_VARIABLE, ""))


def caller() -> tuple[str | None, str]:
    """Return the backend passed to ``init_process_group``, and the line of the script with the call.

    The backend is None if something other than ``init_process_group`` calls the rendezvous. The line is empty if
    phalanx.testing makes the call, because its own callers are pytest and Python.
    """
    backend, frame = None, sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        found = _torch.backend_argument(frame)
        backend = found if found is not None else backend
        if frame.f_globals.get("__name__", "").startswith("phalanx.testing."):
            return backend, ""
        if not code.co_filename.startswith((*_SKIPPED, "<frozen")):
            break
        frame = frame.f_back
    path = frame.f_code.co_filename
    return backend, f"{os.path.basename(path)}:{frame.f_lineno}"
