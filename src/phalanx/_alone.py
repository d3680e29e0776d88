"""Whether a rank has trained all by itself: its launcher tells a user who has forgotten the process group."""

from __future__ import annotations

import atexit
import os
import sys

from phalanx import _env
from phalanx._launched import Launch

_wants_others = False


def wants_others() -> None:
    """Note that this process is about to meet other ranks."""
    global _wants_others
    _wants_others = True


def watch() -> None:
    """Have this rank tell its launcher at its end whether it has trained alone, although there were others."""
    launch = Launch.of(_env.environment().get(_env.LAUNCH_VARIABLE, ""))
    if launch is not None and launch.world_size > 1 and _env.is_rank():
        atexit.register(_tell, launch, os.getpid())


def _tell(launch: Launch, pid: int) -> None:
    from phalanx import _torch  # not for the supervisor, which only forks

    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if os.getpid() == pid and not (_wants_others or has_group) and _torch.has_made_optimizer():
        launch.note_alone()
