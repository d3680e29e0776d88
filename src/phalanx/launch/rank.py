"""What every process that has become a rank sets up in torch, whatever has started it."""

from __future__ import annotations


def watch_torch() -> None:
    """Record groups of Gloo, shield data loaders, and postpone ``torch._dynamo``, in this process. Idempotent.

    torch must have been imported, or be at the end of its import. The imports below load the core; they are not at the
    top, because a process that only forks ranks does without it.
    """
    from phalanx._torch import shield
    from phalanx._torch.dynamo import postpone_import
    from phalanx.record import gloo

    gloo.watch()
    shield.watch()
    postpone_import()
