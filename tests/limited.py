"""Limits of memory and of files."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limited_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup of version 2 or 1 with a limit, or skip; yield its folder."""
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    controllers = v2 / "cgroup.subtree_control"
    has_v2 = controllers.exists() and "memory" in controllers.read_text().split()
    folder = (v2 if has_v2 else v1) / f"phalanx-test-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.max" if has_v2 else "memory.limit_in_bytes")
        limit.write_text(str(limit_bytes))
        if has_v2 and (swap := folder / "memory.swap.max").exists():
            swap.write_text("0")  # else what exceeds the limit is swapped out, and nothing is killed
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        folder.rmdir()


def run_limited(command: list[str], limit_bytes: int, folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` within a cgroup of its own, and return how it ended."""
    with limited_cgroup(limit_bytes) as cgroup:
        return subprocess.run(
            ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )


@contextlib.contextmanager
def limited_files(limit_bytes: int) -> Iterator[None]:
    """Let no file of this process and of those that it starts grow beyond a limit, as on a disk that is just full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
